"""--sample_prompts: a file of prompts, one a line. Nothing here needs a library."""
from pathlib import Path

MOST_PROMPTS = 100  # a longer file is a mistake: its pictures would take hours each time


def read_prompts(path: str) -> list[str]:
    """The prompts in a file, one a line. Raises ValueError if there is none, or too many."""
    try:
        lines = Path(path).read_text(encoding='utf-8').splitlines()
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
