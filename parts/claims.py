"""What an OUT is made of, and how far it is.

OUT/claim.json says what the dataset is made of, and is there before anything else. The shards of part 42 lie in
OUT/000042, and OUT/parts/000042.json is the part's own index, which is written when they are all there, so that a list
of OUT/parts says what is done. OUT/index.json, which makes a dataset of it, comes last.
"""
import contextlib
import json
import re
from collections.abc import Iterable, Iterator

from inputs.errors import DataError
from inputs.places import CLAIM, INDEX, LEFT_BY_KILLED, finished_error, number_of_samples
from parts.output import Output

SKIPPED = 'skipped.jsonl'  # what was left out, and why
DAMAGED = 'damaged.json'  # the files that could not be read to their end, as they were when OUT was begun
EDGE = 'held-out.json'  # the last sample that is held out
RELEASED = 'released'  # in the claim of a run that found nothing to store: another may take its place
IS_HELD_OUT = 'is_held_out'  # in the claim of what was held out of another dataset
# What users call the keys of a claim that are hashes, where that is no flag of the same name.
HASHED = {'source_sha256': '--remote', 'vae_sha256': 'VAE of --model_name', 'scaling_factor': 'VAE of --model_name',
          'model_sha256': 'MODEL', 'batch': 'MODEL', 'captions_sha256': 'DATA', 'inception_sha256': '--inception',
          'clip_sha256': '--clip', 'reference': '--reference'}
# Those of them that every run is given: where one is not in a claim, or is None, it is another one and not missing.
ALWAYS_GIVEN = ('source_sha256', 'vae_sha256', 'scaling_factor', 'model_sha256', 'batch', 'captions_sha256')
RANDOM = 'random'  # the vae_sha256 of weights that are drawn


class DoneAlready(Exception):
    """OUT holds what this command would make."""

    def __init__(self, samples: int):
        super().__init__()
        self.samples = samples  # in OUT


def part_name(number: int) -> str:
    """The folder of a part's shards."""
    return f'{number:06}'


def part_index(number: int) -> str:
    """A part's own index, in a folder with all others, so that one list of it says what is done."""
    return f'parts/{part_name(number)}.json'


def read_json(output: Output, name: str) -> object:
    """What a file of OUT holds; None if there is none. Raises ValueError if it is damaged."""
    content = output.read(name)
    if content is None:
        return None
    try:
        return json.loads(content)
    except ValueError:
        raise ValueError(f'{name} of {output.place} is damaged; give a new folder') from None


def read_part(output: Output, number: int) -> dict | None:
    """The index of a part; None if there is none. Raises DataError if it is damaged."""
    try:
        return read_json(output, part_index(number))
    except ValueError:
        raise DataError(f'{part_index(number)} of {output.place} is damaged; remove it, and run the same command again'
                        ) from None


def require_same_place(output: Output) -> None:
    """Raises DataError if a worker does not see the OUT that the command has begun."""
    if output.read(CLAIM) is None:
        raise DataError(f'{output.place} is not the same folder on every machine; use a shared one or a store')


def claim(output: Output, contents: dict) -> bool:
    """Say in OUT what it is made of.

    Args:
        output: must be new, or begun with the same contents.
        contents: what JSON can hold; `program` is the name of the one that makes it.

    Returns whether an earlier run has begun it. Raises ValueError if OUT holds anything else.
    """
    output.require_new_or_begun()
    text = json.dumps(contents).encode()
    held = output.read(CLAIM)
    if held is None:
        if output.create(CLAIM, text):
            return False
        held = output.read(CLAIM)  # another run was faster
    begun = contents_of_claim(output, held)
    if begun == {'program': contents['program'], RELEASED: True}:
        refuse_others_files(output)
        output.write(CLAIM, text)
        output.remove([SKIPPED])
        return False
    refuse_other_contents(output, begun, contents)
    return True


def contents_of_claim(output: Output, held: bytes | None) -> dict:
    """What a claim.json of OUT says. Raises ValueError if it is damaged."""
    try:
        return dict(json.loads(held or b''))
    except (ValueError, TypeError):
        raise ValueError(f'{output.place} holds a {CLAIM} that is damaged; give a new folder') from None


def refuse_other_contents(output: Output, begun: dict, contents: dict) -> None:
    """Raises ValueError, with what differs in the words of flags, if OUT was begun with other contents."""
    key = other_key(begun, contents)
    if key is None:
        return
    was_begun = 'was begun'
    if output.read(INDEX) is not None:
        was_begun = 'already holds a dataset, which was made'
    raise ValueError(f'{output.place} {was_begun} {difference(key, begun.get(key), contents.get(key))}')


