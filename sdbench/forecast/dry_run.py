"""Forecast what a training needs and how fast it will be, before a GPU is rented: --dry_run of benchmark.py.

The answer comes first: which GPU, how many days, how many dollars. The reasons follow: what other flags would change,
where the memory goes, and where the time goes. Nothing is trained.
"""
import dataclasses
import math
import textwrap
from collections.abc import Callable
from dataclasses import dataclass

from sdbench.complete import complete, index_of_data
from sdbench.costs import ONE_PRICE, days_to_train, describe_prices, gpu_hours, price_of
from sdbench.errors import UserError, plural
from sdbench.flags.train import Train, divisors
from sdbench.forecast.forecast import UNCOUNTED_SHARE, DoesNotFit, Forecast, bytes_needed, forecast, gib_taken
from sdbench.forecast.speed import LARGEST_ERROR
from sdbench.gpus import GIB, NETWORK_SHARE, Card, cards_named, short_name
from sdbench.microbatches import SMALLER_MICROBATCH, changes_that_take_less, memory_advice
from sdbench.process import launcher_variable
from sdbench.records.figures import WIDTH, format_days, rounded, text_table
from sdbench.records.status import NOT_IN_A_FORECAST
from sdbench.setup import Setup, setup_of_settings

IN_BRACKETS = (f'In brackets: the forecast divided and multiplied by {1 + LARGEST_ERROR:.2f}, its largest error on '
               'published speeds that were not used to fit it.')
NOT_TESTED = 'A speed without brackets is not tested: no published run had the same setup.'
MOST_MICROBATCHES = 9  # columns in the memory table, which ends with the first microbatch that does not fit
MEMORY = (f'CUDA and its libraries take more than the counted memory: a microbatch fits if {UNCOUNTED_SHARE:.0%} more '
          'fits.')
NO_SPEED = 'No speed for {}: the peak in {} is not known. Try --precision amp_fp16, for which more peaks are known.'


def forecast_training(settings: Train) -> list[Forecast]:
    """Print the forecasts for a run, whose settings are as the flags gave them, with the GPU counts of --dry_run.

    Returns the forecasts, one for each GPU of --gpu and each GPU count, except where memory is too small for one image.
    Raises UserError if the model or the remote is not known, or if no GPU has enough memory.
    """
    if launcher_variable('RANK'):  # rank 0 prints them
        return []

    # Make a forecast for each card with enough memory and each GPU count.
    index = index_of_data(settings)
    runs = [complete(dataclasses.replace(settings, dry_run=(devices,)), index) for devices in sorted(settings.dry_run)]
    setups = [setup_of_settings(run) for run in runs]
    cards = cards_named(settings.gpu)
    rows_by_card = []
    no_room = []
    for card in cards:
        fitting = [forecast_or_none(setup, card) for setup in setups]
        rows = [Row(run, found) for run, found in zip(runs, fitting, strict=True) if found]
        if rows:
            rows_by_card.append(rows)
        else:
            no_room.append(short_name(card.name))
    if not rows_by_card:
        raise UserError(too_little_memory(setups[0], max(cards, key=lambda card: card.gib)))

    # Write the text, with the cheapest card first.
    rows_by_card.sort(key=lambda rows: rows[0].dollars_per_image)
    rows = [row for of_card in rows_by_card for row in of_card]
    sentences = what_figures_mean(rows)
    if no_room:
        sentences.append(f'Not enough memory: {", ".join(no_room)}.')
    first = rows[0].forecast
    if len(rows) > 1:
        sentences.append(f'The rest is about {first.setup.num_devices} x {short_name(first.card.name)} alone; choose '
                         'others with --gpu and --dry_run.')
    print(title(runs[0]), '\n\n'.join(tables(rows_by_card)) + '\n' + filled(sentences), *explanation(setups[0], first),
          sep='\n\n')
    return [row.forecast for row in rows]


def forecast_or_none(setup: Setup, card: Card) -> Forecast | None:
    """Return the forecast for a setup on a card; None if the card has too little memory."""
    try:
        return forecast(setup, card)
    except DoesNotFit:
        return None


