"""Make the table of plans: what a training in phases takes, from the speed at the size of each.

Records give speeds: measured before forecast, newest before older. A measurement with a forecast for the same setup
corrects the other forecasts for its GPU over the same network, or on one machine.
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
from sdbench.forecast.speed import LARGEST_ERROR
from sdbench.gpus import short_name
from sdbench.records.figures import WIDTH, cell, days_in_words, rounded
from sdbench.records.read import MEASURED
from sdbench.records.setup import SPEED_SETTINGS, UNSTATED_NETWORK, VERSIONS, forecast_command
from sdbench.records.status import FORECAST, NOT_IN_A_FORECAST
from sdbench.report.markdown import differing, fitting_tables, settings_in_words
from sdbench.report.speeds import UNKNOWN

# Settings that a plan has one of, whatever its phases, its data and its libraries are.
PLANNED = [key for key in SPEED_SETTINGS if key not in (
    'stage', 'image_size', 'device_train_microbatch_size', 'dataset', 'num_workers', *VERSIONS)]
SAME_MODEL = ['device', 'model_name']
SAME_SWITCHES = [key for key in PLANNED if key in SWITCHES]
SAME_SETUP = [*PLANNED, 'num_devices', 'image_size', 'microbatch']  # a measurement and its forecast
CORRECTED = 'forecast, corrected'  # status of a part of a plan, where a measurement corrects its forecast
MILESTONE_IMAGES = 4_020_000  # at a batch of 2,048, until the FID of MLPerf's reference runs of Stable Diffusion is 90
MILESTONE_SIZE = '512'  # pixels
MOST_CHECKS = 4  # plans for which the time until then is said
RESTART_HOURS = 0.25  # until a training goes on elsewhere: another machine, the libraries, a checkpoint, the compiler
FORECAST_ERROR = (f'Forecasts were off by up to {LARGEST_ERROR:.0%} on published speeds that were not used to fit '
                  'them, and errors may be larger for setups unlike any published one.')
Corrections = dict[tuple[str, str, str], float]  # by GPU, --compile and network, what forecasts are multiplied by


class PartOfPlan(NamedTuple):
    """A part of a plan.

    Attributes:
        name: what it is, 'encode' or 'train'.
        size: of a side of its images in pixels.
        images: how many it encodes or trains on.
        days: that they take.
        least: the fewest days that they may take; NaN where the forecast is not tested.
        most: the most days.
        status: of the record that the speed is from, or CORRECTED.
        date: of that record; '' where it does not say.
    """
    name: str
    size: str
    images: int
    days: float
    least: float
    most: float
    status: str
    date: str


def plan_table(records: pd.DataFrame, settings: Report) -> tuple[pd.DataFrame, str, list[str]]:
    """Return a row for each plan, the cheapest first, what is planned, and sentences on the plans.

    A plan needs a speed that was measured, or forecast, at the size of every phase of --phase. A plan on latents has
    their encoding in it, as --encode says. Raises UserError if there is no plan.
    """
    # the speeds: only those to rely on, in the order of time
    records = records.sort_values('date', kind='stable')
    trained = records[records['stage'] == 'train']
    is_planned = trained['status'].isin([MEASURED, FORECAST])
    unreliable = trained[~is_planned]
    trained = trained[is_planned]
    phases = [(images or images_of_phase(trained, size), size) for images, size in settings.phase]
    sizes = [size for _, size in phases]
    of_settings = trained.groupby([*PLANNED, 'num_devices'], sort=False)
    planned = of_settings.filter(lambda runs: {*sizes} <= {*runs['image_size']})
    forecasts = planned[planned['status'] == FORECAST]
    correctable = {*zip(forecasts['device'], forecasts['compile'], strict=True)}
    corrections, sentences = find_corrections(trained, correctable)

    # the days: a plan for the runs of each setting on so many GPUs that have a speed for each phase
    plans = []
    left_out = [f'{gpus_of(row)}, {row["notes"]}' for _, row in unreliable.iterrows()]
    for _, runs in of_settings:
        first = runs.iloc[0]
        missing = [size for size in sizes if size not in {*runs['image_size']}]
        if not missing:
            plans.append(plan_row(runs, records, phases, settings, corrections))
        elif MEASURED not in {*runs['status']} or not correctable:
            statuses = ' and '.join(dict.fromkeys(runs['status']))
            left_out.append(f'{gpus_of(first)}, {statuses}, no speed at {" and ".join(missing)} px')
        elif (first['device'], first['compile']) not in correctable:
            left_out.append(f'{gpus_of(first)}, measured {how_compiled(first["compile"])}, unlike the plans for it')
    if not plans:
        raise UserError(f'--phase: no GPU count has reliable records of one setting at {" and ".join(sizes)} '
                        'px; measure or forecast each size with the same flags')
    plans = pd.DataFrame(plans).sort_values(['cost_usd', 'total_gpu_hours'], kind='stable', ignore_index=True)
    for key in differing(plans, [*PLANNED, 'num_nodes']):  # by which a reader of --csv tells them apart
        for record, value in zip(plans['record'], plans[key], strict=True):
            record[key] = value

    # the sentences
    sentences += [*first_check(plans), *what_days_mean(plans, settings)]
    if left_out:
        sentences.append(f'Not in the plan: {"; ".join(dict.fromkeys(left_out))}')
    return plans, title_of(phases, settings), sentences


def what_days_mean(plans: pd.DataFrame, settings: Report) -> list[str]:
    """Return in sentences what the days of plans count, and how sure they are."""
    sentences = []
    if settings.hours_between_preemptions:
        sentences.append(f'Losses: of each machine one in {settings.hours_between_preemptions:g} hours, which costs '
                         f'{RESTART_HOURS * 60:.0f} minutes until the work goes on, and of a training half a '
                         '--save_interval.')
    if any(part.status != MEASURED for parts in plans['parts'] for part in parts):
        sentences.append(NOT_IN_A_FORECAST)
    networks = dict.fromkeys(filter(None, plans['network']))
    if networks:
        sentences.append(f'Several machines are assumed to be joined by {" or ".join(networks)} (--network_gbits), as '
                         'by RDMA; plain TCP carries half of that. On several machines, forecasts for published speeds '
                         'were between 10 % too low and 13 % too high.')
    return sentences


def first_check(plans: pd.DataFrame) -> list[str]:
    """Say in a sentence when the quality of a training can first be checked, on the GPUs of the cheapest plans.

    MLPerf's reference trained SD2 on latents of 512 px from random weights, as these plans do at their largest size.
    """
    times = {}
    for _, plan in plans.iterrows():
        for part in plan['parts']:
            if (part.name, part.size) == ('train', MILESTONE_SIZE):
                minutes = part.days / part.images * MILESTONE_IMAGES * 24 * 60
                times.setdefault(gpus_of(plan), rounded(minutes))
    if not times:
        return []
    listed = '; '.join(f'{minutes} minutes on {gpus}' for gpus, minutes in [*times.items()][:MOST_CHECKS])
    return [f'First check of quality: at {MILESTONE_SIZE} px, MLPerf\'s reference, from random weights, reached FID 90 '
            f'after {MILESTONE_IMAGES / 1e6:g} million images at a batch of 2,048. Training on as many takes {listed}.']


def title_of(phases: list[tuple[int, str]], settings: Report) -> str:
    """Return what is planned in one sentence, by the images and the size of each phase and by --encode."""
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


def images_of_phase(trained: pd.DataFrame, size: str) -> int:
    """Return how many images a phase trains on.

    They are those of the newest forecast of its size, or else of the newest training. A measurement does not count.

    Raises UserError if no record says it.
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
    """Compare measurements with forecasts for the same setup; return a factor for each group of forecasts, and why.

    A group is one GPU, compiled or not, on one machine or over one network. Its factor is measured speed divided by
    forecast speed, or the median if there are several pairs. It applies to every forecast in the group, because a
    systematic error of the forecast should affect them alike. The sentences say so. They also name each measurement
    without a forecast for its setup, with the command that makes one.

    Args:
        trained: the rows of reliable trainings and of forecasts, in the order of time.
        correctable: GPU and --compile of the forecasts that plans are made of.
    """
    # Pair each measurement with the newest forecast for its setup: older ones may come from an older forecast model.
    forecasts = trained[trained['status'] == FORECAST].drop_duplicates(SAME_SETUP, keep='last')
    groups = pd.Series(list(zip(trained['device'], trained['compile'], strict=True)), trained.index, dtype=object)
    measured = trained[(trained['status'] == MEASURED) & groups.isin(correctable)]
    pairs = measured.merge(forecasts, 'left', on=SAME_SETUP, suffixes=('', '_forecast'))
    pairs['ratio'] = pairs['images_per_sec'] / pairs['images_per_sec_forecast']

    corrections = {}
    sentences = []
    of_pairs = pairs[pairs['ratio'].notna()].groupby(['device', 'compile', 'network'], sort=False)
    for (device, compile, network), alike in of_pairs:
        factor = alike['ratio'].median()
        corrections[device, compile, network] = factor
        sources = [f'{gpus_of(pair)} at {pair["image_size"]} px' for _, pair in alike.iterrows()]
        how = f'{how_compiled(compile)}, {f"over {network}" if network else "on one machine"}'
        sentences.append(f'Forecasts for the {short_name(device)} ({how}) are multiplied by {factor:.2f}, as measured '
                         f'on {" and ".join(dict.fromkeys(sources))}. No other forecast is corrected by this, so '
                         'compare plans only after measuring both.')

    # Say what corrects nothing, and how it would.
    for _, run in pairs[pairs['ratio'].isna()].drop_duplicates(SAME_SETUP).iterrows():
        why = (f'{gpus_of(run)} at {run["image_size"]} px was measured, but corrects no plan, because no record here '
               'forecasts the same setup. This command writes that forecast to forecasts.jsonl, which this report then '
               'takes as one more file:')
        command = shell_lines(forecast_command(run['record'], 'forecasts.jsonl'))
        sentences.append(f'{textwrap.fill(why, WIDTH)}\n{command}')
    return corrections, sentences


