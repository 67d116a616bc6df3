"""Variants of the built-in models, for scripts and tests that need other shapes."""
import json
import shutil
from pathlib import Path

from sdbench.models.loading import BUILT_IN


def write_variant(name: str, folder: Path, changes: dict[str, dict]) -> None:
    """Copy a built-in model into a new folder, and change the configurations of its parts.

    Args:
        name: of the model, as --model_name takes it.
        folder: that is made.
        changes: by part, such as `unet`, what its config.json has otherwise.
    """
    shutil.copytree(BUILT_IN[name], folder)
    for part, otherwise in changes.items():
        path = folder / part / 'config.json'
        path.write_text(json.dumps(json.loads(path.read_text()) | otherwise))
