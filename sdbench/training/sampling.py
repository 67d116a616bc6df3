"""Generate images from --sample_prompts during the training."""
import sys
from pathlib import Path

import torch
from composer import ComposerModel
from composer.core import State, get_precision_context
from composer.loggers import Logger
from composer.utils import dist
from PIL import Image
from torchvision.transforms.functional import pil_to_tensor
from tqdm import tqdm

from sdbench.errors import UserError, one_line
from sdbench.files import atomic_write, read_text
from sdbench.flags.train import Run
from sdbench.inputs.tokenizer import token_ids
from sdbench.models.generation import STEPS, build_pipeline, captioned_grid, generate, guidance_for
from sdbench.models.loading import ModelFiles, build_fitting_tokenizer, build_vae


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


class Sampling:
    """Generates one image per prompt, and saves and logs them as a grid.

    Below each image are its prompt, the batch and the kind of weights. Rank 0 generates between two batches, with the
    EMA weights if there are any, and from the same noise each time, while the other ranks wait.

    The training result does not change by a single bit: nothing here uses torch's global random state, and the
    compiled model of the training is neither run nor compiled again. If the model trains on latents, a VAE is loaded
    from `files`.
    """

    def __init__(self, settings: Run, prompts: list[str], model: ComposerModel, files: ModelFiles):
        self.settings = settings
        self.prompts = prompts
        self.model = model
        tokenizer = build_fitting_tokenizer(settings.tokenizer, files)
        self._tokens = torch.tensor(token_ids(tokenizer, ['', *prompts]))  # (1 + prompts, 77)
        self._vae = model.vae
        if self._vae is None and dist.get_global_rank() == 0:
            with torch.device('cpu'):
                self._vae = build_vae(files, settings.encoder_precision)

    def generate_or_warn(self, state: State, logger: Logger) -> None:
        """Generate images on rank 0, and save their grid as a PNG and with the loggers, while the other ranks wait.

        Whatever fails, a full disk or too little memory, is a warning, because it must not end weeks of training.
        """
        batch = state.timestamp.batch.value
        if dist.get_global_rank() == 0:
            try:
                # Use the EMA weights if the EMA has started, or else the raw weights.
                unet, weights = self.model.unet, 'raw'
                for algorithm in state.algorithms:
                    if getattr(algorithm, 'ema_started', False):  # of EMA
                        unet, weights = algorithm.get_ema_model(self.model).unet, 'EMA'
                images = self.generate(unet, state.device_train_microbatch_size)
                captions = [f'{prompt} (batch {batch}, {weights} weights)' for prompt in self.prompts]
                grid = captioned_grid(images, captions)
                folder = Path(self.settings.sample_folder)
                folder.mkdir(parents=True, exist_ok=True)
                with atomic_write(folder / f'ba{batch}.png') as file:
                    grid.save(file, 'PNG')
                logger.log_images(pil_to_tensor(grid).numpy(), 'samples', use_table=False)
            except Exception as error:
                tqdm.write(f'warning: no images were generated at batch {batch} ({type(error).__name__}: '
                           f'{one_line(error, 200)}); the training continues', file=sys.stderr)
        dist.barrier()

    def generate(self, unet: torch.nn.Module, microbatch: int) -> list[Image.Image]:
        """Generate one image per prompt, in batches that need less memory than a microbatch of the training."""
        batch_size = max(1, microbatch // 2)  # guidance runs the UNet on each image twice, with and without its prompt
        side = self.model.image_size
        device = next(unet.parameters()).device
        empty, tokens_of_prompts = self._tokens.to(device).split([1, len(self.prompts)])
        pipeline = build_pipeline(unet, self._vae.to(device), self.model.scheduler.config)
        images = []
        was_training = unet.training
        unet.eval()
        try:
            for first in range(0, len(self.prompts), batch_size):
                tokens = tokens_of_prompts[first:first + batch_size]  # (B, 77)
                seeds = range(self.settings.seed + first, self.settings.seed + first + len(tokens))  # one per prompt
                # Run the UNet uncompiled: its compiled graphs are for the shapes of the training.
                with torch.compiler.set_stance('force_eager'), get_precision_context(self.settings.precision):
                    text = self.model.text_states(tokens)  # (B, 77, D)
                    empty_text = self.model.text_states(empty).expand_as(text)
                    images += generate(pipeline, seeds, side, STEPS, guidance_for(self.settings.model_name),
                                       prompt_embeds=text, negative_prompt_embeds=empty_text)
        finally:
            unet.train(was_training)
        return images
