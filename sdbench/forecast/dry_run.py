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

import pandas as pd
from composer.utils import dist

from sdbench.costs import days_to_train, price_of, prices_in_words
from sdbench.errors import plural
from sdbench.flags.train import SWITCHES, Train
from sdbench.forecast.speed import LARGEST_ERROR, can_forecast
from sdbench.forecast.trace import UNCOUNTED_SHARE, Estimate, is_stable_diffusion_2
from sdbench.gpus import CARDS, GIB, Card, cards_named
from sdbench.records.figures import WIDTH, rounded
from sdbench.records.keys import ENCODERS, FORECAST, NOT_IN_A_FORECAST
from sdbench.records.read import INPUTS, MEASURED, PUBLISHED, read_published, read_records, words
from sdbench.records.record import append_line, make_record
from sdbench.training.microbatch import sizes_to_try

GPUS_A_NODE = 8
RANGE = f"""\
In brackets: {1 + LARGEST_ERROR:.2f} times either way, the most it was off on speeds of sources that it had not seen.
A figure without brackets is not tested: no published run had this model, size and GPU, and was compiled alike."""
NO_RANGE = f"""\
Not tested: no published run had this model, image size, input and GPU, as few images a step, and was compiled alike.
Elsewhere the forecast was off by at most {LARGEST_ERROR:.0%}, on speeds of sources that it had not seen."""
NOT_FITTED = ("the forecast is fitted to NVIDIA's GPUs, and was far off where it was tried on others "
              '(docs/forecast.md). The memory and the microbatch are counted all the same.')
NO_PEAK = 'no peak is known in this precision. In amp_fp16 it is known (--precision).'
MEMORY = (f'CUDA and its libraries take more than is counted: a microbatch fits where there is room for '
          f'{UNCOUNTED_SHARE:.0%} more.')
PUBLISHED_RUNS = 'Those of published.csv ran the original program: encoders in float32, channels first.'


def forecast_training(settings: Train, build_model: Callable) -> list[dict]:
    """Print what the run would need and could reach, and append a record for each GPU where --results is given.

    Args:
        settings: of the run.
        build_model: makes the model that the run would train.

    Returns the records of the forecasts, one for each GPU of --gpu that holds an image and can be forecast.
    Raises ValueError if the model or the remote is not known, a line of --results is no record, or nothing fits.
    """
    if dist.get_global_rank() > 0:
        return []
    # What may be refused comes before the trace. Without --gpu the cards are those whose speed can be forecast, if any.
    cards = cards_named(settings.gpu)
    if not settings.gpu:
        cards = [card for card in cards if can_forecast(card, settings.precision)] or cards
    measured = []
    if os.path.isfile(settings.results_file):
        measured = read_records(settings.results_file)

    # A step of the run, and a record for each card that holds it.
    print('counting memory and work of a step', file=sys.stderr, flush=True)
    given = Estimate.of(settings, build_model)
    fitting = [card for card in cards if given.microbatch_on(card)]
    if not fitting:
        asked = settings.device_train_microbatch_size
        microbatch = asked if isinstance(asked, int) else 1
        raise ValueError(f'--gpu: a microbatch of {microbatch} takes {given.taken(microbatch):.1f} GiB, and the '
                         f'largest GPU asked for has {max(card.gib for card in cards):g}; choose a GPU with more '
                         f'memory by --gpu, or try {" or ".join(with_less_memory(settings))}')
    records = [training_forecast(given, card) for card in fitting]

    # Those with a speed are kept first: what is printed may end with the pipe that reads it.
    answer = training_answer(given, build_model, records, measured)
    forecasts = [record for record in records if record['images_per_sec'] is not None]
    is_kept = settings.results not in (None, '-')
    if is_kept:
        for record in forecasts:
            append_line(json.dumps(record), settings.results)

    # The answer.
    print(answer)
    without_room = [card.name for card in cards if card not in fitting]
    if without_room:
        print(f'\nNo room on {", ".join(without_room)}.')
    if is_kept:
        print(f'\n{plural(len(forecasts), "forecast")} appended to {settings.results}')
    elif settings.results == '-':
        print(*map(json.dumps, forecasts), sep='\n')
    return forecasts


