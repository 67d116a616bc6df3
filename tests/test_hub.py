"""The `hf download` commands of the pages fetch what a training needs, from a server that imitates the hub.

Versions of huggingface-hub read their flags differently; this is tested with the one that is installed.
"""
import hashlib
import json
import os
import subprocess
import sys
import threading
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from sdbench.models.loading import find_model, weight_files
from tests.runs import ROOT
from tests.test_docs import command_lines, words_of

COMMIT = '0' * 40
UNUSED = ('v1-5-pruned.ckpt', 'unet/diffusion_pytorch_model.non_ema.bin', 'safety_checker/model.safetensors')
COMMANDS = [words_of(command) for page in ('photographs.md', 'training.md')
            for command in command_lines(ROOT / 'docs' / page) if command.startswith('hf download')]


class Hub(BaseHTTPRequestHandler):
    """Serves the files of a folder as a repository of the hub, whatever its name."""

    def __init__(self, folder: Path, *request):
        self.folder = folder
        super().__init__(*request)

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        """Answer with what the repository holds, or with one of its files."""
        path, headers = self.path.partition('?')[0], {}
        names = [str(file.relative_to(self.folder)) for file in self.folder.rglob('*') if file.is_file()]
        if path.startswith('/api/') and '/tree/' in path:  # where huggingface-hub 1 and newer look
            files = [{'type': 'file', 'path': name, 'size': Path(self.folder, name).stat().st_size, 'oid': COMMIT}
                     for name in names]
            content = json.dumps(files).encode()
        elif path.startswith('/api/'):
            siblings = [{'rfilename': name} for name in names]
            content = json.dumps({'id': 'some/model', 'sha': COMMIT, 'siblings': siblings}).encode()
        else:
            file = Path(self.folder, path.partition('/resolve/')[2].partition('/')[2])
            if not file.is_file():
                return self.send_error(404)
            content = file.read_bytes()
            headers = {'ETag': hashlib.sha1(content).hexdigest(), 'X-Repo-Commit': COMMIT}
        self.send_response(200)
        for name, value in {'Content-Length': len(content), **headers}.items():
            self.send_header(name, str(value))
        self.end_headers()
        if self.command == 'GET':
            self.wfile.write(content)

    def log_message(self, *_) -> None:
        """Print nothing."""


@pytest.fixture
def hub(tmp_path, model_folder):
    """The address of a hub whose repositories hold a trained model, and files that a training does not need."""
    repository = tmp_path / 'repository'
    for path in Path(model_folder).rglob('*'):
        if path.is_file():
            copy = repository / path.relative_to(model_folder)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(path.read_bytes())
    for name in ('unet/diffusion_pytorch_model.safetensors', *UNUSED):
        (repository / name).parent.mkdir(exist_ok=True)
        (repository / name).write_bytes(b'weights')
    server = ThreadingHTTPServer(('127.0.0.1', 0), partial(Hub, repository))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f'http://127.0.0.1:{server.server_port}'
    server.shutdown()
    server.server_close()


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