def how_compiled(compile: str) -> str:
    """Return the setting --compile in words that tell groups of forecasts apart."""
    return {'': 'not compiled', 'no': 'not compiled', 'yes': 'compiled'}.get(compile, f'compiled with {compile}')


def shell_lines(program: list[str]) -> str:
    """Return the command that starts a program of this folder, in lines of at most WIDTH characters for a shell."""
    lines = ['python']
    for word in map(shlex.quote, program):
        if len(lines[-1]) + len(word) > WIDTH - 3:
            lines[-1] += ' \\'
            lines.append('   ')
        lines[-1] += f' {word}'
    return '\n'.join(lines)


def correction_of(run: pd.Series, name: str, corrections: Corrections) -> float | None:
    """Return what the forecast of a part of a plan is multiplied by, or None where nothing like it was measured.

    An encoding exchanges nothing, so that it is as on one machine on however many.
    """
    return corrections.get((run['device'], run['compile'], run['network'] if name == 'train' else ''))


def machines_of(run: pd.Series) -> int:
    """Return how many machines a run is on; of one that does not say it, that is one."""
    return int(run['num_nodes'] or 1)


def plan_row(runs: pd.DataFrame, records: pd.DataFrame, phases: list[tuple[int, str]], settings: Report,
             corrections: Corrections) -> dict:
    """Return the row of a plan.

    Args:
        runs: the rows of its setting, the newest last.
        records: all rows, for the speed of an encoding.
        phases: images and size of each.
        settings: of the report.
        corrections: of forecasts.
    """
    # its parts, and what they take together
    first = runs.iloc[0]
    parts = parts_of_plan(runs, records, phases, settings, corrections)
    lacks = without_encoding(parts, first['input'], phases)
    days = sum(part.days for part in parts)
    hours = math.nan if first['on_cpu'] else days * 24 * first['num_devices']

    # by the prices of the newest of its records that has some, unless the report is given others
    of_records = [prices for prices in runs['prices'] if prices]
    price = price_of(first['device'], settings.dollars_per_gpu_hour or (of_records[-1] if of_records else ()))

    # --csv has what follows of it, for a spreadsheet
    record = {'stage': 'plan', 'device': first['device'], 'num_devices': first['num_devices'], 'input': first['input'],
              'dollars_per_gpu_hour': price, 'hours_between_preemptions': settings.hours_between_preemptions}
    for part in parts:
        for what, value in (('images', part.images), ('days', part.days)):
            key = f'{what}_{part.name}_{part.size}'
            record[key] = record.get(key, 0) + value
    return first.to_dict() | UNKNOWN | {
        'stage': 'plan', 'parts': parts, 'days': days, 'total_gpu_hours': hours, 'record': record, 'price': price,
        'notes': ', '.join([*notes_on_forecasts(parts), *lacks]), 'lacks': lacks, 'cost_usd': hours * price}


