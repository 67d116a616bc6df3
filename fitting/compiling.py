"""--compile: what torch's compiler must be told."""
import torch

MOST_KINDS_OF_BLOCKS = 64  # Stable Diffusion 2's UNet has 14 kinds of residual blocks and 4 of transformer blocks


def compile_mode(given: bool | str) -> str | None:
    """The MODE of --compile MODE; None for torch's default, or where nothing is compiled."""
    return given if isinstance(given, str) else None


def compile_in_place(modules: list[torch.nn.Module], mode: str | None = None) -> None:
    """Compile each module when it is first called, for the shapes that come. The names in checkpoints stay.

    Args:
        modules: each becomes one graph, or the run fails.
        mode: of torch.compile; None is its default.

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
        module.compile(dynamic=False, mode=mode)


def compile_blocks(model: torch.nn.Module, kinds: tuple[type, ...], mode: str | None = None) -> None:
    """Compile the parts of `model` that are of these classes, in place; those of one kind and size share a graph."""
    config = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, MOST_KINDS_OF_BLOCKS)  # of one class, for all its sizes
    compile_in_place([module for module in model.modules() if type(module) in kinds], mode)
