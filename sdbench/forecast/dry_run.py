"""--dry_run of benchmark.py: say what a training would need and could reach, before a GPU is rented.

Which GPU, how long and for how many dollars comes first, and then why. Nothing is trained.
"""
import dataclasses
import json
import math
import sys
import textwrap
from collections.abc import Callable
from typing import NamedTuple

from composer.utils import dist

from sdbench.complete import complete
from sdbench.costs import ONE_PRICE, days_to_train, describe_prices, gpu_hours, price_of
from sdbench.errors import UserError, plural
from sdbench.flags.train import Train
from sdbench.forecast.speed import LARGEST_ERROR
from sdbench.forecast.trace import UNCOUNTED_SHARE, Estimate
from sdbench.gpus import GIB, NETWORK_SHARE, Card, cards_named, peak_of, short_name
from sdbench.records.figures import WIDTH, format_days, rounded, text_table
from sdbench.records.record import append_line, make_record
from sdbench.records.status import FORECAST, NOT_IN_A_FORECAST
from sdbench.training.microbatch import SMALLER_MICROBATCH, changes_that_take_less, memory_advice

IN_BRACKETS = (f'In brackets: {1 + LARGEST_ERROR:.2f} times either way, the most it was off on published speeds that '
               'it had not seen.')
NOT_TESTED = 'A speed without brackets is not tested: no published run was like it in all that bears on its speed.'
MOST_MICROBATCHES = 9  # columns of the table of memory, up to the first that does not fit
MEMORY = (f'CUDA and its libraries take more than is counted: a microbatch fits where there is room for '
          f'{UNCOUNTED_SHARE:.0%} more.')
NO_SPEED = 'No speed of {}: no peak is known in {}. Where a card has one, --precision amp_fp16 shows it.'


def forecast_training(settings: Train, index: dict | None, build_model: Callable, build_optimizer: Callable
                      ) -> list[dict]:
    """Print what the run would need and could reach, and append a record for each forecast where --results is given.

    Args:
        settings: as the flags gave them, with the numbers of GPUs of --dry_run.
        index: the index.json of the shards; None: synthetic data.
        build_model: makes the model that the run would train.
        build_optimizer: makes its optimizer.

    Returns the records of the forecasts, one for each GPU of --gpu and number of them that hold an image and have a
    speed. Raises UserError if the model or the remote is not known, or nothing fits.
    """
    if dist.get_global_rank() > 0:
        return []
    # a step of the run, and a forecast for each card that holds it on each number of GPUs; the cheapest card first.
    # Where the peak of a card is not known, its memory is.
    runs = [complete(dataclasses.replace(settings, dry_run=(devices,)), index) for devices in sorted(settings.dry_run)]
    print('counting memory and work of a step', file=sys.stderr, flush=True)
    estimates = [Estimate.of(run, build_model, build_optimizer) for run in runs]
    precision = runs[0].precision
    cards = [card._replace(tflops=peak_of(card.name, precision) or math.nan) for card in cards_named(settings.gpu)]
    forecasts = []
    no_room = []
    for card in cards:
        own = [Forecast.of(given, card) for given in estimates if given.microbatch_on(card)]
        if own:
            forecasts.append(own)
        else:
            no_room.append(short_name(card.name))
    if not forecasts:
        asked = settings.device_train_microbatch_size
        microbatch = asked if isinstance(asked, int) else 1
        largest = max(cards, key=lambda card: card.gib)
        fits_with = {}
        for change, changed in changes_that_take_less(runs[0]).items():
            fits_with[change] = Estimate.of(changed, build_model, build_optimizer).microbatch_on(largest) is not None
        raise UserError(f'--gpu: a microbatch of {microbatch} takes {estimates[0].taken(microbatch):.1f} GiB, and the '
                        f'largest GPU asked for has {largest.gib:g}; {memory_advice(fits_with)}')
    forecasts.sort(key=lambda own: own[0].dollars_of_an_image)

    # the text
    rows = [forecast for own in forecasts for forecast in own]
    sentences = what_figures_mean(rows)
    if no_room:
        sentences.append(f'No room on {", ".join(no_room)}.')
    if len(rows) > 1:
        sentences.append(f'What follows is of {rows[0].record["num_devices"]} x {short_name(rows[0].card.name)} alone; '
                         '--gpu and --dry_run pick others.')
    blocks = [title(rows[0].given.settings), '\n\n'.join(tables(forecasts)) + '\n' + filled(sentences),
              *reasons(rows[0], build_model, build_optimizer)]

    # records are kept before anything is printed, which may end with the pipe that reads it
    records = [forecast.record for forecast in rows if forecast.has_speed]
    if settings.results not in (None, '-'):
        for record in records:
            append_line(json.dumps(record), settings.results)
        blocks.append(f'{plural(len(records), "forecast")} appended to {settings.results}')
    print(*blocks, sep='\n\n')
    if settings.results == '-':
        print(*map(json.dumps, records), sep='\n')
    return records


