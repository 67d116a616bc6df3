"""--dry_run: what a run would need and could reach, on any machine, before a GPU is rented. Nothing is trained.

Parameters and arithmetic are counted by torch, memory and work of a step as fake_step.py does it, and speed follows
from its work as speed.py says.
"""
import dataclasses
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from composer import ComposerModel
from composer.utils import dist

from sdbench.costs import days_to_train, gpu_hours
from sdbench.errors import plural
from sdbench.flags.train import SD2_BASE, SWITCHES, Train
from sdbench.forecast.fake_step import StepMemory, trace_step, updater
from sdbench.forecast.memory import build_on_meta, lasting_bytes
from sdbench.forecast.operators import AVERAGE
from sdbench.forecast.speed import (
    CONSTANTS,
    LARGEST_ERROR,
    TESTED_SIZE,
    Constants,
    Layout,
    StepWork,
    can_forecast,
    images_per_sec,
    is_tested,
    seconds_by_kind,
)
from sdbench.gpus import CARDS, Card, cards_named, peak_of
from sdbench.inputs.shards import read_index
from sdbench.measuring.power import GIB
from sdbench.measuring.reliability import why_unreliable
from sdbench.models.loading import find_model
from sdbench.training.microbatch import sizes_to_try

# GiB that torch finds on the card of each size that has least
MEMORY_SIZES = {'24 GB': CARDS['NVIDIA L4'].gib, '40 GB': CARDS['NVIDIA A100-SXM4-40GB'].gib,
                '80 GB': CARDS['NVIDIA H100 80GB HBM3'].gib, '141 GB': CARDS['NVIDIA H200'].gib}
# What a GPU takes beside the tensors that are counted: CUDA itself, its libraries' workspaces, and memory that the
# allocator holds in pieces. milabench's H200, by NVML: 55 GiB where 49.7 are counted, 115.6 where 106.2 are.
UNCOUNTED_SHARE = 0.12
PUBLISHED = Path(__file__).parents[2] / 'published.csv'
ACCURACY = f"""\
Each row below the first is the run as given with that one change. Memory is counted from the tensors of a step, at its
peak. CUDA, its libraries and its allocator take more: an H200 took 9 to 11 % more than is counted (milabench: 55 GiB at
32 images, 115.6 at 80). So {UNCOUNTED_SHARE:.0%} is added, and a microbatch is said to fit where that is in the card.
--compile is not counted; as a rule it needs less."""
SPEEDS = """\
A forecast, without --compile, from the arithmetic, bytes and kernels of a step and the exchange of gradients over the
card's link. Its constants are fitted to published speeds of Stable Diffusion 2 (docs/planning.md)."""
RANGE = f"""\
A range is {1 + LARGEST_ERROR:.2f} times either way: so far off the forecast was at most on published speeds, each with
constants that were fitted without its source. It stands where such a speed is of the same card, on at least as many
GPUs, with at most as many images a step on each."""
NOT_TESTED = """\
Not tested: no published speed is of this model and image size on this card, on at least as many GPUs with at most as
many images a step on each; or the run has --compile, --gradient_checkpointing or --attention math."""
PUBLISHED_RUNS = """\
Those in published.csv ran the original's program: encoders in float32, channels first, libraries of 2022 and 2023."""
GPUS_A_NODE = 8
NETWORK = """\
The network between nodes is taken for as fast as the link between the GPUs of a node; a slower one is not counted."""


