"""What a plan costs: phases of training at several sizes, and latents that are encoded once and stored."""

import math

import pandas as pd

from settings.costs import DAYS_PER_MONTH, Assumptions, Phase, days_to_train
from reporting.records import SETTINGS, settings_in_one
from reporting.tables import printed_figure
from reporting.throughput import with_costs

# A plan joins sizes, and each size may have a microbatch of its own; encoders tell the plans of one setting apart.
DIFFER_WITHIN_A_PLAN = ('stage', 'image_size', 'device_train_microbatch_size', 'encoders')


def plan_rows(trained: pd.DataFrame, encodings: pd.DataFrame, phases: list[Phase], given: Assumptions,
              only_with_latents: bool) -> pd.DataFrame:
    """A row for each setting and number of GPUs that was measured at the size of every phase; there may be none.

    Args:
        trained: measured rows of training, one for each setting and number of GPUs.
        encodings: measured records of encoding.
        only_with_latents: leave out the settings that no plan trains on latents in.
    """
    plans = []
    alike = [key for key in SETTINGS if key not in DIFFER_WITHIN_A_PLAN]
    for _, runs in trained.groupby(['num_devices', 'num_nodes', settings_in_one(trained, alike)], sort=False):
        by_encoders = {}
        for encoders, same_encoders in runs.groupby('encoders'):  # in_loop comes before text_in_loop
            if {phase.size for phase in phases} <= set(same_encoders['image_size']):
                by_encoders[encoders] = training_plan(same_encoders, phases, given)
        if 'text_in_loop' in by_encoders:
            by_encoders['text_in_loop'] = latents_plan(by_encoders, encodings, phases, given)
        elif only_with_latents:
            continue
        plans += by_encoders.values()
    if not plans:
        return trained.iloc[:0]
    return pd.concat(plans, ignore_index=True).sort_values('num_devices', kind='stable')


def training_plan(runs: pd.DataFrame, phases: list[Phase], given: Assumptions) -> pd.DataFrame:
    """One row: the phases one after the other, each at the speed of the fastest run of its size."""
    speeds = runs.groupby('image_size')['images_per_sec'].max()
    days = [days_to_train(speeds[phase.size], phase.images) for phase in phases]
    notes = [f'{printed_figure("days", some_days)} days at {phase.size} px'
             for some_days, phase in zip(days, phases, strict=True)]
    row = runs.iloc[[0]].assign(
        stage='plan', image_size=', '.join(sizes_of(phases)), device_train_microbatch_size='', images_per_sec=math.nan,
        notes=', '.join(notes))
    return with_costs(row, pd.Series(sum(days), index=row.index), given.dollars_per_gpu_hour)


def latents_plan(by_encoders: dict[str, pd.DataFrame], encodings: pd.DataFrame, phases: list[Phase],
                 given: Assumptions) -> pd.DataFrame:
    """One row: the plan that trains on latents, after encoding every image once at each size, and with their storage
    while it trains. It pays off from as many images as save, over the plan with the encoders in the loop, what the
    encoding costs.

    Args:
        by_encoders: the training plans of one setting, one row each; 'text_in_loop' is the one on latents.
    """
    training = by_encoders['text_in_loop']
    gpu_seconds, image_bytes, missing = cost_of_encoding(training, encodings, phases)
    if missing:
        notes = f'no encode record with bytes_per_image at {" and ".join(missing)} px'
        return training.assign(days=math.nan, gpu_hours=math.nan, cost_usd=math.nan, notes=notes)

    encode_days = days_to_train(training['num_devices'] / gpu_seconds, given.dataset_images)
    latents_tb = given.dataset_images * image_bytes / 1e12
    row = with_costs(training, encode_days + training['days'], given.dollars_per_gpu_hour)
    encode_usd = row['cost_usd'] - training['cost_usd']
    storage_usd = latents_tb * given.dollars_per_tb_month * training['days'] / DAYS_PER_MONTH
    row = row.assign(encode_days=encode_days, latents_tb=latents_tb, cost_usd=row['cost_usd'] + storage_usd)

    if 'in_loop' in by_encoders and encode_usd.notna().all():  # a CPU has no price
        in_loop_usd = by_encoders['in_loop']['cost_usd'].iloc[0]
        saved_usd = in_loop_usd - (training['cost_usd'] + storage_usd).iloc[0]  # by all images together
        row['pays_off_images'] = math.inf
        if saved_usd > 0:
            row['pays_off_images'] = encode_usd / (saved_usd / sum(phase.images for phase in phases))
    return row


def cost_of_encoding(training: pd.DataFrame, encodings: pd.DataFrame,
                     phases: list[Phase]) -> tuple[float, float, list[str]]:
    """GPU-seconds and stored bytes of an image that is encoded once at each size, and the sizes that have no record.

    Each is the median of all encodings of the same device, model and size, on any number of GPUs.
    """
    sizes = sizes_of(phases)
    alike = encodings[(encodings['device'] == training['device'].iloc[0])
                      & (encodings['model_name'] == training['model_name'].iloc[0])
                      & encodings['image_size'].isin(sizes)
                      & encodings['bytes_per_image'].notna()]
    missing = [size for size in sizes if size not in set(alike['image_size'])]
    alike = alike.assign(gpu_seconds=alike['num_devices'] / alike['images_per_sec'])
    medians = alike.groupby('image_size')[['gpu_seconds', 'bytes_per_image']].median()
    return medians['gpu_seconds'].sum(), medians['bytes_per_image'].sum(), missing


def sizes_of(phases: list[Phase]) -> list[str]:
    """The size of each phase, once, in the order of the phases."""
    return list(dict.fromkeys(phase.size for phase in phases))
