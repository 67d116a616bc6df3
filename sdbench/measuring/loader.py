"""Measure the data loader alone: --loader_only."""
import itertools
import time

from composer.core import DataSpec
from composer.utils import dist

from sdbench.flags.train import Run
from sdbench.records.metrics import LOADER_LINES, summary_lines
from sdbench.records.record import append_record, make_record
from sdbench.records.status import COMPLETE, caution_about


def measure_loader(settings: Run, data: DataSpec) -> dict:
    """Measure the loader alone, on all ranks, by taking its batches as fast as possible after the warm-up.

    Appends the record to --results, prints it, and returns it.
    """
    # Take the batches of the warm-up, and as many as are prefetched during the warm-up.
    loader = data.dataloader
    epochs = itertools.chain.from_iterable(itertools.repeat(loader))  # an endless sequence of batches
    batches = map(data.batch_transforms, epochs)
    for _ in range(settings.warmup_batches + loader.queue_length):
        next(batches)

    # Measure. If the queue gets shorter, the missing batches were made before the measurement, and do not count.
    measured = settings.measure_batches
    queued_at_start = loader.queued_batches
    start = time.perf_counter()
    images = sum(len(next(batches)['caption']) for _ in range(measured))
    seconds = time.perf_counter() - start
    made = measured + loader.queued_batches - queued_at_start

    # Divide the images of all ranks by the seconds of the slowest rank.
    mine = (images * made / measured, seconds, data.batch_transforms.found)
    images, seconds, bad = zip(*dist.all_gather_object(mine), strict=True)
    record = make_record('loader', settings, {
        'status': COMPLETE, 'loader_images_per_sec': sum(images) / max(seconds), 'measured_batches': measured,
        'bad_samples': len(set.union(*bad))})
    summary = summary_lines(LOADER_LINES, record | {'caution': caution_about(record)})
    return append_record(record, '\n'.join(summary), settings.results)
