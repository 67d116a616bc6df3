"""A training, what keeps it alive and what shows it: ranks, checkpoints, safeguards, evaluations, drawings, loggers."""
