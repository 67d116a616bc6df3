"""Write the page and the picture of a proof: a table of each part, with the forecast and what was measured."""
import math
from pathlib import Path

import pandas as pd

from sdbench.forecast.speed import LARGEST_ERROR
from sdbench.forecast.trace import UNCOUNTED_SHARE
from sdbench.records.figures import rounded
from sdbench.records.keys import why_unreliable
from sdbench.records.read import words
from sdbench.report.markdown import table_text

ROOT = Path(__file__).parents[2]
FAR = 1.25  # times outside of what was published
LIFE_TOLERANCE = 1e-3  # of losses, which are about 1, after a resume; kernels of a GPU may add in another order


def write_page(folder: Path, records: list[dict], missing: list[str]) -> None:
    """Write proof.md, and proof.png where a speed was measured.

    Args:
        folder: where they go.
        records: of the steps, as `python -m benchmarks.proof` appends them.
        missing: names of the steps that have none.
    """
    # results by their steps, and the rows of speeds
    results = {record['step']: record for record in records if record['stage'] == 'proof'}
    runs = [run_row(record, results.get('forecast', {}).get('by_step', {})) for record in records
            if record['stage'] == 'train' and record['step'] != 'loader']
    failed = [record for record in records if record.get('status') == 'failed']
    first = next((record for record in records if record['stage'] == 'train'), {})

    # the blocks of the page, in its order
    blocks = [f'# Proof: {first.get("num_devices", "?")} x {first.get("device", "no device")}',
              '\n'.join(f'- {sentence}' for sentence in plausibility(records))]
    if runs:
        draw(folder / 'proof.png', runs)
        blocks += ['## Speed', markdown(runs, ['run', 'microbatch', 'images/s', 'forecast', 'ratio', 's a batch',
                                               'expected', 'notes']),
                   f'The largest error of the forecast on published speeds was {LARGEST_ERROR:.0%}.', '![](proof.png)',
                   '## Memory', markdown(runs, ['run', 'microbatch', 'reserved', 'allocated', 'counted', 'search found',
                                                'search foreseen']),
                   f'GiB. The forecast counts what is allocated, and adds {UNCOUNTED_SHARE:.0%} for what is '
                   'reserved beyond that. Of a CPU it is all that the process holds.']
    blocks += exactness_blocks(results.get('exactness', {}))
    blocks += ['## Life', markdown(life_rows(results), ['what', 'holds', 'seen'])]
    blocks += loader_and_average_blocks(records, results.get('average', {}))
    blocks += machine_blocks(results.get('identity', {}))
    if failed:
        blocks += ['## Refused or failed', markdown(failed, ['step', 'error'])]
    if missing:
        blocks.append(f'Not run yet: {", ".join(missing)}.')
    steps = {record['step']: record for record in records}
    blocks += ['## Time', markdown(list(steps.values()), ['step', 'step_seconds'])]
    # Records come from strangers: a terminal must find no commands in the page.
    page = '\n\n'.join(blocks) + '\n'
    (folder / 'proof.md').write_text(''.join(char if char.isprintable() or char == '\n' else ' ' for char in page))


def markdown(rows: list[dict], columns: list[str]) -> str:
    """Return a table of these columns, as far as a row has something in them."""
    table = pd.DataFrame(rows, columns=columns).dropna(axis='columns', how='all')
    if table.empty:
        return 'Nothing was measured.'
    return table_text(table.map(text_of), columns)


def text_of(value) -> str:
    """Return the text of a cell; figures have three significant digits or are whole."""
    if isinstance(value, bool):
        return 'yes' if value else 'NO'
    if isinstance(value, float):
        return '' if math.isnan(value) else rounded(value)
    return words(value)


