"""The evaluation of a run on samples that are held out, and what it says and its record knows of it."""
import math
import sys

from composer import Callback, Evaluator
from composer.utils import dist
from torch.utils.data import Dataset
from tqdm import tqdm

from data import StreamingLAIONDataset, build_fitting_tokenizer, build_held_out_loader
from sdbench.flags.train import Train
from sdbench.inputs.held_out import HeldOutSamples
from sdbench.inputs.shards import hash_of_images, read_index, require_same_origin
from sdbench.models.latents import origin_of_latents
from sdbench.models.loading import ModelFiles
from sdbench.paths import INDEX, number_of_samples

LABEL = 'eval'  # of Composer's Evaluator; its loss is logged as metrics/eval/MeanSquaredError
METRIC = 'MeanSquaredError'


class Evaluations(Callback):
    """Remembers the newest evaluation of this process, and says each one's loss on rank 0.

    Attributes:
        count: how many there were.
        loss: mean squared error on the held-out samples; None where it is not finite, or there was none.
        batch: after which it was.
    """

    def __init__(self):
        self.count = 0
        self.loss: float | None = None
        self.batch: int | None = None

    def eval_end(self, state, logger) -> None:
        loss = float(state.eval_metrics[LABEL][METRIC].compute())  # over all ranks
        self.count += 1
        self.loss = loss if math.isfinite(loss) else None
        self.batch = state.timestamp.batch.value
        if dist.get_global_rank() == 0:
            tqdm.write(f'batch {self.batch}: loss {loss:.4g} on the held-out samples', file=sys.stderr)  # over the bar

    def figures(self, all_ranks: bool) -> dict:
        """Return the record's figures of evaluations, which all ranks know."""
        return {'evaluations': self.count, 'eval_loss': self.loss, 'eval_batch': self.batch}


def open_held_out(settings: Train, files: ModelFiles, trained_on: Dataset) -> HeldOutSamples | None:
    """Return the samples of --eval_remote; None without the flag.

    Raises ValueError if they do not fit the model, or are those that the run trains on.

    Args:
        settings: of the run.
        files: of the model.
        trained_on: the dataset of the training; where it holds latents, the model has no VAE.
    """
    remote = settings.eval_remote
    if not remote:
        return None
    flag = '--eval_remote'
    index = read_index(remote, flag)
    if 'latents' in index:
        require_same_origin(remote, index, origin_of_latents(files, settings.image_size), flag)
    elif trained_on.latents:
        raise ValueError(f'{flag} {remote} holds images, and the training is on latents, without a VAE; encode it, too')
    if settings.remote and hash_of_images(index) == trained_on.images_hash:
        raise ValueError(f'{flag} {remote} is what the run trains on, --remote {settings.remote} by its {INDEX}; give '
                         'it shards of other samples')
    if number_of_samples(index) == 0:
        raise ValueError(f'{flag} {remote} holds no samples')
    images = StreamingLAIONDataset(remote, image_size=settings.image_size, index=index, batch_size=1)
    timesteps = files.configs['scheduler'].get('num_train_timesteps', 1000)
    return HeldOutSamples(images, files.latent_size(settings.image_size), timesteps, settings.seed)


def build_evaluator(settings: Train, files: ModelFiles, held_out: HeldOutSamples | None,
                    microbatch: int) -> Evaluator | None:
    """The evaluation on these samples, in batches of the run's microbatch; None without samples."""
    if held_out is None:
        return None
    tokenizer = build_fitting_tokenizer(settings.tokenizer, files)
    loader = build_held_out_loader(held_out, microbatch, settings.num_workers, tokenizer, settings.max_bad_samples)
    return Evaluator(label=LABEL, dataloader=loader, eval_interval=settings.eval_interval,
                     device_eval_microbatch_size=microbatch)
