"""--dry_run of benchmark.py: say what a training would need and could reach, before a GPU is rented.

Which GPU, how long and for how many dollars comes first, and then why. Nothing is trained.
"""
import dataclasses
import json
import math
import os
import sys
import textwrap
from collections.abc import Callable
from typing import NamedTuple

import pandas as pd
from composer.utils import dist

from sdbench.complete import complete
from sdbench.costs import days_to_train, price_of, prices_in_words
from sdbench.errors import plural
from sdbench.flags.train import SWITCHES, Train
from sdbench.forecast.speed import LARGEST_ERROR
from sdbench.forecast.trace import UNCOUNTED_SHARE, Estimate, is_stable_diffusion_2
from sdbench.gpus import GIB, NETWORK_SHARE, Card, cards_named, peak_of, short_name
from sdbench.records.figures import WIDTH, rounded
from sdbench.records.keys import ENCODERS, FORECAST, NOT_IN_A_FORECAST
from sdbench.records.read import INPUTS, MEASURED, PUBLISHED, read_published, read_records, words
from sdbench.records.record import append_line, make_record

RANGE = f"""\
In brackets: {1 + LARGEST_ERROR:.2f} times either way, the most it was off on speeds of sources that it had not seen.
A speed without brackets is not tested: no published run had this model, size, GPU and as many machines, and was
compiled alike."""
NO_RANGE = f"""\
Not tested: no published run had this model, image size, input and GPU, as few images a step, and was compiled alike.
Elsewhere the forecast was off by at most {LARGEST_ERROR:.0%}, on speeds of sources that it had not seen."""
NO_PEAK = 'no peak is known in this precision. In amp_fp16 it is known (--precision).'
MOST_MICROBATCHES = 9  # columns of the table of memory, up to the first that does not fit
MEMORY = (f'CUDA and its libraries take more than is counted: a microbatch fits where there is room for '
          f'{UNCOUNTED_SHARE:.0%} more.')
PUBLISHED_RUNS = 'Those of published.csv ran the original program: encoders in float32, channels first.'


def forecast_training(settings: Train, index: dict | None, build_model: Callable, build_optimizer: Callable
                      ) -> list[dict]:
    """Print what the run would need and could reach, and append a record for each forecast where --results is given.

    Args:
        settings: as the flags gave them, with the numbers of GPUs of --dry_run.
        index: the index.json of the shards; None: synthetic data.
        build_model: makes the model that the run would train.
        build_optimizer: makes its optimizer.

    Returns the records of the forecasts, one for each GPU of --gpu and number of them that hold an image and can be
    forecast. Raises ValueError if the model or the remote is not known, a line of --results is no record, or nothing
    fits.
    """
    if dist.get_global_rank() > 0:
        return []
    # The run on each number of GPUs, or why there can be none.
    runs = []
    refused = {}  # reasons, by number of GPUs
    for devices in sorted(settings.dry_run):
        try:
            settings.check_batch(devices or dist.get_world_size())
            runs.append(complete(dataclasses.replace(settings, dry_run=(devices,)), index))
        except ValueError as error:
            refused[devices] = str(error)
    if not runs:
        raise ValueError(next(iter(refused.values())))

    # What may be refused comes before the trace. Without --gpu the cards are those whose speed can be forecast, if any.
    cards = cards_named(settings.gpu)
    if not settings.gpu:
        cards = [card for card in cards if peak_of(card.name, runs[0].precision)] or cards
    measured = []
    if os.path.isfile(settings.results_file):
        measured = read_records(settings.results_file)

    # A step of the run, and a forecast for each card that holds it, by card and number of GPUs.
    print('counting memory and work of a step', file=sys.stderr, flush=True)
    estimates = [Estimate.of(run, build_model, build_optimizer) for run in runs]
    forecasts = {}
    for card in cards:
        own = {given.settings.num_devices: Forecast.of(given, card) for given in estimates if given.microbatch_on(card)}
        if own:
            forecasts[card] = own
    if not forecasts:
        asked = settings.device_train_microbatch_size
        microbatch = asked if isinstance(asked, int) else 1
        raise ValueError(f'--gpu: a microbatch of {microbatch} takes {estimates[0].taken(microbatch):.1f} GiB, and the '
                         f'largest GPU asked for has {max(card.gib for card in cards):g}; choose a GPU with more '
                         f'memory by --gpu, or try {" or ".join(with_less_memory(runs[0]))}')

    # Those with a speed are kept first: what is printed may end with the pipe that reads it.
    cheapest = sorted(forecasts.values(), key=lambda own: next(iter(own.values())).dollars_of_an_image)
    answer = training_answer(cheapest, refused, build_model, build_optimizer, measured)
    records = [forecast.record for own in forecasts.values() for forecast in own.values()]
    records = [record for record in records if record['images_per_sec'] is not None]
    is_kept = settings.results not in (None, '-')
    if is_kept:
        for record in records:
            append_line(json.dumps(record), settings.results)

    # The answer.
    print(answer)
    without_room = [card.name for card in cards if card not in forecasts]
    if without_room:
        print(f'\nNo room on {", ".join(without_room)}.')
    if is_kept:
        print(f'\n{plural(len(records), "forecast")} appended to {settings.results}')
    elif settings.results == '-':
        print(*map(json.dumps, records), sep='\n')
    return records