@dataclass(frozen=True)
class Estimate:
    """The memory of a device with one set of flags.

    Attributes:
        title: the flags, for people.
        settings: of the run, with these flags.
        model: without memory.
        lasting: bytes by item that do not depend on the microbatch.
        step: bytes of a step.
        work: of a step.
        constants: of the forecast.
    """
    title: str
    settings: Train
    model: ComposerModel
    lasting: dict[str, int]
    step: StepMemory
    work: StepWork
    constants: Constants = CONSTANTS

    @property
    def device_batch_size(self) -> int:
        """Images of a batch on each device."""
        return self.settings.batch_size // self.settings.dry_run

    def needed(self, microbatch: int) -> dict[str, int]:
        """Bytes by item at the peak of a step, which is within a microbatch."""
        return self.lasting | self.step.peak(microbatch, accumulated=microbatch < self.device_batch_size)

    def taken(self, microbatch: int) -> float:
        """GiB of a GPU, with what cannot be counted."""
        return sum(self.needed(microbatch).values()) * (1 + UNCOUNTED_SHARE) / GIB

    def largest_microbatch(self, gib: float) -> int | None:
        """The largest that fits into so much memory; None: not even one image does."""
        return max((size for size in sizes_to_try(self.device_batch_size) if self.taken(size) <= gib), default=None)

    def microbatch_on(self, card: Card) -> int | None:
        """The microbatch that was asked for, or the largest; None: it does not fit."""
        asked = self.settings.device_train_microbatch_size
        if isinstance(asked, int):
            return asked if self.taken(asked) <= card.gib else None
        return self.largest_microbatch(card.gib)

    def layout(self, microbatch: int) -> Layout:
        """Return how the batch of the run is spread."""
        return Layout(microbatch, self.device_batch_size, self.settings.dry_run, self.settings.allreduce_precision)

    def images_per_sec(self, card: Card, microbatch: int) -> float:
        """Return the speed of all devices together, of a card that can be forecast in this precision."""
        speed = images_per_sec(card, self.work, self.layout(microbatch), self.constants)
        return speed * self.settings.dry_run

    def is_tested(self, card: Card) -> bool:
        """Return whether the error of the forecast is known for such a run."""
        settings = self.settings
        has_untested_flag = settings.compile or settings.gradient_checkpointing or settings.attention == 'math'
        if has_untested_flag or settings.image_size != TESTED_SIZE or not is_stable_diffusion_2(self.model):
            return False
        return is_tested(card, settings.dry_run, self.device_batch_size)


def dry_run(settings: Train, build_model: Callable) -> dict[str, int | None]:
    """Print what the run would need and could reach; returns the largest microbatch for each card of --gpu, or without
    it for each of MEMORY_SIZES.

    Args:
        settings: of the run.
        build_model: makes the model that the run would train.

    Raises ValueError if the model or the remote is not known.
    """
    if dist.get_global_rank() > 0:
        return {}
    # what may be refused comes before the trace, which takes a minute
    cards = cards_named(settings.gpu)
    records, unread = read_json_lines(settings.results)
    for words in unread:
        print(words, file=sys.stderr, flush=True)
    sizes = MEMORY_SIZES
    if settings.gpu:
        sizes = {short_name(card): card.gib for card in cards}
    latents = is_on_latents(settings)
    print('counting memory and work of a step', file=sys.stderr, flush=True)
    given = estimate('as given', settings, latents, build_model)
    others = [estimate(*each, build_model, given) for each in with_less_memory(settings, latents)]
    flops_per_image = sum(given.model.flops_per_image.values())
    parameters = sum(parameter.numel() for parameter in given.model.unet.parameters())
    blocks = [
        title(settings, latents),
        f'{parameters:,} parameters of the UNet are trained, with {flops_per_image / 1e9:,.1f} GFLOP of arithmetic for '
        'an image',
        memory_table(given, sizes).to_string(float_format='{:.2f}'.format),
        f'{memory_sizes_table([given, *others], sizes).to_string()}\n{ACCURACY}',
        *speeds(given, others, cards, records)]
    print(*blocks, sep='\n\n')
    return {size: given.largest_microbatch(gib) for size, gib in sizes.items()}


def is_stable_diffusion_2(model: ComposerModel) -> bool:
    """Return whether the UNet is that of Stable Diffusion 2, by its configuration, whatever its image size."""
    for key, value in find_model(SD2_BASE).configs['unet'].items():
        if key in ('_class_name', 'sample_size'):
            continue
        if json.dumps(model.unet.config.get(key)) != json.dumps(value):  # where a tuple is a list
            return False
    return True


def is_on_latents(settings: Train) -> bool:
    """Whether the training needs no VAE. Raises ValueError if --remote is no dataset."""
    if not settings.remote:
        return settings.use_synth_latents
    return 'latents' in read_index(settings.remote)


