"""Fixtures for tests in several folders: samples, shards, models, an S3 server, and a server that forks processes."""
import gc
import multiprocessing
import os
import random
import shutil
import tempfile
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from types import SimpleNamespace

# Set these before any library reads them. GPUs are hidden, because CUDA does not survive a fork.
os.environ.update(HF_HUB_OFFLINE='1', WANDB_MODE='offline', CUDA_VISIBLE_DEVICES='')
os.environ.setdefault('OMP_NUM_THREADS', '1')  # the models are tiny, and other tests run at the same time
# Let Inductor compile in this process, and without vector instructions, whose C++ takes a compiler much longer.
os.environ.update(TORCHINDUCTOR_COMPILE_THREADS='1', TORCHINDUCTOR_VEC_ISA_OK='0')

os.environ.pop('AWS_PROFILE', None)  # the user's own store
os.environ.pop('RAY_ADDRESS', None)  # and cluster

# Traces of steps are cached here, and not in the user's folder. Their names depend on the code that makes them.
os.environ['XDG_CACHE_HOME'] = os.path.join(tempfile.gettempdir(), f'sdbench-tests-{os.getuid()}')

# Importing torch, Composer and the program takes ten seconds. So the first pytest process starts a fork server, which
# imports them once. All processes that tests need are forked from it. The other pytest processes connect to it as well.
if 'FORK_SERVER' not in os.environ:
    os.environ['PYTHONPATH'] = str(Path(__file__).parent.parent)
    multiprocessing.get_context('forkserver').set_forkserver_preload(['tests.preloaded'])
    forkserver.ensure_running()  # the server imports while the tests are collected
    os.environ['FORK_SERVER'] = forkserver._forkserver._forkserver_address
else:
    forkserver._forkserver.ensure_running = resource_tracker.ensure_running
    forkserver._forkserver._forkserver_address = os.environ['FORK_SERVER']
    forkserver._forkserver._forkserver_alive_fd = os.open(os.devnull, os.O_RDONLY)  # the first process ends the server

import pytest

# Fixtures import the libraries that they need. Otherwise xdist's controller, which imports this file, starts slowly.
pytest.register_assert_rewrite('tests.forked_runs', 'tests.runs')


def pytest_collection_finish():
    gc.freeze()  # garbage collection then skips the libraries, which have a million objects


def pytest_unconfigure():
    gc.unfreeze()  # some libraries would report leaks otherwise


@pytest.fixture(scope='session', autouse=True)
def cached_results():
    from tests import shortcuts
    shortcuts.take()


@pytest.fixture(autouse=True)
def seed_random_numbers():
    """Seed all random number generators, so a test does not depend on the tests before it."""
    import numpy as np
    import torch
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)


