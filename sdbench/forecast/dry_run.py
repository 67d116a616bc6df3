"""Forecast what a training needs and how fast it will be, before a GPU is rented: --dry_run of benchmark.py.

The answer comes first: which GPU, how many days, how many dollars. The reasons follow: what other flags would change,
where the memory goes, and where the time goes. Nothing is trained.
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

IN_BRACKETS = (f'In brackets: the forecast divided and multiplied by {1 + LARGEST_ERROR:.2f}, its largest error on '
               'published speeds that were not used to fit it.')
NOT_TESTED = 'A speed without brackets is not tested: no published run had the same setup.'
MOST_MICROBATCHES = 9  # columns in the memory table, which ends with the first microbatch that does not fit
MEMORY = (f'CUDA and its libraries take more than the counted memory: a microbatch fits if {UNCOUNTED_SHARE:.0%} more '
          'fits.')
NO_SPEED = 'No speed for {}: the peak in {} is not known. Try --precision amp_fp16, for which more peaks are known.'


def forecast_training(settings: Train, index: dict | None, build_model: Callable, build_optimizer: Callable
                      ) -> list[dict]:
    """Print the forecasts for a run, and append a record for each of them where --results is given.

    Args:
        settings: settings as the flags gave them, with the GPU counts of --dry_run.
        index: the index.json of the shards; None: synthetic data.
        build_model: builds the model that the run would train.
        build_optimizer: builds the optimizer of the run.

    Returns the records of the forecasts, one for each GPU of --gpu and each GPU count, except where memory is too small
    for one image or the speed is not known. Raises UserError if the model or the remote is not known, or if no GPU has
    enough memory.
    """
    if dist.get_global_rank() > 0:
        return []

    # Estimate a step for each GPU count, and make a forecast for each card with enough memory. For a card whose peak is
    # not known, the forecast has memory but no speed.
    runs = [complete(dataclasses.replace(settings, dry_run=(devices,)), index) for devices in sorted(settings.dry_run)]
    print('counting memory and work of a step', file=sys.stderr, flush=True)
    estimates = [Estimate.of(run, build_model, build_optimizer) for run in runs]
    precision = runs[0].precision
    cards = [card._replace(tflops=peak_of(card.name, precision) or math.nan) for card in cards_named(settings.gpu)]
    forecasts = []
    no_room = []
    for card in cards:
        of_card = [Forecast.of(estimate, card) for estimate in estimates if estimate.microbatch_on(card)]
        if of_card:
            forecasts.append(of_card)
        else:
            no_room.append(short_name(card.name))

    # If no card has enough memory, end with the changes that would help on the largest card.
    if not forecasts:
        asked = settings.device_train_microbatch_size
        microbatch = asked if isinstance(asked, int) else 1
        largest = max(cards, key=lambda card: card.gib)
        fits_with = {}
        for change, changed in changes_that_take_less(runs[0]).items():
            fits_with[change] = Estimate.of(changed, build_model, build_optimizer).microbatch_on(largest) is not None
        raise UserError(f'--gpu: a microbatch of {microbatch} takes {estimates[0].taken(microbatch):.1f} GiB, and the '
                        f'largest GPU asked for has {largest.gib:g}; {memory_advice(fits_with)}')

    # Write the text, with the cheapest card first.
    forecasts.sort(key=lambda of_card: of_card[0].dollars_per_image)
    rows = [forecast for of_card in forecasts for forecast in of_card]
    sentences = what_figures_mean(rows)
    if no_room:
        sentences.append(f'Not enough memory: {", ".join(no_room)}.')
    if len(rows) > 1:
        sentences.append(f'The rest is about {rows[0].record["num_devices"]} x {short_name(rows[0].card.name)} alone; '
                         'choose others with --gpu and --dry_run.')
    blocks = [title(rows[0].estimate.settings), '\n\n'.join(tables(forecasts)) + '\n' + filled(sentences),
              *explanation(rows[0], build_model, build_optimizer)]

    # Append the records before printing, because printing ends the process if its reader, such as `head`, has ended.
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
    """The forecast for a run on one card and GPU count, with a record that has the keys of a training's record."""
    estimate: Estimate
    card: Card
    record: dict

    @classmethod
    def of(cls, estimate: Estimate, card: Card) -> 'Forecast':
        """Calculate the record. Its speed is NaN on a card whose peak is not known."""
        microbatch = estimate.microbatch_on(card)
        settings = dataclasses.replace(estimate.settings, device_train_microbatch_size=microbatch)
        speed = estimate.speed_on(card, microbatch)
        is_tested = estimate.is_tested(card) and not math.isnan(speed)
        return cls(estimate, card, make_record('train', settings, {
            'status': FORECAST,
            'device': card.name,
            'device_type': 'cuda',
            'num_nodes': estimate.machines_on(card),
            'gpus_per_node': estimate.gpus_per_node(card),
            'images_per_sec': speed,
            'images_per_sec_least': speed / (1 + LARGEST_ERROR) if is_tested else None,
            'images_per_sec_most': speed * (1 + LARGEST_ERROR) if is_tested else None,
            'encode_images_per_sec': estimate.encoding_speed_on(card),
            'peak_memory_gib': estimate.taken(microbatch),
        }))

    @property
    def name(self) -> str:
        """Return the name of the card."""
        return self.card.name.removeprefix('NVIDIA ')

    @property
    def price(self) -> float:
        """Return the price per GPU-hour in dollars; NaN without a price."""
        return price_of(self.card.name, self.estimate.settings.dollars_per_gpu_hour)

    @property
    def has_speed(self) -> bool:
        """Tell whether the speed is known."""
        return not math.isnan(self.record['images_per_sec'])

    @property
    def dollars_per_image(self) -> float:
        """Return the dollars per image, which sort the cards; infinite without a price or a speed."""
        dollars = self.price / self.record['images_per_sec_per_device']
        return math.inf if math.isnan(dollars) else dollars

    def cells(self, first: 'Forecast | None' = None) -> dict[str, str]:
        """Return the cells of the forecast's row in a table, by heading.

        Args:
            first: in a table with several GPU counts, the forecast of the same card whose speed per GPU has an
                efficiency of 100 %; None: the table has one GPU count, and its days and dollars have a range.
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

        # Add the days and dollars of the training, if its length is known.
        images = self.estimate.settings.training_images
        if images:
            days = [days_to_train(speed, images) for speed in speeds]
            total_gpu_hours = [gpu_hours(speed, record['num_devices'], images) for speed in speeds]
            cells['days'] = with_range(days, format_days)
            if first is not None:
                cells['GPU-hours'] = with_range(total_gpu_hours)
            cells['dollars'] = with_range([hours * self.price for hours in total_gpu_hours])
        return sizes | cells if first is None else cells | sizes


def with_one_change(settings: Train) -> dict[str, Train]:
    """Return the settings with each single change that may make a run faster or fit, keyed by its description."""
    changes = {'the largest microbatch': {'device_train_microbatch_size': 'auto'},
               '--encoder_precision bf16': {'encoder_precision': 'bf16'},
               '--half_precision_norms': {'half_precision_norms': True}}
    if settings.num_devices > 1:
        changes['--allreduce_precision bf16'] = {'allreduce_precision': 'bf16'}
    changed = {change: dataclasses.replace(settings, **flags) for change, flags in changes.items()}
    changed |= changes_that_take_less(settings)
    changed.pop(SMALLER_MICROBATCH, None)  # it would be slower
    return {change: other for change, other in changed.items() if other != settings}


def title(settings: Train) -> str:
    """Return sentences that describe the run, the method of the forecast, and what the forecast does not include."""
    parts = [f'{settings.image_size} pixels', settings.precision, f'encoders in {settings.encoder_precision}']
    if settings.latents:
        parts.append('latents encoded before the training')
    if settings.compile:
        parts.append('compiled')
    if settings.use_ema:
        parts.append('EMA')
    return filled([f'{settings.model_name}: {", ".join(parts)}; a batch of {plural(settings.batch_size, "image")}',
                   f'This is a forecast from the arithmetic, bytes and kernels of a step. {NOT_IN_A_FORECAST}'])


def tables(forecasts: list[list[Forecast]]) -> list[str]:
    """Return one table with a row per card if there is one GPU count, or else a table per card.

    Args:
        forecasts: for each card with enough memory for one image, its forecasts by ascending GPU count.
    """
    counts = {each.record['num_devices'] for of_card in forecasts for each in of_card}
    if len(counts) == 1:
        heading = plural(*counts, 'GPU')
        return [text_table([{heading: each.name} | each.cells() for [each] in forecasts])]
    found = []
    for of_card in forecasts:
        first = of_card[0]
        rows = {each.record['num_devices']: each.cells(first) for each in of_card}
        table = text_table([{first.name: plural(count, 'GPU')} | cells for count, cells in rows.items()])
        heading, *lines = table.splitlines()

        # A GPU count without a forecast has a line instead of a row.
        line_by_count = {count: f'{plural(count, "GPU")}: not enough memory' for count in counts}
        line_by_count |= zip(rows, lines, strict=True)
        found.append('\n'.join([heading, *(line_by_count[count] for count in sorted(counts))]))
    return found


def what_figures_mean(rows: list[Forecast]) -> list[str]:
    """Return sentences that say what the figures in the tables mean and how accurate they are."""
    settings = rows[0].estimate.settings
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
    """Return a sentence about the assumed network; [] if gradients cross no network in any row."""
    gpus_per_node = {row.record['gpus_per_node'] for row in rows if row.estimate.needs_network(row.card)}
    if not gpus_per_node:
        return []
    gbits = rows[0].estimate.settings.network_gbits
    speed = 'is assumed to be as fast as the interconnect of its GPUs; give its speed with --network_gbits.'
    if gbits is not None:
        speed = f'has {gbits:g} Gbit/s, and the forecast uses {NETWORK_SHARE:.0%} of them.'
    gpus = ' or '.join(map(str, sorted(gpus_per_node)))
    return [f'The network of each machine with {gpus} GPUs {speed}']


def explanation(first: Forecast, build_model: Callable, build_optimizer: Callable) -> list[str]:
    """Return blocks of text: what single changes would do, the memory by item, and where the time goes."""
    estimate, card, record = first
    changes = text_table(change_rows(first, build_model, build_optimizer))
    blocks = [changes, f'{memory_table(estimate, card)}\n{MEMORY}']
    if first.has_speed:
        seconds = estimate.seconds_on(card, record['device_train_microbatch_size'])
        kinds = [f'{kind} {part / seconds.total():.0%}' for kind, part in seconds.most_common()
                 if part >= 0.005 * seconds.total()]
        blocks.append(filled([f'Time by kind of operation: {", ".join(kinds)}.', 'Encoding all images once, for a '
                              f'training on latents: {rounded(record["encode_images_per_sec"])} images/s.']))
    return blocks


def change_rows(first: Forecast, build_model: Callable, build_optimizer: Callable) -> list[dict]:
    """Return a row for each single change: the microbatch that fits, its images/s, and their ratio to the forecast."""
    rows = []
    for change, settings in with_one_change(first.estimate.settings).items():
        other = Estimate.of(settings, build_model, build_optimizer)
        microbatch = other.microbatch_on(first.card)
        row = {'one change': change, 'microbatch': microbatch or 'none', 'images/s': '', 'times as fast': ''}
        if microbatch and first.has_speed:
            speed = other.speed_on(first.card, microbatch)
            row |= {'images/s': rounded(speed), 'times as fast': f'{speed / first.record["images_per_sec"]:.2f}'}
        rows.append(row)
    return rows


def memory_table(estimate: Estimate, card: Card) -> str:
    """Return a table of GiB by item, for the largest microbatches that fit on a card and the first that does not."""
    sizes = estimate.settings.microbatch_sizes
    held = [size for size in sizes if estimate.taken(size) <= card.gib]
    columns = {}
    for size in sizes[:len(held) + 1][-MOST_MICROBATCHES:]:
        needed = estimate.needed(size)
        columns[size] = needed | {'counted': sum(needed.values())}
    rows = []
    for item in next(iter(columns.values())):
        gib = {str(size): f'{needed[item] / GIB:.2f}' for size, needed in columns.items()}
        rows.append({'GiB, by microbatch': item} | gib)
    return text_table(rows)


def with_range(figures: list[float], text_of: Callable[[float], str] = rounded) -> str:
    """Return the first figure as text, with the range of the other two in brackets, such as '70 (57 to 85)'."""
    figure, *bounds = figures
    if math.isnan(figure):  # no speed, or no price
        return '-'
    if not bounds:
        return text_of(figure)
    least, most = sorted(bounds)
    return f'{text_of(figure)} ({text_of(least)} to {text_of(most)})'


def filled(sentences: list[str]) -> str:
    """Return sentences as text, each on a new line."""
    return '\n'.join(textwrap.fill(sentence, WIDTH, break_on_hyphens=False) for sentence in sentences)
