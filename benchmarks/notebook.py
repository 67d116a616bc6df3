"""Run a notebook and store the printed text and the figures of its cells in it.

    python -m benchmarks.notebook docs/walk.ipynb    # two minutes on two idle cores

The cells run in this process, one after another, in the notebook's folder. A figure is stored where `plt.show()` is
called. Execution counts and metadata are not stored, so two versions of the notebook differ only in their visible
content. tests/test_walk.py compares the stored output with the output of a run.
"""
import argparse
import base64
import contextlib
import io
import json
import os
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt


def run_cell(source: str, names: dict) -> list[dict]:
    """Run the code of a cell with the variables in `names`, and return its outputs in the format of notebooks."""
    figures = []

    def keep_figure() -> None:
        png = io.BytesIO()
        plt.savefig(png, format='png', bbox_inches='tight')
        plt.close('all')
        figures.append(png.getvalue())

    plt.show = keep_figure
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(source, names)
    outputs = []
    if printed.getvalue():
        outputs.append({'output_type': 'stream', 'name': 'stdout', 'text': printed.getvalue().splitlines(True)})
    for png in figures:
        data = {'image/png': base64.b64encode(png).decode(), 'text/plain': ['<Figure>']}
        outputs.append({'output_type': 'display_data', 'metadata': {}, 'data': data})
    return outputs


def run_cells(cells: list[dict], names: dict) -> list[dict]:
    """Run the cells of a notebook in the current folder, and return them with their outputs.

    The variables of the cells are stored in `names`.
    """
    done = []
    for cell in cells:
        if cell['cell_type'] == 'code':
            cell = cell | {'execution_count': None, 'outputs': run_cell(''.join(cell['source']), names)}
        done.append(cell)
    return done


def main() -> None:
    parser = argparse.ArgumentParser('python -m benchmarks.notebook', description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('notebook', type=Path, metavar='NOTEBOOK', help='file that is run and rewritten')
    path = parser.parse_args().notebook.resolve()
    matplotlib.use('Agg')
    notebook = json.loads(path.read_text())
    os.chdir(path.parent)
    notebook['cells'] = run_cells(notebook['cells'], {})
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + '\n')


if __name__ == '__main__':
    main()
