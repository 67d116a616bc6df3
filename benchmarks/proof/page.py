"""Write the page of a proof: what was measured beside its forecast, and what each check has seen."""
import math
from collections.abc import Collection
from pathlib import Path

import pandas as pd

from sdbench.forecast.speed import LARGEST_ERROR
from sdbench.records.figures import rounded
from sdbench.records.setup import text_of as words
from sdbench.records.status import FORECAST, why_unreliable
from sdbench.report.markdown import table_text

FAR = 1.25  # times the forecast either way, beyond its error on published speeds


def write_page(folder: Path, records: list[dict], missing: Collection[str]) -> None:
    """Write proof.md into a folder: of the records of its steps, and with the names of those that have none."""
    # what was measured, the speeds that are far from their forecasts first
    trained = [record for record in records if record['stage'] == 'train' and record['step'] != 'loader']
    forecasts = {record['step']: record for record in trained if record['status'] == FORECAST}
    runs = [run_row(record, forecasts.get(record['step'], {})) for record in trained if record['status'] != FORECAST]
    first = trained[0] if trained else {}
    blocks = [f'# Proof: {first.get("num_devices", "?")} x {first.get("device", "no device")}']
    for run in runs:
        if run['ratio'] is not None and not 1 / FAR <= run['ratio'] <= FAR:
            blocks.append(f'**FAR OFF: {run["run"]} has {run["ratio"]:.2f} times the speed of its forecast. Look for '
                          'the reason before anything else here is believed.**')
    if runs:
        blocks += ['## Speed and memory', markdown(runs), 'A forecast was off by at most '
                   f'{LARGEST_ERROR:.0%} on published speeds. Memory is the reserved one, and of a CPU all that the '
                   'process holds.']

    # what was checked
    checks = [record for record in records if 'holds' in record]
    if checks:
        rows = [{'step': check['step'], 'holds': check['holds'], 'seen': check['seen']} for check in checks]
        blocks += ['## Checks', markdown(rows)]
    for record in records:
        if record.get('rows'):
            blocks += [f'## {record["step"].capitalize()}', markdown(record['rows'])]

    # what is not there, and how long it took
    failed = [{'step': record['step'], 'error': record['error']} for record in records
              if record.get('status') == 'failed']
    if failed:
        blocks += ['## Refused or failed', markdown(failed)]
    if missing:
        blocks.append(f'Not run yet: {", ".join(missing)}.')
    seconds = {record['step']: record['step_seconds'] for record in records}
    blocks.append(f'{sum(seconds.values()) / 60:.0f} minutes in all.')

    # Records come from strangers: a terminal must find no commands in the page.
    page = '\n\n'.join(blocks) + '\n'
    (folder / 'proof.md').write_text(''.join(char if char.isprintable() or char == '\n' else ' ' for char in page))


def run_row(record: dict, forecast: dict) -> dict:
    """Return the row of a measured run, beside its forecast at the same microbatch."""
    speed, foreseen = record.get('images_per_sec'), forecast.get('images_per_sec')
    ratio = None
    if speed and foreseen:
        ratio = speed / foreseen
    return {'run': record['step'], 'microbatch': str(record.get('device_train_microbatch_size')), 'images/s': speed,
            'forecast': foreseen, 'ratio': ratio, 'GiB': record.get('peak_memory_gib'),
            'GiB forecast': forecast.get('peak_memory_gib'),
            'notes': record.get('error') or why_unreliable(record)}


def markdown(rows: list[dict]) -> str:
    """Return a table of rows, which have the same keys; a column with nothing in it is left out."""
    return table_text(pd.DataFrame(rows).map(text_of), list(rows[0]))


def text_of(value: object) -> str:
    """Return the text of a cell; figures have three significant digits or are whole."""
    if isinstance(value, bool):
        return 'yes' if value else 'NO'
    if value is None or isinstance(value, float) and math.isnan(value):
        return ''
    if isinstance(value, float):
        return rounded(value)
    return words(value)
