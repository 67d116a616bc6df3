"""Files of text, a prompt or a caption on each line.

Nothing here needs a library, so that commands can ask before their imports.
"""
import re
from pathlib import Path

from inputs.words import counted

MOST_PROMPTS = 100  # a longer file is a mistake: its pictures would take hours each time


def read_prompts(path: str) -> list[str]:
    """The prompts in a file, one a line. Raises ValueError if there is none, or too many."""
    try:
        lines = Path(path).read_text(encoding='utf-8-sig').splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, 'strerror', None) or 'it is no UTF-8'
        raise ValueError(f'--sample_prompts {path} cannot be read ({reason}); give a text file with a prompt on each '
                         'line') from None
    prompts = [line.strip() for line in lines if line.strip()]
    if not prompts:
        raise ValueError(f'--sample_prompts {path} holds no prompt; write one on each line')
    if len(prompts) > MOST_PROMPTS:
        raise ValueError(f'--sample_prompts {path} holds {len(prompts):,} prompts; use at most {MOST_PROMPTS}, since '
                         'training waits for all of them to be drawn')
    return prompts


def read_captions(path: str, number: int) -> list[str]:
    """The first captions of a file. Raises ValueError if it holds fewer, or one of them has no words."""
    try:
        with open(path, encoding='utf-8-sig') as file:
            lines = [line.strip() for line in file.read().rstrip().split('\n')]
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f'DATA {path} cannot be read ({error}); give a text file with a caption on each line, or '
                         'shards of images with captions') from None
    if lines == ['']:
        lines = []
    refuse_too_few(path, len(lines), number, 'caption')
    for line_number, line in enumerate(lines[:number], start=1):
        if not has_words(line):
            raise ValueError(f'DATA {path}:{line_number}: a caption without words; write one, or take the line out')
    return lines[:number]


def refuse_too_few(data: str, there: int, wanted: int, kind: str) -> None:
    """Raises ValueError if DATA holds fewer captions or images than --samples."""
    if there < wanted:
        remedy = f'use --samples {there}, or give more' if there > 1 else 'give more'
        raise ValueError(f'DATA {data} holds {counted(there, kind)}, fewer than --samples {wanted:,}; {remedy}')


def has_words(caption: str) -> bool:
    """Whether there is a letter or a digit of any script in it."""
    return re.search(r'[^\W_]', caption) is not None
