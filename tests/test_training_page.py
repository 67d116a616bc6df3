"""The walks in docs/ and the notebook run from the first command to the image, with a small model.

The downloads of a walk are there already: `sd15`, `sd2` and `FOLDER` are a pipeline of the tiny model, and `package`
has images as the package of emojis has them. `composer` starts one process here.
"""
import json
import re
import subprocess
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import pytest

from sdbench.models.loading import find_model
from tests.forked_runs import run_program, script
from tests.runs import ROOT
from tests.test_docs import FENCE, call, folder, words_of  # noqa: F401

DOWNLOADS = ('hf', 'npm', 'tar')
SCRIPTS = {'captions.csv': 'captions.py', 'emoji-model': 'model.py'}  # what a block is saved as, by what is in it
SMALLER = {'convert.py': ['--num_workers 1'],
           'benchmark.py': ['--batch_size 4', '--image_size 64', '--max_duration 2ba', '--lr_warmup 1ba',
                            '--save_interval 2ba', '--sample_interval 2ba', '--num_workers 0', '--no-compile']}
NEEDED = {'--save_interval 2ba': '--save_folder', '--sample_interval 2ba': '--sample_prompts'}
NOTEBOOK = ROOT / 'docs' / 'walk.ipynb'
FEWER = {'600ba': '40ba', '150ba': '10ba', '40ba': '2ba', '120ba': '30ba'}  # batches in the notebook, to save time


def blocks_of(page: str, heading: str) -> list[tuple[str, str]]:
    """Return language and content of the blocks below a heading."""
    text = (ROOT / 'docs' / page).read_text()
    return FENCE.findall(text.partition(f'# {heading}\n')[2].partition('\n## ')[0])


@pytest.mark.long
@pytest.mark.parametrize('page, heading', [
    ('photographs.md', 'How do I train on my photographs?'), ('training.md', 'Train from random weights'),
    ('training.md', 'Get the weights'), ('laptop.md', 'Train a model that generates emojis')])
def test_a_walk_runs_to_its_end(page, heading, folder, pipeline, server):  # noqa: F811
    for name in ('sd15', 'sd2', 'FOLDER'):
        (folder / name).symlink_to(pipeline)
    (folder / 'prompts.txt').write_text('a cat\n')
    emojis = [{'image': f'{number}.jpg', 'name': f'EMOJI {number}', 'short_name': ''} for number in range(32)]
    (folder / 'package/emoji.json').write_text(json.dumps(emojis))

    def run(words: list[str]) -> None:
        code, output, errors = run_program(server, folder, script, words)
        assert code == 0, f'{words}\n{output}{errors}'

    ran = 0
    for language, content in blocks_of(page, heading):
        if language == 'python':
            names = [name for key, name in SCRIPTS.items() if key in content]
            path = folder / (names or ['block.py'])[0]
            path.write_text(re.sub(r"\.to\('cuda'\)", '', content))
            if not names:
                run([path.name])
            continue
        for command in content.replace('\\\n', ' ').splitlines():
            program, arguments = call(words_of(command))
            if program:
                for flag in SMALLER.get(program, []):
                    if flag not in NEEDED or NEEDED[flag] in arguments:
                        arguments += flag.split()
                run([program, *arguments])
                ran += 1
            elif command.startswith('python '):
                run(words_of(command)[1:])
            elif not command.startswith(DOWNLOADS):
                subprocess.run(command, shell=True, cwd=folder, check=True)
    assert ran
    if heading == 'Get the weights':
        assert find_model(str(folder / 'half-width')).configs['unet']['block_out_channels'] == [160, 320, 640, 640]
    else:
        pipeline = 'emojis-pipeline' if page == 'laptop.md' else 'my-model'
        assert Path(folder, pipeline, 'model_index.json').exists()


@pytest.mark.long
def test_every_cell_of_the_notebook_runs(server, tmp_path, monkeypatch):
    def run_forked(command: list, cwd: Path, env: dict[str, str], **_) -> subprocess.CompletedProcess:
        """Run a program like `subprocess.run`, but in a process that has already imported it."""
        code, output, errors = run_program(server, cwd, script, command[1:], **env)
        return subprocess.CompletedProcess(command, code, output + errors)

    monkeypatch.setattr(subprocess, 'run', run_forked)
    monkeypatch.setattr(tempfile, 'tempdir', str(tmp_path))
    monkeypatch.setattr(plt, 'show', lambda: plt.close('all'))
    monkeypatch.chdir(NOTEBOOK.parent)
    variables = {}
    for cell in json.loads(NOTEBOOK.read_text())['cells']:
        if cell['cell_type'] == 'code':
            exec(re.sub(r'\d+ba', lambda found: FEWER[found[0]], ''.join(cell['source'])), variables)
