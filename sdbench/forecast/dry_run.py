"""Forecast what a training needs and how fast it will be, before a GPU is rented: --dry_run of benchmark.py.

The answer comes first: which GPU, how many days, how many dollars. The reasons follow: what other flags would change,
where the memory goes, and where the time goes. Nothing is trained.
"""
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from sdbench.complete import complete, index_of_data
from sdbench.costs import days_to_train
from sdbench.errors import UserError, plural
from sdbench.flags.train import Run, Train, divisors
from sdbench.forecast.forecast import (
    UNCOUNTED_SHARE,
    DoesNotFit,
    Forecast,
    bytes_needed,
    forecast,
    gib_taken,
    network_sentence,
)
from sdbench.forecast.speed import LARGEST_ERROR
from sdbench.gpus import GIB, Card, cards_named, short_name
from sdbench.plan.prices import LIST_PRICES, ON_DEMAND, Price, price_for, read_prices
from sdbench.process import launcher_variable
from sdbench.records.metrics import filled, format_days, rounded, text_table
from sdbench.records.status import NOT_IN_A_FORECAST
from sdbench.setup import SMALLER_MICROBATCH, Setup, changes_that_take_less, setup_of_settings

IN_BRACKETS = (f'In brackets: the forecast divided and multiplied by {1 + LARGEST_ERROR:.2f}, its largest error on '
               'published speeds that were not used to fit it.')
NOT_TESTED = 'A speed without brackets is not tested: no published run had the same setup.'
MOST_MICROBATCHES = 9  # columns in the memory table, which ends with the first microbatch that does not fit
MEMORY = (f'CUDA and its libraries take more than the counted memory: a microbatch fits if {UNCOUNTED_SHARE:.0%} more '
          'fits.')


def forecast_training(settings: Train) -> list[Forecast]:
    """Print and return the forecasts for a run, one for each GPU of --gpu and each GPU count that has enough memory.

    Raises UserError if the model or the remote is not known, or if no GPU has enough memory.
    """
    if launcher_variable('RANK'):  # rank 0 prints them
        return []

    # Make a forecast for each GPU count on each card with enough memory.
    index = index_of_data(settings)
    runs = [complete(replace(settings, dry_run=(devices,)), index) for devices in sorted({*settings.dry_run})]
    setups = [setup_of_settings(run) for run in runs]
    cards = cards_named(settings.gpu)
    by_card = {}
    no_room = []
    for card, setup in itertools.product(cards, setups):
        found = forecast_or_none(setup, card)
        if found:
            by_card.setdefault(card, []).append(found)
        else:
            no_room.append(f'{setup.num_devices} x {short_name(card.name)}')
    if not by_card:
        raise UserError(too_little_memory(setups[0], max(cards, key=lambda card: card.gib)))

    # Print them with the cheapest card first, then those without a price, and details of the first forecast.
    prices = read_prices(LIST_PRICES, ON_DEMAND, settings.dollars_per_gpu_hour)
    ordered = sorted(by_card.values(), key=lambda found: cost_of_an_image(found[0], prices))
    forecasts = list(itertools.chain(*ordered))
    rows = [row_of(found, group[0], runs[0], prices, len(runs) > 1) for group in ordered for found in group]
    sentences = what_numbers_mean(runs[0], forecasts, prices)
    if no_room:
        sentences.append(f'Not enough memory: {", ".join(no_room)}.')
    first = forecasts[0]
    if len(rows) > 1:
        sentences.append(f'The rest is about {first.setup.num_devices} x {short_name(first.card.name)} alone; choose '
                         'others with --gpu and --dry_run.')
    print(title(runs[0]), f'{text_table(rows)}\n{filled(sentences)}', *explanation(first, setups[0].microbatch),
          sep='\n\n')
    return forecasts


def forecast_or_none(setup: Setup, card: Card) -> Forecast | None:
    """Return the forecast for a setup on a card; None if the card has too little memory."""
    try:
        return forecast(setup, card)
    except DoesNotFit:
        return None


def too_little_memory(setup: Setup, largest: Card) -> str:
    """Return an error message with the changes that would help on the largest card, which has too little memory."""
    # Try each change alone, and then all of them together.
    changes = changes_that_take_less(setup)
    enough_alone = [change for change, changed in changes.items() if forecast_or_none(changed, largest)]
    all_values = {}  # what the changes set
    for changed in changes.values():
        all_values |= {name: value for name, value in vars(changed).items() if value != getattr(setup, name)}
    advice = 'use a GPU with more memory'
    if enough_alone:
        advice += f', or make one of these changes: {"; ".join(enough_alone)}'
    elif changes and forecast_or_none(replace(setup, **all_values), largest):
        advice += f', or make all of these changes: {"; ".join(changes)}'
    elif changes:
        advice += f'; these changes together are not enough: {"; ".join(changes)}'
    microbatch = setup.microbatch or 1
    return (f'--gpu: a microbatch of {microbatch} takes {gib_taken(setup, microbatch):.1f} GiB, and the largest GPU '
            f'asked for has {largest.gib:g}; {advice}')


def dollars_per_gpu_hour(found: Forecast, prices: Sequence[Price]) -> float:
    """Return the price of a forecast's GPU; NaN if it has none."""
    price = price_for(found.setup, prices)
    return math.nan if price is None else price.dollars


