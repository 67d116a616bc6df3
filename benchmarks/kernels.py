"""Show where a training step spends its time, by kind of kernel, from a trace that benchmark.py --profile has written.

    python -m benchmarks.kernels trace/rank0.*.pt.trace.json        # GB/s counts inputs only: a lower bound
"""
import argparse
import json
import math
import re
from pathlib import Path

import pandas as pd

from sdbench.gpus import CARDS

# Patterns for the names of operators and, where a CUDA graph launches a kernel, for the names of kernels.
KINDS = {'layout copies and casts': 'nchw|nhwc|memcpy|aten::(copy_|_to_copy|clone)$',
         'convolution backward': 'convolution_backward|dgrad|wgrad', 'convolution forward': 'convolution|fprop',
         'attention backward': 'attention.*backward|flash_bwd', 'attention forward': 'attention|flash_fwd',
         'optimizer and EMA': 'adam|foreach|lerp', 'matrix products': '::(add|b|badd)?mm$|gemm|nvjet',
         'norms and pointwise': ''}
BYTES = {'c10::BFloat16': 2, 'c10::Half': 2, 'float': 4, 'int': 4, 'double': 8, 'long int': 8, 'unsigned char': 1}


def kind_of(name: str) -> str:
    return next(kind for kind, pattern in KINDS.items() if re.search(pattern, name, re.IGNORECASE))


def operations_of(name: str, shapes: list[list[int]], values: list[str]) -> int:
    """Count the floating-point operations of an operator from its shapes, as torch's FlopCounterMode does."""
    if name == 'aten::convolution_backward':  # the last value says whether input and weight need gradients
        return 2 * sum(json.loads(values[-1].lower())[:2]) * math.prod(shapes[0] + shapes[2][1:])
    if name == 'aten::convolution':
        return 2 * math.prod(shapes[0]) // shapes[0][1] // math.prod(json.loads(values[3])) * math.prod(shapes[1])
    if re.fullmatch('aten::(add|b|badd)?mm', name):
        first, second = [shape for shape in shapes if len(shape) > 1][-2:]
        return 2 * math.prod(first) * second[-1]
    if name.startswith('aten::_scaled_dot_product'):  # two products forward, five backward
        backward = 'backward' in name
        return (10 if backward else 4) * math.prod(shapes[backward]) * shapes[backward + 1][-2]
    return 0


def operators_of(spans: list[dict]) -> pd.DataFrame:
    """Return a row for each operator, by its id. `us` is its time without the operators that it calls."""
    rows = {}
    stack = []  # the operators that are running, each called by the one before it
    for span in spans:
        args = {'Input Dims': [], 'Input type': [], 'Concrete Inputs': []} | span['args']
        inputs = zip(args['Input Dims'], args['Input type'], strict=True)
        row = {'kind': kind_of(span['name']), 'us': span['dur'], 'end': span['ts'] + span['dur'],
               'operations': operations_of(span['name'], args['Input Dims'], args['Concrete Inputs']),
               'bytes': sum(math.prod(shape) * BYTES[kind] for shape, kind in inputs if kind in BYTES)}
        while stack and stack[-1]['end'] <= span['ts']:
            stack.pop()
        if stack:
            stack[-1]['us'] -= span['dur']
        stack.append(row)
        rows[args['External id']] = row
    return pd.DataFrame.from_dict(rows, orient='index')


def main(path: str) -> None:
    """Print the time per step and the rates of each kind, and the higher of the two fractions of the GPU's limits."""
    trace = json.loads(Path(path).read_text())
    spans = sorted((e for e in trace['traceEvents'] if e.get('ph') == 'X'), key=lambda e: (e['ts'], -e['dur']))
    steps = [span['dur'] for span in spans if span['name'].startswith('ProfilerStep')]
    operators = operators_of([span for span in spans if span.get('cat') == 'cpu_op'])

    # On a GPU, use the times of kernels. A kernel names the operator that launched it, unless a CUDA graph launched it.
    kernels = pd.DataFrame([{'name': span['name'], 'us': span['dur'], 'id': span['args'].get('External id')}
                            for span in spans if span.get('cat') in ('kernel', 'gpu_memcpy', 'gpu_memset')])
    table = operators.groupby('kind')[['us', 'operations', 'bytes']].sum()
    if len(kernels):
        of_name = kernels['name'].map(kind_of)
        launched_by = kernels['id'].map(operators['kind']).fillna(of_name)
        copies = of_name == 'layout copies and casts'  # convolutions start copies, too
        table['us'] = kernels['us'].groupby(of_name.where(copies, launched_by)).sum()

    table.loc['gaps', 'us'] = sum(steps) - table['us'].sum()
    shown = pd.DataFrame({'ms per step': table['us'] / len(steps) / 1000, '% of step': 100 * table['us'] / sum(steps)})
    shown['TFLOP/s'] = table['operations'] / table['us'] / 1e6
    shown['GB/s'] = table['bytes'] / table['us'] / 1e3
    gpu = CARDS.get((trace['deviceProperties'] or [{}])[0].get('name'))
    if gpu:
        fractions = (shown['TFLOP/s'] / gpu.tflops).combine(shown['GB/s'] / gpu.gigabytes_per_sec, max)
        shown['% of limit'] = 100 * fractions
    print(shown.sort_values('ms per step', ascending=False).round(2).to_string())


if __name__ == '__main__':
    parser = argparse.ArgumentParser('python -m benchmarks.kernels', description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('trace', metavar='TRACE', help='file that benchmark.py --profile has written')
    main(parser.parse_args().trace)
