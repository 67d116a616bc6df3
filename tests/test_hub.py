"""The `hf download` commands of the pages fetch what a training needs, and a failure is reported with its own reason.

A server imitates the hub. Versions of huggingface-hub read their flags differently; the installed one is tested.
"""
import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
from types import SimpleNamespace

import huggingface_hub
import pytest
from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError
from werkzeug.wrappers import Request, Response

from sdbench.errors import UserError
from sdbench.models.folders import find_or_download
from sdbench.models.loading import find_model, weight_files
from tests.local_s3 import served
from tests.runs import ROOT
from tests.test_docs import command_lines, words_of

COMMIT = '0' * 40
UNUSED = ('v1-5-pruned.ckpt', 'unet/diffusion_pytorch_model.non_ema.bin', 'safety_checker/model.safetensors')
COMMANDS = [words_of(command) for page in ('photographs.md', 'training.md')
            for command in command_lines(ROOT / 'docs' / page) if command.startswith('hf download')]
ANSWER = SimpleNamespace(headers={}, request=None, status_code=401, url='', text='')  # of the hub
NOT_IN_THE_CACHE = LocalEntryNotFoundError('we cannot find the snapshot folder')  # raised for most causes
NOT_IN_THE_CACHE.__cause__ = ConnectionError('Connection refused')


@pytest.fixture
def hub(tmp_path, model_folder):
    """The address of a hub whose repositories hold a trained model, and files that a training does not need."""
    repository = shutil.copytree(model_folder, tmp_path / 'repository')
    for name in ('unet/diffusion_pytorch_model.safetensors', *UNUSED):
        (repository / name).parent.mkdir(exist_ok=True)
        (repository / name).write_bytes(b'weights')

    @Request.application
    def answer(request: Request) -> Response:
        """Answer with what the repository holds, or with one of its files."""
        files = [file for file in repository.rglob('*') if file.is_file()]
        names = [str(file.relative_to(repository)) for file in files]
        if request.path.startswith('/api/') and '/tree/' in request.path:  # where huggingface-hub 1 and newer look
            entries = [{'type': 'file', 'path': name, 'size': file.stat().st_size, 'oid': COMMIT}
                       for name, file in zip(names, files, strict=True)]
            return Response(json.dumps(entries))
        if request.path.startswith('/api/'):
            siblings = [{'rfilename': name} for name in names]
            return Response(json.dumps({'id': 'some/model', 'sha': COMMIT, 'siblings': siblings}))
        file = repository / request.path.partition('/resolve/')[2].partition('/')[2]
        if file not in files:
            return Response(status=404)
        content = file.read_bytes()
        return Response(content, headers={'ETag': hashlib.sha1(content).hexdigest(), 'X-Repo-Commit': COMMIT})

    with served(answer) as url:
        yield url


@pytest.mark.parametrize('words', COMMANDS, ids=lambda words: words[2])
def test_the_downloads_on_the_page_make_a_folder_that_a_training_accepts(hub, tmp_path, words):
    environment = os.environ | {'HF_ENDPOINT': hub, 'HF_HOME': str(tmp_path / 'home'), 'HF_HUB_OFFLINE': '0'}
    script = f'import sys; sys.argv = {words}; from huggingface_hub.cli.hf import main; main()'
    done = subprocess.run([sys.executable, '-c', script], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    folder = tmp_path / words[words.index('--local-dir') + 1]
    model = find_model(str(folder), pretrained=True)
    assert model.tokenizer
    assert bool(weight_files(folder / 'unet')) == any('diffusion_pytorch_model' in word for word in words)
    assert not any((folder / name).exists() for name in UNUSED)


@pytest.mark.parametrize('error, reason, fix', [
    (GatedRepoError('Access to model me/x is restricted', response=ANSWER), 'Access to model me/x is restricted',
     'accept its terms on its page there, and log in: hf auth login'),
    (NOT_IN_THE_CACHE, 'Connection refused', 'check the name and the network'),
    (OSError(errno.ENOSPC, 'No space left on device', '/cache/blob'), '/cache/blob: No space left on device',
     'free some of the disk, or set HF_HOME')])
def test_a_failure_at_the_hub_is_reported_with_its_reason_and_the_fix(error, reason, fix, monkeypatch):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(huggingface_hub, 'snapshot_download', fail)
    with pytest.raises(UserError, match='^--model_name me/x is not a folder here, and') as refused:
        find_or_download('--model_name', 'me/x', [])
    assert f'({reason}); {fix}' in str(refused.value)
