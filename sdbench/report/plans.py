"""Make the table of plans: what a training in phases takes, from the speed at the size of each."""
import pandas as pd

from sdbench.costs import days_to_train, storage_in_words
from sdbench.errors import plural
from sdbench.flags.commands import Report
from sdbench.records.read import FORECAST, MEASURED, SETTINGS
from sdbench.report.markdown import printed
from sdbench.report.speeds import UNKNOWN, with_costs

SPEED_AND_RANGE = ['images_per_sec', 'images_per_sec_least', 'images_per_sec_most']
OF_A_PHASE = ['image_size', 'device_train_microbatch_size']  # settings that may differ from phase to phase


def plan_in_words(phases: tuple[tuple[int, str], ...]) -> str:
    """Return what the plan of --phase is, as the heading of its table."""
    sizes = [f'{plural(images, "image")} at {size} px' for images, size in phases]
    return f'Plan, for each number of devices with a speed at each size: train on {", then ".join(sizes)}'


def plan_table(records: pd.DataFrame, settings: Report) -> tuple[pd.DataFrame, list[str]]:
    """Return a plan for each setting and number of devices, and what has no plan, each with the reason.

    A plan needs a speed that was measured, or forecast, at the size of every phase of --phase. A phase takes the speed
    of the fastest run of its size, whatever the microbatch. A plan on latents has the encoding of their images in it,
    once at each size, where the records have one. Raises ValueError if there is no plan.
    """
    # only speeds to rely on
    encodings = records[(records['stage'] == 'encode') & records['status'].isin([MEASURED, FORECAST])]
    trained = records[records['stage'] == 'train']
    left_out = []
    planned = trained['status'].isin([MEASURED, FORECAST])
    for _, row in trained[~planned].iterrows():
        left_out.append(f'{row["num_devices"]} x {row["device"]}, {row["notes"]}')
    trained = trained[planned]

    # a plan for the runs of each setting
    keys = ['status', *(key for key in SETTINGS if key not in OF_A_PHASE), 'num_devices', 'num_nodes']
    sizes = [size for _, size in settings.phase]
    plans = []
    for _, runs in trained.groupby(keys, sort=False):
        of_settings = runs.groupby(OF_A_PHASE)[SPEED_AND_RANGE].median().sort_values('images_per_sec')
        speeds = of_settings.groupby('image_size').tail(1).droplevel(1)  # (sizes, speed and range)
        unmeasured = [size for size in sizes if size not in speeds.index]
        if unmeasured:
            first = runs.iloc[0]
            left_out.append(f'{first["num_devices"]} x {first["device"]}, not measured at '
                            f'{" and ".join(unmeasured)} px')
            continue
        plans.append(plan_row(runs, speeds, encodings, settings))
    if not plans:
        raise ValueError(f'--phase: no number of devices has reliable records of one setting at {" and ".join(sizes)} '
                         'px; measure each size with the same flags')
    return pd.concat(plans).sort_values('num_devices', kind='stable'), left_out


def plan_row(runs: pd.DataFrame, speeds: pd.DataFrame, encodings: pd.DataFrame, settings: Report) -> pd.DataFrame:
    """Return the row of a plan.

    Args:
        runs: the rows of its setting.
        speeds: of each size the speed, and the least and the most that a forecast may be; NaN: not known.
        encodings: the rows of encode.py.
        settings: of the report.
    """
    days = []
    notes = []
    for images, size in settings.phase:
        speed, *bounds = speeds.loc[size]
        days.append(days_to_train(speed, images))
        note = f'{printed("days", days[-1])} days at {size} px'
        if runs['status'].iloc[0] == FORECAST:
            note += f' ({range_in_words(images, bounds)})'
        notes.append(note)
    if runs['status'].iloc[0] == FORECAST:
        notes[0] = f'forecast: {notes[0]}'
    sizes = [size for _, size in settings.phase]
    if runs['input'].iloc[0] == 'latents':
        for size in dict.fromkeys(sizes):
            some, note = days_to_encode(encodings, runs.iloc[0], size)
            days.append(some)
            notes.append(note)
    plan = runs.iloc[[0]].assign(stage='plan', image_size=', then '.join(sizes), device_train_microbatch_size='',
                                 notes=', '.join(notes), **UNKNOWN)
    return with_costs(plan, pd.Series(sum(days), index=plan.index), settings.dollars_per_gpu_hour)


def range_in_words(images: int, speeds: list[float]) -> str:
    """Return the days of so many images at the least and the most images per second; NaN: not known."""
    if any(pd.isna(speed) for speed in speeds):
        return 'not tested'
    least, most = sorted(days_to_train(speed, images) for speed in speeds)
    return f'{printed("days", least)} to {printed("days", most)}'


def days_to_encode(encodings: pd.DataFrame, run: pd.Series, size: str) -> tuple[float, str]:
    """Return the days of encoding the images of a dataset once at a size, on the GPUs of a run, and a note on them.

    A record of encode.py says how many images its dataset has, how fast they are encoded, and into how many bytes. Of
    several of the same model, size and GPUs the one with the most images counts. Without one it is 0 days.
    """
    # the record
    same = {'image_size': size, 'model_name': run['model_name'], 'device': run['device'],
            'num_devices': run['num_devices']}
    encoding = None
    images = 0
    for _, row in encodings.iterrows():
        stored = row['record'].get('stored_samples', 0)
        if stored > images and all(row[key] == value for key, value in same.items()):
            encoding, images = row, stored
    if encoding is None:
        return 0.0, f'without encoding the images at {size} px'

    # what it says
    days = days_to_train(encoding['images_per_sec'], images)
    details = []
    if 'bytes_per_image' in encoding['record']:
        details.append(storage_in_words(images * encoding['record']['bytes_per_image']))
    if encoding['status'] == FORECAST:
        details.append(encoding['notes'])
    in_brackets = f' ({"; ".join(details)})' if details else ''
    return days, f'{printed("days", days)} days to encode {plural(images, "image")} at {size} px{in_brackets}'
