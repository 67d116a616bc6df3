"""What an error means, in one line, and how a command ends. It knows nothing of models and data."""