def run_row(record: dict, forecasts: dict[str, dict]) -> dict:
    """Return the row of a measured run, with what the forecast says at its microbatch."""
    microbatch = str(record.get('device_train_microbatch_size'))
    forecast = forecasts.get(record['step'], {})
    speed = record.get('images_per_sec')
    foreseen = forecast.get('images_per_sec', {}).get(microbatch)
    is_searched = record.get('microbatch_search')
    return {'run': record['step'], 'microbatch': microbatch, 'images/s': speed, 'forecast': foreseen,
            'ratio': speed / foreseen if speed and foreseen else None,
            's a batch': record.get('batch_seconds_median'), 'reserved': record.get('peak_memory_gib'),
            'allocated': record.get('peak_memory_allocated_gib'), 'counted': forecast.get('gib', {}).get(microbatch),
            'search found': microbatch if is_searched else None,
            'search foreseen': forecast.get('largest_microbatch') if is_searched else None,
            'expected': record['expectation'], 'notes': record.get('error') or why_unreliable(record)}


def plausibility(records: list[dict]) -> list[str]:
    """Say whether the original's recipe is as fast as others found it on this GPU. That stands first on the page."""
    # images/s a GPU of the same work, and of each run at the same microbatch
    files = (ROOT / 'published.csv', ROOT / 'benchmarks/forecast/published_speeds.csv')
    published = pd.concat([pd.read_csv(file) for file in files])
    published = published[(published['image_size'] == 512) & (published['encoders'] == 'in_loop')
                          & (published['num_devices'] <= 8)]
    published = published.assign(each=published['images_per_sec'] / published['num_devices'])

    # each run of the recipe, those that are far off first
    sentences = []
    for record in records:
        is_original = record['step'].startswith('original') and record.get('images_per_sec')
        if not is_original or record['model_name'] == 'tiny':
            continue
        speed = record['images_per_sec_per_device']
        same = ((published['device'] == record['device'].removeprefix('NVIDIA '))
                & (published['device_train_microbatch_size'] == record['device_train_microbatch_size']))
        found = published[same]['each']
        said = (f"The original's recipe trains {speed:.3g} images/s a GPU at a microbatch of "
                f'{record["device_train_microbatch_size"]}')
        if found.empty:
            sentences.append(f'{said}; nothing is published for it.')
            continue
        others = ' and '.join(f'{each:.3g}' for each in sorted(found))
        if found.min() / FAR <= speed <= found.max() * FAR:
            sentences.append(f'{said}, which is plausible: others found {others}.')
        else:
            sentences.insert(0, f'**FAR OFF: {said}, where others found {others}. '
                                'Look for the reason before anything else here is believed.**')
    return sentences or ["The original's recipe was not measured with Stable Diffusion 2, so that no speed here can be "
                         'compared with published ones.']


def exactness_blocks(result: dict) -> list[str]:
    """Return the tables of thirty steps on the device and on the CPU, and of each switch against eager float32."""
    if 'steps_here' not in result:
        return []
    rows = []
    for number, (here, cpu) in enumerate(zip(result['steps_here'], result['steps_cpu'], strict=True), start=1):
        if number in (1, 10, 20, 30):
            rows.append({'step': number, 'loss here': f'{here[0]:.6f}', 'loss CPU': f'{cpu[0]:.6f}',
                         'norm here': f'{here[1]:.6f}', 'norm CPU': f'{cpu[1]:.6f}'})
    sentence = (f'Thirty steps of the tiny model in float32 on {result["device"]} and on the CPU: largest difference '
                f'{result["largest_difference"]:.1e} of a loss or gradient norm, {result["average_difference"]:.1e} of '
                f'the average; tolerance {result["tolerance"]:g}: {"holds" if result["holds"] else "DOES NOT HOLD"}.')
    switches = markdown(result['switches'], ['flags', 'loss', 'gradient', 'tolerance', 'holds', 'error'])
    return ['## Exactness', sentence, markdown(rows, list(rows[0])),
            'Each switch against eager float32 on the same device, relative:', switches]