class Forecast(NamedTuple):
    """A run on a number of GPUs of one kind, and its record, which has the keys of a training's."""
    given: Estimate
    card: Card
    record: dict

    @classmethod
    def of(cls, given: Estimate, card: Card) -> 'Forecast':
        """Calculate the record, without a speed on a card whose peak is not known."""
        microbatch = given.microbatch_on(card)
        settings = dataclasses.replace(given.settings, device_train_microbatch_size=microbatch)
        speed = given.speed_on(card, microbatch)
        is_tested = given.is_tested(card) and not math.isnan(speed)
        return cls(given, card, make_record('train', settings, {
            'status': FORECAST,
            'device': card.name,
            'device_type': 'cuda',
            'num_nodes': given.machines_on(card),
            'gpus_per_node': given.gpus_per_node(card),
            'images_per_sec': speed,
            'images_per_sec_least': speed / (1 + LARGEST_ERROR) if is_tested else None,
            'images_per_sec_most': speed * (1 + LARGEST_ERROR) if is_tested else None,
            'encode_images_per_sec': given.encoding_speed_on(card),
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
    def has_speed(self) -> bool:
        """Tell whether its speed is known."""
        return not math.isnan(self.record['images_per_sec'])

    @property
    def dollars_of_an_image(self) -> float:
        """Return what orders the cards; infinite where there is no price, or no speed."""
        dollars = self.price / self.record['images_per_sec_per_device']
        return math.inf if math.isnan(dollars) else dollars

    def cells(self, first: 'Forecast | None' = None) -> dict[str, str]:
        """Return the cells of its row by heading.

        Args:
            first: of the same card, over whose speed its efficiency is, in a table of several numbers of GPUs; None:
                there is one number, and days and dollars have a range as well.
        """
        record = self.record
        sizes = {'microbatch': record['device_train_microbatch_size'], 'GiB taken': f'{record["peak_memory_gib"]:.1f}'}
        speeds = [record['images_per_sec']]
        if record['images_per_sec_least']:
            speeds += [record['images_per_sec_least'], record['images_per_sec_most']]
        cells = {'images/s': with_range(speeds)}
        if first is not None:
            each = record['images_per_sec_per_device']
            efficiency = each / first.record['images_per_sec_per_device']
            cells |= {'each': with_range([each]), 'efficiency': f'{efficiency:.1%}' if self.has_speed else '-'}
            speeds = speeds[:1]

        # what the training takes
        images = self.given.settings.training_images
        if images:
            days = [days_to_train(speed, images) for speed in speeds]
            hours = [gpu_hours(speed, record['num_devices'], images) for speed in speeds]
            cells['days'] = with_range(days, format_days)
            if first is not None:
                cells['GPU-hours'] = with_range(hours)
            cells['dollars'] = with_range([each_hours * self.price for each_hours in hours])
        return sizes | cells if first is None else cells | sizes


def with_one_change(settings: Train) -> dict[str, Train]:
    """Return the settings of a run with each change that may be worth it, by the change in words."""
    changes = {'the largest microbatch': {'device_train_microbatch_size': 'auto'},
               '--encoder_precision bf16': {'encoder_precision': 'bf16'},
               '--half_precision_norms': {'half_precision_norms': True}}
    if settings.num_devices > 1:
        changes['--allreduce_precision bf16'] = {'allreduce_precision': 'bf16'}
    changed = {change: dataclasses.replace(settings, **flags) for change, flags in changes.items()}
    changed |= changes_that_take_less(settings)
    changed.pop(SMALLER_MICROBATCH, None)  # it would be slower, and the table has the largest
    return {change: other for change, other in changed.items() if other != settings}


def title(settings: Train) -> str:
    """Return what is forecast, the model, its sizes and the batch, and what a forecast is."""
    parts = [f'{settings.image_size} pixels', settings.precision, f'encoders in {settings.encoder_precision}']
    if settings.latents:
        parts.append('latents that are encoded already')
    if settings.compile:
        parts.append('compiled')
    if settings.use_ema:
        parts.append('EMA')
    return filled([f'{settings.model_name}: {", ".join(parts)}; a batch of {plural(settings.batch_size, "image")}',
                   f'A forecast, from the arithmetic, bytes and kernels of a step. {NOT_IN_A_FORECAST}'])


def tables(forecasts: list[list[Forecast]]) -> list[str]:
    """Return the tables of a forecast: of one number of GPUs one with a row for each card, else one for each card.

    Args:
        forecasts: of each card that holds an image, on each number of GPUs.
    """
    numbers = {each.record['num_devices'] for own in forecasts for each in own}
    if len(numbers) == 1:
        heading = plural(*numbers, 'GPU')
        return [text_table([{heading: each.name} | each.cells() for [each] in forecasts])]
    found = []
    for own in forecasts:
        rows = {each.record['num_devices']: each.cells(own[0]) for each in own}
        table = text_table([{own[0].name: plural(number, 'GPU')} | cells for number, cells in rows.items()])
        heading, *lines = table.splitlines()
        line_of = {number: f'{plural(number, "GPU")}: no room' for number in numbers}
        line_of |= zip(rows, lines, strict=True)
        found.append('\n'.join([heading, *(line_of[number] for number in sorted(numbers))]))
    return found


def what_figures_mean(rows: list[Forecast]) -> list[str]:
    """Say in sentences what the figures of the tables are of, and how sure they are."""
    settings = rows[0].given.settings
    sentences = []
    if settings.training_images:
        prices = describe_prices((row.card.name, row.price) for row in rows)
        epochs = ''
        if settings.remote:
            epochs = f' ({rounded(settings.training_images / settings.batch_size / settings.batches_per_epoch)} epochs)'
        sentences.append(f'Days and dollars: {settings.training_images:,} images{epochs}, {prices} '
                         '(--dollars_per_gpu_hour).')
        if len({row.card.name for row in rows}) > 1 and len({row.price for row in rows}) == 1:
            sentences.append(ONE_PRICE)
    sentences += network_sentences(rows)
    unknown = {short_name(row.card.name): None for row in rows if not row.has_speed}
    if unknown:
        sentences.append(NO_SPEED.format(', '.join(unknown), settings.precision))
    if any(row.record['images_per_sec_least'] for row in rows):
        sentences.append(IN_BRACKETS)
    return [*sentences, NOT_TESTED]


def network_sentences(rows: list[Forecast]) -> list[str]:
    """Say what is counted between machines, if any row has gradients that leave one."""
    machines = {row.record['gpus_per_node'] for row in rows if row.given.needs_network(row.card)}
    if not machines:
        return []
    gbits = rows[0].given.settings.network_gbits
    speed = 'is taken to be as fast as the link of its GPUs; --network_gbits says how fast it is.'
    if gbits is not None:
        speed = f'is {gbits:g} Gbit/s, of which {NETWORK_SHARE:.0%} count.'
    return [f'The network of a machine, which has {" or ".join(map(str, sorted(machines)))} GPUs, {speed}']


def reasons(first: Forecast, build_model: Callable, build_optimizer: Callable) -> list[str]:
    """Return why for a forecast: what one change would do, the memory by item, and where the time goes."""
    given, card, record = first
    blocks = [text_table(change_rows(first, build_model, build_optimizer)), f'{memory_table(given, card)}\n{MEMORY}']
    if first.has_speed:
        seconds = given.seconds_on(card, record['device_train_microbatch_size'])
        kinds = [f'{kind} {part / seconds.total():.0%}' for kind, part in seconds.most_common()
                 if part >= 0.005 * seconds.total()]
        blocks.append(filled([f'Where the time goes: {", ".join(kinds)}.', 'Encoding once, before a training on '
                              f'latents: {rounded(record["encode_images_per_sec"])} images/s.']))
    return blocks


def change_rows(first: Forecast, build_model: Callable, build_optimizer: Callable) -> list[dict]:
    """Return what one change would do on a card: the microbatch that then fits, images/s, and these over the given."""
    rows = []
    for change, settings in with_one_change(first.given.settings).items():
        other = Estimate.of(settings, build_model, build_optimizer)
        microbatch = other.microbatch_on(first.card)
        row = {'one change': change, 'microbatch': microbatch or 'none', 'images/s': '', 'times as fast': ''}
        if microbatch and first.has_speed:
            speed = other.speed_on(first.card, microbatch)
            row |= {'images/s': rounded(speed), 'times as fast': f'{speed / first.record["images_per_sec"]:.2f}'}
        rows.append(row)
    return rows


def memory_table(given: Estimate, card: Card) -> str:
    """Return GiB of a card by item, for the last microbatches up to the first that it does not hold."""
    sizes = given.settings.microbatch_sizes
    held = [size for size in sizes if given.taken(size) <= card.gib]
    columns = {}
    for size in sizes[:len(held) + 1][-MOST_MICROBATCHES:]:
        needed = given.needed(size)
        columns[size] = needed | {'counted': sum(needed.values())}
    rows = []
    for item in next(iter(columns.values())):
        gib = {str(size): f'{needed[item] / GIB:.2f}' for size, needed in columns.items()}
        rows.append({'GiB, by microbatch': item} | gib)
    return text_table(rows)


def with_range(figures: list[float], text_of: Callable[[float], str] = rounded) -> str:
    """Return a figure, with its range in brackets where two bounds follow it, such as '70 (57 to 85)'."""
    figure, *bounds = figures
    if math.isnan(figure):  # no speed, or no price
        return '-'
    if not bounds:
        return text_of(figure)
    least, most = sorted(bounds)
    return f'{text_of(figure)} ({text_of(least)} to {text_of(most)})'


def filled(sentences: list[str]) -> str:
    """Return each sentence in lines of its own."""
    return '\n'.join(textwrap.fill(sentence, WIDTH, break_on_hyphens=False) for sentence in sentences)
