"""Make the table of plans: days and dollars of a training in phases, from the speed at the image size of each phase.

The speeds come from records. Measurements count before forecasts, and newer records before older ones. A measurement
that has a forecast for the same setup corrects the other forecasts for its GPU on one machine or over its network.
"""
import math
import shlex
import textwrap
from typing import NamedTuple

import pandas as pd

from sdbench.costs import days_to_train, price_of
from sdbench.errors import UserError, plural
from sdbench.flags.commands import Report
from sdbench.flags.times import LONGEST_INTERVAL, to_batches
from sdbench.flags.train import SWITCHES
from sdbench.forecast.speed import LARGEST_ERROR, SEVERAL_MACHINES_ERRORS
from sdbench.gpus import short_name
from sdbench.records.figures import WIDTH, format_days, format_figure, rounded
from sdbench.records.read import MEASURED
from sdbench.records.setup import SPEED_SETTINGS, UNSTATED_NETWORK, VERSIONS, forecast_command
from sdbench.records.status import FORECAST, NOT_IN_A_FORECAST
from sdbench.report.markdown import describe_settings, differing_settings, tables_within_width
from sdbench.report.speeds import NO_RUN_FIGURES

# Settings that all phases of a plan share. The image size, the microbatch and the data may differ between phases.
PLAN_SETTINGS = [key for key in SPEED_SETTINGS if key not in (
    'stage', 'image_size', 'device_train_microbatch_size', 'dataset', 'num_workers', *VERSIONS)]
SAME_MODEL = ['device', 'model_name']
SAME_SWITCHES = [key for key in PLAN_SETTINGS if key in SWITCHES]
SAME_SETUP = [*PLAN_SETTINGS, 'num_devices', 'image_size', 'microbatch']  # of a measurement and its forecast
CORRECTED = 'forecast, corrected'  # status of a part of a plan whose forecast is corrected by a measurement
MILESTONE_IMAGES = 4_020_000  # until MLPerf's reference for Stable Diffusion reached FID 90, at a batch of 2,048
MILESTONE_SIZE = '512'  # pixels
MOST_MILESTONES = 4  # plans for which the time until the milestone is printed
RESTART_HOURS = 0.25  # from a preemption until training goes on: new machine, libraries, checkpoint, compilation
FORECAST_ERROR = (f'Forecasts were off by up to {LARGEST_ERROR:.0%} on published speeds that were not used to fit '
                  'them, and errors may be larger for setups unlike any published one.')
Corrections = dict[tuple[str, str, str], float]  # factor for forecasts, by (GPU, --compile, network)


class PlanPart(NamedTuple):
    """A part of a plan: an encoding or a phase of the training.

    Attributes:
        name: 'encode' or 'train'.
        size: width and height of the images in pixels.
        images: number of images that are encoded or trained on.
        days: days that the part takes.
        least: fewest days within the range of the forecast; NaN if the forecast is not tested.
        most: most days within the range of the forecast; NaN if the forecast is not tested.
        status: status of the record with the speed, or CORRECTED.
        date: date of that record; '' if it has none.
    """
    name: str
    size: str
    images: int
    days: float
    least: float
    most: float
    status: str
    date: str


class PartSpeed(NamedTuple):
    """The speed of a part of a plan.

    Attributes:
        name: 'encode' or 'train'.
        size: width and height of the images in pixels.
        images: number of images that are encoded or trained on.
        images_per_sec: the speed on all GPUs together.
        most: highest speed within the range of the forecast; NaN if the forecast is not tested.
        least: lowest speed within the range of the forecast; NaN if the forecast is not tested.
        status: status of the record with the speed.
        date: date of that record; '' if it has none.
        images_between_checkpoints: images that are trained on between two checkpoints; 0 for an encoding.
    """
    name: str
    size: str
    images: int
    images_per_sec: float
    most: float
    least: float
    status: str
    date: str
    images_between_checkpoints: int


