"""The switches of a training: what each is called, what it does, what it can be, and what it needs.

Options, checks, settings, records, the report, --dry_run and the ladder read this table. A new switch is an entry here
and the code that does it (fitting/switches.py). Nothing here needs torch.
"""
import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

ATTENTION_BACKENDS = ('cudnn', 'flash', 'efficient', 'math')  # torch's kernels of attention


@dataclass(frozen=True)
class Value:
    """A value that a switch can be given.

    Attributes:
        value: True and False are on and off; a text is given behind the flag.
        expectation: of its speed beside that of the defaults, written down before it was measured. None: it is the
            default, or not measured alone, so that the ladder has no rung for it.
        package: that it needs beside a GPU.
        cudnn: the first version whose faults do not meet it, as torch gives it: 91501 is 9.15.1.
        faults: what is wrong in the versions before.
        remedy: what to do where package or version are missing.
        whole_batch: why a device's share of the batch has to be one microbatch; None: it need not.
        several_devices: it does nothing on one device.
    """
    value: bool | str
    expectation: str | None = None
    package: str | None = None
    cudnn: int | None = None
    faults: str = ''
    remedy: str = 'leave it out'
    whole_batch: str | None = None
    several_devices: bool = False


@dataclass(frozen=True)
class Situation:
    """What the default of a switch can depend on.

    Attributes:
        on_gpu: whether the run is on GPUs.
        num_devices: that share the batch; None: not known.
        compile: the value of --compile.
    """
    on_gpu: bool
    num_devices: int | None
    compile: bool | str


@dataclass(frozen=True)
class Switch:
    """A switch of a training.

    Attributes:
        flag: without its dashes; the key of records, too.
        does: in words, as they stand in the help.
        default: its value unless it is given, or a function that tells it for a situation.
        values: all that it can have. On and off need not be named.
        default_in_words: where the default is a function.
        parse: an argparse type for values that are more than one of `values`; its result is a text.
        metavar: of such a value, or of one that may be left out.
        in_encoding: encode.py has it as well.
        needs_half_precision: it does nothing in --precision fp32.
        needs: another switch, without which it does nothing.
        useless_with: other switches, with which it does nothing, and why, for the error.
        bears_on_speed: reports keep records apart that differ in it.
        bears_on_memory: --dry_run shows the run with it and without.
    """
    flag: str
    does: str
    default: bool | str | Callable[[Situation], bool] = False
    values: tuple[Value, ...] = ()
    default_in_words: str = ''
    parse: Callable[[str], str] | None = None
    metavar: str | None = None
    in_encoding: bool = False
    needs_half_precision: bool = False
    needs: str | None = None
    useless_with: Mapping[str, str] = field(default_factory=dict)
    bears_on_speed: bool = True
    bears_on_memory: bool = False

    @property
    def is_on_or_off(self) -> bool:
        """Whether it has no other values."""
        return not self.names and self.parse is None

    @property
    def names(self) -> list[str]:
        """The values that are given behind the flag."""
        return [value.value for value in self.values if isinstance(value.value, str)]

    @property
    def help(self) -> str:
        """What it does, and its default."""
        words = {True: 'on', False: 'off'}
        default = self.default_in_words or words.get(self.default, self.default)
        return f'{self.does} (default: {default})'

    def default_in(self, situation: Situation) -> bool | str:
        """Its value unless it is given."""
        return self.default(situation) if callable(self.default) else self.default

    def values_in(self, value: bool | str) -> list[Value]:
        """The entries of `values` that a value is made of: a list of kernels is made of several."""
        parts = value.split(',') if isinstance(value, str) else [value]
        return [each for each in self.values if any(each.value is part or each.value == part for part in parts)]

    def as_flags(self, value: bool | str) -> list[str]:
        """The command line that gives it this value."""
        if value is True:
            return [f'--{self.flag}']
        if value is False:
            return [f'--no-{self.flag}']
        return [f'--{self.flag}', value]


def attention_order(text: str) -> str:
    """An argparse type: sdpa, xformers, or some of torch's kernels in an order of one's own, such as cudnn,flash."""
    names = text.split(',')
    if text not in ('sdpa', 'xformers') and (not set(names) <= set(ATTENTION_BACKENDS) or len(set(names)) < len(names)):
        raise argparse.ArgumentTypeError(f'{text} is not sdpa, xformers, or a list such as '
                                         f'{",".join(ATTENTION_BACKENDS)}')
    return text


