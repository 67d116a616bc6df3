"""Make a file for `evaluate.py --inception` of the trained InceptionV3 that a package of npm holds.

    npm pack nsfwjs@4.4.0
    tar -xzf nsfwjs-4.4.0.tgz
    python -m benchmarks.once.inception package/dist/models/inception_v3 inception.pth    # calls node

The network tells kinds of pictures apart, photographs and drawings among them. Its weights are not those of published
FIDs, and their scores can be compared among themselves only. docs/evaluating.md has some.
"""
import base64
import io
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
from torch_fidelity.feature_extractor_inceptionv3 import BasicConv2d

from sdbench.models.feature_extractors import INCEPTION, LAYER, Inception


class RandomInception(Inception):
    """InceptionV3 with random weights that keep the scale of the features.

    torch-fidelity's cannot be made without a file of weights.
    """

    def load_state_dict(self, state_dict, *args, **kwargs):
        """Draw the weights of the convolutions, and take none of the file."""
        for module in self.modules():
            if isinstance(module, torch.nn.Conv2d):
                torch.nn.init.kaiming_normal_(module.weight, nonlinearity='relu')


def random_inception() -> Inception:
    """Make InceptionV3 with random weights, the same each time, on the CPU, in float32 and in eval mode."""
    no_weights = io.BytesIO()
    torch.save({}, no_weights)
    no_weights.seek(0)
    torch.manual_seed(2)
    return RandomInception(INCEPTION, [LAYER], feature_extractor_weights_path=no_weights)


def read_module(path: Path) -> dict | str:
    """Return what a module of JavaScript exports."""
    program = 'process.stdout.write(JSON.stringify(require(require("path").resolve(process.argv[1]))))'
    return json.loads(subprocess.run(['node', '-e', program, path], capture_output=True, check=True).stdout)


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Return the weights of a model of TensorFlow.js by their names, float32; the files have 8 bits for each number."""
    [manifest] = read_module(folder / 'model.min.js')['weightsManifest']
    data = b''
    for name in manifest['paths']:
        data += base64.b64decode(read_module(folder / f'{name}.min.js'))
    weights = {}
    start = 0
    for about in manifest['weights']:
        shape, levels = about['shape'], about['quantization']
        count = int(np.prod(shape))
        numbers = np.frombuffer(data, levels['dtype'], count, start)
        start += count
        values = numbers.astype(np.float32) * levels['scale'] + levels['min']
        weights[about['name']] = torch.from_numpy(values.astype(np.float32).reshape(shape))
    return weights


def inception_weights(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the weights under the names of torch-fidelity's InceptionV3.

    Keras counts the convolutions in the order in which torch-fidelity's network lists them.
    """
    network = random_inception()
    state = network.state_dict()
    blocks = [name for name, module in network.named_modules() if isinstance(module, BasicConv2d)]
    for number, block in enumerate(blocks, start=1):
        norm = f'batch_normalization_{number}'
        kernel = weights[f'conv2d_{number}/kernel'].permute(3, 2, 0, 1)  # from (H, W, C in, C out)
        mean = weights[f'{norm}/moving_mean']
        if number == 1:  # it was trained on pictures from 0 to 1, and torch-fidelity's gives it (picture - 128) / 128
            kernel = kernel * (128 / 255)
            mean = mean - kernel.sum((1, 2, 3))
        changes = {'conv.weight': kernel, 'bn.bias': weights[f'{norm}/beta'], 'bn.weight': torch.ones_like(mean),
                   'bn.running_mean': mean, 'bn.running_var': weights[f'{norm}/moving_variance']}
        state |= {f'{block}.{name}': tensor.contiguous() for name, tensor in changes.items()}
    return state


def main() -> None:
    if len(sys.argv) != 3:
        raise SystemExit('usage: python -m benchmarks.once.inception FOLDER FILE')
    folder, out = map(Path, sys.argv[1:])
    torch.save(inception_weights(read_weights(folder)), out)
    print(f'{out} has the weights of InceptionV3')


if __name__ == '__main__':
    main()
