"""Files of text, a prompt on each line."""
from pathlib import Path


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
