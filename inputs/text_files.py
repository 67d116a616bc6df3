"""Files of text, a prompt or a caption on each line."""
from pathlib import Path

from inputs.words import counted


def read_lines(path: str) -> list[str]:
    """The lines of a file that are not empty."""
    lines = Path(path).read_text(encoding='utf-8-sig').split('\n')
    return [line.strip() for line in lines if line.strip()]


def read_prompts(path: str) -> list[str]:
    """The prompts in a file, one a line. Raises ValueError if there is none."""
    prompts = read_lines(path)
    if not prompts:
        raise ValueError(f'--sample_prompts {path} holds no prompt; write one on each line')
    return prompts


def read_captions(path: str, number: int) -> list[str]:
    """The first captions of a file. Raises ValueError if it holds fewer."""
    captions = read_lines(path)
    refuse_too_few(path, len(captions), number, 'caption')
    return captions[:number]


def refuse_too_few(data: str, there: int, wanted: int, kind: str) -> None:
    """Raises ValueError if DATA holds fewer captions or images than --samples."""
    if there < wanted:
        raise ValueError(f'DATA {data} holds {counted(there, kind)}, fewer than --samples {wanted:,}; use --samples '
                         f'{there}, or give more')
