"""What a run needs around its training: options, measurement, the record, ranks, safeguards, checkpoints and costs."""
