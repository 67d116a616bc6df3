"""Everything around a training loop: ranks, checkpoints, exact resumes, generated images, loggers."""
