"""List the keys of a record that the tables in docs/record.md explain."""
import re
from pathlib import Path

DOCS = Path(__file__).parents[2] / 'docs'


def rows_of(page: str, heading: str) -> list[str]:
    """Return the rows of all tables of a page with this heading."""
    tables = (DOCS / page).read_text().split(f'{heading}\n|---|---|\n')[1:]
    return [row for table in tables for row in table.partition('\n\n')[0].splitlines()]


KEYS = [key for row in rows_of('record.md', '| key | meaning |')
        for key in re.findall('`([a-z0-9_]+)`', row.split('|')[1])]