def notes_on_forecasts(parts: list[PartOfPlan]) -> list[str]:
    """Say which parts of a plan are forecast, and of these which are corrected, and the range of the others."""
    notes = []
    forecasts = [part for part in parts if part.status == FORECAST]
    least, most = sum(part.least for part in forecasts), sum(part.most for part in forecasts)
    tested = 'not tested' if math.isnan(least) else f'{days_in_words(least)} to {days_in_words(most, " days")}'
    for status, how in ((CORRECTED, 'corrected'), (FORECAST, tested)):
        names = dict.fromkeys(f'{part.name} {part.size}' for part in parts if part.status == status)
        if names:
            of_parts = '' if all(part.status == status for part in parts) else f' of {" and ".join(names)}'
            notes.append(f'forecast{of_parts}, {how}')
    of_trainings = [part.status for part in parts if part.name == 'train']
    if MEASURED in of_trainings and FORECAST in of_trainings:
        notes.append('not corrected: what was measured has no forecast of the same flags and microbatch')
    return notes


def without_encoding(parts: list[PartOfPlan], input: str, phases: list[tuple[int, str]]) -> list[str]:
    """Say at which sizes a plan on latents has no encoding in it; nothing where it has all."""
    encoded = [part.size for part in parts if part.name == 'encode']
    without = dict.fromkeys(size for _, size in phases if size not in encoded)
    if input != 'latents' or not without:
        return []
    return [f'without encoding at {" and ".join(without)} px']


