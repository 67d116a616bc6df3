"""What each key of a record means, as docs/measuring.md has it, and when its speed is not to be relied on yet.

The summary of a run and report.py ask here, so nothing needs torch.
"""
from sdbench.errors import plural

# Each `status` of a record. Reports calculate with complete runs and with forecasts.
COMPLETE = 'complete'
FAILED = 'failed'
INTERRUPTED = 'interrupted'
UNMEASURED = 'unmeasured'
PROFILED = 'profiled'
FORECAST = 'forecast'
NOT_IN_A_FORECAST = 'Not in a forecast: waiting for data, checkpoints, evaluations, storage and traffic.'

QUEUES_IN_WINDOW = 5  # in a shorter window many of its batches were made before it began
FEWEST_BATCHES = 20   # a window that is shorter says little
MUCH_DRIFT = 0.1      # within a window: another would show another speed
FEWEST_FOR_FID = 10_000  # pictures: with fewer, FID is biased upwards by much

# Names, parted by spaces, and what they mean. Each flag of the command is a key as well, unless it has a row here.
KEYS = {
    # of every run
    'stage': '`train`, `loader`, `encode` or `evaluate`',
    'status error': '`complete`, `failed` or `interrupted`; `profiled` for a run with `--profile`, `unmeasured` for '
    'one that ended within its warm-up, `forecast` for one of `--dry_run`. Why a run failed',
    'date command git_commit versions': 'when and how it was started, the commit of this program, and the versions of '
    'Python, CUDA and the libraries',
    'device device_type num_devices num_nodes': 'name of the GPU or CPU; `cuda` or `cpu`; on how many of them, and on '
    'how many machines',
    'by_default dataset': 'flags that were left open and follow from the machine, the number of devices or the '
    'measured batches, such as the microbatch that was found; `streaming` or `synthetic`',

    # of its speed
    'images_per_sec images_per_sec_per_device': 'images divided by the wall clock of the measured batches on the '
    'slowest process',
    'images_per_sec_least images_per_sec_most': 'range of a forecast; null where it is not tested',
    'encode_images_per_sec': 'of a forecast: images that the VAE would encode a second, once, on all devices',
    'batch_seconds_median batch_seconds_p10 batch_seconds_p90 measured_batches': 'the times of the batches, and how '
    'many there were',
    'drift': 'by what share the last third of these batches was faster than the first',
    'data_wait_fraction queue_batches turnover_batches': 'the wait for the loader, the batches that it prepares ahead, '
    'and how many passed before the clock started',
    'checkpoint_seconds evaluation_seconds sampling_seconds': 'time between batches, which no speed counts',
    'tflops_per_image tflops_per_sec_per_device mfu': 'arithmetic of an image, speed in it, and the share of the peak',
    'peak_memory_gib peak_memory_allocated_gib allocator_retries': 'memory that was reserved, what tensors took of it, '
    'and how often the allocator had to free its cache, which should be 0',
    'gpu_power_watts_mean gpu_power_watts_max gpu_sm_clock_mhz_mean gpu_sm_clock_mhz_max': 'power of a GPU and clock '
    'of its multiprocessors, asked for at most once a second',
    'joules_per_image': 'energy of an image over all GPUs',
    'loader_images_per_sec': 'of the loader alone',

    # of a training
    'encoders tf32': '`in_loop`, or `text_in_loop` on latents; whether fp32 multiplies as TF32',
    'first_batch trained_batches trained_epochs batches_per_epoch': 'the batch that this run resumed after, the last '
    'batch of the whole training, its whole epochs, and how long one is',
    'captions': 'of which names the data has how many captions, one of which is drawn for an image at each visit; null '
    'where its `index.json` does not say',
    'gpu_hours dollars': 'of this training so far, with the runs that it resumed; dollars where a price is given',
    'loss skipped_batches bad_samples': 'loss of the last batch, steps that were not finite, samples that could not be '
    'read',
    'evaluations eval_loss eval_batch eval_samples eval_held_out': 'images seen and loss of each evaluation; loss and '
    'batch of the last; on how many samples, and whether the training is known to have none of them',

    # of an encoding
    'samples stored_samples bytes_per_image': 'images that this run encoded, images and bytes an image that are stored '
    'by all runs',

    # of an evaluation
    'model model_name model_sha256 weights': 'what drew, the model that it was trained as, the hash of its weights, '
    'and `averaged` or `live`',
    'images_seen training': 'images of its training, and its flags, with the GPU-hours and the device of it',
    'data trained_on_data samples_drawn sampler': 'captions and images that were compared with, whether the training '
    'had them too, where that is known, how many pictures this run drew, and how',
    'scores': 'for each `guidance` the `fid` and the `clip_score`, null where a score was not asked for',
    'network inception_sha256 fid_of_published_weights resize fid_is_biased': 'what FID was found by, whether it '
    'compares with published ones, and whether it is of fewer than 10,000 pictures',
    'clip clip_sha256': 'what the CLIP score was found by',
}

# What a value of each of these keys is. Those of flags are as the flag takes them, and all others are numbers.
KEYS_OF_TYPE = {
    str: 'stage status error date command git_commit device device_type dataset encoders model model_name model_sha256 '
    'weights data sampler network inception_sha256 resize clip clip_sha256',
    bool: 'extrapolated tf32 eval_held_out trained_on_data fid_of_published_weights fid_is_biased',
    int: 'num_devices num_nodes',
    list: 'by_default evaluations scores',
    dict: 'versions training captions',
}


def fewest_batches(queue_batches: int) -> int:
    """Return the batches of the shortest window that shows the speed of a run whose loader prepares so many ahead."""
    return max(FEWEST_BATCHES, QUEUES_IN_WINDOW * queue_batches)


def why_unreliable(record: dict) -> str:
    """Say in a few words why the speed in a record is not to be relied on; '' where it is, or nothing is known."""
    batches = record.get('measured_batches')
    drift = record.get('drift')
    if batches is not None and batches < fewest_batches(record.get('queue_batches') or 0):
        return f'only {plural(batches, "measured batch", "measured batches")}'
    if drift is not None and abs(drift) > MUCH_DRIFT:
        return f'speed changed by {drift:+.1%}'
    return ''


def caution_about(record: dict) -> str | None:
    """Say why the speed in a record should not be trusted yet, and the remedy; None where it can be."""
    if record.get('status') == PROFILED:
        return 'these figures include the cost of the trace, so that no report counts them'
    why = why_unreliable(record)
    if not why:
        return None
    least = fewest_batches(record.get('queue_batches') or 0)
    if record['measured_batches'] < least:
        return f'{why}: use --measure_batches {least} or more, and where --max_duration is given, a longer one'
    return f'{why}: measure again, while no other program runs, with more --warmup_batches and --measure_batches'
