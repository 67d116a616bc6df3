"""--compile makes whole graphs under DDP, and fails if torch would stop compiling."""
import pytest
import torch
from composer.utils import dist
from torch.nn.parallel import DistributedDataParallel

from benchmark import StableDiffusion, apply_switches
from sdbench.errors import known_reason
from sdbench.models.switches import compile_in_place
from tests.forked_runs import run_program
from tests.runs import TINY, record_graphs, settings_of

pytestmark = pytest.mark.usefixtures('dynamo')


def switched_model(*argv: str, name: str = 'tiny', side: int = 64) -> StableDiffusion:
    settings = settings_of('--use_synth_data', *TINY, *argv)
    torch.manual_seed(0)
    model = StableDiffusion(name, side).train()
    apply_switches(model, settings)
    return model


def train_under_ddp(argv: list[str]) -> None:
    """Compare a compiled step under DDP with an uncompiled one in this process, and print the number of graphs."""
    name, *flags = argv
    graphs = record_graphs(pytest.MonkeyPatch())
    expected = switched_model(name=name, side=16)
    model = switched_model('--compile', *flags, name=name, side=16)
    dist.initialize_dist('cpu')  # one rank is enough for DDP to wrap a model
    wrapped = DistributedDataParallel(model, bucket_cap_mb=2 ** -10)  # small buckets: even this model has several
    losses = []
    for each in (expected, wrapped):
        torch.manual_seed(1)
        batch = {'image': torch.rand(2, 3, 16, 16) * 2 - 1, 'caption': torch.randint(49408, (2, 77))}
        loss = model.loss(each(batch), batch)
        loss.backward()
        losses.append(loss)
    torch.testing.assert_close(*losses)
    for name, parameter in expected.unet.named_parameters():
        torch.testing.assert_close(model.unet.get_parameter(name).grad, parameter.grad, atol=1e-5, rtol=1e-3)
    print(len(graphs))


@pytest.mark.long
@pytest.mark.parametrize('flags, num_graphs', [
    (['--gradient_checkpointing'], 3),  # the UNet, the VAE's encoder and the text encoder's layers
    (['--compile_blocks'], 5),
    (['--compile_blocks', '--no-channels_last'], 6)], ids=str)  # channels_last latents compile one block twice
def test_compiling_does_not_change_a_step_and_ddp_cuts_no_graph(server, tmp_path, smallest_with_attention, flags,
                                                              num_graphs):
    code, output, errors = run_program(server, tmp_path, train_under_ddp, [smallest_with_attention, *flags])
    assert code == 0, errors
    assert output.splitlines()[-1] == str(num_graphs)


def test_the_run_fails_with_a_one_line_error_if_torch_would_stop_compiling(graphs, capfd):
    class Half(torch.nn.Module):
        def forward(self, tensor):
            return tensor / 2

    layer = Half()
    compile_in_place([layer], True)
    limit = torch._dynamo.config.recompile_limit
    with pytest.raises(Exception) as caught:
        for size in range(1, 3 * limit):
            layer(torch.ones(size, 3))
    assert len(graphs) == limit == 8
    line = known_reason(caught.value)
    assert '--compile' in line and '--no-compile' in line
    assert not capfd.readouterr().err.count('Traceback')


def test_the_mode_of_compile_reaches_torch(monkeypatch):
    modes = set()
    monkeypatch.setattr(torch.nn.Module, 'compile', lambda module, dynamic, mode: modes.add(mode))
    switched_model('--compile')
    assert modes == {None}
    switched_model('--compile', 'max-autotune-no-cudagraphs')
    switched_model('--compile', 'reduce-overhead', '--compile_blocks')
    assert modes == {None, 'max-autotune-no-cudagraphs', 'reduce-overhead'}
