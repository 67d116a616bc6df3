"""Upload a file: `python -m sdbench.stores FILE ADDRESS`. A training uploads its checkpoints in this process."""
import os
import sys

from sdbench.stores import upload

if __name__ == '__main__':
    _, path, address = sys.argv
    with open(path, 'rb') as file:
        upload(file, address, os.path.basename(path))
