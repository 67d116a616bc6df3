"""Write a report as one HTML file that opens without a network: figures, tables, notes and the command.

page.html is the template. Jinja, which torch depends on, escapes everything that the template inserts, and the
Content-Security-Policy of the page forbids all requests. itables brings DataTables, which sorts and filters the tables.
Readers without JavaScript, such as mail programs, still show the tables.
"""
import datetime
from base64 import b64encode
from collections.abc import Sequence
from pathlib import Path

from sdbench.errors import UserError, redacted
from sdbench.records.read import WITH_SPEED
from sdbench.records.versions import git_commit
from sdbench.report.tables import Table


def write_page(path: Path, figures: dict[str, str], tables: Sequence[Table], notes: Sequence[str],
               command: str) -> None:
    """Write the report as an HTML file. Raises UserError if itables is not installed.

    Args:
        path: path of the file.
        figures: figures as SVG by their caption, which come before the tables.
        tables: tables in their order.
        notes: sentences below the tables, after those of the tables.
        command: the command that made the page.
    """
    import jinja2

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

    # Fill in the template. The figures, the tables and DataTables are part of the page, which loads nothing.
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(Path(__file__).with_name('page.html').read_text())
    page = template.render(
        figures=figures, tables=shown, notes=[*sentences, *notes], command=redacted(command), commit=git_commit(),
        date=datetime.datetime.now(datetime.UTC).strftime('%Y-%m-%d %H:%M UTC'),
        style=(bundle / 'dt_bundle.css').read_text(),
        library=b64encode((bundle / 'dt_bundle.js').read_bytes()).decode())
    path.write_text(page, encoding='utf-8')
