"""Divisions by one, of which diffusers' blocks have 120 in a step: each reads and writes a whole image of channels."""
import torch

DIVISORS = ('output_scale_factor', 'rescale_output_factor')  # of residual blocks and of attention


class NoDivision:
    """In the place of the divisor 1.0: what is divided by it is given back as it is, which no kernel is needed for."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None) -> torch.Tensor:
        return args[0]  # asked before torch looks at what it divides by, which would take longer than a division


def skip_divisions_by_one(network: torch.nn.Module) -> None:
    """Let the blocks of a network divide by nothing where they divide by 1.0. Results are the same to the bit.

    A network that is to be compiled keeps its divisions: torch 2.7.0's compiler takes no divisor of a class of ours.
    """
    for module in network.modules():
        for name in DIVISORS:
            if getattr(module, name, None) == 1.0:
                setattr(module, name, NoDivision())
