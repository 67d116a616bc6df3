"""Draw the pictures of a report: speeds of trainings as bars, and scores of evaluations as lines.

matplotlib is imported only when there is something to draw.
"""
import textwrap

import pandas as pd

from sdbench.errors import plural

MEASURED = 'measured'  # the status of a row
EXTRAPOLATED = 'extrapolated'  # the status of a row that nobody has measured: it follows from other rows,
FORECAST = 'forecast'          # or from the operators of a step
# Columns that all scores of one line agree in: for any score, and for each kind of score its network's
CONDITIONS = ['model', 'weights', 'data', 'samples', 'image_size', 'steps']
JUDGES = {'fid': ['network', 'inception_sha256'], 'clip_score': ['clip', 'clip_sha256']}
COLORS = ('#1f3b73', '#d9730d', '#2a9d8f', '#9b2d5e', '#8fb339', '#7f7f7f', '#6aa8e0', '#f2b84b')
PANELS = {'days': '{:,.4g}', 'scaling_efficiency': '{:.1%}', 'images_per_sec': '{:,.4g}'}  # how a figure is printed
LINE_INCHES = 0.2  # of text
LABEL_CHARACTERS = 50  # of a line of a label
CAPTION_CHARACTERS = 130
TITLES = {'fid': 'FID', 'clip_score': 'CLIP score', 'images_seen': 'images seen'}
PANEL_INCHES = 4.8
PANEL_CHARACTERS = 60  # of a caption below a panel


def draw_speeds(path: str, rows: pd.DataFrame, training_images: int, caption: str) -> None:
    """Write a picture of a table of trainings, with a bar for each row in the order of the table.

    It shows days and efficiency if a row has both, else images per second. Rows of one setting share a color, and
    extrapolated bars are hollow.

    Args:
        path: of the picture, whose suffix is its format.
        rows: the table.
        training_images: images of a training, which the days are for.
        caption: text below the bars.
    """
    from matplotlib.figure import Figure

    # panels and texts
    titles = {'images_per_sec': 'images/s'}
    if 'scaling_efficiency' in rows and (rows['scaling_efficiency'].notna() & rows['days'].notna()).any():
        titles = {'days': f'days for {training_images:,} images', 'scaling_efficiency': 'efficiency'}
    labels = [label_of(row) for _, row in rows.iterrows()]
    caption = wrapped(caption, CAPTION_CHARACTERS)
    num_lines = sum(label.count('\n') + 1.5 for label in [*labels, caption])

    # bars, with their figures behind them
    figure = Figure(figsize=(10, 1 + LINE_INCHES * num_lines), layout='constrained')
    figure.supxlabel(caption, x=0.01, ha='left', fontsize=9)
    all_axes = figure.subplots(1, len(titles), sharey=True, squeeze=False)[0]
    for axes, (key, title) in zip(all_axes, titles.items(), strict=True):
        bars = axes.barh(range(len(rows)), rows[key].fillna(0))
        axes.bar_label(bars, [text_of(row, key) for _, row in rows.iterrows()], padding=4, fontsize=9)
        for bar, (_, row) in zip(bars, rows.iterrows(), strict=True):
            color = COLORS[row['setting'] % len(COLORS)]
            bar.set(edgecolor=color, facecolor=color if row['status'] == MEASURED else 'none')
        axes.set_title(title, loc='left', fontsize=11)
        axes.margins(x=0.2)  # for the texts
        axes.set_xticks([])  # each bar has its figure
        axes.spines[['top', 'right', 'bottom']].set_visible(False)

    # labels of the rows, left of the first panel
    all_axes[0].set_yticks(range(len(rows)), labels, fontsize=9)
    all_axes[0].invert_yaxis()  # the first row on top
    figure.savefig(path, dpi=160)


def wrapped(text: str, characters: int) -> str:
    """Wrap each line of a text at so many characters."""
    return '\n'.join(textwrap.fill(line, characters) for line in text.splitlines())


def label_of(row: pd.Series) -> str:
    """Name a row: its run if it has a number, its devices, and what distinguishes its setting."""
    label = plural(row['num_devices'], 'CPU rank' if row['on_cpu'] else 'GPU')
    if 'run' in row:
        label = f'run {row["run"]}: {label}'
    if row['label']:
        label += f', {row["label"]}'
    return textwrap.fill(label, LABEL_CHARACTERS)