def plan_table(records: pd.DataFrame, settings: Report) -> tuple[pd.DataFrame, str, list[str]]:
    """Return a row for each plan with the cheapest first, the title of the plans, and notes below the table.

    A plan needs a measured or forecast speed at the image size of every phase. A plan on latents includes the encoding
    of --encode. Raises UserError if there is no plan.
    """
    # Only reliable speeds count, and newer records replace older ones, so sort them by date.
    records = records.sort_values('date', kind='stable')
    trained = records[records['stage'] == 'train']
    is_reliable = trained['status'].isin([MEASURED, FORECAST])
    reliable = trained[is_reliable]
    phases = [(images or phase_images(reliable, size), size) for images, size in settings.phase]
    sizes = [size for _, size in phases]

    # Records of one setting and GPU count make a plan if they have a speed at each of the sizes.
    groups = reliable.groupby([*PLAN_SETTINGS, 'num_devices'], sort=False)
    planned = groups.filter(lambda runs: {*sizes} <= {*runs['image_size']})
    forecasts = planned[planned['status'] == FORECAST]
    correctable = {*zip(forecasts['device'], forecasts['compile'], strict=True)}
    corrections, sentences = find_corrections(reliable, correctable)
    plans = []
    excluded = [f'{describe_gpus(row)}, {row["notes"]}' for _, row in trained[~is_reliable].iterrows()]
    for _, runs in groups:
        if {*sizes} <= {*runs['image_size']}:
            plans.append(plan_row(runs, records, phases, settings, corrections))
        else:
            excluded += exclusion_reasons(runs, sizes, correctable)
    if not plans:
        raise UserError(f'--phase: no GPU count has reliable records of one setting at {" and ".join(sizes)} '
                        'px; measure or forecast each size with the same flags')
    plans = pd.DataFrame(plans).sort_values(['cost_usd', 'total_gpu_hours'], kind='stable', ignore_index=True)

    # Add the settings that distinguish plans to their records, which --csv writes.
    for key in differing_settings(plans, [*PLAN_SETTINGS, 'num_nodes']):
        for record, value in zip(plans['record'], plans[key], strict=True):
            record[key] = value

    sentences += [*milestone_sentences(plans), *explain_days(plans, settings)]
    if excluded:
        sentences.append(f'No plan was made from: {"; ".join(dict.fromkeys(excluded))}.')
    return plans, plan_title(phases, settings), sentences


def exclusion_reasons(runs: pd.DataFrame, sizes: list[str], correctable: set[tuple[str, str]]) -> list[str]:
    """Return why these records make no plan, or [] if they are measurements that can correct a forecast.

    Args:
        runs: rows of one setting and GPU count that lack a speed at some of the sizes.
        sizes: image sizes of the phases.
        correctable: GPU and --compile of the forecasts in plans.
    """
    first = runs.iloc[0]
    if MEASURED not in {*runs['status']} or not correctable:
        missing = [size for size in sizes if size not in {*runs['image_size']}]
        statuses = ' and '.join(dict.fromkeys(runs['status']))
        return [f'{describe_gpus(first)}, {statuses}, no speed at {" and ".join(missing)} px']
    if (first['device'], first['compile']) not in correctable:
        how = how_compiled(first['compile'])
        return [f'{describe_gpus(first)}, measured {how}, but no plan has a forecast for this GPU with this --compile']
    return []


def explain_days(plans: pd.DataFrame, settings: Report) -> list[str]:
    """Return sentences that say what the days of the plans include, and which network they assume."""
    sentences = []
    if settings.hours_between_preemptions:
        hours = settings.hours_between_preemptions
        sentences.append(f'Preemptions: each machine is preempted every {hours:g} hours on average. Each time, '
                         f'{RESTART_HOURS * 60:.0f} minutes pass until the work goes on, and a training repeats half a '
                         '--save_interval.')
    if any(part.status != MEASURED for parts in plans['parts'] for part in parts):
        sentences.append(NOT_IN_A_FORECAST)
    networks = [f'a {network}' for network in plans['network'].unique() if network not in ('', UNSTATED_NETWORK)]
    if networks:
        lowest, highest = SEVERAL_MACHINES_ERRORS
        sentences.append(f'Several machines are assumed to be joined by {" or ".join(networks)} (--network_gbits) with '
                         'RDMA; plain TCP carries half as much. On several machines, forecasts for published speeds '
                         f'were between {-lowest:.0%} too low and {highest:.0%} too high.')
    return sentences


