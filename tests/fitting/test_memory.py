"""What a training needs in memory, against published sizes; and who is refused."""
import pytest

import benchmark
import fitting.memory as memory
from fitting.memory import GIB, build_outline, lasting_bytes, memory_of_host, refuse_too_little_memory
from models.loading import find_model
from tests.runs import one_error_line, settings_of

README = ['--use_ema', '--use_synth_data', '--device_train_microbatch_size', '4']
UNET = 865_910_724 * 4  # published numbers of parameters, in float32
TEXT_ENCODER = 340_387_840 * 4
VAE = 83_653_863 * 4


@pytest.fixture
def host(monkeypatch):
    """Sets the memory of this machine, in GiB."""
    def set_memory(gib: float) -> None:
        monkeypatch.setattr(memory, 'memory_of_host', lambda: int(gib * GIB))
    return set_memory


def outline(settings, latents: bool = False):
    return build_outline(settings, find_model(settings.model_name), latents, benchmark.build_model)


def test_the_readmes_first_command_ends_in_one_line_where_memory_is_short(host, results, monkeypatch, capfd):
    host(17)
    monkeypatch.setattr(benchmark, 'build_run', lambda *args: pytest.fail('a model was built'))
    line = one_error_line([*README, '--results', results], capfd)
    assert 'needs at least 17.7 GiB' in line and 'has 17.0' in line and ', Adam moments 6.5' in line
    settings = settings_of(*line.split('python benchmark.py ')[1].split())
    host(0.1)
    refuse_too_little_memory(settings, outline(settings))  # that one runs


def test_items_are_the_published_sizes():
    settings = settings_of(*README)
    assert lasting_bytes(settings, outline(settings), 8) == {
        'weights': UNET, 'gradients': UNET, 'Adam moments': 2 * UNET, 'average of the weights': UNET,
        'gradient buckets': UNET, 'text encoder': TEXT_ENCODER, 'VAE': VAE}
    settings = settings_of('--use_synth_latents', '--encoder_precision', 'bf16')
    assert lasting_bytes(settings, outline(settings, latents=True), 1) == {
        'weights': UNET, 'gradients': UNET, 'Adam moments': 2 * UNET, 'text encoder': TEXT_ENCODER // 2}


def test_on_a_gpu_its_own_memory_counts(as_on_a_gpu):
    settings = settings_of('--use_ema', '--use_synth_data', '--batch_size', '64')
    as_on_a_gpu(gib=24)
    refuse_too_little_memory(settings, outline(settings))
    as_on_a_gpu(gib=16)
    with pytest.raises(ValueError, match='this GPU has 16.0'):
        refuse_too_little_memory(settings, outline(settings))


def test_a_containers_limit_is_found(tmp_path, monkeypatch):
    limit = tmp_path / 'memory.max'
    monkeypatch.setattr(memory, 'CONTAINERS_LIMIT', limit)
    without = memory_of_host()
    for content, expected in (('1073741824\n', GIB), ('max\n', without)):
        limit.write_text(content)
        assert memory_of_host() == expected