def training_forecast(given: Estimate, card: Card) -> dict:
    """Return the record of a forecast: the keys of a training's record, calculated and not measured."""
    microbatch = given.microbatch_on(card)
    settings = dataclasses.replace(given.settings, device_train_microbatch_size=microbatch)
    # None where the GPU is not NVIDIA's, or its peak in the precision is not known; the range where it is not tested
    speeds = dict.fromkeys(['images_per_sec', 'images_per_sec_least', 'images_per_sec_most', 'encode_images_per_sec'])
    if can_forecast(card, settings.precision):
        speed = given.speed_on(card, microbatch)
        speeds['images_per_sec'] = speed
        speeds['encode_images_per_sec'] = given.encoding_speed_on(card)
        if given.is_tested(card):
            speeds['images_per_sec_least'] = speed / (1 + LARGEST_ERROR)
            speeds['images_per_sec_most'] = speed * (1 + LARGEST_ERROR)
    return make_record('train', settings, {
        'status': FORECAST,
        'device': card.name,
        'device_type': 'cuda',
        'num_nodes': math.ceil(settings.num_devices / GPUS_A_NODE),
        **speeds,
        'peak_memory_gib': given.taken(microbatch),
    })


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


def training_answer(given: Estimate, build_model: Callable, forecasts: list[dict], measured: list[dict]) -> str:
    """Return the text of a forecast: a row for each card, cheapest first, and the reasons for the first of them.

    Args:
        given: the run as given.
        build_model: makes the model, for the run with one change each.
        forecasts: the record of each card that holds an image of it.
        measured: the rows of --results.
    """
    settings = given.settings

    def dollars_of_an_image(record: dict) -> float:
        price = price_of(record['device'], settings.dollars_per_gpu_hour)
        if record['images_per_sec'] is None or math.isnan(price):
            return math.inf
        return price / record['images_per_sec']

    forecasts = sorted(forecasts, key=dollars_of_an_image)
    first = CARDS[forecasts[0]['device']]

    # the answer
    basis = f'A forecast, from the arithmetic, bytes and kernels of a step. {NOT_IN_A_FORECAST}'
    blocks = ['\n'.join(textwrap.fill(text, WIDTH) for text in (title(settings), basis)), answer(forecasts, settings)]

    # the reasons
    is_forecast = forecasts[0]['images_per_sec'] is not None
    if is_forecast:
        blocks.append(aligned(change_rows(given, build_model, first)))
    blocks.append(f'{aligned(memory_rows(given, first))}\n{MEMORY}')
    if is_forecast:
        seconds = given.seconds_on(first, given.microbatch_on(first))
        shares = (seconds / seconds.sum()).sort_values(ascending=False)
        kinds = [f'{kind} {share:.0%}' for kind, share in shares.items() if share >= 0.005]
        time = textwrap.fill(f'Where the time goes: {", ".join(kinds)}.', WIDTH)
        encoding = rounded(forecasts[0]['encode_images_per_sec'])
        blocks.append(f'{time}\nEncoding once, before a training on latents: {encoding} images/s.')

    # the evidence
    speeds = measured_speeds(settings, given.model.unet.config, first, measured)
    if len(speeds):
        blocks.append(speeds.to_string(index=False))
        if PUBLISHED.name in set(speeds['file']):
            blocks[-1] += f'\n{PUBLISHED_RUNS}'
    return '\n\n'.join(blocks)


def title(settings: Train) -> str:
    """Return what is forecast: the model, its sizes, and how the batch is spread."""
    parts = [f'{settings.image_size} pixels', settings.precision, f'encoders in {settings.encoder_precision}']
    if settings.latents:
        parts.append('latents that are encoded already')
    if settings.compile:
        parts.append('compiled')
    if settings.use_ema:
        parts.append('EMA')
    images = plural(settings.device_batch_size, 'image')
    devices = plural(settings.num_devices, 'GPU')
    return f'{settings.model_name}: {", ".join(parts)}; {images} a step on each of {devices}'


