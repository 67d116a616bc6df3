"""Say what a run would need and reach: which GPU, how long and for how many dollars first, and then why."""
import dataclasses
import math
import textwrap

import pandas as pd

from sdbench.costs import days_to_train, gpu_hours, price_of, prices_in_words
from sdbench.errors import plural
from sdbench.flags.train import Train
from sdbench.forecast.estimate import UNCOUNTED_SHARE, Estimate
from sdbench.forecast.measured import PUBLISHED, measured_speeds
from sdbench.forecast.speed import LARGEST_ERROR, can_forecast, seconds_by_kind
from sdbench.gpus import Card
from sdbench.measuring.power import GIB
from sdbench.measuring.record import training_settings
from sdbench.training.microbatch import sizes_to_try

GPUS_A_NODE = 8
WIDTH = 120  # of a line, in characters
FORECAST = 'forecast'  # the status of a record that was calculated
NOT_IN_IT = """\
A forecast, from the arithmetic, bytes and kernels of a step. Not in it: waiting for data, checkpoints, evaluations,
a network between nodes that is slower than the GPUs' own link, and for latents their encoding."""
RANGE = f"""\
In brackets: {1 + LARGEST_ERROR:.2f} times either way, the most it was off on speeds of sources that it had not seen.
One figure alone is not tested: no published run had this model, size and GPU, as few images a step, compiled alike."""
MEMORY = (f'CUDA and its libraries take more than is counted: a microbatch fits where there is room for '
          f'{UNCOUNTED_SHARE:.0%} more.')
PUBLISHED_RUNS = 'Those of published.csv ran the original program: encoders in float32, channels first.'


def forecast_record(each: Estimate, card: Card, latents: bool) -> dict:
    """Return the record of a forecast, with the keys that the record of a training has, and the range of its speed.

    | key                                     | meaning                                                         |
    |-----------------------------------------|-----------------------------------------------------------------|
    | status                                  | forecast                                                        |
    | images_per_sec                          | None where the GPU is not NVIDIA's, or the precision is float32 |
    | images_per_sec_least, _most             | its range; None where the forecast is not tested                |
    | peak_memory_gib                         | of the card, with what is added to what is counted              |
    """
    settings = each.settings
    microbatch = each.microbatch_on(card)
    speed, least, most = None, None, None
    if can_forecast(card, settings.precision):
        speed = each.images_per_sec(card, microbatch)
        if each.is_tested(card):
            least, most = speed / (1 + LARGEST_ERROR), speed * (1 + LARGEST_ERROR)
    return training_settings(settings, latents, microbatch) | {
        'status': FORECAST,
        'device': card.name,
        'device_type': 'cuda',
        'num_devices': settings.dry_run,
        'num_nodes': math.ceil(settings.dry_run / GPUS_A_NODE),
        'images_per_sec': speed,
        'images_per_sec_per_device': speed and speed / settings.dry_run,
        'images_per_sec_least': least,
        'images_per_sec_most': most,
        'peak_memory_gib': each.taken(microbatch),
    }


def answer(given: Estimate, others: list[Estimate], cards: list[Card], forecasts: list[dict],
           measured: list[dict]) -> str:
    """Return the text of a forecast: a row for each card, cheapest first, and the reasons for the first of them.

    Args:
        given: the run as given.
        others: the run with one change each.
        cards: that hold an image of it.
        forecasts: the record of each card, in their order.
        measured: the rows of --results.
    """
    settings = given.settings
    latents = given.model.vae is None

    def dollars_of_an_image(pair: tuple[Card, dict]) -> float:
        card, record = pair
        if record['images_per_sec'] is None:
            return math.inf
        return price_of(card.name, settings.dollars_per_gpu_hour) / record['images_per_sec']

    pairs = sorted(zip(cards, forecasts, strict=True), key=dollars_of_an_image)
    first, record_of_first = pairs[0]
    rows = [record for _, record in pairs]

    # the answer
    blocks = [f'{textwrap.fill(title(settings, latents), WIDTH)}\n{NOT_IN_IT}',
              f'{aligned(answer_rows(rows, settings))}\n{notes_on_answer(rows, settings)}']

    # the reasons
    is_forecast = record_of_first['images_per_sec'] is not None
    if is_forecast:
        blocks.append(aligned(change_rows(given, others, first)))
    blocks.append(f'{aligned(memory_rows(given, first))}\n{MEMORY}')
    if is_forecast:
        layout = given.layout(given.microbatch_on(first))
        seconds = seconds_by_kind(first, given.work, layout, given.constants)
        blocks.append(textwrap.fill(time_in_words(seconds), WIDTH))

    # the evidence
    speeds = measured_speeds(settings, given.model.unet.config, latents, first, measured)
    if len(speeds):
        blocks.append(speeds.to_string(index=False))
        if PUBLISHED.name in set(speeds['file']):
            blocks[-1] += f'\n{PUBLISHED_RUNS}'
    return '\n\n'.join(blocks)


