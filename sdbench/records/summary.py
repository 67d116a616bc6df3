"""Write the summary that a run prints for people. Nothing here needs torch."""
import math
import os
import shlex
from typing import Any

from sdbench.costs import days_to_train, gpu_hours, price_of
from sdbench.errors import plural
from sdbench.files import sibling_path
from sdbench.flags.times import to_batches
from sdbench.flags.train import Run
from sdbench.records.metrics import EVALUATION_LINES, LINES, TRAINING_LINES, format_metric, summary_lines, text_table
from sdbench.records.status import FAILED, FEWEST_FOR_FID, INTERRUPTED, caution_about

MUCH_WAITING_FOR_DATA = 0.05


def run_summary(record: dict, settings: Run) -> str:
    values = record | notes_on_training(record, settings) | notes_on_speed(record, settings)
    return '\n'.join(summary_lines(LINES if settings.measures else TRAINING_LINES, values))


def notes_on_training(record: dict, settings: Run) -> dict[str, Any]:
    """Return the values that a summary adds to the record of a training: its progress, checkpoints and samples."""
    notes = {}
    if record['trained_epochs']:
        notes['whole_epochs'] = record['trained_epochs']
    if record['first_batch']:
        notes['resumed_after'] = record['first_batch']
    if settings.sample_prompts and os.path.isdir(settings.sample_folder):
        notes['sample_images'] = settings.sample_folder

    # Say that the EMA has not started, or users would look for EMA weights in the checkpoint.
    if settings.ema_start and record['trained_batches'] < to_batches(settings.ema_start):
        notes['ema_start_to_come'] = settings.ema_start

    # Say where the checkpoints are, and how to export a pipeline from them if it can generate images.
    if settings.save_folder and record['status'] not in (FAILED, INTERRUPTED):
        notes['checkpoints'] = settings.save_folder
        if settings.pretrained:
            pipeline = sibling_path(settings.save_folder, 'model')
            notes['next'] = shlex.join(['python', 'export.py', settings.save_folder, pipeline])
    return notes


def notes_on_speed(record: dict, settings: Run) -> dict[str, Any]:
    """Return the values that a summary adds about the speed in a record: a caution, or the cost of a full training."""
    if not record['images_per_sec']:
        return {'why_no_speed': 'the run was over before the clock started, so no batch was measured'}
    notes = {'on_waiting': ''}
    if record['data_wait_fraction'] > MUCH_WAITING_FOR_DATA:
        notes['on_waiting'] = '; more --num_workers shorten it, and longer epochs'

    # An unreliable speed gets a caution instead of a cost, which people would believe. On a CPU, training takes years.
    notes['caution'] = caution_about(record)
    if notes['caution'] is None and settings.training_images and record['device_type'] == 'cuda':
        speed = record['images_per_sec']
        full_hours = gpu_hours(speed, record['num_devices'], settings.training_images)
        notes['full_images'] = settings.training_images
        notes['full_days'] = days_to_train(speed, settings.training_images)
        notes['gpus'] = plural(record['num_devices'], 'GPU')
        notes['full_hours'] = full_hours
        price = price_of(record['device'], settings.dollars_per_gpu_hour)
        notes['full_cost'] = 'no price' if math.isnan(price) else f'${full_hours * price:,.0f}'
    return notes


def evaluation_summary(record: dict) -> str:
    """Return the summary of an evaluation: the model, the scores at each guidance scale, and cautions."""
    notes = {'generated_by': record['model']}
    if record['trained_batches'] is not None:
        notes['generated_by'] += f', {record["weights"]} weights after {record["trained_batches"]:,} batches'
    table = []
    if record['inception'] or record['clip']:
        rows = [{'guidance': f'{score["guidance"]:g}', 'FID': format_metric('fid', score['fid']),
                 'CLIP score': format_metric('clip_score', score['clip_score'])} for score in record['scores']]
        table.append(text_table(rows))
    else:
        notes['not_scored'] = ('run the same command with --inception for FID, and with --clip for the CLIP score; it '
                               'scores these images')

    # Say what the scores cannot be compared with.
    cautions = []
    if record['trained_on_data']:
        cautions.append('the model was trained on DATA, so the scores say nothing about other captions and images')
    elif record['trained_on_data'] is None:
        cautions.append('DATA is not known to be held out from the training of the model')
    if record.get('fid_is_biased'):
        cautions.append(f'FID is too high, because it is biased below {FEWEST_FOR_FID:,} images; compare it only with '
                        f'FIDs of {record["samples"]:,} images')
    if record.get('fid_of_published_weights') is False:
        cautions.append('--inception has other weights than published FIDs, so do not compare with them')
    lines = summary_lines(EVALUATION_LINES, record | notes) + table
    for caution in cautions:
        lines += summary_lines(['caution'], {'caution': caution})
    return '\n'.join(lines)