class Forecast(NamedTuple):
    """A run on a number of GPUs of one kind, and its record, which has the keys of a training's."""
    given: Estimate
    card: Card
    record: dict

    @classmethod
    def of(cls, given: Estimate, card: Card) -> 'Forecast':
        """Calculate the record; its speed is None where the peak of the card is not known in the precision."""
        microbatch = given.microbatch_on(card)
        settings = dataclasses.replace(given.settings, device_train_microbatch_size=microbatch)
        speeds = dict.fromkeys(['images_per_sec', 'images_per_sec_least', 'images_per_sec_most',
                                'encode_images_per_sec'])
        if peak_of(card.name, settings.precision):
            speed = given.speed_on(card, microbatch)
            speeds['images_per_sec'] = speed
            speeds['encode_images_per_sec'] = given.encoding_speed_on(card)
            if given.is_tested(card):
                speeds['images_per_sec_least'] = speed / (1 + LARGEST_ERROR)
                speeds['images_per_sec_most'] = speed * (1 + LARGEST_ERROR)
        return cls(given, card, make_record('train', settings, {
            'status': FORECAST,
            'device': card.name,
            'device_type': 'cuda',
            'num_nodes': given.machines_on(card),
            'gpus_per_node': given.gpus_per_node(card),
            **speeds,
            'peak_memory_gib': given.taken(microbatch),
        }))

    @property
    def name(self) -> str:
        """Return the name of the card."""
        return self.card.name.removeprefix('NVIDIA ')

    @property
    def price(self) -> float:
        """Return the dollars of a GPU-hour; NaN where there is no price."""
        return price_of(self.card.name, self.given.settings.dollars_per_gpu_hour)

    @property
    def dollars_of_an_image(self) -> float:
        """Return what orders the cards; infinite where it is not known."""
        if self.record['images_per_sec'] is None or math.isnan(self.price):
            return math.inf
        return self.price / self.record['images_per_sec_per_device']

    def cells(self, each: float | None = None) -> dict[str, str]:
        """Return the cells of its row by heading.

        Args:
            each: images/s of each GPU that its efficiency is over, in a table of several numbers of GPUs; None: there
                is one number, and days and dollars have a range as well.
        """
        record = self.record
        speeds = [record['images_per_sec'], record['images_per_sec_least'], record['images_per_sec_most']]
        cells = {'images/s': with_range(speeds)}
        if each is not None and speeds[0] is not None:
            own = record['images_per_sec_per_device']
            cells |= {'each': rounded(own), 'efficiency': f'{own / each:.1%}'}
        images = self.given.settings.training_images
        if images:
            days = [speed and days_to_train(speed, images) for speed in speeds]
            hours = [each_days and each_days * 24 * record['num_devices'] for each_days in days]
            dollars = [each_hours and each_hours * self.price for each_hours in hours]
            if each is not None:
                days, dollars = days[:1], dollars[:1]
            cells['days'] = with_range(days)
            if each is not None:
                cells['GPU-hours'] = with_range(hours[:1])
            cells['dollars'] = 'no price' if math.isnan(self.price) else with_range(dollars)
        sizes = {'microbatch': str(record['device_train_microbatch_size']),
                 'GiB taken': f'{record["peak_memory_gib"]:.1f}'}
        return sizes | cells if each is None else cells | sizes


