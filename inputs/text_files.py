"""Files of text, a prompt on each line."""
from pathlib import Path


def read_prompts(path: str) -> list[str]:
    """The prompts in a file, one a line. Raises ValueError if there is none."""
    lines = Path(path).read_text(encoding='utf-8-sig').split('\n')
    prompts = [line.strip() for line in lines if line.strip()]
    if not prompts:
        raise ValueError(f'--sample_prompts {path} holds no prompt; write one on each line')
    return prompts
