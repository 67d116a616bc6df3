"""The values that switches of speed can have. Nothing here needs torch."""

ATTENTION_BACKENDS = ('cudnn', 'flash', 'efficient', 'math')  # torch's kernels of attention, in the order to try them
COMPILE_MODES = ('max-autotune-no-cudagraphs', 'reduce-overhead')  # of torch.compile, beside its default