def parts_of_plan(runs: pd.DataFrame, records: pd.DataFrame, phases: list[tuple[int, str]], settings: Report,
                  corrections: Corrections) -> list[PartOfPlan]:
    """Return the parts of a plan in the order of the work; the arguments are those of `plan_row`.

    Raises UserError if a machine would be taken away before it has saved what it trained.
    """
    # the speed of each part, at most and at least, and how many images are trained on between two checkpoints
    first = runs.iloc[0]
    work = []
    for images, size in settings.encode if first['input'] == 'latents' else ():
        speed, status, date = speed_of_encoding(first, records, size)
        if status:
            work.append(('encode', size, images, (speed, math.nan, math.nan), status, date, 0))
    for images, size in phases:
        # by the newest forecast; where there are measurements, by the fastest of the newest of each microbatch
        of_size = runs[runs['image_size'] == size]
        measured = of_size[of_size['status'] == MEASURED].drop_duplicates('microbatch', keep='last')
        run = of_size.iloc[-1] if measured.empty else measured.loc[measured['images_per_sec'].idxmax()]
        speeds = run['images_per_sec'], run['images_per_sec_most'], run['images_per_sec_least']
        interval = str(run['record'].get('save_interval', ''))
        batches = to_batches(interval) if interval.endswith('ba') else LONGEST_INTERVAL
        unsaved = batches * run['record'].get('batch_size', 1)
        work.append(('train', size, images, speeds, run['status'], run['date'], unsaved))

    # its days; each loss of a machine costs half of what is trained between two checkpoints, and a restart
    parts = []
    hours = (settings.hours_between_preemptions or 0) / machines_of(first)  # whichever machine is lost
    for name, size, images, speeds, status, date, unsaved in work:
        factor = correction_of(first, name, corrections)
        if status == MEASURED:
            speeds = speeds[:1] * 3
        elif factor is not None:
            speeds = [speeds[0] * factor] * 3
            status = CORRECTED
        days = [days_to_train(speed, images) for speed in speeds]
        for number, speed in enumerate(speeds):
            lost = RESTART_HOURS + unsaved / 2 / speed / 3600
            if hours and lost >= hours:
                raise UserError(f'--hours_between_preemptions {settings.hours_between_preemptions:g}: '
                                f'{short_name(first["device"])} at {size} px loses {lost:.1f} hours each time; plan '
                                'with a shorter --save_interval')
            if hours:
                days[number] *= hours / (hours - lost)
        parts.append(PartOfPlan(name, size, images, *days, status, date))
    return parts


