"""What a checkpoint holds of its model, as this program or Composer's own EMA has saved it."""
import contextlib
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from composer.utils import dist, get_file

from ema import DDP_PREFIX
from sdbench.errors import one_line
from sdbench.training.checkpoints import load_checkpoint, newest_checkpoint


@dataclass
class Trained:
    """What a checkpoint holds of the model: tensors by the names that they have in each part.

    Attributes:
        batch: how many batches it was trained for; None where it does not say.
        samples: how many images these were.
        flags: of the run, such as model_name and image_size; empty if it was not one of benchmark.py.
        live: the weights of the UNet that the optimizer moves.
        averaged: those of the average; None where there is none.
        ema: the state of the algorithm that keeps the average, for its `load_state_dict`; None where there is none.
        vae: None where the run trained on latents.
        text_encoder: as it was held in the run, perhaps in half precision.
    """
    batch: int | None
    samples: int | None
    flags: dict
    live: dict[str, torch.Tensor]
    averaged: dict[str, torch.Tensor] | None
    ema: dict | None
    vae: dict[str, torch.Tensor] | None
    text_encoder: dict[str, torch.Tensor]


def read_trained(source: str, flag: str) -> Trained:
    """The model of a checkpoint, of the newest in a folder, or of either in an object store.

    Files are mapped, not read: the optimizer's moments, most of a checkpoint, never come into memory. All ranks call
    this together.

    Args:
        source: path or URI; what ends with .pt is a checkpoint, and all else a folder of them.
        flag: what errors call it.

    Raises ValueError if there is no such checkpoint, or it cannot be read or trusted.
    """
    name = source if source.endswith('.pt') else newest_checkpoint(source, flag)
    if name is None:
        raise ValueError(f'{flag} {source} is not there, or holds no whole checkpoint; give one, or the --save_folder '
                         'of a run')
    with fetched(name, flag) as path:
        try:
            return trained_of(load_checkpoint(path)['state'])
        except (RuntimeError, KeyError, TypeError, ValueError, AttributeError, EOFError, OSError) as error:
            raise ValueError(f'{flag} {source}: {name} is no checkpoint of a training ({one_line(error, 400)}); use '
                             'another') from None


def trained_of(state: dict) -> Trained:
    """The model in the state of a checkpoint. KeyError, TypeError or the like if it is none."""
    model = state['model']
    ema = dict(state.get('algorithms', ())).get('EMA')
    if ema is not None:
        model, ema = live_and_averaged(model, ema)
    live = with_prefix_removed(model, 'unet.')
    averaged = None
    if ema is not None:
        averaged = live | with_prefix_removed(ema['ema_model']['named_parameters_dict'], 'unet.')
    flags = {}
    for callback in dict(state.get('callbacks', ())).values():
        flags = callback.get('flags', flags)
    timestamp = state.get('timestamp', {}).get('Timestamp', {})
    return Trained(timestamp.get('batch'), timestamp.get('sample'), flags, live, averaged, ema,
                   with_prefix_removed(model, 'vae.') or None, with_prefix_removed(model, 'text_encoder.'))


def live_and_averaged(model: dict[str, torch.Tensor], ema: dict) -> tuple[dict[str, torch.Tensor], dict | None]:
    """The live weights of a checkpoint, and the state of its average; None where the average has not started.

    Composer's own EMA saves while the average is in the model, and the live weights are in its shadow. Of a run on
    several devices, the names in its shadow have DDP's prefix.

    Args:
        model: the tensors of the model, by name.
        ema: the state of the algorithm, this program's or Composer's.
    """
    if not ema['ema_started']:
        return model, None
    live = dict(model)
    shadow = {}
    for group, tensors in ema['ema_model'].items():  # parameters and buffers
        shadow[group] = {name.removeprefix(DDP_PREFIX): tensor for name, tensor in tensors.items()}
    if ema['ema_weights_active']:
        for tensors in shadow.values():
            for name in tensors.keys() & model.keys():
                live[name] = tensors[name]
                tensors[name] = model[name]
    return live, {'ema_model': shadow, 'ema_started': True, 'ema_weights_active': False}


@contextlib.contextmanager
def fetched(name: str, flag: str) -> Iterator[str]:
    """The path of a checkpoint: itself, or for the URI of an object in a store that of a copy, one on each node.

    What is mapped of the copy stays readable when it has gone with the context.
    """
    if '://' not in name:
        yield name
        return
    with tempfile.TemporaryDirectory() as folder:
        first_of_node = dist.get_global_rank() - dist.get_local_rank()
        path = os.path.join(dist.all_gather_object(folder)[first_of_node], 'checkpoint.pt')
        with dist.run_local_rank_zero_first():
            try:
                if dist.get_local_rank() == 0:
                    get_file(name, path, progress_bar=False)
            except Exception as error:  # every storage client has its own exceptions
                raise ValueError(f'{flag}: {name} cannot be fetched ({type(error).__name__}: {one_line(error, 200)}); '
                                 f'check its name, your credentials, and the room in {folder}') from None
        yield path
        dist.barrier()  # the other ranks of this node may still open it


def with_prefix_removed(tensors: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    """Those whose name has the prefix, without it."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