def with_less_memory(settings: Train, latents: bool) -> list[tuple[str, Train, bool]]:
    """The run with each thing that it has not and that takes less memory: in words, its settings, and whether it is on
    latents."""
    half = settings.image_size // 16 * 8
    changes = {}
    if settings.encoder_precision != 'bf16':
        changes['--encoder_precision bf16'] = {'encoder_precision': 'bf16'}
    if not settings.half_precision_norms and settings.precision != 'fp32':
        changes['--half_precision_norms'] = {'half_precision_norms': True}
    if not settings.gradient_checkpointing:
        changes['--gradient_checkpointing'] = {'gradient_checkpointing': True}
    if settings.use_ema:
        changes['without --use_ema'] = {'use_ema': False}
    if half >= 64:
        changes[f'--image_size {half}'] = {'image_size': half}

    runs = []
    for words, change in changes.items():
        runs.append((words, dataclasses.replace(settings, **change), latents))
    if not latents:
        runs.append(('latents (encode.py)', settings, True))
    return runs


def estimate(title: str, settings: Train, latents: bool, build_model: Callable,
             traced_before: Estimate | None = None) -> Estimate:
    """Memory and work of a device for the model that is built with these settings.

    What is the same in `traced_before` is not traced again: all of the step where it differs in the average alone, and
    else the update.
    """
    model = build_on_meta(settings, find_model(settings.model_name), latents, build_model)  # sizes need no weights
    lasting = lasting_bytes(settings, model, settings.dry_run)
    if traced_before is None:
        update = updater(settings.fused_optimizer, settings.use_ema)
        memory, work = trace_step(model, settings.precision, update, settings.attention)
    elif settings.use_ema != traced_before.settings.use_ema:
        update = {kind: work for kind, work in traced_before.work.update.items() if kind != AVERAGE}
        memory, work = traced_before.step, dataclasses.replace(traced_before.work, update=update)
    else:
        memory, work = trace_step(model, settings.precision, attention=settings.attention)
        work = dataclasses.replace(work, update=traced_before.work.update)
    return Estimate(title, settings, model, lasting, memory, work)


