"""A training, what keeps it alive and what shows it: ranks, checkpoints, exact resumes, drawings, loggers."""
