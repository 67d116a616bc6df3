"""Write the page of a proof: what was measured beside its forecast, and what each check has seen."""
from collections.abc import Collection
from pathlib import Path

import pandas as pd

from sdbench.forecast.speed import LARGEST_ERROR
from sdbench.records.setup import text_of
from sdbench.records.status import FORECAST, why_unreliable
from sdbench.report.page import Table, write_page

FAR = 1.25  # times the forecast either way, beyond its error on published speeds


def write_proof(folder: Path, records: list[dict], missing: Collection[str], command: str) -> None:
    """Write proof.html into a folder: of the records of its steps, and with the names of those that have none."""
    # what was measured, the speeds that are far from their forecasts first
    trained = [record for record in records if record['stage'] == 'train' and record['step'] != 'loader']
    forecasts = {record['step']: record for record in trained if record['status'] == FORECAST}
    runs = [run_row(record, forecasts.get(record['step'], {})) for record in trained if record['status'] != FORECAST]
    first = trained[0] if trained else {}
    answers = []
    for run in runs:
        if run['ratio'] is not None and not 1 / FAR <= run['ratio'] <= FAR:
            answers.append(f'FAR OFF: {run["run"]} has {run["ratio"]:.2f} times the speed of its forecast. Look for '
                           'the reason before anything else here is believed.')

    # what was checked, what failed, what is not there, and how long it took
    checks = [{'step': record['step'], 'holds': record['holds'], 'seen': record['seen']}
              for record in records if 'holds' in record]
    for check in checks:
        if not check['holds']:
            answers.append(f'Does not hold: {check["step"]}, {check["seen"]}.')
    failed = [{'step': record['step'], 'error': record['error']} for record in records
              if record.get('status') == 'failed']
    for failure in failed:
        answers.append(f'Refused or failed: {failure["step"]}, {failure["error"]}.')
    if missing:
        answers.append(f'Not run yet: {", ".join(missing)}.')
    seconds = {record['step']: record['step_seconds'] for record in records}
    answers.append(f'{sum(seconds.values()) / 60:.0f} minutes in all.')

    tables = {'Speed and memory': runs, 'Checks': checks}
    for record in records:
        tables[record['step'].capitalize()] = record.get('rows', [])
    tables = [table(caption, rows) for caption, rows in tables.items() if rows]
    notes = [f'A forecast was off by at most {LARGEST_ERROR:.0%} on published speeds. Memory is the reserved one, and '
             'of a CPU all that the process holds.']
    verdict = f'Proof: {first.get("num_devices", "?")} x {first.get("device", "no device")}'
    write_page(folder / 'proof.html', verdict, answers, [], tables, notes, command)


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


def table(caption: str, rows: list[dict]) -> Table:
    """Return rows, which have the same keys, as a table; a column with nothing in it is left out."""
    found = pd.DataFrame(rows).dropna(axis='columns', how='all')
    numbers = found.select_dtypes('number').columns
    texts = found.columns.difference(numbers)
    doubtful = [row.get('holds') is False or bool(row.get('notes')) for row in rows]
    cells = found.astype({text: object for text in texts})
    cells[texts] = found[texts].map(text_of)
    return Table(caption, cells, dict.fromkeys(numbers, 0), doubtful=doubtful)