def speed_of_encoding(run: pd.Series, records: pd.DataFrame, size: str) -> tuple[float, str, str]:
    """Return how fast the GPUs of a training encode images of a size, with status and date; '' where it is not known.

    It is of the same model and GPU: the newest measurement of encode.py, or else the newest forecast with the same
    switches of speed; on any number of GPUs, since these share no work.
    """
    of_model = records[(records['image_size'] == size) & (records[SAME_MODEL] == run[SAME_MODEL]).all(axis='columns')]
    measured = of_model[(of_model['stage'] == 'encode') & (of_model['status'] == MEASURED)]
    for _, row in measured[::-1].iterrows():  # the newest is the last
        return row['images_per_sec'] / row['num_devices'] * run['num_devices'], MEASURED, row['date']
    for _, row in of_model[of_model['status'] == FORECAST][::-1].iterrows():
        speed = row['record'].get('encode_images_per_sec')
        if speed is not None and (row[SAME_SWITCHES] == run[SAME_SWITCHES]).all():
            return speed / row['num_devices'] * run['num_devices'], FORECAST, row['date']
    return math.nan, '', ''


def told_apart_by(plans: pd.DataFrame) -> list[str]:
    """Return the settings by which plans of as many GPUs of a kind are told apart."""
    keys = differing(plans, [key for key in PLANNED if key != 'device'])
    if 'network' in keys and {*plans['network']} <= {'', UNSTATED_NETWORK}:
        keys.remove('network')  # it follows from the number of machines
    if plans.groupby('num_devices')['num_nodes'].nunique().max() > 1:  # as many GPUs on another number of machines
        keys.append('num_nodes')
    return keys


def plan_blocks(plans: pd.DataFrame, apart: list[str]) -> list[str]:
    """Return the table of plans, with columns for `apart`, and their notes in sentences, for which it has no room."""
    others = [key for key in apart if key != 'input']
    rows = []
    for _, plan in plans.iterrows():
        row = {'GPUs': f'{plan["num_devices"]} x {short_name(plan["device"])}', 'input': plan['input'],
               'settings': settings_in_words(plan, others)}
        for key, days in plan['record'].items():
            if key.startswith('days_'):
                row[key.removeprefix('days_').replace('_', ' ')] = days_in_words(days, ' days')
        for key, heading in (('days', 'days'), ('total_gpu_hours', 'GPU-hours'), ('cost_usd', 'cost')):
            row[heading] = cell(key, plan[key])
        rows.append(row)

    # what is encoded stands before what is trained, and the sums last
    labels = ['GPUs', 'input', 'settings']
    sums = ['days', 'GPU-hours', 'cost']
    cells = pd.DataFrame(rows, index=plans.index).fillna('')
    parts = sorted(column for column in cells if column not in (*labels, *sums))
    blocks = fitting_tables(cells[[*labels, *parts, *sums]], labels, [sums, parts], labels)
    for note, noted in plans[plans['notes'] != ''].groupby('notes', sort=False):
        whose = 'All of these'
        if len(noted) < len(plans):
            whose = '; '.join(dict.fromkeys(name_of(plan, apart) for _, plan in noted.iterrows()))
        blocks.append(f'{whose}: {note}.')
    return blocks