@pytest.fixture(autouse=True)
def run_in_new_folder(tmp_path, monkeypatch):
    """Run each test in a new folder, because a training or an encoding writes its record to the current folder."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def results(tmp_path) -> Path:
    return tmp_path / 'results.jsonl'


@pytest.fixture(scope='session')
def samples() -> list[dict]:
    """24 JPEGs of 64 by 64 pixels with different captions."""
    from tests.samples import encoded, picture
    return [{'jpg': encoded(picture(i), quality=95), 'caption': f'picture number {i}'} for i in range(24)]


@pytest.fixture(scope='session')
def shards(tmp_path_factory, samples) -> str:
    from tests.samples import write_shards
    return write_shards(tmp_path_factory.mktemp('data') / 'shards', samples)


@pytest.fixture(scope='session')
def several_captions(tmp_path_factory, samples) -> str:
    """The same images with three captions each: one called short and two called long."""
    from tests.samples import write_several_captions
    return write_several_captions(tmp_path_factory.mktemp('several') / 'shards', samples)


@pytest.fixture(scope='session')
def held_out_samples() -> list[dict]:
    """7 samples, which do not divide into batches. They are PNGs, which all decoders decode to the same pixels."""
    from tests.samples import encoded, picture
    return [{'jpg': encoded(picture(100 + i), 'PNG'), 'caption': f'held out {i}'} for i in range(7)]


@pytest.fixture(scope='session')
def held_out(tmp_path_factory, held_out_samples) -> str:
    from tests.samples import write_shards
    return write_shards(tmp_path_factory.mktemp('held_out') / 'shards', held_out_samples)


@pytest.fixture(scope='session')
def smallest_model(tmp_path_factory) -> str:
    """The smallest model, with weights for the VAE and the text encoder."""
    import torch

    from sdbench.models.loading import build_text_encoder, build_vae, find_model
    from tests.runs import SMALLEST
    folder = shutil.copytree(SMALLEST, tmp_path_factory.mktemp('smallest') / 'model')
    torch.manual_seed(1)
    for part, build in (('vae', build_vae), ('text_encoder', build_text_encoder)):
        network = build(find_model(SMALLEST), 'fp16').float()  # rounded to fp16, so a variant in fp16 has equal weights
        network.save_pretrained(folder / part)
    return str(folder)


@pytest.fixture(scope='session')
def smallest_with_attention(tmp_path_factory, smallest_model) -> str:
    """The smallest model with a UNet that has two blocks with attention, because only attention uses the captions."""
    from diffusers import UNet2DConditionModel
    folder = shutil.copytree(smallest_model, tmp_path_factory.mktemp('with_attention') / 'model')
    UNet2DConditionModel(sample_size=32, down_block_types=('CrossAttnDownBlock2D',), cross_attention_dim=16,
                         up_block_types=('CrossAttnUpBlock2D',), mid_block_type=None, block_out_channels=(8,),
                         layers_per_block=1, norm_num_groups=4, attention_head_dim=2).save_pretrained(folder / 'unet')
    return str(folder)


@pytest.fixture(scope='session')
def model_folder(tmp_path_factory, smallest_with_attention) -> str:
    """The smallest model with attention, v-prediction, and a tokenizer of letters with another padding token."""
    from transformers import PreTrainedTokenizerFast

    from sdbench.inputs.tokenizer import clip_tokenizer
    folder = shutil.copytree(smallest_with_attention, tmp_path_factory.mktemp('model') / 'model')
    config = folder / 'scheduler/scheduler_config.json'
    config.write_text(config.read_text().replace('epsilon', 'v_prediction'))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr('sdbench.inputs.tokenizer.clip_merges', tuple)  # the full vocabulary takes a second
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=clip_tokenizer(), pad_token='<|endoftext|>',
                                            model_max_length=77)
    tokenizer.save_pretrained(folder / 'tokenizer')
    return str(folder)


@pytest.fixture(scope='session')
def pipeline(tmp_path_factory) -> str:
    """A pipeline of the tiny model that generates images of 32 pixels."""
    from tests.scoring_models import save_pipeline
    return save_pipeline(tmp_path_factory.mktemp('pipeline') / 'pipeline')


@pytest.fixture
def s3(monkeypatch):
    """An S3 server on loopback that accepts only signed requests, with a boto3 `client` and a bucket named bucket."""
    from tests.local_s3 import local_s3
    with local_s3(monkeypatch) as store:
        store.access_key = os.environ['AWS_ACCESS_KEY_ID']
        yield store


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Let torch report a GPU, on which nothing can be computed. Call the fixture to report another GPU."""
    import torch

    def set_up(count: int = 1, name: str = 'NVIDIA A100-SXM4-40GB', gib: int = 40) -> None:
        properties = SimpleNamespace(name=name, total_memory=gib << 30)
        answers = {'is_available': count > 0, 'device_count': count, 'current_device': 0, 'get_device_name': name,
                   'get_device_properties': properties, 'is_bf16_supported': True}
        for question, answer in answers.items():
            monkeypatch.setattr(torch.cuda, question, lambda *_, answer=answer, **__: answer)
    set_up()
    return set_up


@pytest.fixture
def dynamo():
    """Reset torch's compiler, as if the process were new."""
    import torch
    settings = torch._dynamo.config.save_config()
    torch._dynamo.reset()
    yield
    torch._dynamo.config.load_config(settings)
    torch._dynamo.reset()


@pytest.fixture
def graphs(monkeypatch, dynamo) -> list:
    """The graphs that torch compiles in a test."""
    from tests.runs import record_graphs
    return record_graphs(monkeypatch)


@pytest.fixture(scope='session')
def server():
    """The fork server that has imported the program. Workers of convert.py and encode.py are forked from it as well."""
    return multiprocessing.get_context('forkserver')