def milestone_sentences(plans: pd.DataFrame) -> list[str]:
    """Return a sentence that says when the cheapest plans can first check the quality of their training.

    The milestone is from MLPerf's reference, which trained Stable Diffusion 2 from random weights on latents of 512 px.
    """
    times = {}
    for _, plan in plans.iterrows():
        for part in plan['parts']:
            if (part.name, part.size) == ('train', MILESTONE_SIZE):
                minutes = part.days / part.images * MILESTONE_IMAGES * 24 * 60
                times.setdefault(describe_gpus(plan), rounded(minutes))
    if not times:
        return []
    listed = '; '.join(f'{minutes} minutes on {gpus}' for gpus, minutes in [*times.items()][:MOST_MILESTONES])
    return [f'First check of quality: at {MILESTONE_SIZE} px, MLPerf\'s reference, from random weights, reached FID 90 '
            f'after {MILESTONE_IMAGES / 1e6:g} million images at a batch of 2,048. Training on as many images takes '
            f'{listed}.']


def plan_title(phases: list[tuple[int, str]], settings: Report) -> str:
    """Return the plan as one sentence: the images and the size of each phase, and the images to encode."""
    encoded = {size: images for images, size in settings.encode}
    trainings = []
    for images, size in phases:
        epochs = f' ({rounded(images / encoded[size])} epochs)' if size in encoded else ''
        trainings.append(f'{plural(images, "image")} at {size} px{epochs}')
    title = f'Plan: train on {", then ".join(trainings)}'
    if encoded:
        once = ' and '.join(f'{plural(images, "image")} at {size} px' for size, images in encoded.items())
        title += f'; for latents, encode {once}'
    return title


def phase_images(trained: pd.DataFrame, size: str) -> int:
    """Return the number of images of a phase whose --phase gives only the image size.

    The number comes from the newest forecast at this size, or else from the newest training. A measurement does not
    count, because its number of batches follows from --measure_batches. Raises UserError if no record states a number.
    """
    of_size = trained[trained['image_size'] == size]
    is_forecast = of_size['status'] == FORECAST
    for record in [*of_size['record'][is_forecast][::-1], *of_size['record'][~is_forecast][::-1]]:
        duration = str(record.get('max_duration', ''))
        is_given = 'max_duration' not in record.get('by_default', ())
        if is_given and duration.endswith('ba') and 'batch_size' in record:
            return to_batches(duration) * record['batch_size']
    raise UserError(f'--phase {size}: no training of this size has a --max_duration in batches; give IMAGES@{size}')


def find_corrections(trained: pd.DataFrame, correctable: set[tuple[str, str]]) -> tuple[Corrections, list[str]]:
    """Return factors that correct forecasts by measurements, and sentences about the factors.

    For each GPU, --compile and network, the factor is the median of measured speed / forecast speed over all setups
    that have both. It multiplies all their forecasts, because a systematic error should affect all of them. The
    sentences also name each measurement without a forecast for its setup, and give the command that makes one.

    Args:
        trained: rows of reliable trainings and of forecasts, sorted by date.
        correctable: GPU and --compile of the forecasts in plans.
    """
    # Pair each measurement with the newest forecast for its setup: older forecasts may come from an older version of
    # the forecast model.
    forecasts = trained[trained['status'] == FORECAST].drop_duplicates(SAME_SETUP, keep='last')
    keys = pd.Series(list(zip(trained['device'], trained['compile'], strict=True)), trained.index, dtype=object)
    measured = trained[(trained['status'] == MEASURED) & keys.isin(correctable)]
    pairs = measured.merge(forecasts, 'left', on=SAME_SETUP, suffixes=('', '_forecast'))
    pairs['ratio'] = pairs['images_per_sec'] / pairs['images_per_sec_forecast']

    corrections = {}
    sentences = []
    groups = pairs[pairs['ratio'].notna()].groupby(['device', 'compile', 'network'], sort=False)
    for (device, compile, network), group in groups:
        factor = group['ratio'].median()
        corrections[device, compile, network] = factor
        sources = [f'{describe_gpus(pair)} at {pair["image_size"]} px' for _, pair in group.iterrows()]
        how = f'{how_compiled(compile)}, {f"over {network}" if network else "on one machine"}'
        sentences.append(f'Forecasts for the {short_name(device)} ({how}) are multiplied by {factor:.2f}, as measured '
                         f'on {" and ".join(dict.fromkeys(sources))}. No other forecast is corrected by this, so '
                         'compare plans only after measuring both.')

    # Name measurements that correct nothing, with the command that makes the missing forecast.
    for _, run in pairs[pairs['ratio'].isna()].drop_duplicates(SAME_SETUP).iterrows():
        why = (f'{describe_gpus(run)} at {run["image_size"]} px was measured, but corrects no plan, because no record '
               'here forecasts the same setup. This command writes that forecast to forecasts.jsonl, which this report '
               'then takes as one more file:')
        command = shell_lines(forecast_command(run['record'], 'forecasts.jsonl'))
        sentences.append(f'{textwrap.fill(why, WIDTH)}\n{command}')
    return corrections, sentences


