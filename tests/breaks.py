"""Twenty ways to break the product in a line or two, each of which the tests must notice.

    python tests/breaks.py                          # each alone in a copy, with the tests that are named for it here
    python tests/breaks.py ema_smoothing no_claims  # some of them
    python tests/breaks.py --whole                  # with all of `make test`; of those that pass, `make test-long`

It prints which were noticed, and ends with 1 where one was not.
"""
import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent


class Break(NamedTuple):
    """A change that no user should ever meet.

    Attributes:
        what: goes wrong with it.
        file: of the product.
        changes: of its text, each from and to; what it is changed from is there once.
        test: the file that is to notice it.
    """
    what: str
    file: str
    changes: dict[str, str]
    test: str


BREAKS = {
    'ema_smoothing': Break(
        'the average keeps what it should give away', 'ema.py',
        {'(floating_averages, floating_weights, 1 - smoothing)': '(floating_averages, floating_weights, smoothing)'},
        'tests/test_ema.py'),
    'ema_before_the_step': Break(
        'the average takes the weights of before the optimizer step', 'ema.py',
        {'if event == self.update_event:': 'if event == Event.AFTER_TRAIN_BATCH:',
         'if event in (Event.BATCH_END, Event.EPOCH_END):': 'if event in (Event.AFTER_TRAIN_BATCH, Event.EPOCH_END):'},
        'tests/test_ema.py'),
    'noise_is_the_same_in_each_batch': Break(
        'each batch draws the noise and timesteps of the first', 'sdbench/training/safeguard.py',
        {'(self.seed, state.timestamp.batch.value, dist.get_global_rank())': '(self.seed, dist.get_global_rank())'},
        'tests/training/test_safeguard.py'),
    'nan_is_learned': Break(
        'a loss or gradient that is not finite is learned', 'sdbench/training/safeguard.py',
        {'if loss_is_finite and gradients_finite:': 'if True:'}, 'tests/training/test_safeguard.py'),
    'resume_is_off_by_one': Break(
        'a run that is resumed in an epoch leaves out a sample', 'sdbench/training/safeguard.py',
        {'state.timestamp.sample_in_epoch.value)': 'state.timestamp.sample_in_epoch.value + 1)'},
        'tests/training/test_checkpoints.py'),
    'a_checkpoint_is_not_atomic': Break(
        'a run that is killed while it saves leaves half a checkpoint under its name', 'sdbench/training/checkpoints.py',
        {"unfinished = Path(path).with_name(f'.{os.path.basename(path)}.unfinished')": 'unfinished = Path(path)'},
        'tests/training/test_checkpoints.py'),
    'images_are_not_scaled': Break(
        'the model is given images from 0 to 1', 'sdbench/inputs/images.py', {'/ 127.5 - 1': '/ 255'}, 'tests/test_data.py'),
    'encoders_are_trained': Break(
        'the optimizer holds the frozen encoders as well', 'benchmark.py',
        {'torch.optim.AdamW(model.unet.parameters(),': 'torch.optim.AdamW(model.parameters(),'},
        'tests/test_benchmark.py'),
    'microbatches_weigh_too_much': Break(
        'a microbatch counts by its number of images', 'benchmark.py',
        {'F.mse_loss(prediction.float(), target)': 'F.mse_loss(prediction.float(), target) * len(target)'},
        'tests/test_benchmark.py'),
    'the_warm_up_is_measured': Break(
        'images_per_sec counts the batches of the warm-up', 'sdbench/measuring/clock.py',
        {'if self.batches >= first and not self._is_full():': 'if not self._is_full():'},
        'tests/measuring/test_measurement.py'),
    'shards_are_not_verified': Break(
        'samples come from shards that are not those of the index', 'sdbench/inputs/verified_stream.py',
        {'if get_hash(algorithm, Path(path).read_bytes()) != digest:': 'if False:'},
        'tests/inputs/test_verified_stream.py'),
    'no_claims': Break(
        'two runs that start at once both write to one OUT of a store', 'sdbench/datasets/output.py',
        {"content, mode='create')": "content, mode='overwrite')"}, 'tests/datasets/test_output.py'),
    'caption_drop_ignores_its_share': Break(
        'half of the captions are left out, whatever --caption_drop says', 'sdbench/training/augmentation.py',
        {'device_batch] < self.probability)': 'device_batch] < 0.5)'}, 'tests/training/test_augmentation.py'),
    'a_file_is_dropped_in_silence': Break(
        'a file that cannot be converted is not listed in skipped.jsonl', 'sdbench/datasets/sources.py',
        {"self.leave_out(path, f'not an image, a caption, a tar or Parquet: {why_not_read(suffix)}')": 'pass'},
        'tests/datasets/test_sources.py'),
    'out_is_not_guarded': Break(
        'a run writes among the files of somebody else', 'sdbench/datasets/output.py',
        {'if names and CLAIM not in names:': 'if False:'}, 'tests/test_convert.py'),
    'a_part_is_done_before_its_shards': Break(
        'a conversion that is killed leaves parts that count as done without their last shard', 'sdbench/datasets/output.py',
        {'        self.flush_shard()\n        index': '        index'}, 'tests/datasets/test_output.py'),
    'settings_are_in_no_parts_name': Break(
        'a part that was made with other settings is taken for done', 'sdbench/datasets/output.py',
        {'json.dumps(facts).encode()': 'json.dumps(facts[1:]).encode()'}, 'tests/datasets/test_output.py'),
    'a_signal_saves_nothing': Break(
        'a run that a signal ends leaves no checkpoint', 'sdbench/training/checkpoints.py',
        {'from composer.utils import dist, ma': 'from composer.utils import create_interval_scheduler, dist, ma',
         'save_interval=save_interval,': 'save_interval=create_interval_scheduler(save_interval, False),'},
        'tests/training/test_signals.py'),
    'a_flag_is_not_filled_in': Break(
        'the average has no half-life unless --ema_half_life is given', 'sdbench/training/resolve.py',
        {"        'ema_half_life': '1000ba' if settings.use_ema else None,\n": ''}, 'tests/flags/test_train.py'),
    'pictures_are_drawn_again': Break(
        'an evaluation that is started again draws what OUT holds already', 'evaluate.py',
        {' if not path_of(settings, guidance, number).exists()]': ']'}, 'tests/test_evaluate.py'),
}