def with_less_memory(settings: Train) -> dict[str, Train]:
    """Return the settings of a run with each change that takes less memory, by the change in words."""
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
    if not settings.latents:
        changes['latents (encode.py)'] = {'encoders': ENCODERS[True]}
    return {change: dataclasses.replace(settings, **flags) for change, flags in changes.items()}


def training_answer(forecasts: list[dict[int, Forecast]], refused: dict[int, str], build_model: Callable,
                    build_optimizer: Callable, measured: list[dict]) -> str:
    """Return the text of a forecast: a row for each card and number of GPUs, and the reasons for the first of them.

    Args:
        forecasts: of each card that holds an image, by number of GPUs; the cheapest card first.
        refused: why there can be no run, by number of GPUs.
        build_model: makes the model, for the run with one change each.
        build_optimizer: makes its optimizer.
        measured: the rows of --results.
    """
    # the answer
    given, card, record = next(iter(forecasts[0].values()))
    basis = f'A forecast, from the arithmetic, bytes and kernels of a step. {NOT_IN_A_FORECAST}'
    blocks = ['\n'.join(textwrap.fill(text, WIDTH) for text in (title(given.settings), basis))]
    blocks.append(answer(forecasts, refused))

    # the reasons
    is_forecast = record['images_per_sec'] is not None
    if is_forecast:
        blocks.append(aligned(change_rows(given, build_model, build_optimizer, card)))
    blocks.append(f'{aligned(memory_rows(given, card))}\n{MEMORY}')
    if is_forecast:
        seconds = given.seconds_on(card, given.microbatch_on(card))
        shares = (seconds / seconds.sum()).sort_values(ascending=False)
        kinds = [f'{kind} {share:.0%}' for kind, share in shares.items() if share >= 0.005]
        time = textwrap.fill(f'Where the time goes: {", ".join(kinds)}.', WIDTH)
        encoding = rounded(record['encode_images_per_sec'])
        blocks.append(f'{time}\nEncoding once, before a training on latents: {encoding} images/s.')

    # the evidence
    speeds = measured_speeds(given.settings, given.model.unet.config, card, measured)
    if len(speeds):
        blocks.append(aligned(speeds))
        if PUBLISHED.name in set(speeds['file']):
            blocks[-1] += f'\n{PUBLISHED_RUNS}'
    return '\n\n'.join(blocks)


def title(settings: Train) -> str:
    """Return what is forecast: the model, its sizes, and the batch."""
    parts = [f'{settings.image_size} pixels', settings.precision, f'encoders in {settings.encoder_precision}']
    if settings.latents:
        parts.append('latents that are encoded already')
    if settings.compile:
        parts.append('compiled')
    if settings.use_ema:
        parts.append('EMA')
    return f'{settings.model_name}: {", ".join(parts)}; a batch of {plural(settings.batch_size, "image")}'