def how_compiled(compile: str) -> str:
    """Return a value of --compile in words, such as 'not compiled' or 'compiled with reduce-overhead'."""
    return {'': 'not compiled', 'no': 'not compiled', 'yes': 'compiled'}.get(compile, f'compiled with {compile}')


def shell_lines(program: list[str]) -> str:
    """Return a shell command that runs a program of this folder, in lines of at most WIDTH characters."""
    lines = ['python']
    for word in map(shlex.quote, program):
        if len(lines[-1]) + len(word) > WIDTH - 3:
            lines[-1] += ' \\'
            lines.append('   ')
        lines[-1] += f' {word}'
    return '\n'.join(lines)


def plan_row(runs: pd.DataFrame, records: pd.DataFrame, phases: list[tuple[int, str]], settings: Report,
             corrections: Corrections) -> dict:
    """Return the row of a plan.

    Args:
        runs: rows of one setting and GPU count, the newest last.
        records: all rows, which have the speed of an encoding.
        phases: (images, image size) of each phase.
        settings: settings of the report.
        corrections: factors for forecasts.
    """
    first = runs.iloc[0]
    parts = plan_parts(runs, records, phases, settings, corrections)
    lacks = missing_encodings(parts, first['input'], phases)
    days = sum(part.days for part in parts)
    gpu_hours = math.nan if first['on_cpu'] else days * 24 * first['num_devices']

    # Prices come from --dollars_per_gpu_hour, or else from the newest record that has prices.
    recorded = [prices for prices in runs['prices'] if prices]
    price = price_of(first['device'], settings.dollars_per_gpu_hour or (recorded[-1] if recorded else ()))

    # The record is what --csv writes: images and days of each part, for a spreadsheet. Two phases may have one size.
    record = {'stage': 'plan', 'device': first['device'], 'num_devices': first['num_devices'], 'input': first['input'],
              'dollars_per_gpu_hour': price, 'hours_between_preemptions': settings.hours_between_preemptions}
    for part in parts:
        for figure, value in (('images', part.images), ('days', part.days)):
            key = f'{figure}_{part.name}_{part.size}'
            record[key] = record.get(key, 0) + value
    return first.to_dict() | NO_RUN_FIGURES | {
        'stage': 'plan', 'parts': parts, 'days': days, 'total_gpu_hours': gpu_hours, 'record': record,
        'price': price, 'cost_usd': gpu_hours * price, 'lacks': lacks,
        'notes': ', '.join([*notes_on_forecasts(parts), *lacks])}


def notes_on_forecasts(parts: list[PlanPart]) -> list[str]:
    """Return notes that say which parts of a plan are forecast, which are corrected, and the range of the others."""
    notes = []
    forecasts = [part for part in parts if part.status == FORECAST]
    least = sum(part.least for part in forecasts)
    most = sum(part.most for part in forecasts)
    days_range = 'not tested' if math.isnan(least) else f'{format_days(least)} to {format_days(most, " days")}'
    for status, note in ((CORRECTED, 'corrected'), (FORECAST, days_range)):
        names = dict.fromkeys(f'{part.name} {part.size}' for part in parts if part.status == status)
        if names:
            which = '' if all(part.status == status for part in parts) else f' of {" and ".join(names)}'
            notes.append(f'forecast{which}, {note}')
    train_statuses = {part.status for part in parts if part.name == 'train'}
    if {MEASURED, FORECAST} <= train_statuses:
        notes.append('not corrected, because the measurement has no forecast with the same flags and microbatch')
    return notes


