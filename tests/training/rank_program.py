"""Train for three real steps on a rank, in float64, and leave what it saw and learned in OUT/rankN.pt."""
from pathlib import Path

import torch
from composer import Callback
from composer.utils import dist

import benchmark
from ema import EMA
from sdbench.models.loading import find_model


class BySample(benchmark.StableDiffusion):
    """Draws noise and timesteps from each sample's caption, so that they are the same on any number of ranks."""

    def forward(self, batch):
        outputs = []
        for image, caption in zip(batch['image'], batch['caption'], strict=True):
            torch.manual_seed(int(caption.sum()))
            outputs.append(super().forward({'image': image[None], 'caption': caption[None]}))
        return tuple(map(torch.cat, zip(*outputs, strict=True)))

    def encode(self, batch):
        latents, text = super().encode(batch)
        return latents.double(), text.double()

    def loss(self, outputs, batch):
        return torch.nn.functional.mse_loss(*outputs)


class Witness(Callback):
    """Captions that the rank saw."""

    def __init__(self):
        self.captions = []

    def batch_start(self, state, logger):
        self.captions += state.batch['caption'].tolist()


def main(out: str | Path, *argv: str) -> None:
    """Train with these flags of benchmark.py."""
    benchmark.join_ranks(timeout=60)
    settings = benchmark.parse(benchmark.Train, '', argv)
    index = benchmark.index_of_data(settings)
    settings = benchmark.complete(settings, index)
    torch.manual_seed(0)
    model = BySample(settings.model_name, settings.image_size)
    model.unet.double()
    files = find_model(settings.model_name)
    data = benchmark.build_data(settings, files, index)
    assert len(data.dataloader) == settings.batches_per_epoch
    witness = Witness()
    benchmark.build_model = lambda *_, **__: model
    with benchmark.StopAtSignal() as stop:
        _, _, trainer = benchmark.build_training(settings, files, data, stop, [witness])
        trainer.fit()
    [ema] = [algorithm for algorithm in trainer.state.algorithms if isinstance(algorithm, EMA)]
    torch.save({'weights': {name: weight.detach() for name, weight in model.unet.named_parameters()},
                'average': ema.ema_model.named_parameters_dict, 'captions': witness.captions},
               Path(out) / f'rank{dist.get_global_rank()}.pt')