def answer(forecasts: list[dict[int, Forecast]], refused: dict[int, str]) -> str:
    """Return the tables of a forecast, and what their figures are of; the arguments are those of `training_answer`.

    Of one number of GPUs there is a table with a row for each card. Of several there is one for each card, with a row
    for each number.
    """
    rows = [forecast for own in forecasts for forecast in own.values()]
    settings = rows[0].given.settings
    counts = {row.record['num_devices'] for row in rows} | set(refused)
    if len(counts) == 1:
        heading = plural(*counts, 'GPU')
        tables = [aligned(pd.DataFrame([{heading: row.name} | row.cells() for row in rows]))]
    else:
        tables = [table_of_numbers(own, refused | dict.fromkeys(counts - set(refused) - set(own), 'no room'))
                  for own in forecasts]

    # what its figures are of, and how sure
    sentences = []
    if settings.training_images:
        prices = prices_in_words([row.card.name for row in rows], settings.dollars_per_gpu_hour)
        epochs = ''
        if settings.remote:
            epochs = f' ({rounded(settings.training_images / settings.batch_size / settings.batches_per_epoch)} epochs)'
        sentences.append(f'Days and dollars: {settings.training_images:,} images{epochs}, {prices} '
                         '(--dollars_per_gpu_hour).')
    sentences += network_sentences(rows)
    with_speed = [row.record for row in rows if row.record['images_per_sec'] is not None]
    if with_speed:
        sentences.append(RANGE if any(record['images_per_sec_least'] for record in with_speed) else NO_RANGE)
    without = dict.fromkeys(row.card.name for row in rows if row.record['images_per_sec'] is None)
    if without:
        sentences.append(f'No speed of {", ".join(without)}: {NO_PEAK}')
    if len(rows) > 1:
        sentences.append('What follows is of the first row; --gpu NAME picks another GPU.')
    filled = '\n'.join(sentence if '\n' in sentence else textwrap.fill(sentence, WIDTH) for sentence in sentences)
    return '\n\n'.join(tables) + '\n' + filled


def table_of_numbers(own: dict[int, Forecast], reasons: dict[int, str]) -> str:
    """Return a table with a row for each number of GPUs of one kind.

    Args:
        own: forecasts by number.
        reasons: why there is none of other numbers. They stand in the lines of these.
    """
    first = next(iter(own.values()))
    each = first.record['images_per_sec_per_device']
    rows = [{first.name: plural(devices, 'GPU')} | forecast.cells(each) for devices, forecast in own.items()]
    heading, *lines = aligned(pd.DataFrame(rows)).splitlines()
    line_of = dict(zip(own, lines, strict=True))
    line_of |= {devices: f'{plural(devices, "GPU")}: {reason}' for devices, reason in reasons.items()}
    return '\n'.join([heading, *(line_of[devices] for devices in sorted(line_of))])


def network_sentences(rows: list[Forecast]) -> list[str]:
    """Say what is counted between machines, if any row has gradients that leave one."""
    names = {}  # of cards, by the GPUs of a machine
    for row in rows:
        if row.given.needs_network(row.card):
            names.setdefault(row.record['gpus_per_node'], {})[short_name(row.card.name)] = None
    if not names:
        return []
    machines = ' or '.join(f'{gpus} x {", ".join(cards)}' for gpus, cards in names.items())
    gbits = rows[0].given.settings.network_gbits
    if gbits is None:
        speed = 'is taken to be as fast as the link of its GPUs; --network_gbits says how fast it is.'
    else:
        speed = f'is {gbits:g} Gbit/s, of which {NETWORK_SHARE:.0%} count.'
    return [f'The network of a machine ({machines}) {speed}']