def missing_encodings(parts: list[PlanPart], input: str, phases: list[tuple[int, str]]) -> list[str]:
    """Return a note that names the image sizes whose encoding a plan on latents lacks; [] if it lacks none."""
    encoded = [part.size for part in parts if part.name == 'encode']
    missing = dict.fromkeys(size for _, size in phases if size not in encoded)
    if input != 'latents' or not missing:
        return []
    return [f'without encoding at {" and ".join(missing)} px']


def plan_parts(runs: pd.DataFrame, records: pd.DataFrame, phases: list[tuple[int, str]], settings: Report,
               corrections: Corrections) -> list[PlanPart]:
    """Return the parts of a plan in the order of the work. See `plan_row` for the arguments."""
    first = runs.iloc[0]
    parts = []
    for work in part_speeds(runs, records, phases, settings):
        # GPUs that encode do not communicate, so on any number of machines they have the factor of one machine.
        network = first['network'] if work.name == 'train' else ''
        factor = corrections.get((first['device'], first['compile'], network))

        # A measured or corrected speed has no range. The highest speed gives the fewest days.
        speeds = [work.images_per_sec, work.most, work.least]
        status = work.status
        if status == MEASURED:
            speeds = [work.images_per_sec] * 3
        elif factor is not None:
            speeds = [work.images_per_sec * factor] * 3
            status = CORRECTED

        days = [days_to_train(speed, work.images) for speed in speeds]
        if settings.hours_between_preemptions:
            days = [days_with_preemptions(part_days, speed, work, first, settings.hours_between_preemptions)
                    for part_days, speed in zip(days, speeds, strict=True)]
        parts.append(PlanPart(work.name, work.size, work.images, *days, status, work.date))
    return parts


def part_speeds(runs: pd.DataFrame, records: pd.DataFrame, phases: list[tuple[int, str]], settings: Report
                ) -> list[PartSpeed]:
    """Return the speed of each part of a plan. See `plan_row` for the arguments."""
    first = runs.iloc[0]
    speeds = []
    if first['input'] == 'latents':
        encodings = [encoding_speed(first, records, images, size) for images, size in settings.encode]
        speeds += [speed for speed in encodings if speed is not None]
    for images, size in phases:
        # Take the newest measurement of each microbatch and of these the fastest, or else the newest forecast.
        of_size = runs[runs['image_size'] == size]
        measured = of_size[of_size['status'] == MEASURED].drop_duplicates('microbatch', keep='last')
        run = of_size.iloc[-1] if measured.empty else measured.loc[measured['images_per_sec'].idxmax()]
        # A record without a --save_interval has its default for a long run.
        interval = str(run['record'].get('save_interval', ''))
        batches = to_batches(interval) if interval.endswith('ba') else LONGEST_INTERVAL
        speeds.append(PartSpeed(
            'train', size, images, run['images_per_sec'], run['images_per_sec_most'], run['images_per_sec_least'],
            run['status'], run['date'], batches * run['record'].get('batch_size', 1)))
    return speeds


def days_with_preemptions(days: float, images_per_sec: float, work: PartSpeed, run: pd.Series, hours_between: float
                          ) -> float:
    """Return the days that a part of a plan takes if machines are preempted.

    Each preemption costs a restart, and on average half of the work between two checkpoints.

    Args:
        days: days without preemptions.
        images_per_sec: speed of the part.
        work: the part.
        run: row of the plan's GPUs.
        hours_between: mean hours between two preemptions of one machine.

    Raises UserError if a machine would be preempted before it has saved its work.
    """
    lost = RESTART_HOURS + work.images_between_checkpoints / 2 / images_per_sec / 3600
    period = hours_between / int(run['num_nodes'] or 1)  # hours: the preemption of any machine stops all of them
    if lost >= period:
        fix = 'plan with a shorter --save_interval'
        if RESTART_HOURS >= period:  # even if nothing had to be repeated
            fix = 'plan with fewer machines, or with machines that are preempted less often'
        raise UserError(f'--hours_between_preemptions {hours_between:g}: {describe_gpus(run)} at {work.size} px would '
                        f'lose {lost:.2f} hours in each preemption, one every {period:.2f} hours; {fix}')
    return days * period / (period - lost)


