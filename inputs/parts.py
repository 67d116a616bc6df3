"""A dataset made in parts: each has an index of its own, written last, and the dataset's index comes after all."""
import json
import os
import re
import tempfile
from pathlib import Path

from streaming.base.storage import CloudDownloader, CloudUploader


class Output:
    """A folder, or an object store through a temporary folder, that files are written to and fetched from."""

    def __init__(self, out: str):
        self.out = out.rstrip('/')
        self.remote = None
        self.folder = self.out
        if '://' in out:
            self.remote = self.out
            self._staging = tempfile.TemporaryDirectory()  # as long as this lives
            self.folder = self._staging.name

    def target(self, part: str) -> str | tuple[str, str]:
        """`out` for an MDSWriter."""
        folder = os.path.join(self.folder, part)
        if self.remote:
            return folder, f'{self.remote}/{part}'
        return folder

    def write(self, name: str, content: dict) -> None:
        """A JSON file, whole or not at all."""
        path = Path(self.folder, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix('.tmp')
        unfinished.write_text(json.dumps(content))
        unfinished.rename(path)
        if self.remote:
            CloudUploader.get((self.folder, self.remote), keep_local=True, exist_ok=True).upload_file(name)

    def read(self, name: str) -> dict | None:
        """A JSON file; None if there is none."""
        path = Path(self.folder, name)
        if self.remote and not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                CloudDownloader.direct_download(f'{self.remote}/{name}', str(path))
            except Exception as error:  # every storage client has its own
                if not re.search('not found|404|NoSuchKey|does not exist', f'{type(error).__name__} {error}'):
                    raise
        if not path.exists():
            return None
        return json.loads(path.read_text())


def part_name(number: int) -> str:
    """The folder of a part."""
    return f'{number:06}'


def part_index(number: int) -> str:
    """A part's own index: Streaming's index.json can be there before the shards that it lists."""
    return f'{part_name(number)}/part.json'


def finish_part(output: Output, number: int) -> None:
    """Say that a part is whole, once its writer has finished."""
    output.write(part_index(number), output.read(f'{part_name(number)}/index.json'))


def claim(output: Output, contents: dict) -> bool:
    """Say in OUT what it is made of; True if an earlier run has. ValueError: OUT is finished, or of something else."""
    if output.read('index.json'):
        raise ValueError(f'--out {output.out} already holds a dataset; give a new folder')
    begun = output.read('encoding.json')
    if begun:
        for key, ours in contents.items():
            if begun.get(key) != ours:
                raise ValueError(f'--out {output.out} was begun with {key} {begun.get(key)}, and this run has {ours}; '
                                 'give the flags that it was begun with, or a new folder')
    output.write('encoding.json', contents)
    return begun is not None


def merge_parts(output: Output, num_parts: int, about: dict) -> dict:
    """Write OUT/index.json, the index of all parts with `about` beside them, and return it; a part may be missing."""
    shards = []
    for number in range(num_parts):
        part = output.read(part_index(number))
        if part is None:
            continue
        for shard in part['shards']:
            shard['raw_data']['basename'] = f'{part_name(number)}/{shard["raw_data"]["basename"]}'
            shards.append(shard)
    index = {'version': 2, 'shards': shards, **about}
    if shards:
        output.write('index.json', index)
    return index