def too_little_memory(setup: Setup, largest: Card) -> str:
    """Return an error message with the changes that would help on the largest card, which has too little memory."""
    setup = dataclasses.replace(setup, device=largest.name)
    microbatch = setup.microbatch or 1
    fits_with = {change: forecast_or_none(changed, largest) is not None
                 for change, changed in changes_that_take_less(setup).items()}
    return (f'--gpu: a microbatch of {microbatch} takes {gib_taken(setup, microbatch):.1f} GiB, and the largest GPU '
            f'asked for has {largest.gib:g}; {memory_advice(fits_with)}')


@dataclass(frozen=True)
class Row:
    """A row of a table: the settings of a run, and the forecast for it on one card."""
    settings: Train
    forecast: Forecast

    @property
    def name(self) -> str:
        """Return the name of the card."""
        return self.forecast.card.name.removeprefix('NVIDIA ')

    @property
    def price(self) -> float:
        """Return the price per GPU-hour in dollars; NaN without a price."""
        return price_of(self.forecast.card.name, self.settings.dollars_per_gpu_hour)

    @property
    def each(self) -> float:
        """Return the images per second of each GPU."""
        return self.forecast.images_per_sec / self.forecast.setup.num_devices

    @property
    def has_speed(self) -> bool:
        """Tell whether the speed is known."""
        return not math.isnan(self.each)

    @property
    def dollars_per_image(self) -> float:
        """Return the dollars per image, which sort the cards; infinite without a price or a speed."""
        dollars = self.price / self.each
        return math.inf if math.isnan(dollars) else dollars

    def cells(self, first: 'Row | None' = None) -> dict[str, str]:
        """Return the cells of the forecast's row in a table, by heading.

        Args:
            first: in a table with several GPU counts, the row of the same card whose speed per GPU has an
                efficiency of 100 %; None: the table has one GPU count, and its days and dollars have a range.
        """
        forecast = self.forecast
        sizes = {'microbatch': forecast.setup.microbatch, 'GiB taken': f'{forecast.gib:.1f}'}
        speeds = [forecast.images_per_sec, *(forecast.images_per_sec_range or ())]
        cells = {'images/s': with_range(speeds)}
        if first is not None:
            cells |= {'each': with_range([self.each]),
                      'efficiency': f'{self.each / first.each:.1%}' if self.has_speed else '-'}
            speeds = speeds[:1]

        # Add the days and dollars of the training, if its length is known.
        images = self.settings.training_images
        if images:
            days = [days_to_train(speed, images) for speed in speeds]
            total_gpu_hours = [gpu_hours(speed, forecast.setup.num_devices, images) for speed in speeds]
            cells['days'] = with_range(days, format_days)
            if first is not None:
                cells['GPU-hours'] = with_range(total_gpu_hours)
            cells['dollars'] = with_range([hours * self.price for hours in total_gpu_hours])
        return sizes | cells if first is None else cells | sizes


def with_one_change(setup: Setup) -> dict[str, Setup]:
    """Return the setup with each single change that may make a run faster or fit, keyed by its description."""
    changes = {'the largest microbatch': {'microbatch': None},
               '--encoder_precision bf16': {'encoder_precision': 'bf16'},
               '--half_precision_norms': {'half_precision_norms': True}}
    if setup.num_devices > 1:
        changes['--allreduce_precision bf16'] = {'allreduce_precision': 'bf16'}
    changed = {change: dataclasses.replace(setup, **flags) for change, flags in changes.items()}
    changed |= changes_that_take_less(setup)
    changed.pop(SMALLER_MICROBATCH, None)  # it would be slower
    return {change: other for change, other in changed.items() if other != setup}


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


def tables(rows_by_card: list[list[Row]]) -> list[str]:
    """Return one table with a row per card if there is one GPU count, or else a table per card.

    Args:
        rows_by_card: for each card with enough memory for one image, its rows by ascending GPU count.
    """
    counts = {row.forecast.setup.num_devices for rows in rows_by_card for row in rows}
    if len(counts) == 1:
        heading = plural(*counts, 'GPU')
        return [text_table([{heading: row.name} | row.cells() for [row] in rows_by_card])]
    found = []
    for rows in rows_by_card:
        first = rows[0]
        cells_by_count = {row.forecast.setup.num_devices: row.cells(first) for row in rows}
        table = text_table([{first.name: plural(count, 'GPU')} | cells for count, cells in cells_by_count.items()])
        heading, *lines = table.splitlines()

        # A GPU count without a forecast has a line instead of a row.
        line_by_count = {count: f'{plural(count, "GPU")}: not enough memory' for count in counts}
        line_by_count |= zip(cells_by_count, lines, strict=True)
        found.append('\n'.join([heading, *(line_by_count[count] for count in sorted(counts))]))
    return found


