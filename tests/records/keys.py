"""List the keys of a record that the tables in docs/measuring.md explain."""
import re
from pathlib import Path

PAGE = (Path(__file__).parents[2] / 'docs/measuring.md').read_text()


def rows_of(heading: str) -> list[str]:
    """Return the rows of all tables of the page with this heading."""
    tables = PAGE.split(f'{heading}\n|---|---|\n')[1:]
    return [row for table in tables for row in table.partition('\n\n')[0].splitlines()]


KEYS = [key for row in rows_of('| key | meaning |') for key in re.findall('`([a-z0-9_]+)`', row.split('|')[1])]
