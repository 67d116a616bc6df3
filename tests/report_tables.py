"""Read the tables of a report or a page, and the figures in a page."""
import re
from pathlib import Path


def tables(text: str) -> list[list[dict[str, str]]]:
    """Return the rows of each Markdown table in a report, as texts by heading.

    A table that is split into parts with the same labels is one table. `text` has the settings and notes of a row, from
    its columns or from the lines below the table.
    """
    found = []
    for block in text.strip().split('\n\n'):
        if block.startswith('|'):
            cells = [re.split(r'(?<!\\)\|', line)[1:-1] for line in block.splitlines()]  # not at \\|
            heading, _, *lines = [[cell.strip() for cell in line] for line in cells]
            rows = [dict(zip(heading, line, strict=True)) for line in lines]
            shared = [name for name in heading if found and name in found[-1][0]]
            if shared and columns(rows, *shared) == columns(found[-1], *shared):
                rows = [first | row for first, row in zip(found.pop(), rows, strict=True)]
            found.append(rows)
        elif re.match('[0-9]+: ', block):
            for line in re.sub('\n +', ' ', block).splitlines():
                number, _, texts = line.partition(': ')
                [row] = [row for row in found[-1] if row['run'] == number]
                row['below'] = texts
    for row in (row for rows in found for row in rows):
        row['text'] = '; '.join(filter(None, [row.get('settings'), row.get('notes'), row.pop('below', '')]))
    return found


def columns(table: list[dict[str, str]], *names: str) -> list[tuple[str, ...]]:
    return [tuple(row[name] for name in names) for row in table]


def assert_figures(page: Path, *figures: str) -> None:
    """Check that a page has these figures, and not only as parts of other numbers."""
    text = ' '.join(page.read_text().split())
    assert [figure for figure in figures if not re.search(rf'(?<![\d.,]){re.escape(figure)}(?!,?\d)', text)] == []