def what_figures_mean(rows: list[Row]) -> list[str]:
    """Return sentences that say what the figures in the tables mean and how accurate they are."""
    settings = rows[0].settings
    sentences = []
    if settings.training_images:
        prices = describe_prices((row.forecast.card.name, row.price) for row in rows)
        epochs = ''
        if settings.remote:
            epochs = f' ({rounded(settings.training_images / settings.batch_size / settings.batches_per_epoch)} epochs)'
        sentences.append(f'Days and dollars: {settings.training_images:,} images{epochs}, {prices} '
                         '(--dollars_per_gpu_hour).')
        if len({row.name for row in rows}) > 1 and len({row.price for row in rows}) == 1:
            sentences.append(ONE_PRICE)
    sentences += network_sentences(rows)
    unknown = {short_name(row.forecast.card.name): None for row in rows if not row.has_speed}
    if unknown:
        sentences.append(NO_SPEED.format(', '.join(unknown), settings.precision))
    if any(row.forecast.is_tested for row in rows):
        sentences.append(IN_BRACKETS)
    return [*sentences, NOT_TESTED]


def network_sentences(rows: list[Row]) -> list[str]:
    """Return a sentence about the assumed network; [] if gradients cross no network in any row."""
    gpus_per_node = {row.settings.gpus_per_node or row.forecast.card.gpus_per_node for row in rows
                     if row.forecast.setup.needs_network}
    if not gpus_per_node:
        return []
    gbits = rows[0].settings.network_gbits
    speed = 'is assumed to be as fast as the interconnect of its GPUs; give its speed with --network_gbits.'
    if gbits is not None:
        speed = f'has {gbits:g} Gbit/s, and the forecast uses {NETWORK_SHARE:.0%} of them.'
    gpus = ' or '.join(map(str, sorted(gpus_per_node)))
    return [f'The network of each machine with {gpus} GPUs {speed}']


def explanation(setup: Setup, first: Forecast) -> list[str]:
    """Return blocks of text: what single changes would do, the memory by item, and where the time goes.

    Args:
        setup: the setup as the flags gave it. Its microbatch is None if the largest was looked for.
        first: the forecast for it on the card that the text is about.
    """
    blocks = [text_table(change_rows(setup, first)), f'{memory_table(first)}\n{MEMORY}']
    if not math.isnan(first.images_per_sec):
        seconds = first.seconds
        kinds = [f'{kind} {part / seconds.total():.0%}' for kind, part in seconds.most_common()
                 if part >= 0.005 * seconds.total()]
        blocks.append(filled([f'Time by kind of operation: {", ".join(kinds)}.', 'Encoding all images once, for a '
                              f'training on latents: {rounded(first.encode_images_per_sec)} images/s.']))
    return blocks


def change_rows(setup: Setup, first: Forecast) -> list[dict]:
    """Return a row for each single change: the microbatch that fits, its images/s, and their ratio to the forecast."""
    rows = []
    for change, changed in with_one_change(setup).items():
        other = forecast_or_none(changed, first.card)
        row = {'one change': change, 'microbatch': other.setup.microbatch if other else 'none', 'images/s': '',
               'times as fast': ''}
        if other and not math.isnan(first.images_per_sec):
            row |= {'images/s': rounded(other.images_per_sec),
                    'times as fast': f'{other.images_per_sec / first.images_per_sec:.2f}'}
        rows.append(row)
    return rows


def memory_table(first: Forecast) -> str:
    """Return a table of GiB by item, for the largest microbatches that fit on a card and the first that does not."""
    setup, card = first.setup, first.card
    sizes = divisors(setup.device_batch_size)
    held = [size for size in sizes if gib_taken(setup, size) <= card.gib]
    columns = {}
    for size in sizes[:len(held) + 1][-MOST_MICROBATCHES:]:
        needed = bytes_needed(setup, size)
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
