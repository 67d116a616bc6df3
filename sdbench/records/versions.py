"""Which program this is, and with which libraries; told without importing any of them."""
import importlib.metadata
import subprocess
from pathlib import Path

PACKAGES = ('torch', 'mosaicml', 'mosaicml-streaming', 'diffusers', 'transformers', 'xformers')


def git_commit() -> str | None:
    """Return the commit of this program, marked where files differ from it; None outside a git checkout."""
    command = ['git', 'describe', '--always', '--dirty', '--abbrev=40', '--exclude=*']
    try:
        return subprocess.run(command, check=True, cwd=Path(__file__).parent, capture_output=True,
                              text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def package_versions() -> dict[str, str | None]:
    """Return the versions of the libraries that bear on speed; None where one is not installed."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found