def within_limits(plans: pd.DataFrame, apart: list[str], max_dollars: float | None, max_days: float | None
                  ) -> tuple[pd.DataFrame, list[str]]:
    """Return the plans that keep within dollars and days, and in sentences how near each is, and how sure that is.

    Plans are named by `apart`. Where none keeps within, all are returned, and a sentence and the column `is_nearest`
    say which comes nearest. A limit that is None is none; a plan without a price keeps within no dollars.
    """
    # what share of each limit a plan takes, and of the limit that it is nearest to
    shares = {}
    if max_dollars is not None:
        shares[f'${rounded(max_dollars)}'] = plans['cost_usd'] / max_dollars
    if max_days is not None:
        shares[f'{max_days:g} {"day" if max_days == 1 else "days"}'] = plans['days'] / max_days
    if not shares:
        return plans, []
    shares = pd.DataFrame(shares)
    nearest = shares.max(axis='columns', skipna=False)

    # those that keep within all, or else the one that passes them by least
    limits = ' and '.join(shares)
    kept = named = plans[nearest <= 1]
    sentence = f'{len(kept)} of {plural(len(plans), "plan")} within {limits}'
    if kept.empty:
        sentence = f'No plan is within {limits}; see "Within a budget" in docs/planning.md. The nearest'
        named = plans.loc[nearest.nsmallest(1).index]
        plans = plans.assign(is_nearest=plans.index.isin(named.index))

    # how near these are, and by how much what was measured passes them
    is_measured = pd.Series([MEASURED in {part.status for part in parts} for parts in plans['parts']], plans.index)
    each = []
    for row, plan in named.iterrows():
        taken = ' and '.join(f'{share:.0%} of {limit}' for limit, share in shares.loc[row].items())
        each.append(', '.join([name_of(plan, apart), taken, *how_sure(plan, nearest[row]), *plan['lacks']]))
    sentences = [f'{sentence}: {"; ".join(each) or "none has a price"}.']

    over = [f'{name_of(plans.loc[row], apart)}, {nearest[row]:.0%} of a limit'
            for row in plans.index[is_measured & (nearest > 1)] if row not in named.index]
    if over:
        sentences.append(f'Measured, and over a limit: {"; ".join(over)}.')

    # how sure that is
    if any(part.status != MEASURED for parts in kept['parts'] for part in parts):
        sentences.append(f'Measure plans close to a limit first. {FORECAST_ERROR}')
    return plans if kept.empty else kept, sentences


def how_sure(plan: pd.Series, share: float) -> list[str]:
    """Say how far a plan may exceed a limit within its range, and which fraction of the forecast speed it needs.

    Args:
        plan: its row.
        share: fraction of the limit that it takes.
    """
    forecast = [part for part in plan['parts'] if part.status != MEASURED]
    if not forecast:
        return []
    days = sum(part.days for part in forecast)
    measured_days = plan['days'] - days
    sure = []
    most = measured_days + sum(part.most for part in forecast)
    if most > plan['days']:  # not where it is NaN or corrected, which have no range
        sure.append(f'{share * most / plan["days"]:.0%} at the slow end of its range')
    needed = days / (plan['days'] / share - measured_days)
    if 0 < needed <= 1:
        of_what = 'the forecast speed'
        if CORRECTED in {part.status for part in forecast}:
            of_what = 'the corrected forecast speed'
        if len(forecast) < len(plan['parts']):
            of_what += f' of {" and ".join(dict.fromkeys(f"{part.name} {part.size}" for part in forecast))}'
        sure.append(f'so at least {needed:.2f} of {of_what} is needed')
    return sure


def name_of(plan: pd.Series, apart: list[str]) -> str:
    """Return the GPUs and the input of a plan, and the settings that tell it from others."""
    settings = settings_in_words(plan, [key for key in apart if key != 'input'])
    return ', '.join(filter(None, [gpus_of(plan), settings]))


def gpus_of(row: pd.Series) -> str:
    """Return which GPUs a row is of, and what it trains on, such as '8 x B200 on latents'."""
    on = f' on {row["input"]}' if row['input'] else ''
    return f'{row["num_devices"]} x {short_name(row["device"])}{on}'
