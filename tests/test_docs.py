"""README.md and docs/: every link leads somewhere, every flag and file exists, and what can run here runs.

Commands are the lines of the shell blocks, and `code` in the text. They run in a folder with images if they read
records or need no other model than the tiny one.
"""
import ast
import importlib
import json
import os
import re
import shlex
import shutil
import subprocess
from dataclasses import fields
from pathlib import Path

import pytest

import report
from sdbench.flags.parser import build_parser
from sdbench.flags.train import TINY_MODEL
from sdbench.records.metrics import LINES
from tests.records.keys import rows_of
from tests.runs import COMMANDS, ROOT, SMALLEST
from tests.samples import good, write_parquet, write_photos

PAGES = [ROOT / 'README.md', *sorted(ROOT.glob('docs/*.md'))]
PARSERS = {program: build_parser(kind, '', program) for program, kind in COMMANDS.items()}
NAMES = {program: [field.name for field in fields(kind) if 'options' in field.metadata]
         for program, kind in COMMANDS.items()}  # of the flags
FLAGS = {'--help', *(f'--{no}{name}' for names in NAMES.values() for name in names for no in ('', 'no-'))}
FOLDERS = 'benchmarks|docs|recipes|sdbench|tests'  # whose files the pages name
FENCE = re.compile(r'^```(\w*)\n(.*?)^```$', re.MULTILINE | re.DOTALL)
LINK = re.compile(r'\[[^\]]*\]\(([^)\s]+)\)')
CODE = re.compile('`([^`]+)`')


def blocks(page: Path, language: str) -> list[str]:
    """Return the contents of the page's fenced blocks in a language."""
    return [content for name, content in FENCE.findall(page.read_text()) if name == language]


def code_in_text(page: Path) -> list[str]:
    """Return what stands in backquotes outside the fenced blocks, each on one line."""
    return [' '.join(code.split()) for code in CODE.findall(FENCE.sub('', page.read_text()))]


def command_lines(page: Path) -> list[str]:
    """Return the commands of the page's blocks of shell in their order, without comments, continued lines joined."""
    lines = '\n'.join(blocks(page, 'sh')).replace('\\\n', ' ').splitlines()
    commands = [' '.join(re.sub(r'(^| )#.*', '', line).split()) for line in lines]
    return [command for command in commands if command]


def all_commands(page: Path) -> list[str]:
    """Return the same, and what may be a command in the text."""
    return [*command_lines(page), *code_in_text(page)]


def words_of(command: str) -> list[str]:
    """Split a command as the shell does; its variables stand for the number 1."""
    try:
        return shlex.split(re.sub(r'\$\(\(.*?\)\)|\$\w+', '1', command))
    except ValueError:  # an apostrophe: it is no command
        return []


def call(words: list[str]) -> tuple[str | None, list[str]]:
    """Return our program among the words of a command, and its arguments; launchers stand before it."""
    if len(words) > 1 and words[0].startswith('@'):  # a file of flags, and others
        return 'benchmark.py', words
    for position, word in enumerate(words):
        if word in PARSERS:
            return word, words[position + 1:]
        if ' ' in word:  # a command for another shell
            return call(words_of(word))
    return None, []


def settings_in(commands: list[str]) -> list[tuple[str, str, dict]]:
    """Return each command of our programs with its program and the values that its flags have."""
    found = []
    for command in commands:
        program, arguments = call(words_of(command))
        if arguments not in ([], ['--help']):
            found.append((command, program, vars(PARSERS[program].parse_args(arguments))))
    return found


def anchors(page: Path) -> set[str]:
    """Return what links to the headings of a page end with, as GitHub makes it."""
    headings = re.findall('^#+ (.*)$', FENCE.sub('', page.read_text()), re.MULTILINE)
    return {re.sub(r'[^\w\- ]', '', heading.lower()).replace(' ', '-') for heading in headings}


@pytest.mark.parametrize('page', PAGES, ids=lambda page: page.name)
def test_every_link_leads_to_a_file_and_to_a_heading(page):
    for link in LINK.findall(FENCE.sub('', page.read_text())):
        if '://' not in link:
            name, _, anchor = link.partition('#')
            target = page.parent / name if name else page
            assert target.exists(), link
            assert not anchor or anchor in anchors(target), link


def test_the_readme_links_to_every_page():
    readme, *pages = PAGES
    links = LINK.findall(readme.read_text())
    assert [page.name for page in pages if f'docs/{page.name}' not in links] == []


