"""Generate images from --sample_prompts during the training."""
import sys
from pathlib import Path

import torch
from composer import Callback, ComposerModel
from composer.core import State, get_precision_context
from composer.loggers import Logger
from composer.utils import dist
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from torchvision.transforms.functional import pil_to_tensor
from tqdm import tqdm

from sdbench.errors import UserError, one_line
from sdbench.files import atomic_write, read_text
from sdbench.flags.times import is_due
from sdbench.flags.train import Run
from sdbench.inputs.tokenizer import token_ids
from sdbench.measuring.clock import Stopwatch
from sdbench.models.generation import STEPS, build_pipeline, captioned_grid, generate, guidance_for
from sdbench.models.loading import ModelFiles, build_fitting_tokenizer, build_vae
from sdbench.training.ranks import GracefulStop


def read_prompts(path: str | None) -> list[str]:
    """Read the prompts of --sample_prompts, one per line without empty lines; none if the flag is not given.

    Raises UserError if the file cannot be read or holds no prompt.
    """
    if path is None:
        return []
    lines = read_text(path, f'--sample_prompts {path}, a text file with one prompt on each line,').split('\n')
    prompts = [line.strip() for line in lines if line.strip()]
    if not prompts:
        raise UserError(f'--sample_prompts {path} holds no prompt; write one on each line')
    return prompts


class Sampling(Callback):
    """Generates one image per prompt at batch 0, at each interval and at the end, and saves and logs them as a grid.

    Below each image are its prompt and the batch. The grid is a PNG, whose metadata has the prompts, too. Rank 0
    generates between two batches, with the EMA weights if there are any, and from the same noise each time, while the
    other ranks wait. If it fails, rank 0 prints a warning and the training continues. Images that are due in a batch
    that a signal ends are generated when the run is resumed.

    The training result does not change by a single bit: nothing here uses torch's global random state, and the
    compiled model of the training is neither run nor compiled again.

    Args:
        settings: the settings of the run.
        prompts: the prompts.
        model: the model. If it trains on latents, a VAE is loaded from `files`.
        files: the files of the model.
        stopwatch: the stopwatch of the run, which excludes this time from the speed.
        stop: tells whether a signal has ended the training.
    """

    def __init__(self, settings: Run, prompts: list[str], model: ComposerModel, files: ModelFiles,
                 stopwatch: Stopwatch, stop: GracefulStop):
        self.settings = settings
        self.prompts = prompts
        self.model = model
        self.files = files
        self.stopwatch = stopwatch
        self.stop = stop

    def after_load(self, state: State, logger: Logger) -> None:
        """Tokenize the prompts, and load a VAE if the model has none, before the clock runs."""
        if dist.get_global_rank() == 0:
            device = next(self.model.unet.parameters()).device
            tokenizer = build_fitting_tokenizer(self.settings.tokenizer, self.files)
            tokens = torch.tensor(token_ids(tokenizer, ['', *self.prompts]), device=device)  # (1 + prompts, 77)
            self._empty, self._tokens = tokens[0], tokens[1:]
            self._vae = self.model.vae
            if self._vae is None:
                self._vae = build_vae(self.files, self.settings.encoder_precision).to(device)

    def batch_checkpoint(self, state: State, logger: Logger) -> None:
        if not self.stop.interrupted:
            self.generate_if_due(state, logger)

    def generate_if_due(self, state: State, logger: Logger) -> None:
        """Generate and save images if they are due: at batch 0, by the interval, or after the last batch."""
        if not is_due(state.timestamp.batch.value, self.settings.sample_interval, self.settings.max_duration):
            return
        # Whatever fails here, a full disk or too little memory, must not end weeks of training. All ranks wait for
        # rank 0 and exclude the time from their speed.
        self.stopwatch.count_as('sampling')
        if dist.get_global_rank() == 0:
            try:
                self._generate_and_save(state, logger)
            except Exception as error:
                tqdm.write(f'warning: no images were generated at batch {state.timestamp.batch.value} '
                           f'({type(error).__name__}: {one_line(error, 200)}); the training continues', file=sys.stderr)
        dist.barrier()
        self.stopwatch.count_as('checkpoint')  # a checkpoint may follow

    def _generate_and_save(self, state: State, logger: Logger) -> None:
        """Generate images with the current weights, and save their grid as a PNG and with the loggers."""
        # Use the EMA weights if the EMA has started, or else the raw weights.
        unet, weights = self.model.unet, 'raw'
        for algorithm in state.algorithms:
            if getattr(algorithm, 'ema_started', False):  # of EMA
                unet, weights = algorithm.get_ema_model(self.model).unet, 'EMA'

        images = self.generate(unet, state.device_train_microbatch_size)
        captions = [f'{prompt} (batch {state.timestamp.batch.value})' for prompt in self.prompts]
        grid = captioned_grid(images, captions)

        # Write the prompts and the kind of weights into the PNG, because the file may be copied elsewhere.
        text = PngInfo()
        text.add_itxt('prompts', '\n'.join(self.prompts))
        text.add_itxt('weights', weights)
        folder = Path(self.settings.sample_folder)
        folder.mkdir(parents=True, exist_ok=True)
        with atomic_write(folder / f'ba{state.timestamp.batch.value}.png') as file:
            grid.save(file, 'PNG', pnginfo=text)
        logger.log_images(pil_to_tensor(grid).numpy(), 'samples', use_table=False)

    def generate(self, unet: torch.nn.Module, microbatch: int) -> list[Image.Image]:
        """Generate one image per prompt, in batches that need less memory than a microbatch of the training."""
        batch_size = max(1, microbatch // 2)  # guidance runs the UNet on each image twice, with and without its prompt
        side = self.model.image_size
        pipeline = build_pipeline(unet, self._vae, self.model.scheduler.config)
        images = []
        was_training = unet.training
        unet.eval()
        try:
            for first in range(0, len(self._tokens), batch_size):
                tokens = self._tokens[first:first + batch_size]  # (B, 77)
                seeds = range(self.settings.seed + first, self.settings.seed + first + len(tokens))  # one per prompt
                # Run the UNet uncompiled: its compiled graphs are for the shapes of the training.
                with torch.compiler.set_stance('force_eager'), get_precision_context(self.settings.precision):
                    text = self.model.text_states(tokens)  # (B, 77, D)
                    empty_text = self.model.text_states(self._empty[None]).expand_as(text)
                    images += generate(pipeline, seeds, side, STEPS, guidance_for(self.settings.model_name),
                                       prompt_embeds=text, negative_prompt_embeds=empty_text)
        finally:
            unet.train(was_training)
        return images