def title(settings: Train, latents: bool) -> str:
    """Return what is forecast: the model, its sizes, and how the batch is spread."""
    devices = settings.dry_run
    words = [f'{settings.image_size} pixels', settings.precision, f'encoders in {settings.encoder_precision}']
    if latents:
        words.append('latents that are encoded already')
    if settings.compile:
        words.append('compiled')
    if settings.use_ema:
        words.append('EMA')
    images = plural(settings.batch_size // devices, 'image')
    return f'{settings.model_name}: {", ".join(words)}; {images} a step on each of {plural(devices, "GPU")}'


def answer_rows(rows: list[dict], settings: Train) -> pd.DataFrame:
    """Return the table that answers: for each record of a forecast microbatch, memory, images/s, days and dollars."""
    table = []
    for row in rows:
        speeds = [row['images_per_sec'], row['images_per_sec_least'], row['images_per_sec_most']]
        line = {f'{plural(row["num_devices"], "GPU")}': row['device'].removeprefix('NVIDIA '),
                'microbatch': row['device_train_microbatch_size'],
                'GiB taken': f'{row["peak_memory_gib"]:.1f}',
                'images/s': with_range(speeds)}
        if settings.training_images:
            price = price_of(row['device'], settings.dollars_per_gpu_hour)
            days, dollars = [], []
            for speed in speeds:
                days.append(speed and days_to_train(speed, settings.training_images))
                dollars.append(speed and gpu_hours(speed, row['num_devices'], settings.training_images) * price)
            line |= {'days': with_range(days), 'dollars': with_range(dollars)}
        table.append(line)
    return pd.DataFrame(table)


def notes_on_answer(rows: list[dict], settings: Train) -> str:
    """Return what the figures of the answer are of, and how sure."""
    sentences = []
    if settings.training_images:
        sentences.append(f'Days and dollars: {settings.training_images:,} images, '
                         f'{prices_in_words(settings.dollars_per_gpu_hour)} (--dollars_per_gpu_hour).')
    sentences.append(RANGE)
    if len(rows) > 1:
        sentences.append('What follows is of the first GPU; --gpu NAME picks another.')
    return '\n'.join(sentences)


def change_rows(given: Estimate, others: list[Estimate], card: Card) -> pd.DataFrame:
    """Return what one change would do on a card: the microbatch that then fits, images/s, and these over the given."""
    settings = given.settings
    runs = [(each.title, each, each.microbatch_on(card)) for each in others]
    largest = given.largest_microbatch(card.gib)
    if largest != given.microbatch_on(card):
        runs.insert(0, ('the largest microbatch', given, largest))
    if settings.dry_run > 1 and settings.allreduce_precision == 'fp32':
        half = dataclasses.replace(given, settings=dataclasses.replace(settings, allreduce_precision='bf16'))
        runs.append(('--allreduce_precision bf16', half, given.microbatch_on(card)))
    speed_given = given.images_per_sec(card, given.microbatch_on(card))
    table = []
    for name, each, microbatch in runs:
        line = {'one change': name, 'microbatch': microbatch or 'none', 'images/s': '', 'times as fast': ''}
        if microbatch:
            speed = each.images_per_sec(card, microbatch)
            line |= {'images/s': three_digits(speed), 'times as fast': f'{speed / speed_given:.2f}'}
        table.append(line)
    return pd.DataFrame(table)


def memory_rows(given: Estimate, card: Card) -> pd.DataFrame:
    """Return GiB of a card by item, for each microbatch up to the first that it does not hold."""
    columns = {}
    for size in sizes_to_try(given.device_batch_size):
        columns[str(size)] = given.needed(size)
        if given.taken(size) > card.gib:
            break
    table = pd.DataFrame(columns).fillna(0) / GIB
    table.loc['counted'] = table.sum()
    table = table.map('{:.2f}'.format)
    table.insert(0, 'GiB, by microbatch', table.index)
    return table


def time_in_words(seconds: dict[str, float]) -> str:
    """Return the share of the time of a step by kind of operator, the largest first, down to one in a hundred."""
    total = sum(seconds.values())
    shares = []
    for kind, spent in sorted(seconds.items(), key=lambda item: -item[1]):
        if spent >= 0.005 * total:
            shares.append(f'{kind} {spent / total:.0%}')
    return f'Where the time goes: {", ".join(shares)}.'


def aligned(table: pd.DataFrame) -> str:
    """Return a table as text: the first column to the left, figures to the right."""
    alignment = ['left', *['right'] * (len(table.columns) - 1)]
    return table.to_markdown(index=False, tablefmt='plain', disable_numparse=True, colalign=alignment)


def with_range(figures: list[float | None]) -> str:
    """Return a figure with its range in brackets, such as '70 (57 to 85)'.

    Of three figures the last two are its bounds, or None.
    """
    figure, *bounds = figures
    if figure is None:
        return 'not known'
    if None in bounds:
        return three_digits(figure)
    least, most = sorted(bounds)
    return f'{three_digits(figure)} ({three_digits(least)} to {three_digits(most)})'


def three_digits(figure: float) -> str:
    """Return a figure with three significant digits, or whole."""
    return f'{figure:,.3g}' if figure < 100 else f'{figure:,.0f}'