def encoding_speed(run: pd.Series, records: pd.DataFrame, images: int, size: str) -> PartSpeed | None:
    """Return the speed at which the GPUs of a training encode `images` images of a size; None if it is not known.

    The speed comes from the newest measurement by encode.py with the same model and GPU, or else from the newest
    forecast with the same switches. Any GPU count will do, because the GPUs encode independently.
    """
    of_model = records[(records['image_size'] == size) & (records[SAME_MODEL] == run[SAME_MODEL]).all(axis='columns')]
    measured = of_model[(of_model['stage'] == 'encode') & (of_model['status'] == MEASURED)]
    forecasts = of_model[(of_model['status'] == FORECAST) & (of_model[SAME_SWITCHES] == run[SAME_SWITCHES]).all(axis=1)]
    known = [row for _, row in forecasts.iterrows() if row['record'].get('encode_images_per_sec') is not None]
    if not measured.empty:
        row = measured.iloc[-1]  # the last one is the newest
        speed = row['images_per_sec']
    elif known:
        row = known[-1]
        speed = row['record']['encode_images_per_sec']
    else:
        return None
    speed *= run['num_devices'] / row['num_devices']
    return PartSpeed('encode', size, images, speed, math.nan, math.nan, row['status'], row['date'], 0)


def distinguishing_settings(plans: pd.DataFrame) -> list[str]:
    """Return the settings that distinguish plans on the same GPUs."""
    keys = differing_settings(plans, [key for key in PLAN_SETTINGS if key != 'device'])
    if 'network' in keys and {*plans['network']} <= {'', UNSTATED_NETWORK}:
        keys.remove('network')  # it follows from the number of machines
    if plans.groupby('num_devices')['num_nodes'].nunique().max() > 1:  # equal GPU counts on different machines
        keys.append('num_nodes')
    return keys


def plan_blocks(plans: pd.DataFrame, keys: list[str]) -> list[str]:
    """Return the tables of plans, with the settings in `keys` as a column, and the notes on plans as sentences."""
    others = [key for key in keys if key != 'input']
    rows = []
    for _, plan in plans.iterrows():
        row = {'GPUs': f'{plan["num_devices"]} x {short_name(plan["device"])}', 'input': plan['input'],
               'settings': describe_settings(plan, others)}
        for key, days in plan['record'].items():
            if key.startswith('days_'):
                row[key.removeprefix('days_').replace('_', ' ')] = format_days(days, ' days')
        for key, heading in (('days', 'days'), ('total_gpu_hours', 'GPU-hours'), ('cost_usd', 'cost')):
            row[heading] = format_figure(key, plan[key])
        rows.append(row)

    # Sorted by name, encodings come before phases of training ('encode 256', 'train 256'). Sums come last.
    labels = ['GPUs', 'input', 'settings']
    sums = ['days', 'GPU-hours', 'cost']
    cells = pd.DataFrame(rows, index=plans.index).fillna('')
    parts = sorted(column for column in cells if column not in (*labels, *sums))
    blocks = tables_within_width(cells[[*labels, *parts, *sums]], labels, [sums, parts], labels)
    for note, noted in plans[plans['notes'] != ''].groupby('notes', sort=False):
        names = 'All of these'
        if len(noted) < len(plans):
            names = '; '.join(dict.fromkeys(describe_plan(plan, keys) for _, plan in noted.iterrows()))
        blocks.append(f'{names}: {note}.')
    return blocks


def limit_fractions(plans: pd.DataFrame, max_dollars: float | None, max_days: float | None) -> pd.DataFrame:
    """Return the fraction of each limit that each plan takes, in a column for each limit that is not None.

    A plan without a price has NaN for a limit in dollars.
    """
    fractions = pd.DataFrame(index=plans.index)
    if max_dollars is not None:
        fractions[f'${rounded(max_dollars)}'] = plans['cost_usd'] / max_dollars
    if max_days is not None:
        fractions[f'{max_days:g} {"day" if max_days == 1 else "days"}'] = plans['days'] / max_days
    return fractions