def cost_of_an_image(found: Forecast, prices: Sequence[Price]) -> tuple[float, float]:
    """Return the cost of an image in dollars and in GPU-seconds; infinite without a price or a speed."""
    seconds = found.setup.num_devices / found.images_per_sec
    dollars = seconds * dollars_per_gpu_hour(found, prices) / 3600
    if math.isnan(dollars):
        dollars = math.inf
    if math.isnan(seconds):
        seconds = math.inf
    return dollars, seconds


def row_of(found: Forecast, first: Forecast, settings: Run, prices: Sequence[Price], has_efficiency: bool
           ) -> dict[str, str]:
    """Return the cells of a forecast in the table, by heading; '-' for what is not known.

    `first` is the forecast for the fewest GPUs of the same card, whose speed per GPU is an efficiency of 100 %.
    """
    devices, speed = found.setup.num_devices, found.images_per_sec
    each = speed / devices
    days = days_to_train(speed, settings.training_images or math.nan)
    hours = days * 24 * devices
    dollars = hours * dollars_per_gpu_hour(found, prices)
    bounds = ' ({} to {})'.format(*map(rounded, found.images_per_sec_range)) if found.is_tested else ''
    cells = {'GPUs': f'{devices} x {found.card.name.removeprefix("NVIDIA ")}', 'microbatch': found.setup.microbatch,
             'GiB taken': f'{found.gib:.1f}', 'images/s': known(speed, rounded) + bounds}
    if has_efficiency:
        efficiency = each / (first.images_per_sec / first.setup.num_devices)
        cells |= {'each': known(each, rounded), 'efficiency': known(efficiency, '{:.1%}'.format)}
    if settings.training_images:
        cells['days'] = known(days, format_days)
        if has_efficiency:
            cells['GPU-hours'] = known(hours, rounded)
        cells['dollars'] = known(dollars, rounded)
    return cells


def known(value: float, text_of: Callable[[float], str]) -> str:
    return '-' if math.isnan(value) else text_of(value)


def title(settings: Run) -> str:
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


def what_numbers_mean(settings: Run, forecasts: Sequence[Forecast], prices: Sequence[Price]) -> list[str]:
    """Return sentences that say what the numbers in the table mean and how accurate they are."""
    sentences = []
    if settings.training_images:
        used = {}  # text about a price by the name of its GPU
        for found in forecasts:
            price = price_for(found.setup, prices)
            if price is not None:
                used[short_name(found.card.name)] = f'${price.dollars:.2f} {price.provider}'
        per_hour = '; '.join(f'{name} {text}' for name, text in used.items()) or 'no price'
        epochs = ''
        if settings.remote:
            epochs = f' ({rounded(settings.training_images / settings.batch_size / settings.batches_per_epoch)} epochs)'
        sentences.append(f'Days and dollars: {settings.training_images:,} images{epochs}; per GPU-hour {per_hour} '
                         '(recipes/prices.csv, or --dollars_per_gpu_hour).')
    sentences += filter(None, [network_sentence(found.setup for found in forecasts)])
    if any(math.isnan(found.images_per_sec) for found in forecasts):
        sentences.append(f'A speed of - means that the peak of the GPU in {settings.precision} is not known. Try '
                         '--precision amp_fp16, for which more peaks are known.')
    if any(found.gib > found.card.gib for found in forecasts):
        sentences.append('Where GiB taken exceeds the memory of the GPU, the microbatch may still fit, because GiB '
                         f'taken includes a margin of {UNCOUNTED_SHARE:.0%}.')
    if any(found.is_tested for found in forecasts):
        sentences.append(IN_BRACKETS)
    if not all(found.is_tested for found in forecasts):
        sentences.append(NOT_TESTED)
    return sentences


def explanation(first: Forecast, given_microbatch: int | None) -> list[str]:
    """Return blocks of text: what single changes would do, the memory by item, and where the time goes."""
    changes = change_rows(first, given_microbatch)
    blocks = [text_table(changes)] if changes else []
    blocks.append(f'{memory_table(first)}\n{MEMORY}')
    if not math.isnan(first.images_per_sec):
        seconds = first.seconds
        kinds = [f'{kind} {part / seconds.total():.0%}' for kind, part in seconds.most_common()
                 if part >= 0.005 * seconds.total()]
        blocks.append(filled([f'Time by kind of operation: {", ".join(kinds)}.', 'Encoding all images once, for a '
                              f'training on latents: {rounded(first.encode_images_per_sec)} images/s.']))
    return blocks


def change_rows(first: Forecast, given_microbatch: int | None) -> list[dict]:
    """Return a row for each single change that may make the run of a forecast faster or fit.

    Without a given microbatch, each change has the largest that then fits.
    """
    setup = replace(first.setup, microbatch=given_microbatch)
    half = 'fp16' if setup.precision == 'amp_fp16' else 'bf16'
    changes = {'the largest microbatch': {'microbatch': None}}
    if setup.encoder_precision == 'fp32':
        changes[f'--encoder_precision {half}'] = {'encoder_precision': half}
    changes['--half_precision_norms'] = {'half_precision_norms': True}
    if setup.num_devices > 1:
        changes['--allreduce_precision bf16'] = {'allreduce_precision': 'bf16'}
    changed = {change: replace(setup, **flags) for change, flags in changes.items()}
    changed |= changes_that_take_less(setup)
    changed.pop(SMALLER_MICROBATCH, None)  # it would be slower

    rows = []
    for change, other_setup in changed.items():
        other = forecast_or_none(other_setup, first.card)
        if other and other.setup == first.setup:  # it changes nothing
            continue
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