@pytest.mark.parametrize('page', PAGES, ids=lambda page: page.name)
def test_the_programs_take_every_command_line_and_trainings_make_models_that_can_generate_images(page, monkeypatch):
    """With random encoders, or without dropped captions, a model cannot generate images, which shows after days."""
    monkeypatch.chdir(ROOT)  # where @recipes/... is
    for command, program, given in settings_in(all_commands(page)):
        is_training = program == 'benchmark.py' and 'remote' in given and given.keys() & {'max_duration', 'save_folder'}
        if is_training and given.get('model_name') != TINY_MODEL:
            assert given.get('pretrained') and given.get('caption_drop'), command


@pytest.mark.parametrize('page', PAGES, ids=lambda page: page.name)
def test_every_flag_file_and_target_of_make_that_a_page_names_is_there(page):
    flags = {code.split()[0].partition('=')[0] for code in code_in_text(page) if code.startswith('--')}
    assert flags - FLAGS == set(), 'no program here has them; those of others stand without backquotes'
    words = ' '.join(all_commands(page)).split()
    files = {word.lstrip('@') for word in words if re.match(f'@?({FOLDERS})/', word)}
    assert [name for name in sorted(files) if not (ROOT / name).exists()] == []
    targets = {words_of(command)[1] for command in all_commands(page) if command.startswith('make ')}
    assert targets <= set(re.findall(r'^([a-z-]+):', (ROOT / 'Makefile').read_text(), re.MULTILINE))


OUTPUTS = {'out', 'save_folder', 'results', 'profile', 'tensorboard', 'csv', 'html', 'figure', 'learned', 'quality'}


def test_git_ignores_every_file_that_a_command_of_a_page_makes(monkeypatch):
    monkeypatch.chdir(ROOT)
    made = {given[flag].rstrip('/') for page in PAGES for _, _, given in settings_in(command_lines(page))
            for flag in OUTPUTS & given.keys()}
    made = [name for name in sorted(made) if not re.match('[a-z0-9]+://|/|docs/|results/', name)]
    asked = [f'{name}/file' for name in made]  # which a pattern for the file or for the folder ignores
    ignored = subprocess.run(['git', 'check-ignore', '--no-index', *asked], capture_output=True, text=True).stdout
    missed = [name for name in asked if name not in ignored.splitlines()]
    assert not missed, f'.gitignore misses {", ".join(missed)}'


def test_every_flag_is_explained_in_some_page():
    commands = [command for page in PAGES for command in all_commands(page)]
    named = {flag for command in commands for flag in re.findall(r'--[\w-]+', command)}
    unexplained = [f'{program} --{name}' for program, names in NAMES.items() for name in names
                   if not named & {f'--{name}', f'--no-{name}'}]
    assert not unexplained, f'no page explains {", ".join(unexplained)}; docs/training.md and speed.md have tables'


def test_every_line_of_a_summary_is_explained():
    headings = [row.split('|')[1] for row in rows_of('measuring.md', '| line | meaning |')]
    unexplained = [heading for heading in LINES if f'`{heading}`' not in ' '.join(headings)]
    assert not unexplained, f'"The summary" in docs/measuring.md has no row of {", ".join(unexplained)}'


FLAG = re.compile(r'(?<![\w-])--[a-z][a-z_]*(?:-[a-z_]+)*')
OF_OTHERS = {'--always', '--dirty', '--abbrev', '--exclude', '--shm-size', '--head', '--local-dir',  # git, docker, ...
             '--world_size', '--node_rank', '--base_rank', '--master_addr', '--master_port',  # Composer's
             '--ntasks-per-node'}  # srun
NO_FLAGS = {'--flag', '--no'}  # as --help says, and as in f'--no-{name}'


def test_every_flag_that_an_error_or_an_advice_names_is_one():
    known = FLAGS | OF_OTHERS | NO_FLAGS
    for path in (*ROOT.glob('*.py'), *ROOT.glob('sdbench/**/*.py')):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        docstrings = {node.value for node in nodes if isinstance(node, ast.Expr)}
        for node in nodes:
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in docstrings:
                assert set(FLAG.findall(node.value)) <= known, path


def test_python_in_pages_and_in_benchmarks_compiles_and_imports_what_is_there():
    scripts = [script.read_text() for script in ROOT.glob('benchmarks/**/*.py')]
    for code in [*scripts, *(block for page in PAGES for block in blocks(page, 'python'))]:
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.ImportFrom):
                top = node.module.partition('.')[0]
                if (ROOT / top).is_dir() or (ROOT / f'{top}.py').exists():
                    module = importlib.import_module(node.module)
                    assert all(hasattr(module, name.name) for name in node.names), ast.unparse(node)


