"""--sample_prompts: what the model draws while it is trained."""
import math
import sys
from pathlib import Path

import torch
from composer import Callback, ComposerModel
from composer.core import State, get_precision_context
from composer.loggers import Logger
from composer.utils import dist
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from torchvision.transforms.functional import pil_to_tensor, to_pil_image
from torchvision.utils import make_grid
from tqdm import tqdm

from sdbench.errors import UserError, one_line
from sdbench.files import atomic_write, read_text
from sdbench.flags.times import is_due
from sdbench.flags.train import Train
from sdbench.measuring.clock import Stopwatch
from sdbench.models.generation import STEPS, build_pipeline, decode, guidance_for, seeded, with_captions
from sdbench.models.loading import ModelFiles, build_fitting_tokenizer, build_vae
from sdbench.training.ranks import GracefulStop


def read_prompts(path: str | None) -> list[str]:
    """Read the prompts of --sample_prompts, one per line; none where the flag is not given.

    Raises UserError if the file cannot be read or holds none.
    """
    if path is None:
        return []
    # what is drawn; an empty line is not
    lines = read_text(path, f'--sample_prompts {path}, a text file with one prompt on each line,').split('\n')
    prompts = [line.strip() for line in lines if line.strip()]
    if not prompts:
        raise UserError(f'--sample_prompts {path} holds no prompt; write one on each line')
    return prompts


class Sampling(Callback):
    """Draws a picture of each prompt at each interval and at the end of a run: a grid, kept as a PNG and logged.

    The pictures stand in rows in the order of their prompts, each with its prompt and the batch below it. The PNG's
    text has the prompts, too. Rank 0 draws between two batches, with the averaged weights where there are any, and from
    the same noise each time. The other ranks wait for it. A drawing that fails is warned of, and the training goes on.
    What is due in a batch that a signal ends is drawn when the run is resumed.

    Training stays as it is to the bit: nothing here takes from torch's random state, and what is compiled for training
    is neither run nor compiled again.

    Args:
        settings: of the run.
        prompts: what is drawn.
        model: where it trains on latents, the VAE of `files` decodes.
        files: of the model.
        stopwatch: of the run, which counts the seconds apart.
        stop: of the run.
    """

    def __init__(self, settings: Train, prompts: list[str], model: ComposerModel, files: ModelFiles,
                 stopwatch: Stopwatch, stop: GracefulStop):
        self.settings = settings
        self.prompts = prompts
        self.model = model
        self.files = files
        self.stopwatch = stopwatch
        self.stop = stop

    def after_load(self, state: State, logger: Logger) -> None:
        if dist.get_global_rank() == 0:
            device = next(self.model.unet.parameters()).device
            tokenizer = build_fitting_tokenizer(self.settings.tokenizer, self.files)
            captions = tokenizer.encode_batch(['', *self.prompts])
            tokens = torch.tensor([caption.ids for caption in captions], device=device)  # (1 + prompts, 77)
            self._empty, self._tokens = tokens[0], tokens[1:]
            self._vae = self.model.vae
            if self._vae is None:
                self._vae = build_vae(self.files, self.settings.encoder_precision).to(device)

    def batch_checkpoint(self, state: State, logger: Logger) -> None:
        if not self.stop.interrupted:
            self.draw_if_due(state, logger)

    def draw_if_due(self, state: State, logger: Logger) -> None:
        """Draw and keep the pictures, where the batch that has ended is one of the interval, or the last."""
        if not is_due(state.timestamp.batch.value, self.settings.sample_interval, self.settings.max_duration):
            return
        # on rank 0; the seconds of all ranks count apart, until that one is through
        self.stopwatch.count_as('sampling')
        if dist.get_global_rank() == 0:
            try:
                self._draw_and_keep(state, logger)
            except Exception as error:  # of a disk, of memory: whatever it is, weeks of training do not end with it
                tqdm.write(f'warning: nothing was drawn at batch {state.timestamp.batch.value} '
                           f'({type(error).__name__}: {one_line(error, 200)}); the training goes on', file=sys.stderr)
        dist.barrier()
        self.stopwatch.count_as('checkpoint')  # which comes next

    def _draw_and_keep(self, state: State, logger: Logger) -> None:
        """Draw with the weights of now, and keep the grid as a PNG and with the loggers."""
        # the EMA weights if the EMA has started, or else the raw weights
        unet, weights = self.model.unet, 'raw'
        for algorithm in state.algorithms:
            if getattr(algorithm, 'ema_started', False):  # of EMA
                unet, weights = algorithm.get_ema_model(self.model).unet, 'EMA'

        # a picture of each prompt, with the prompt and the batch below it, in a grid
        pictures = self.draw(unet, state.device_train_microbatch_size)
        captions = [f'{prompt} (batch {state.timestamp.batch.value})' for prompt in self.prompts]
        cells = [pil_to_tensor(cell) for cell in with_captions(pictures, captions)]
        columns = math.ceil(math.sqrt(len(cells)))
        grid = make_grid(cells, columns, padding=0, pad_value=255)  # uint8 (3, H, W), white behind the last

        # as a PNG that says what it shows, and as an image of the loggers
        text = PngInfo()
        text.add_itxt('prompts', '\n'.join(self.prompts))
        text.add_itxt('weights', weights)
        folder = Path(self.settings.sample_folder)
        folder.mkdir(parents=True, exist_ok=True)
        with atomic_write(folder / f'ba{state.timestamp.batch.value}.png') as file:
            to_pil_image(grid).save(file, 'PNG', pnginfo=text)
        logger.log_images(grid.numpy(), 'samples', use_table=False)

    def draw(self, unet: torch.nn.Module, microbatch: int) -> list[Image.Image]:
        """Draw the pictures, with no more at once in the UNet than in training, where gradients come on top."""
        at_once = max(1, microbatch // 2)  # each is there with its caption and without
        side = self.model.image_size
        pipeline = build_pipeline(unet, self._vae, self.model.scheduler.config)
        pictures = []
        was_training = unet.training
        unet.eval()
        try:
            for first in range(0, len(self._tokens), at_once):
                tokens = self._tokens[first:first + at_once]  # (B, 77)
                noise = seeded(self.settings.seed + first + index for index in range(len(tokens)))  # by prompt
                # with the UNet as it stands, not as it is compiled
                with torch.compiler.set_stance('force_eager'), get_precision_context(self.settings.precision):
                    text = self.model.text_states(tokens)  # (B, 77, D)
                    empty_text = self.model.text_states(self._empty[None]).expand_as(text)
                    drawn = pipeline(prompt_embeds=text, negative_prompt_embeds=empty_text, height=side, width=side,
                                     generator=noise, num_inference_steps=STEPS,
                                     guidance_scale=guidance_for(self.settings.model_name), output_type='latent')
                pictures += decode(pipeline, drawn.images)
        finally:
            unet.train(was_training)
        return pictures