def is_on_gpu(situation: Situation) -> bool:
    return situation.on_gpu


def compiles_by_blocks(situation: Situation) -> bool:
    """Whether --compile goes by blocks unless it is told: where several devices exchange gradients.

    A whole UNet has all its gradients at once, at the end of its backward pass; of blocks those of one travel while
    those of the next are computed. CUDA graphs stay whole: they are tied to the weights, which blocks differ in.
    """
    several = situation.num_devices is not None and situation.num_devices > 1
    return several and situation.compile not in (False, 'reduce-overhead')


# In the order in which reports name them.
SWITCHES = (
    Switch('channels_last', 'memory format of the convolutions', default=is_on_gpu,
           default_in_words='on where there is a GPU', in_encoding=True, values=(
               Value(False, '-10 to +10 %: the group norm of torch 2.7 answers in channels first on a GPU, and the '
                     'next convolution copies back: 4,918 launches for a microbatch with channels_last, 4,651 without'),
           )),
    Switch('compile', "compile the UNet, the VAE's encoder and the text encoder, which takes minutes at the start, in "
           "torch's default mode or in one of max-autotune-no-cudagraphs, reduce-overhead", metavar='MODE',
           in_encoding=True, values=(
               Value(True, '15 to 30 %: NVIDIA saw 6 % of inductor after 23 % of channels_last'),
               Value('max-autotune-no-cudagraphs', '0 to 5 % over --compile'),
               Value('reduce-overhead', '0 to 2 % over --compile; it may not run', whole_batch='replays CUDA graphs, '
                     'whose gradients the next microbatch would overwrite'),
           )),
    Switch('attention', "sdpa, torch's attention; a list of its kernels in the order to try them in the UNet, of "
           f'{",".join(ATTENTION_BACKENDS)}, the others after them; or xformers, that of the package', default='sdpa',
           parse=attention_order, metavar='WHICH', values=(
               Value('sdpa'),
               Value('cudnn', '2 to 5 %', cudnn=91501,  # before it, gradients there can be NaN
                     faults='whose attention has faults at lengths that no 128 divides', remedy='leave cudnn out'),
               Value('flash', 'the same as the defaults on an A100, where flash comes first'),
               Value('efficient'),
               Value('math'),
               Value('xformers', '2 to 5 %, where FlashAttention 3 is built', package='xformers', remedy='use sdpa'),
           )),
    Switch('gradient_checkpointing', 'less memory for about a third more arithmetic', bears_on_memory=True),
    Switch('fused_optimizer', 'AdamW in one kernel', default=True),
    Switch('half_precision_norms', "compute the norms of the UNet and of the VAE's encoder in the half precision of "
           '--precision instead of float32', needs_half_precision=True, bears_on_memory=True,
           values=(Value(True, '5 to 15 %, and a quarter less memory for activations'),)),
    Switch('cast_weights_once', "cast the UNet's weights to half precision once for a batch instead of for each "
           'microbatch', needs_half_precision=True, useless_with={
               'compile': 'whose graphs cast the weights themselves',
               'gradient_checkpointing': 'which computes on a GPU in a thread that casts the weights anew',
           }, values=(Value(True, '1 to 4 % at a microbatch of 4: 5 GB less to read and write for each'),)),
    Switch('cudnn_benchmark', 'let cuDNN try its algorithms for each new shape and keep the fastest',
           values=(Value(True, '1 to 5 %'),)),
    Switch('compile_blocks', "with --compile: compile each kind of the UNet's blocks once instead of the whole UNet, "
           'for a shorter start, and so that devices exchange the gradients of one while those of the next are '
           'computed', default=compiles_by_blocks, needs='compile', default_in_words='on with --compile on several '
           'devices, unless in the mode reduce-overhead',
           values=(Value(True, 'the speed of --compile within 5 %, with a start several times as short'),)),
    Switch('allreduce_precision', 'in which GPUs exchange gradients', default='fp32', values=(
        Value('fp32'),
        Value('bf16', '0 to 1 % within a node; 2 to 4 % at 128 GPUs', several_devices=True),
    )),
)


def switch_of(flag: str) -> Switch:
    """The switch of that name."""
    [switch] = [switch for switch in SWITCHES if switch.flag == flag]
    return switch


def flags_of_switches(in_encoding: bool = False) -> list[str]:
    """Those of benchmark.py, or those that encode.py has as well."""
    return [switch.flag for switch in SWITCHES if switch.in_encoding or not in_encoding]
