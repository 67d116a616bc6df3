"""Write a report as one HTML file that opens without a network: figures, tables, notes and the command.

The Content-Security-Policy of its template, page.html, forbids all requests. itables brings DataTables, which sorts and
filters the tables. Readers without JavaScript, such as mail programs, still show the tables.
"""
import datetime
from base64 import b64encode
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sdbench.errors import UserError, redacted
from sdbench.records.read import WITH_SPEED
from sdbench.records.versions import git_commit
from sdbench.report.tables import Table


def write_page(path: str, figures: dict[str, str], tables: Sequence[Table], notes: Sequence[str],
               command: str) -> None:
    """Write the report as an HTML file. Raises UserError if itables is not installed.

    Args:
        path: path of the file.
        figures: figures as SVG by their caption, which come before the tables.
        tables: tables in their order.
        notes: sentences below the tables, after those of the tables.
        command: the command that made the page.
    """
    try:
        import itables
    except ImportError:
        raise UserError('an HTML page needs itables, which sorts and filters its tables: pip install itables') from None
    bundle = Path(itables.__file__).parent / 'html'  # which has DataTables
    shown = []
    for table in tables:
        keys = {heading: key for key, heading in table.headings().items()}
        rows = []
        for row, cells in zip(table.rows, table.cells(), strict=True):
            # Each cell has its text, and the number by which its column is sorted: None in a column of text.
            numbers = [row.metrics.get(keys[heading], '') if heading in keys else None for heading in cells]
            rows.append((row.status in WITH_SPEED, [*zip(cells.values(), numbers, strict=True)]))
        shown.append((table.caption, {heading: heading in keys for heading in cells}, rows))

    sentences = [sentence for table in tables for sentence in table.sentences]

    # The figures, the tables and DataTables are part of the page, which loads nothing.
    fill_template(Path(__file__).with_name('page.html'), path, command, figures=figures, tables=shown,
                  notes=[*sentences, *notes], style=(bundle / 'dt_bundle.css').read_text(),
                  library=b64encode((bundle / 'dt_bundle.js').read_bytes()).decode())


def fill_template(template: Path, path: str, command: str, **values: Any) -> None:
    """Write an HTML page from a template, with the command, the commit and the date.

    Jinja, which torch depends on, escapes all values. Passwords in the command are replaced by asterisks.
    """
    import jinja2

    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    page = environment.from_string(template.read_text()).render(
        values, command=redacted(command), commit=git_commit(),
        date=f'{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M UTC}')
    Path(path).write_text(page, encoding='utf-8')
