"""What fits into a device and what makes it faster: memory, microbatch, --dry_run, and the switches of speed."""
from fitting.dry_run import dry_run
from fitting.memory import build_outline, refuse_too_little_memory
from fitting.microbatch import find_microbatch
from fitting.slow_cpu import warn_of_a_slow_cpu
from fitting.switches import apply_switches, process_switches, switch_callbacks

__all__ = ['apply_switches', 'build_outline', 'dry_run', 'find_microbatch', 'process_switches',
           'refuse_too_little_memory', 'switch_callbacks', 'warn_of_a_slow_cpu']
