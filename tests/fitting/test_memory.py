"""What a training needs in memory, against published sizes, real tensors and real processes; and who is refused."""
import warnings
from pathlib import Path

import pytest
import torch

import benchmark
from fitting import memory
from fitting.memory import GIB, build_outline, cgroup_limits, lasting_bytes, refuse_too_little_memory
from models.loading import find_model
from tests.runs import settings_of

ROOT = Path(__file__).parent.parent.parent
README = ['--use_ema', '--use_synth_data', '--device_train_microbatch_size', '4']
UNET = 865_910_724 * 4  # published numbers of parameters, in float32
TEXT_ENCODER = 340_387_840 * 4
VAE = 83_653_863 * 4


def parsed(argv: list[str]):
    return settings_of(*argv)


@pytest.fixture
def host(monkeypatch):
    """Sets the memory of this machine, in GiB."""
    def set_memory(gib: float) -> None:
        monkeypatch.setattr(memory, 'memory_of_host', lambda: int(gib * GIB))
    return set_memory


def outline(settings, latents: bool = False):
    return build_outline(settings, find_model(settings.model_name), latents, benchmark.build_model)


def refusal(argv: list[str]) -> str | None:
    settings = parsed(argv)
    try:
        refuse_too_little_memory(settings, outline(settings, settings.use_synth_latents))
    except ValueError as error:
        return str(error)
    return None


def test_the_readmes_first_command_ends_in_one_line_where_memory_is_short(host, results, monkeypatch, capfd):
    host(19)
    monkeypatch.setattr(benchmark, 'build_run', lambda *args: pytest.fail('a model was built'))
    with pytest.raises(SystemExit):
        benchmark.main([*README, '--results', str(results)])
    out, err = capfd.readouterr()
    assert out == '' and err.count('\n') == 1
    assert 'needs at least 19.2 GiB' in err and 'has 19.0' in err and ', Adam moments 6.5' in err
    command = err.split('benchmark.py ')[-1]
    assert '--use_synth_data --model_name tiny --image_size 64 --batch_size 4' in command
    host(0.1)
    assert refusal(command.split()) is None  # that one runs


def test_a_refusal_names_the_users_own_data(host):
    host(0.01)
    tiny = ['--model_name', 'tiny', '--batch_size', '16']
    assert '--remote s3://photos --model_name tiny' in refusal(['--remote', 's3://photos', '--num_workers', '0', *tiny])
    assert '--use_synth_latents --model_name tiny' in refusal(['--use_synth_latents', *tiny])


def test_items_are_the_published_sizes():
    settings = parsed(README)
    needed = lasting_bytes(settings, outline(settings), 1)
    assert needed == {'weights': UNET, 'gradients': UNET, 'Adam moments': 2 * UNET, 'average of the weights': UNET,
                      'text encoder': TEXT_ENCODER, 'VAE': VAE, 'batch': 2048 * 3 * 512 * 512}
    settings = parsed(['--use_synth_latents', '--encoder_precision', 'bf16'])
    needed = lasting_bytes(settings, outline(settings, latents=True), 1)
    assert 'average of the weights' not in needed
    assert (needed['text encoder'], needed['batch']) == (TEXT_ENCODER // 2, 2048 * 8 * 64 * 64 * 2)
    assert 'VAE' not in needed


def test_ranks_of_a_host_share_its_memory_and_no_more_is_counted_than_any_microbatch_needs(host, monkeypatch):
    argv = ['--use_synth_data', '--use_ema', '--model_name', 'tiny', '--image_size', '64', '--batch_size', '256',
            '--device_train_microbatch_size', '16']
    settings = parsed(argv)
    lasting = lasting_bytes(settings, outline(settings), 4)
    assert 'gradient buckets' not in lasting
    monkeypatch.setattr(memory.dist, 'get_world_size', lambda: 4)
    monkeypatch.setattr(memory.dist, 'get_local_world_size', lambda: 2)
    host(2.01 * sum(lasting.values()) / GIB)
    assert refusal(argv) is None
    host(1.99 * sum(lasting.values()) / GIB)
    assert 'this training needs at least' in refusal(argv)


def test_on_a_gpu_the_batch_stays_on_the_host(monkeypatch):
    settings = parsed(['--dry_run', '--use_synth_data', '--model_name', 'tiny'])
    assert 'batch' not in lasting_bytes(settings, outline(settings), 1)


def test_where_there_are_several_gpus_an_outline_does_not_warn_of_their_random_states(as_on_a_gpu):
    settings = parsed(['--dry_run', '--model_name', 'tiny'])
    as_on_a_gpu(count=8)
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        outline(settings)


def test_an_outline_has_no_memory_and_leaves_random_state_as_it_was():
    torch.manual_seed(3)
    expected = torch.rand(5)
    torch.manual_seed(3)
    model = outline(parsed([*README, '--gradient_checkpointing']))
    assert torch.equal(torch.rand(5), expected)
    assert {parameter.device.type for parameter in model.parameters()} == {'meta'}
    assert model.unet.is_gradient_checkpointing


def test_on_a_gpu_the_microbatch_does_not_count(as_on_a_gpu):
    as_on_a_gpu(gib=24)
    argv = ['--use_ema', '--use_synth_data', '--batch_size', '64']
    for microbatch in ('auto', '64'):
        assert refusal([*argv, '--device_train_microbatch_size', microbatch]) is None
    as_on_a_gpu(gib=16)
    assert 'needs at least 16.9 GiB' in refusal(argv) and 'this GPU has 16.0' in refusal(argv)


@pytest.mark.parametrize('membership, file', [
    ('0::/slurm/job_7\n', 'slurm/job_7/memory.max'),
    ('0::/slurm/job_7\n', 'slurm/memory.max'),  # of the group above
    ('0::/elsewhere\n', 'memory.max'),  # a container sees its own group as the root
    ('3:cpu,cpuacct:/\n4:memory:/docker/1\n', 'memory/docker/1/memory.limit_in_bytes'),
])
def test_a_containers_limit_is_found(membership, file, tmp_path):
    limit = tmp_path / 'cgroup' / file
    limit.parent.mkdir(parents=True)
    limit.write_text('8589934592\n')
    (tmp_path / 'self').write_text(membership)
    assert cgroup_limits(tmp_path / 'cgroup', tmp_path / 'self') == [8 * GIB]
    assert memory.memory_of_host(tmp_path / 'cgroup', tmp_path / 'self') <= 8 * GIB
    if file.endswith('max'):
        limit.write_text('max\n')
        assert cgroup_limits(tmp_path / 'cgroup', tmp_path / 'self') == []


def test_without_control_groups_there_is_no_limit(tmp_path):
    assert cgroup_limits(tmp_path, tmp_path / 'missing') == []