def life_rows(results: dict[str, dict]) -> list[dict]:
    """Return the rows of a training that was killed and stopped, and of runs that must end in one line."""
    rows = []
    life = results.get('life', {})
    if 'batches' in life:
        killed, stopped, ended = life['exit_statuses']
        rows += [{'what': 'killed, stopped by SIGTERM and resumed: the batches',
                  'holds': life['went_on_where_it_was'] and killed != 0 and stopped != 0 and ended == 0,
                  'seen': f'batches {life["batches"]}, exit statuses {life["exit_statuses"]}'},
                 {'what': 'the same losses as a run that was not', 'holds': life['largest_difference'] < LIFE_TOLERANCE,
                  'seen': f'largest difference {life["largest_difference"]:.1e}'}]
    for name in ('NaN', 'out of memory'):
        if 'said' in results.get(name, {}):
            rows.append({'what': f'{name}: one line', 'holds': results[name]['holds'], 'seen': results[name]['said']})
    return rows


def loader_and_average_blocks(records: list[dict], average: dict) -> list[str]:
    """Return the table of the loader alone and with the model, and a sentence of an update of the average."""
    rows = []
    for record in records:
        if record['step'] == 'loader' and record['stage'] in ('loader', 'train'):
            rows.append({'what': {'loader': 'alone', 'train': 'with the model'}[record['stage']],
                         'images/s': record.get('loader_images_per_sec') or record.get('images_per_sec'),
                         'share of time that waits': record.get('data_wait_fraction'),
                         'processes a device': record.get('num_workers')})
    columns = ['what', 'images/s', 'share of time that waits', 'processes a device']
    blocks = ['## Loader and average', markdown(rows, columns)]
    if 'ratio' in average:
        here, composer = (pd.Series(average['seconds'][whose]).median() for whose in ('here', 'composer'))
        blocks.append(f'An update of the average takes {here * 1000:.3g} ms, and {composer * 1000:.3g} ms in Composer: '
                      f'{average["ratio"]:.2f} times as fast.')
    return blocks


def machine_blocks(identity: dict) -> list[str]:
    """Return what the devices are and reach, and with which libraries."""
    if 'rates' not in identity:
        return []
    versions = ', '.join(f'{name} {version}' for name, version in identity['versions'].items())
    lines = [f'- {line}' for line in identity['gpu_says']]
    lines.append(f'- commit {identity["git_commit"]}, Python {identity["python"]}, CUDA {identity["cuda"]}, cuDNN '
                 f'{identity["cudnn"]}, {versions}, {identity["cpu_cores"]} CPU cores')
    return ['## Machine', markdown(identity['rates'], ['device', 'tflops_per_sec', 'gigabytes_per_sec']),
            'A bf16 product, and the bytes that a copy reads and writes.', '\n'.join(lines)]


def draw(path: Path, runs: list[dict]) -> None:
    """Draw bars of speed and of memory, with a mark where the forecast has them."""
    from matplotlib.figure import Figure
    figure = Figure(figsize=(11, 1.5 + 0.3 * len(runs)), layout='constrained')
    panels = (('images/s', 'forecast', 'images/s'), ('reserved', 'counted', 'peak memory, GiB'))
    all_axes = figure.subplots(1, 2, sharey=True)
    for axes, (measured, foreseen, title) in zip(all_axes, panels, strict=True):
        table = pd.DataFrame(runs, columns=[measured, foreseen], dtype=float)
        bars = axes.barh(table.index, table[measured].fillna(0), color='#1f3b73', label='measured')
        axes.bar_label(bars, [text_of(value) for value in table[measured]], padding=4, fontsize=8)
        if table[foreseen].notna().any():
            axes.plot(table[foreseen], table.index, 'D', markerfacecolor='white', color='#d9730d', label=foreseen)
        axes.set_title(title, loc='left', fontsize=11)
        axes.margins(x=0.15)
        axes.spines[['top', 'right']].set_visible(False)
        axes.legend(loc='lower right', bbox_to_anchor=(1, 1), ncols=2, frameon=False, fontsize=8)
    all_axes[0].set_yticks(range(len(runs)), [f'{run["run"]} (microbatch {run["microbatch"]})' for run in runs],
                           fontsize=8)
    all_axes[0].invert_yaxis()
    figure.savefig(path, dpi=120)
