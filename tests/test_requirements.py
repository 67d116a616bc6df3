"""What `make` installs: locks that hold what the lists ask for, and one line where a machine lacks something."""
import os
import re
import subprocess

import pytest

from tests.runs import ROOT

LOCKS = {'requirements.lock': ('requirements.txt', 'tests/requirements.txt'),
         'requirements-newest.lock': ('requirements-newest.txt',)}


def pins(text: str) -> dict[str, str]:
    """Return each package of a list or a lock and its version; names as the index compares them, without extras."""
    found = re.findall(r'^([\w.-]+)(?:\[.*?\])?==([^\s;]+)', text, re.MULTILINE)
    return {re.sub('[-_.]+', '-', name).lower(): version for name, version in found}


@pytest.mark.parametrize('lock', LOCKS)
def test_a_lock_holds_the_versions_of_its_lists_each_with_hashes_and_names_no_place(lock):
    asked_for = {}
    for path in LOCKS[lock]:
        asked_for |= pins((ROOT / path).read_text())
    text = (ROOT / lock).read_text()
    assert asked_for
    assert asked_for.items() <= pins(text).items()
    _, *packages = re.split(r'^(?=[\w.-]+(?:\[.*?\])?==)', text, flags=re.MULTILINE)
    assert all('--hash=sha256:' in package for package in packages)
    for word in ('://', '--index-url', '--extra-index-url', '--find-links', '--trusted-host', ' @ ', ' /'):
        assert word not in text


def installed(folder, path: str, **environment: str) -> subprocess.CompletedProcess:
    """Run install.sh for a lock that is empty, with the programs of `path` alone."""
    (folder / 'empty.lock').touch()
    return subprocess.run(['sh', ROOT / 'install.sh', folder / 'venv', folder / 'empty.lock'], cwd=folder, text=True,
                          capture_output=True, env={'PATH': path, 'HOME': str(folder), **environment})


def assert_one_line(done: subprocess.CompletedProcess, *words: str) -> None:
    assert (done.returncode, done.stdout) == (2, '')
    assert done.stderr.startswith('install.sh: error: ')
    assert done.stderr.count('\n') == 1
    for word in words:
        assert word in done.stderr


def test_a_machine_without_a_python_that_fits_is_told_in_one_line(tmp_path):
    old = tmp_path / 'python3'
    old.write_text('#!/bin/sh\nexit 1\n')
    old.chmod(0o755)
    assert_one_line(installed(tmp_path, '/usr/bin:/bin', PYTHON=str(old)), 'Python 3.11 or 3.12', 'make PYTHON=')
    assert not (tmp_path / 'venv').exists()


def test_a_link_to_an_environment_of_this_very_lock_is_taken_and_one_to_another_is_named(tmp_path):
    elsewhere = tmp_path / 'elsewhere'
    elsewhere.mkdir()
    (tmp_path / 'venv').symlink_to(elsewhere)
    assert_one_line(installed(tmp_path, '/usr/bin:/bin'), f'is a link to {elsewhere}', 'remove the link')
    (elsewhere / 'installed').touch()  # of a lock that is empty
    done = installed(tmp_path, '/usr/bin:/bin')
    assert (done.returncode, done.stdout, done.stderr) == (0, '', '')


@pytest.mark.long
def test_a_machine_without_a_network_is_told_in_one_line(tmp_path):
    programs = tmp_path / 'bin'
    programs.mkdir()
    for name in ('sh', 'df', 'awk', 'grep', 'tail'):  # and no uv
        (programs / name).symlink_to(f'/usr/bin/{name}')
    (programs / 'python3.11').symlink_to(os.path.realpath('/proc/self/exe'))
    done = installed(tmp_path, str(programs), PIP_INDEX_URL='http://127.0.0.1:1/simple', PIP_CONFIG_FILE=os.devnull)
    assert_one_line(done, 'pip cannot reach a package index', 'PIP_INDEX_URL')


@pytest.mark.parametrize('answer, flags, newest', [
    ('echo 9.0; echo 10.0', [], True), ('echo 9.0', [], False), ('exit 9', [], False),
    ('echo 10.0', ['STACK=pinned'], False)])
def test_make_takes_the_newest_libraries_where_a_gpu_needs_them_and_says_why(tmp_path, answer, flags, newest):
    smi = tmp_path / 'nvidia-smi'
    smi.write_text(f'#!/bin/sh\n{answer}\n')
    smi.chmod(0o755)
    environment = {'PATH': f'{tmp_path}:/usr/bin:/bin'}
    made = subprocess.run(['make', '-n', '-W', 'install.sh', 'smoke', *flags], cwd=ROOT, env=environment, text=True,
                          capture_output=True, check=True)
    assert ('sh install.sh .venv-newest requirements-newest.lock' in made.stdout) == newest
    assert ('sh install.sh .venv requirements.lock' in made.stdout) != newest
    assert made.stdout.count('STACK=newest: a GPU of compute capability 1') == newest
