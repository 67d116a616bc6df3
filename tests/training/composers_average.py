"""A training of the original's kind on a rank: Composer's own EMA, and Composer's own checkpoints."""
from pathlib import Path

import torch
from composer import Callback, Trainer
from composer.algorithms import EMA
from composer.utils import dist

from benchmark import StableDiffusion
from data import SyntheticImageCaptionDataset, build_loader

BATCHES = 4
HALF_LIFE = 2  # batches


class Weights(Callback):
    """One of the UNet's weights at the end of each batch, before Composer puts the average in its place."""

    def __init__(self):
        self.after_batch: list[torch.Tensor] = []

    def batch_end(self, state, logger):
        model = getattr(state.model, 'module', state.model)
        self.after_batch.append(model.unet.conv_in.bias.detach().clone())


def main(model_name: str, folder: Path) -> None:
    """Train, and leave a checkpoint in `folder` and in `weights.pt` what the weight and its average then were."""
    if dist.get_world_size() > 1:
        dist.initialize_dist('cpu')
    torch.manual_seed(3)
    model = StableDiffusion(model_name, image_size=16)
    dataset = SyntheticImageCaptionDataset(16, num_samples=64, seed=dist.get_global_rank())
    weights = Weights()
    trainer = Trainer(model=model, train_dataloader=build_loader(dataset, 2, num_workers=0),
                      optimizers=torch.optim.AdamW(model.unet.parameters(), lr=0.01), device='cpu', seed=3,
                      algorithms=EMA(f'{HALF_LIFE}ba'), callbacks=[weights], max_duration=f'{BATCHES}ba',
                      progress_bar=False, save_folder=str(folder / 'kept'), save_interval=f'{BATCHES}ba')
    trainer.fit()
    average = weights.after_batch[0]
    for weight in weights.after_batch[1:]:
        average = average + (weight - average) * (1 - 2 ** (-1 / HALF_LIFE))
    if dist.get_global_rank() == 0:
        torch.save({'live': weights.after_batch[-1], 'averaged': average}, folder / 'weights.pt')