def answer(rows: list[dict], settings: Train) -> str:
    """Return microbatch, memory, images/s, days and dollars of each record of a forecast, and what these are of."""
    # the table
    table = []
    for row in rows:
        speeds = [row['images_per_sec'], row['images_per_sec_least'], row['images_per_sec_most']]
        line = {f'{plural(row["num_devices"], "GPU")}': row['device'].removeprefix('NVIDIA '),
                'microbatch': row['device_train_microbatch_size'],
                'GiB taken': f'{row["peak_memory_gib"]:.1f}',
                'images/s': with_range(speeds)}
        if settings.training_images:
            price = price_of(row['device'], settings.dollars_per_gpu_hour)
            days = [speed and days_to_train(speed, settings.training_images) for speed in speeds]
            dollars = [each and each * 24 * row['num_devices'] * price for each in days]
            line |= {'days': with_range(days), 'dollars': 'no price' if math.isnan(price) else with_range(dollars)}
        table.append(line)

    # what its figures are of, and how sure
    sentences = [aligned(pd.DataFrame(table))]
    if settings.training_images:
        devices = [row['device'] for row in rows]
        prices = prices_in_words(devices, settings.dollars_per_gpu_hour)
        epochs = ''
        if settings.remote:
            epochs = f' ({rounded(settings.training_images / settings.batch_size / settings.batches_per_epoch)} epochs)'
        sentences.append(textwrap.fill(f'Days and dollars: {settings.training_images:,} images{epochs}, {prices} '
                                       '(--dollars_per_gpu_hour).', WIDTH))
    without_speed = {}  # cards, by the reason
    for row in rows:
        if row['images_per_sec'] is None:
            is_fitted = CARDS[row['device']].multiprocessors is not None
            without_speed.setdefault(NO_PEAK if is_fitted else NOT_FITTED, []).append(row['device'])
    if any(row['images_per_sec'] is not None for row in rows):
        sentences.append(RANGE if any(row['images_per_sec_least'] for row in rows) else NO_RANGE)
    for reason, devices in without_speed.items():
        sentences.append(textwrap.fill(f'No speed of {", ".join(devices)}: {reason}', WIDTH))
    if len(rows) > 1:
        sentences.append('What follows is of the first GPU; --gpu NAME picks another.')
    return '\n'.join(sentences)


def change_rows(given: Estimate, build_model: Callable, card: Card) -> pd.DataFrame:
    """Return what one change would do on a card: the microbatch that then fits, images/s, and these over the given."""
    settings = given.settings
    asked = given.microbatch_on(card)
    largest = given.largest_microbatch(card.gib)
    runs = {}
    if largest != asked:
        runs['the largest microbatch'] = (given, largest)
    for change, changed in with_less_memory(settings).items():
        other = Estimate.of(changed, build_model)
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
    """Return GiB of a card by item, for each microbatch up to the first that it does not hold."""
    columns = {}
    for size in sizes_to_try(given.settings.device_batch_size):
        columns[str(size)] = given.needed(size)
        if given.taken(size) > card.gib:
            break
    table = pd.DataFrame(columns).fillna(0) / GIB
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

    Of three figures the last two are its bounds, or None.
    """
    figure, *bounds = figures
    if figure is None:
        return 'not known'
    if None in bounds:
        return rounded(figure)
    least, most = sorted(bounds)
    return f'{rounded(figure)} ({rounded(least)} to {rounded(most)})'


def aligned(table: pd.DataFrame) -> str:
    """Return a table as text: the first column to the left, figures to the right."""
    alignment = ['left', *['right'] * (len(table.columns) - 1)]
    return table.to_markdown(index=False, tablefmt='plain', disable_numparse=True, colalign=alignment)