def change_rows(given: Estimate, build_model: Callable, build_optimizer: Callable, card: Card) -> pd.DataFrame:
    """Return what one change would do on a card: the microbatch that then fits, images/s, and these over the given."""
    settings = given.settings
    asked = given.microbatch_on(card)
    largest = given.largest_microbatch(card.gib)
    runs = {}
    if largest != asked:
        runs['the largest microbatch'] = (given, largest)
    for change, changed in with_less_memory(settings).items():
        other = Estimate.of(changed, build_model, build_optimizer)
        runs[change] = (other, other.microbatch_on(card))
    if settings.num_devices > 1 and settings.allreduce_precision == 'fp32':
        half = dataclasses.replace(given, settings=dataclasses.replace(settings, allreduce_precision='bf16'))
        runs['--allreduce_precision bf16'] = (half, asked)

    table = []
    for change, (other, microbatch) in runs.items():
        line = {'one change': change, 'microbatch': microbatch or 'none', 'images/s': '', 'times as fast': ''}
        if microbatch:
            speed = other.speed_on(card, microbatch)
            times = speed / given.speed_on(card, asked)
            line |= {'images/s': rounded(speed), 'times as fast': f'{times:.2f}'}
        table.append(line)
    return pd.DataFrame(table)


def memory_rows(given: Estimate, card: Card) -> pd.DataFrame:
    """Return GiB of a card by item, for the last microbatches up to the first that it does not hold."""
    columns = {}
    for size in given.settings.microbatch_sizes:
        columns[str(size)] = given.needed(size)
        if given.taken(size) > card.gib:
            break
    table = pd.DataFrame(columns).fillna(0).iloc[:, -MOST_MICROBATCHES:] / GIB
    table.loc['counted'] = table.sum()
    table = table.map('{:.2f}'.format)
    table.insert(0, 'GiB, by microbatch', table.index)
    return table


def measured_speeds(settings: Train, unet_config: dict, card: Card, rows: list[dict]) -> pd.DataFrame:
    """Return a row for each reliable speed of the same model and input on a card.

    Flags that such a run had otherwise stand in the column `with`.

    Args:
        settings: of the run that is forecast.
        unet_config: of its UNet. Published speeds stand beside that of Stable Diffusion 2 alone.
        card: that it is forecast for.
        rows: of the records of --results, as `read_records` returns them.
    """
    # published.csv names no model
    found = []
    if is_stable_diffusion_2(unet_config):
        for row in read_published():
            found.append(row | {'file': PUBLISHED.name, 'model_name': settings.model_name})
    found += [row | {'file': settings.results_file} for row in rows]

    # those of such a run
    same = {'stage': 'train', 'status': MEASURED, 'model_name': settings.model_name, 'device': card.name,
            'input': INPUTS[settings.encoders], 'image_size': str(settings.image_size)}
    speeds = []
    for row in found:
        if any(row.get(key) != value for key, value in same.items()):
            continue
        # flags that bear on speed and are others than those of the run, but for the microbatch
        flags = []
        for name in ('batch_size', 'use_ema', *SWITCHES):
            value = row[name]
            if value in ('', words(getattr(settings, name))) or name == 'device_train_microbatch_size':
                continue
            if value in ('yes', 'no'):
                flags.append(f'--{name}' if value == 'yes' else f'--no-{name}')
            else:
                flags.append(f'--{name} {value}')
        speeds.append({'measured on': row['device'], 'GPUs': row['num_devices'],
                       'microbatch': row['record'].get('device_train_microbatch_size', ''),
                       'images/s': row['images_per_sec'], 'with': ' '.join(flags), 'file': row['file']})
    return pd.DataFrame(speeds)


def with_range(figures: list[float | None]) -> str:
    """Return a figure with its range in brackets, such as '70 (57 to 85)'.

    Of three figures the last two are its bounds, or None; one stands alone.
    """
    figure, *bounds = figures
    if figure is None:
        return 'not known'
    if not bounds or None in bounds:
        return rounded(figure)
    least, most = sorted(bounds)
    return f'{rounded(figure)} ({rounded(least)} to {rounded(most)})'


def aligned(table: pd.DataFrame) -> str:
    """Return a table as text: the first column to the left, figures to the right."""
    alignment = ['left', *['right'] * (len(table.columns) - 1)]
    return table.to_markdown(index=False, tablefmt='plain', disable_numparse=True, colalign=alignment)
