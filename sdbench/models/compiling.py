"""--compile: what torch's compiler must be told."""
from collections.abc import Callable

import torch


def compile_in_place(modules: list[torch.nn.Module], mode: bool | str, backend: str | Callable = 'inductor') -> None:
    """Compile each module when it is first called, for the shapes that come. The names in checkpoints stay.

    Args:
        modules: each becomes one graph, or the run fails.
        mode: of torch.compile, as --compile has it; True is torch's default.
        backend: of torch.compile. A dry run gives one that counts what is compiled.

    Left alone, torch 2.7.0 makes no single graph of a module in two places:
    - Under DDP it cuts a graph where a bucket of gradients ends, so that they travel while others are computed: the
      UNet of Stable Diffusion 2 in 71 graphs. With gradient checkpointing that crashes (BackendCompilerFailed).
    - After 8 compilations of one function (`recompile_limit`) it goes on without compiling, and only warns.
    """
    config = torch._dynamo.config
    config.optimize_ddp = False
    if hasattr(config, 'fail_on_recompile_limit_hit'):
        config.fail_on_recompile_limit_hit = True
    for module in modules:
        module.compile(dynamic=False, mode=None if mode is True else mode, backend=backend)