def difference(key: str, begun: object, now: object) -> str:
    """How OUT was begun otherwise than this run would, and the remedy.

    Args:
        key: of the claim.
        begun: its value when OUT was begun; None: there was none.
        now: its value in this run.
    """
    if key == 'program':
        return f'by {begun}, not by {now}; give a new folder'
    if key == 'source':
        return f'from {begun}, and SOURCE has {now}: it has changed since, or is another; give a new folder'
    if key == IS_HELD_OUT:
        return f'{"with what was" if begun else "with nothing"} held out of another dataset; give a new folder'
    if key == 'vae_sha256' and RANDOM in (begun, now) and None not in (begun, now):
        key, begun, now = 'pretrained', begun != RANDOM, now != RANDOM
    if key in ALWAYS_GIVEN or (key in HASHED and None not in (begun, now)):
        return f'with another {HASHED[key]}; give the same, or a new folder'
    return f'{in_flags(key, begun)}, not {in_flags(key, now)}; give the same, or a new folder'


def in_flags(key: str, value: object) -> str:
    """A key of a claim and its value, as a command line gives them."""
    flag = HASHED.get(key, f'--{key}')
    if value is None or value is False:
        return f'without {flag}'
    if value is True or key in HASHED:
        return f'with {flag}'
    if isinstance(value, list):
        value = ' '.join(map(str, value))
    return f'with {flag} {value}'


def other_key(begun: dict, contents: dict) -> str | None:
    """The first key in which two claims differ; None where they are of one dataset."""
    for key in {**contents, **begun}:  # what only the earlier run knows of makes it another dataset as well
        if begun.get(key) != contents.get(key):
            return key
    return None


def names_beside_claim(output: Output) -> Iterator[str]:
    """The names of what lies in OUT beside its claim."""
    return (name for name in output.names() if name != CLAIM and not LEFT_BY_KILLED.fullmatch(name))


def refuse_others_files(output: Output) -> None:
    """Raises ValueError if an OUT that was given back holds more than a run leaves in it."""
    for name in names_beside_claim(output):
        if name != SKIPPED:
            raise ValueError(f'{output.place} already holds something, {name}; give a new folder')


def is_begun(output: Output) -> bool:
    """Whether a run has claimed OUT, and not given it back."""
    held = output.read(CLAIM)
    if held is None:
        return False
    with contextlib.suppress(ValueError, TypeError):
        return RELEASED not in json.loads(held)
    return True  # `claim` says that it is damaged


def samples_of_finished(output: Output) -> int | None:
    """How many samples the dataset in OUT has; None where it has no index.json yet. Raises ValueError if that is
    damaged."""
    index = read_json(output, INDEX)
    if index is None:
        return None
    try:
        return number_of_samples(index)
    except (KeyError, TypeError):
        raise ValueError(f'{INDEX} of {output.place} is damaged; give a new folder') from None


def refuse_finished(output: Output) -> None:
    """Raises ValueError if OUT has its index.json already."""
    if output.read(INDEX) is not None:
        raise finished_error(output.place)


def finished_parts(output: Output, num_parts: int) -> set[int]:
    """The numbers of the parts that are done; a store is listed once, 1000 parts a request."""
    found = (re.fullmatch(r'(\d{6,})\.json', name) for name in output.names_in('parts'))
    numbers = {int(match[1]) for match in found if match}
    return {number for number in numbers if number < num_parts}


def redo(output: Output, numbers: Iterable[int]) -> None:
    """Take parts of a dataset back, so that they are made again, and with them what makes a dataset of it."""
    output.remove([INDEX])
    for number in numbers:
        part = read_part(output, number)
        if part is None:
            continue
        shards = [shard['raw_data']['basename'] for shard in part['shards']]
        output.remove([part_index(number), *shards, *part.get('replaced', ())])


def remove_part_folders(output: Output, numbers: Iterable[int]) -> None:
    """Remove the folders of parts whose shards are all gone."""
    for number in numbers:
        output.remove_folder(part_name(number))


def release(output: Output, num_parts: int, program: str) -> None:
    """Give an OUT back that no sample came to, so that the next run may use it; the list of reasons stays."""
    output.remove(map(part_index, range(num_parts)))
    output.remove([DAMAGED, EDGE])
    remove_part_folders(output, range(num_parts))
    output.remove_folder('parts')
    output.write(CLAIM, json.dumps({'program': program, RELEASED: True}).encode())