@pytest.fixture
def folder(tmp_path):
    """A folder as the pages speak of it: this repository, images with captions, and records of trainings."""
    tracked = subprocess.run(['git', 'ls-files'], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in {line.partition('/')[0] for line in tracked.splitlines()}:
        (tmp_path / name).symlink_to(ROOT / name)
    photos = write_photos(tmp_path / 'photos', 32)
    names = [f'{number}.jpg' for number in range(32)]
    shutil.copytree(photos, tmp_path / 'package/img/google/64')  # as the package of emojis has its pictures
    (photos / 'captions.csv').write_text('\n'.join(['file_name,text', *(f'{name},a cat' for name in names)]))
    rows = [f'../photos/{name},a cat' for name in names]
    (tmp_path / 'elsewhere').mkdir()
    (tmp_path / 'elsewhere/captions.csv').write_text('\n'.join(['file_name,text', *rows]))
    columns = {'image': [good(0)['jpg']], 'text': ['a cat'], 'short': ['cat'], 'long': ['a cat asleep']}
    for split in ('train', 'validation'):
        write_parquet(tmp_path / f'hub-dataset/data/{split}-00000-of-00001.parquet', columns)
    for name in ('results.jsonl', 'plan.jsonl'):
        (tmp_path / name).write_text(''.join(json.dumps(record) + '\n' for record in records()))
    return tmp_path


def records() -> list[dict]:
    """Return records of trainings at two sizes, on images and latents, of encodings, of loaders and an evaluation."""
    found = []
    for size, speed in ((256, 480.0), (512, 160.0)):
        machine = {'device': 'NVIDIA H100 80GB HBM3', 'num_devices': 8, 'image_size': size, 'batch_size': 2048,
                   'max_duration': '9ba', 'evaluations': [[2048, 0.5], [4096, 0.4]]}
        found.append(machine | {'images_per_sec': speed, 'encoders': 'in_loop'})
        found.append(machine | {'images_per_sec': 1.5 * speed, 'encoders': 'text_in_loop'})
        found.append(machine | {'images_per_sec': 3 * speed, 'stage': 'encode', 'bytes_per_image': 66_000})
        found.append(machine | {'loader_images_per_sec': 9 * speed, 'stage': 'loader'})
    score = {'guidance': 7.5, 'fid': 50.0, 'clip_score': 20.0}
    found.append(machine | {'stage': 'evaluate', 'samples': 30_000, 'steps': 50, 'scores': [score]})
    return found


@pytest.mark.parametrize('command', sorted({
    command for page in PAGES for command in command_lines(page) if ' report.py ' in command}))
def test_every_report_runs(command, folder, capsys):
    if '--html' in command:
        pytest.importorskip('itables', reason='needs itables: pip install itables')
    report.main(words_of(command)[2:])
    output = capsys.readouterr().out
    assert ' images/s |' in output or output.startswith('Plan: ')


INPUTS = ('records', 'source', 'checkpoint', 'remote', 'eval_remote', 'load_weights', 'sample_prompts', 'model', 'data',
          'inception', 'clip')


def is_small(command: str, program: str, given: dict) -> bool:
    """Return whether a command is no report and needs neither a launcher nor another model than the tiny one."""
    if not command.startswith(f'python {program}') or program == 'report.py':
        return False
    is_large = program in ('benchmark.py', 'encode.py') and not {'model_name', 'dry_run'} & given.keys()
    return 'loader_only' in given or given.get('model_name', 'tiny') == 'tiny' and not is_large


@pytest.mark.long
@pytest.mark.parametrize('page', PAGES, ids=lambda page: page.name)
def test_what_can_run_here_runs(page, folder, server):
    """All small trainings and encodings do: what they read is made by their page."""
    from tests.forked_runs import run_program, script
    for command, program, given in settings_in(command_lines(page)):
        if not is_small(command, program, given):
            continue
        read = [given[name] for name in INPUTS if name in given]
        paths = [path for value in read for path in ([value] if isinstance(value, str) else value)]
        missing = [path for path in paths if not os.path.exists(path)]
        if missing:
            assert program not in ('benchmark.py', 'encode.py'), f'nothing on the page makes {missing} for {command}'
            continue
        # Stable Diffusion 2 would be traced for most of a minute in each dry run.
        smallest = ['--model_name', SMALLEST] if 'dry_run' in given else []
        code, output, errors = run_program(server, folder, script, [*words_of(command)[1:], *smallest])
        assert code == 0, f'{command}\n{output}{errors}'