def text_of(row: pd.Series, key: str) -> str:
    """Write what stands behind a bar: its figure, and its status unless it was measured; without a figure, why."""
    if pd.isna(row[key]):
        return textwrap.shorten(row['notes'], 40, placeholder=' ...')
    text = PANELS[key].format(row[key])
    if row['status'] != MEASURED:
        text += f', {row["status"]}'
    return text


def draw_quality(path: str, rows: pd.DataFrame, caption: str) -> None:
    """Write a picture of a table of scores.

    One panel shows FID against CLIP score, a line for each checkpoint over its guidance scales. Two show FID and CLIP
    score against the images of the training, a line for each model and guidance scale. Scores that differ in one of
    CONDITIONS, or in the columns of their JUDGES, are never on one line. The notes of the scores stand below.

    Args:
        path: of the picture, whose suffix is its format.
        rows: the table.
        caption: text below the panels.

    Raises ValueError if there is nothing to draw.
    """
    from matplotlib.figure import Figure

    # which panels have scores: x, y, and the columns that a line agrees in
    panels = [('clip_score', 'fid', [*CONDITIONS, *JUDGES['fid'], *JUDGES['clip_score'], 'trained_batches']),
              ('images_seen', 'fid', [*CONDITIONS, *JUDGES['fid'], 'guidance']),
              ('images_seen', 'clip_score', [*CONDITIONS, *JUDGES['clip_score'], 'guidance'])]
    panels = [panel for panel in panels if len(rows.dropna(subset=panel[:2]))]
    if not panels:
        raise ValueError(f'--quality {path}: no evaluation has both scores, or the images of its training')

    # a figure with room for the legends and the texts below
    most_lines = max(rows.groupby(keys, dropna=False).ngroups for _, _, keys in panels)  # each has one in a legend
    figure = Figure(figsize=(PANEL_INCHES * len(panels), PANEL_INCHES + LINE_INCHES * most_lines), layout='constrained')
    caption = '\n'.join([caption, *filter(None, rows['notes'].unique())])
    figure.supxlabel(wrapped(caption, PANEL_CHARACTERS * len(panels)), x=0.01, ha='left', fontsize=9)

    # one panel each
    for axes, (across, up, line_keys) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        draw_scores(axes, rows.dropna(subset=[across, up]), across, up, line_keys)
    figure.savefig(path, dpi=160)


def draw_scores(axes, rows: pd.DataFrame, across: str, up: str, line_keys: list[str]) -> None:
    """Draw a panel of `up` against `across`, with a line for each value of `line_keys`, and its legend below."""
    from matplotlib.ticker import EngFormatter

    # lines, named by what distinguishes them
    named = [key for key in line_keys if rows[key].nunique() > 1]
    for number, (_, points) in enumerate(rows.groupby(line_keys, dropna=False)):
        label = [words_of(key, points[key].iloc[0]) for key in named]
        if 'guidance' not in line_keys:
            label.append('guidance ' + ', '.join(f'{scale:g}' for scale in points['guidance']))
        axes.plot(points[across], points[up], marker='o', markersize=4, label=', '.join(label),
                  color=COLORS[number % len(COLORS)])

    # axes and legend
    axes.locator_params(axis='x', nbins=5)  # more may overlap
    axes.set_xlabel(TITLES[across])
    axes.set_ylabel(TITLES[up])
    if across == 'images_seen':
        axes.xaxis.set_major_formatter(EngFormatter())
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc='upper left', bbox_to_anchor=(0, -0.15), frameon=False, fontsize=8)  # below the panel
    axes.spines[['top', 'right']].set_visible(False)


def words_of(key: str, value) -> str:
    """Write the value of a column as the legend shows it."""
    if key == 'guidance':
        return f'guidance {value:g}'
    if key == 'trained_batches':
        return f'batch {value:,.0f}'
    if key not in ('model', 'weights'):
        value = f'{key} {value}'
    return textwrap.shorten(value, LABEL_CHARACTERS, placeholder=' ...')