def within_limits(plans: pd.DataFrame, keys: list[str], max_dollars: float | None, max_days: float | None
                  ) -> tuple[pd.DataFrame, list[str]]:
    """Return the plans within the limits of dollars and days, and sentences that say how close each is to a limit.

    If no plan is within the limits, all plans are returned, and a sentence and the column `is_nearest` name the nearest
    plan. Sentences describe plans by the settings in `keys`.
    """
    fractions = limit_fractions(plans, max_dollars, max_days)
    if fractions.empty:
        return plans, []
    limits = ' and '.join(fractions)
    largest = fractions.max(axis='columns', skipna=False)  # NaN, which is within no limit, for a plan without a price
    if largest.isna().all():
        return plans, [f'No plan has a price, so none can be compared with {limits}; give prices with '
                       '--dollars_per_gpu_hour.']

    within = plans[largest <= 1]
    if within.empty:
        described = plans.loc[[largest.idxmin()]]
        shown = plans.assign(is_nearest=plans.index.isin(described.index))
        heading = f'No plan is within {limits}; see "Within a budget" in docs/planning.md. The nearest plan'
    else:
        described = shown = within
        are = 'is' if len(within) == 1 else 'are'
        heading = f'{len(within)} of {plural(len(plans), "plan")} {are} within {limits}'

    # Say how close each of these plans is to the limits.
    descriptions = []
    for row, plan in described.iterrows():
        taken = ' and '.join(f'{fraction:.0%} of {limit}' for limit, fraction in fractions.loc[row].items())
        notes = [*notes_on_limit(plan, largest[row]), *plan['lacks']]
        descriptions.append(', '.join([describe_plan(plan, keys), taken, *notes]))
    sentences = [f'{heading}: {"; ".join(descriptions)}.']

    # Name measured plans that exceed a limit: their speed is certain, so a small change may bring them within it.
    is_measured = pd.Series([MEASURED in {part.status for part in parts} for parts in plans['parts']], plans.index)
    exceeding = [f'{describe_plan(plans.loc[row], keys)}, {largest[row]:.0%} of a limit'
                 for row in plans.index[is_measured & (largest > 1)] if row not in described.index]
    if exceeding:
        sentences.append(f'Measured plans over a limit: {"; ".join(exceeding)}.')
    if any(part.status != MEASURED for parts in within['parts'] for part in parts):
        sentences.append(f'Measure plans close to a limit first. {FORECAST_ERROR}')
    return shown, sentences


def notes_on_limit(plan: pd.Series, fraction: float) -> list[str]:
    """Return notes on the forecasts in a plan: the fraction at their slow end, and the speed that the limit needs.

    Args:
        plan: row of the plan.
        fraction: fraction of the limit that the plan takes.
    """
    forecasts = [part for part in plan['parts'] if part.status != MEASURED]
    if not forecasts:
        return []
    forecast_days = sum(part.days for part in forecasts)
    measured_days = plan['days'] - forecast_days
    notes = []
    most = measured_days + sum(part.most for part in forecasts)
    if most > plan['days']:  # false for a forecast that is not tested (NaN) or corrected (no range)
        notes.append(f'{fraction * most / plan["days"]:.0%} at the slow end of its range')

    # At the limit, the plan may take days / fraction. The forecast parts may use what the measured parts leave of it.
    needed = forecast_days / (plan['days'] / fraction - measured_days)
    if 0 < needed <= 1:
        speed = 'the forecast speed'
        if CORRECTED in {part.status for part in forecasts}:
            speed = 'the corrected forecast speed'
        if len(forecasts) < len(plan['parts']):
            speed += f' of {" and ".join(dict.fromkeys(f"{part.name} {part.size}" for part in forecasts))}'
        rounded_up = math.ceil(100 * needed) / 100
        notes.append(f'needs at least {rounded_up:.2f} of {speed}')
    return notes


def describe_plan(plan: pd.Series, keys: list[str]) -> str:
    """Return the GPUs, the input and the settings in `keys` of a plan as text."""
    settings = describe_settings(plan, [key for key in keys if key != 'input'])
    return ', '.join(filter(None, [describe_gpus(plan), settings]))


def describe_gpus(row: pd.Series) -> str:
    """Return the GPUs and the input of a row as text, such as '8 x B200 on latents'."""
    on = f' on {row["input"]}' if row['input'] else ''
    return f'{row["num_devices"]} x {short_name(row["device"])}{on}'
