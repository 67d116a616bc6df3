"""Find the commit of this program and the versions of its libraries, without importing the libraries."""
import importlib.metadata
import subprocess
from pathlib import Path

PACKAGES = ('torch', 'mosaicml', 'mosaicml-streaming', 'diffusers', 'transformers', 'xformers')


def git_commit() -> str | None:
    """Return the commit of this program, with '-dirty' if files have changed; None outside a git checkout."""
    command = ['git', 'describe', '--always', '--dirty', '--abbrev=40', '--exclude=*']
    try:
        return subprocess.run(command, check=True, cwd=Path(__file__).parent, capture_output=True,
                              text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def package_versions() -> dict[str, str | None]:
    """Return the versions of the libraries that affect speed; None for a library that is not installed."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found