def text_with(broken: Break, root: Path = ROOT) -> str:
    """The text of a break's file with its changes. ValueError: the product has changed, and the break must follow."""
    text = (root / broken.file).read_text()
    for old, new in broken.changes.items():
        if text.count(old) != 1:
            raise ValueError(f'{broken.file} has {text.count(old)} times: {old}')
        text = text.replace(old, new)
    return text


def copy_of_the_product(folder: Path) -> Path:
    """A copy of all files that git knows or would take."""
    names = subprocess.run(['git', 'ls-files', '--cached', '--others', '--exclude-standard'], cwd=ROOT, text=True,
                           capture_output=True, check=True).stdout.splitlines()
    for name in names:
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


def fails(folder: Path, *arguments: str) -> bool:
    """Whether a test fails in that folder; prints the first that does."""
    done = subprocess.run([sys.executable, '-m', 'pytest', '-x', '-q', '--no-header', *arguments], cwd=folder,
                          text=True, capture_output=True)
    failures = [line for line in done.stdout.splitlines() if line.startswith(('FAILED', 'ERROR'))]
    for line in failures:
        print('   ', line.partition(' - ')[0], flush=True)
    return bool(failures)


def noticed_by(broken: Break, whole: bool) -> str | None:
    """The target whose tests fail with a break; None where none do."""
    with tempfile.TemporaryDirectory() as folder:
        copy = copy_of_the_product(Path(folder))
        (copy / broken.file).write_text(text_with(broken))
        tests = [broken.test]
        if whole:
            tests = ['-n', '2', '--dist', 'worksteal', 'tests']
        for target, marked in (('make test', 'not long'), ('make test-long', 'long')):
            if fails(copy, '-m', marked, *tests):
                return target
    return None


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('names', nargs='*', metavar='NAME', help='of breaks (default: all)')
    parser.add_argument('--whole', action='store_true', help='run all tests, not only the named file')
    args = parser.parse_args(argv)
    missed = []
    for name in args.names or BREAKS:
        print(f'{name}: {BREAKS[name].what}', flush=True)
        target = noticed_by(BREAKS[name], args.whole)
        print(f'    noticed by {target}' if target else '    NOT NOTICED', flush=True)
        if target is None:
            missed.append(name)
    return int(bool(missed))


if __name__ == '__main__':
    sys.exit(main())
