"""--dry_run: say what a run would need and could reach, on any machine, before a GPU is rented. Nothing is trained."""
import dataclasses
import json
import os
import sys
from collections.abc import Callable

from composer.utils import dist

from sdbench.errors import plural
from sdbench.flags.train import Train
from sdbench.forecast.answer import answer, forecast_record
from sdbench.forecast.compiled_step import NotCounted
from sdbench.forecast.estimate import estimate, is_on_latents, with_less_memory
from sdbench.forecast.speed import can_forecast
from sdbench.gpus import Card, cards_named
from sdbench.measuring.record import append_line
from sdbench.report.records import read_records


def dry_run(settings: Train, build_model: Callable) -> list[dict]:
    """Print what the run would need and could reach, and append a record for each GPU where --results is given.

    Args:
        settings: of the run.
        build_model: makes the model that the run would train.

    Returns the records of the forecasts, one for each GPU of --gpu that holds an image and can be forecast.
    Raises ValueError if the model or the remote is not known, a line of --results is no record, or nothing fits.
    """
    if dist.get_global_rank() > 0:
        return []
    # What may be refused comes before the trace, which takes a minute.
    cards = cards_to_forecast(settings.gpu, settings.precision)
    measured = []
    if os.path.isfile(settings.results_file):
        measured = read_records(settings.results_file)
    latents = is_on_latents(settings)

    # A step of the run as given, and with each change that takes less memory.
    print('counting memory and work of a step', file=sys.stderr, flush=True)
    if settings.compile:
        print('what the compiler makes of it takes some minutes', file=sys.stderr, flush=True)
    try:
        given = estimate('as given', settings, latents, build_model)
    except NotCounted as error:
        print(f'warning: the compiled step could not be counted ({error}); this is the forecast of an eager one',
              file=sys.stderr, flush=True)
        settings = dataclasses.replace(settings, compile=False, compile_blocks=False)
        given = estimate('as given', settings, latents, build_model)
    others = [estimate(*each, build_model, given) for each in with_less_memory(settings, latents)]

    # The answer, and its records.
    fitting = [card for card in cards if given.microbatch_on(card)]
    if not fitting:
        largest = max(cards, key=lambda card: card.gib)
        raise ValueError(why_nothing_fits(largest.gib, [given, *others]))
    records = [forecast_record(given, card, latents) for card in fitting]
    print(answer(given, others, fitting, records, measured))
    left_out = [card.name for card in cards if card not in fitting]
    if left_out:
        print(f'\nNo room for an image on {", ".join(left_out)}.')
    return keep_forecasts(records, settings.results)


def cards_to_forecast(names: tuple[str, ...], precision: str) -> list[Card]:
    """Return the cards that --gpu names; without it those whose speed can be forecast, if there are any.

    Raises ValueError for a name that is no card's.
    """
    cards = cards_named(names)
    if not names:
        cards = [card for card in cards if can_forecast(card, precision)] or cards
    return cards


def keep_forecasts(records: list[dict], results: str | None) -> list[dict]:
    """Append the records that have a speed to the file of --results, or print them, and return them."""
    forecasts = [record for record in records if record['images_per_sec'] is not None]
    if results == '-':
        print(*map(json.dumps, forecasts), sep='\n')
    elif results is not None:
        for record in forecasts:
            append_line(json.dumps(record), results)
        print(f'\n{plural(len(forecasts), "forecast")} appended to {results}')
    return forecasts


def why_nothing_fits(gib: float, estimates: list) -> str:
    """Return the error of a run of which no GPU that was asked for holds an image, with the changes that would help.

    Args:
        gib: of the largest GPU.
        estimates: of the run as given, and with one change each.
    """
    given, *others = estimates
    asked = given.settings.device_train_microbatch_size
    microbatch = asked if isinstance(asked, int) else 1
    helpful = [each.title for each in others if each.largest_microbatch(gib)]
    remedy = 'choose a GPU with more memory by --gpu'
    if helpful:
        remedy += f', or take {" or ".join(helpful)}'
    return (f'--gpu: a microbatch of {microbatch} takes {given.taken(microbatch):.1f} GiB, and the largest GPU asked '
            f'for has {gib:g}; {remedy}')
