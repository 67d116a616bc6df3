"""How fast a run is, and its record: clock, GPU and trace."""
from measuring.measurement import Measurement
from measuring.record import circumstances, keep, measure_loader, redacted, training_settings
from measuring.tracing import build_profiler

__all__ = ['Measurement', 'build_profiler', 'circumstances', 'keep', 'measure_loader', 'redacted', 'training_settings']