def title(settings: Train, latents: bool) -> str:
    devices = settings.dry_run
    words = [f'{settings.image_size} pixels', settings.precision, f'encoders in {settings.encoder_precision}']
    if latents:
        words.append('latents that are encoded already')
    if settings.use_ema:
        words.append('EMA')
    images = plural(settings.batch_size // devices, 'image')
    return f'{settings.model_name}: {", ".join(words)}; {images} a step on each of {plural(devices, "GPU")}'


def memory_table(given: Estimate, sizes: dict[str, float]) -> pd.DataFrame:
    """GiB of a device by item, for each microbatch up to the first that no card holds; `sizes` is GiB by card."""
    columns = {}
    for size in sizes_to_try(given.device_batch_size):
        columns[size] = given.needed(size)
        if given.taken(size) > max(sizes.values()):
            break
    table = pd.DataFrame(columns).fillna(0) / GIB
    counted = table.sum()
    table.loc['counted'] = counted
    table.loc[f'with {UNCOUNTED_SHARE:.0%} more'] = counted * (1 + UNCOUNTED_SHARE)
    return table.rename_axis(columns='GiB at the peak of a step, by microbatch')


def memory_sizes_table(estimates: list[Estimate], sizes: dict[str, float]) -> pd.DataFrame:
    """The largest microbatch on each card: where nothing fits in the first row, a later one says what would."""
    table = pd.DataFrame(columns=sizes)
    for each in estimates:
        table.loc[each.title] = [each.largest_microbatch(gib) or 'none' for gib in sizes.values()]
    return table.rename_axis(columns='largest microbatch on')


def speeds(given: Estimate, others: list[Estimate], cards: list[Card], records: list[dict]) -> list[str]:
    """Return blocks of text: images/s, what the whole training would take, what was measured, where the time goes, and
    what other flags would change."""
    settings = given.settings
    if not any(peak_of(card.name, settings.precision) for card in cards):
        return [f'No peak is known in {settings.precision}, so nothing is said of speed; try another --precision.']
    cards = [card for card in cards if can_forecast(card, settings.precision)]
    if not cards:
        return ["The forecast is fitted to NVIDIA's GPUs, so nothing is said of the speed of others."]
    fitting = [card for card in cards if given.microbatch_on(card)]
    if not fitting:
        return ['No card that is known here has the memory for one image of this run; see the table above.']
    sentences = [SPEEDS]
    if any(given.is_tested(card) for card in fitting):
        sentences.append(RANGE)
    if not all(given.is_tested(card) for card in fitting):
        sentences.append(NOT_TESTED)
    if settings.dry_run > GPUS_A_NODE:
        sentences.append(NETWORK)
    blocks = ['\n'.join([speed_table(given, fitting).to_string(), *sentences])]
    if settings.training_images:
        price = (f'Days and dollars are for {settings.training_images:,} images at ${settings.dollars_per_gpu_hour:g} '
                 'a GPU-hour, one price for all cards (--dollars_per_gpu_hour).')
        blocks.append(f'{cost_table(given, fitting).to_string()}\n{price}')
    measured = measured_speeds(given, fitting, records)
    if len(measured):
        text = measured.to_string(index=False)
        if PUBLISHED.name in set(measured['file']):
            text += f'\n{PUBLISHED_RUNS}'
        blocks.append(text)
    blocks.append(kinds_table(given, fitting).to_string())
    blocks.append(changes_table(given, others, fitting).to_string())
    return blocks


def speed_table(given: Estimate, cards: list[Card]) -> pd.DataFrame:
    """Images/s of all devices for each microbatch that fits."""
    rows = {}
    for card in cards:
        largest = given.largest_microbatch(card.gib)
        sizes = [size for size in sizes_to_try(given.device_batch_size) if size <= largest]
        rows[card.name] = {size: three_digits(given.images_per_sec(card, size)) for size in sizes}
    columns = f'images/s on {plural(given.settings.dry_run, "GPU")}, by microbatch'
    return pd.DataFrame.from_dict(rows, orient='index').fillna('').rename_axis(columns=columns)


def cost_table(given: Estimate, cards: list[Card]) -> pd.DataFrame:
    """Return images/s, days and dollars: from the fastest to the slowest speed that the error allows where that is
    known, and else of the forecast itself, with the words "not tested"."""
    settings = given.settings
    devices = settings.dry_run
    images = settings.training_images
    rows = {}
    for card in cards:
        speed = given.images_per_sec(card, given.microbatch_on(card))
        speeds = [speed]
        tested = 'not tested'
        if given.is_tested(card):
            speeds = [speed * (1 + LARGEST_ERROR), speed / (1 + LARGEST_ERROR)]
            tested = 'tested'
        days = [days_to_train(each, images) for each in speeds]
        dollars = [gpu_hours(each, devices, images) * settings.dollars_per_gpu_hour for each in speeds]
        rows[card.name] = {'images/s': in_a_range(speeds[::-1]), 'days': in_a_range(days),
                           'dollars': in_a_range(dollars), '': tested}
    return pd.DataFrame.from_dict(rows, orient='index').rename_axis(columns=at_microbatch(settings))


def short_name(card: Card) -> str:
    return card.name.removeprefix('NVIDIA ')


def at_microbatch(settings: Train) -> str:
    asked = settings.device_train_microbatch_size
    return f'at a microbatch of {asked}' if isinstance(asked, int) else 'at the largest microbatch'


def kinds_table(given: Estimate, cards: list[Card]) -> pd.DataFrame:
    """Share of the time of a step by kind of operator, the largest share first."""
    columns = {}
    for card in cards:
        microbatch = given.microbatch_on(card)
        by_kind = seconds_by_kind(card, given.work, given.layout(microbatch), given.constants)
        seconds = pd.Series(by_kind)
        columns[short_name(card)] = seconds / seconds.sum()
    table = pd.DataFrame(columns)
    table = table.sort_values(table.columns[0], ascending=False).map('{:.0%}'.format)
    return table.rename_axis(columns=f'where the time goes, {at_microbatch(given.settings)}')


def changes_table(given: Estimate, others: list[Estimate], cards: list[Card]) -> pd.DataFrame:
    """Images/s with each change, at the microbatch that was asked for, or the largest that fits with the change."""
    settings = given.settings
    rows = {}
    for card in cards:
        row = {}
        for each in [given, *others]:
            microbatch = each.microbatch_on(card)
            row[each.title] = three_digits(each.images_per_sec(card, microbatch)) if microbatch else 'none'
        if settings.dry_run > 1 and settings.allreduce_precision == 'fp32':
            half = dataclasses.replace(given, settings=dataclasses.replace(settings, allreduce_precision='bf16'))
            row['--allreduce_precision bf16'] = three_digits(half.images_per_sec(card, given.microbatch_on(card)))
        largest = given.largest_microbatch(card.gib)
        if largest != given.microbatch_on(card):
            row['the largest microbatch'] = three_digits(given.images_per_sec(card, largest))
        rows[short_name(card)] = row
    heading = f'images/s with one change, {at_microbatch(settings)}'
    return pd.DataFrame(rows).fillna('').rename_axis(columns=heading)


def measured_speeds(given: Estimate, cards: list[Card], records: list[dict]) -> pd.DataFrame:
    """Return a row for each reliable speed of the same model and input on one of these cards: the published ones and
    those in `records` of --results. What such a run had otherwise stands as flags in the column `with`.
    """
    settings = given.settings
    found = []
    if is_stable_diffusion_2(given.model):
        found += published_records(settings.model_name)
    found += [{'file': settings.results} | record for record in records]
    encoders = 'text_in_loop' if given.model.vae is None else 'in_loop'
    same = {'stage': 'train', 'status': 'complete', 'model_name': settings.model_name, 'encoders': encoders,
            'image_size': settings.image_size}
    names = {card.name for card in cards}
    rows = []
    for record in found:
        record = {'stage': 'train', 'status': 'complete'} | record
        is_same = all(record.get(key) == value for key, value in same.items())
        if is_same and record.get('device') in names and not why_unreliable(record):
            rows.append({'measured on': record['device'], 'GPUs': record.get('num_devices', ''),
                         'microbatch': record.get('device_train_microbatch_size', ''),
                         'images/s': record.get('images_per_sec', ''), 'with': flags_that_differ(record, settings),
                         'file': record['file']})
    return pd.DataFrame(rows)


def published_records(model_name: str) -> list[dict]:
    """Return the rows of published.csv that were measured, which are all of Stable Diffusion 2, as records of it by
    this name."""
    rows = pd.read_csv(PUBLISHED).query('extrapolated == "no"')
    rows = rows.assign(file=PUBLISHED.name, model_name=model_name, device='NVIDIA ' + rows['device'],
                       use_ema=rows['use_ema'] == 'yes')
    return rows.to_dict('records')


def flags_that_differ(record: dict, settings: Train) -> str:
    """Return the flags of a record that bear on speed and are others than those of the run, but for the microbatch."""
    flags = []
    for name in ('batch_size', 'use_ema', *SWITCHES):
        value = record.get(name)
        if value is None or name == 'device_train_microbatch_size' or value == getattr(settings, name):
            continue
        if isinstance(value, bool):
            flags.append(f'--{name}' if value else f'--no-{name}')
        else:
            flags.append(f'--{name} {value}')
    return ' '.join(flags)


def read_json_lines(path: str) -> tuple[list[dict], list[str]]:
    """Read the records of a file of --results, and say of each line that is none, such as one that a full disk cut,
    why. A file that is not there has none.
    """
    if not os.path.isfile(path):
        return [], []
    records = []
    unread = []
    lines = Path(path).read_text(errors='replace').split('\n')
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            unread.append(f'{path}:{number} is no record, and is passed over: {error}')
            continue
        if isinstance(record, dict):
            records.append(record)
        else:
            unread.append(f'{path}:{number} is no record, and is passed over: not one JSON object')
    return records, unread


def in_a_range(figures: list[float]) -> str:
    return ' to '.join(three_digits(figure) for figure in figures)


def three_digits(figure: float) -> str:
    """With three significant digits, or whole."""
    return f'{figure:,.3g}' if figure < 100 else f'{figure:,.0f}'
