"""A search for a microbatch and then three steps, on a rank whose memory ends elsewhere than that of its peer."""
from pathlib import Path

import torch
from composer.utils import dist, get_device

import benchmark
from models.loading import find_model
from tests.fitting.test_microbatch import run_out_of_memory_above
from tests.runs import TINY, settings_of


def main(out: str, microbatch_size: str) -> None:
    flags = ['--use_synth_data', '--use_ema', *TINY, '--batch_size', '16', '--results', '/dev/null']
    settings = settings_of(*flags, '--device_train_microbatch_size', microbatch_size)
    benchmark.join_ranks(get_device(), settings.dist_timeout)
    rank = dist.get_global_rank()
    build_model = benchmark.build_model
    tried = []

    def build_limited_model(*args):
        model = build_model(*args)
        limit, where = [(4, 'forward'), (2, 'backward')][rank]
        tried.append(run_out_of_memory_above(limit, model, where))
        return model

    benchmark.build_model = build_limited_model
    data = benchmark.build_data(settings, find_model('tiny'))
    model, trainer = benchmark.build_run(settings, data, benchmark.StopAtSignal())
    sizes = list(tried[0])
    trainer.fit()
    torch.save({'tried': sizes, 'microbatch': trainer.state.device_train_microbatch_size,
                'weights': {name: weight.detach() for name, weight in model.unet.named_parameters()}},
               Path(out) / f'{microbatch_size}-rank{rank}.pt')
