"""The `hf download` commands of the pages fetch what a training needs, and a failure is reported with its own reason.

Versions of huggingface-hub read the flags of `hf` differently; the installed one is tested.
"""
import contextlib
import errno
import shutil
import sys
from types import SimpleNamespace

import huggingface_hub
import pytest
from huggingface_hub.cli import download as hf_download
from huggingface_hub.cli import hf
from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError
from huggingface_hub.utils import filter_repo_objects

from sdbench.errors import UserError
from sdbench.models.folders import find_or_download
from sdbench.models.loading import find_model, weight_files
from tests.runs import ROOT, files_of
from tests.test_docs import command_lines, words_of

UNUSED = ('v1-5-pruned.ckpt', 'unet/diffusion_pytorch_model.non_ema.bin', 'safety_checker/model.safetensors')
COMMANDS = [words_of(command) for page in ('photographs.md', 'training.md')
            for command in command_lines(ROOT / 'docs' / page) if command.startswith('hf download')]
ANSWER = SimpleNamespace(headers={}, request=None, status_code=401, url='', text='')  # of the hub
NOT_IN_THE_CACHE = LocalEntryNotFoundError('we cannot find the snapshot folder')  # raised for most causes
NOT_IN_THE_CACHE.__cause__ = ConnectionError('Connection refused')


@pytest.mark.parametrize('words', COMMANDS, ids=lambda words: words[2])
def test_the_downloads_on_the_page_make_a_folder_that_a_training_accepts(words, model_folder, tmp_path, monkeypatch):
    repository = shutil.copytree(model_folder, tmp_path / 'repository')
    for name in ('unet/diffusion_pytorch_model.safetensors', *UNUSED):
        (repository / name).parent.mkdir(exist_ok=True)
        (repository / name).write_bytes(b'weights')

    def download(repo_id: str, *, allow_patterns: list[str], local_dir: str, **_) -> str:
        """Copy the files that the hub would send if it had this repository."""
        for name in filter_repo_objects(files_of(repository), allow_patterns=allow_patterns):
            (tmp_path / local_dir / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(repository / name, tmp_path / local_dir / name)
        return local_dir

    monkeypatch.setattr(hf_download, 'snapshot_download', download)
    monkeypatch.setattr(sys, 'argv', words)
    with contextlib.suppress(SystemExit):  # newer versions exit in this way
        hf.main()
    folder = tmp_path / words[words.index('--local-dir') + 1]
    assert find_model(str(folder), pretrained=True).tokenizer
    assert bool(weight_files(folder / 'unet')) == any('diffusion_pytorch_model' in word for word in words)
    assert not any((folder / name).exists() for name in UNUSED)


@pytest.mark.parametrize('error, reason, fix', [
    (GatedRepoError('Access to model me/x is restricted', response=ANSWER), 'Access to model me/x is restricted',
     'hf auth login'),
    (NOT_IN_THE_CACHE, 'Connection refused', 'network'),
    (OSError(errno.ENOSPC, 'No space left on device', '/cache/blob'), '/cache/blob: No space left on device',
     'HF_HOME')])
def test_a_failure_at_the_hub_is_reported_with_its_reason_and_the_fix(error, reason, fix, monkeypatch):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(huggingface_hub, 'snapshot_download', fail)
    with pytest.raises(UserError, match='^--model_name me/x ') as refused:
        find_or_download('--model_name', 'me/x', [])
    assert reason in str(refused.value) and fix in str(refused.value)
