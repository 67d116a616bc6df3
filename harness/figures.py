"""Pictures of a report: the ladder of records as bars, and days and efficiency against GPUs.

matplotlib is imported here and nowhere else, once there is something to draw.
"""

import textwrap

import pandas as pd

from harness.records import SETTINGS
from harness.tables import differing_settings, printed_figure, versions_in_all, without_packages

COLORS = ('#1f3b73', '#d9730d', '#2a9d8f', '#9b2d5e', '#7a8b2f', '#5f5f5f')  # one a setting; then they repeat
MOST_BARS = 60
INCHES_PER_BAR = 0.34
WIDTH_INCHES = 10
INCHES_PER_CHARACTER = 0.085  # of the labels, rather too much than too little
LABEL_CHARACTERS = 36         # of a line of a setting's label
FOOTER_CHARACTERS = 120

TEMPLATES = {  # how the value of a setting reads in words; a setting that is not here is its value alone
    'image_size': '{} px', 'stage': 'stage {}', 'batch_size': 'batch {}',
    'device_train_microbatch_size': 'microbatch {}', 'use_ema': 'EMA {}', 'encoders': 'encoders {}',
    'encoder_precision': 'encoders in {}', 'dataset': '{} data', 'num_workers': '{} workers',
    'channels_last': 'channels last {}', 'compile': 'compile {}', 'attention': '{} attention',
    'gradient_checkpointing': 'gradient checkpointing {}', 'fused_optimizer': 'fused optimizer {}',
}
WORDS = {  # values that have words of their own
    ('stage', 'train'): 'training',
    ('use_ema', 'yes'): 'EMA',
    ('use_ema', 'no'): 'no EMA',
    ('encoders', 'in_loop'): 'encoders in the loop',
    ('encoders', 'text_in_loop'): 'latents',
    ('encoders', 'none'): 'no encoders',
    ('dataset', 'streaming'): 'streamed data',
    ('channels_last', 'yes'): 'channels last',
    ('channels_last', 'no'): 'channels first',
    ('compile', 'yes'): 'compiled',
    ('compile', 'no'): 'not compiled',
    ('gradient_checkpointing', 'yes'): 'gradient checkpointing',
    ('gradient_checkpointing', 'no'): 'no gradient checkpointing',
    ('fused_optimizer', 'yes'): 'fused optimizer',
    ('fused_optimizer', 'no'): 'optimizer not fused',
}


def draw(path: str, rows: pd.DataFrame, training_images: int, as_ladder: bool) -> None:
    """Writes the picture of the rows of a report: bars of images per second, or days and efficiency against GPUs where
    a setting was measured on several numbers of them.

    Args:
        rows: of all tables, as `with_figures` returns them; an encoding is left out.
        as_ladder: a bar for each record, however many GPUs it ran on.

    Raises ValueError if nothing can be drawn or the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError('--figure needs matplotlib: pip install matplotlib') from None
    trainings = rows[rows['stage'] != 'encode']
    if not (trainings['status'] == 'complete').any():
        raise ValueError('--figure: no complete record to draw; give records of training')
    figure = Figure(layout='constrained')
    if not as_ladder and has_several_counts(trainings):
        title = f'Days to train Stable Diffusion on {training_images:,} images'
        footer = draw_scaling(figure, trainings)
    else:
        title = 'Images per second in training Stable Diffusion'
        footer = draw_ladder(figure, trainings, training_images)
    if len(trainings) < len(rows):
        footer.append(f'Not drawn: {len(rows) - len(trainings)} of encoding.')
    wrapped = [line for sentence in footer for line in textwrap.wrap(sentence, FOOTER_CHARACTERS)]
    figure.suptitle(title, x=0.01, ha='left', fontsize=14, weight='bold')
    figure.supxlabel(without_formulas('\n'.join(wrapped)), x=0.01, ha='left', fontsize=9, color='0.35')
    height = figure.get_figheight() + 0.17 * len(wrapped)
    figure.set_size_inches(WIDTH_INCHES, height)
    try:
        figure.savefig(path, dpi=160)
    except OSError as error:
        raise ValueError(f'--figure {path} cannot be written: {error.strerror}; name another file') from None
    except ValueError as error:
        raise ValueError(f'--figure {path}: {error}') from None


def has_several_counts(rows: pd.DataFrame) -> bool:
    """Whether any setting is complete on two numbers of GPUs or more."""
    complete = rows[rows['status'] == 'complete']
    return bool((complete.groupby(list(SETTINGS))['num_devices'].nunique() > 1).any())


def draw_ladder(figure, rows: pd.DataFrame, training_images: int) -> list[str]:
    """A bar for each row, in their order from the top; returns the sentences below the picture."""
    sentences = sentences_on(rows)
    if differing_settings(rows):
        sentences.append('The first bar names its settings, and each other one what differs from the first.')
    if len(rows) > MOST_BARS:
        sentences.append(f'Not drawn: the last {len(rows) - MOST_BARS} records.')
        rows = rows.head(MOST_BARS)
    if len(rows) == 1:
        row = rows.iloc[0]
        sentences.append(f'At this speed {training_images:,} images take {printed_figure("days", row["days"])} days.')

    labels = [wrapped_label(label) for label in labels_of_records(rows)]
    texts = [text_of_bar(row, rows['measured'].sum()) for _, row in rows.iterrows()]
    axes = figure.add_subplot(xlabel='images/s')
    draw_bars(axes, list(range(len(rows))), rows['images_per_sec'].fillna(0), texts, bar_styles(rows, COLORS[0]))
    axes.set_yticks(range(len(rows)), labels, fontsize=10)
    axes.invert_yaxis()

    most_label_characters = max(len(line) for label in labels for line in label.split('\n'))
    width = WIDTH_INCHES - most_label_characters * INCHES_PER_CHARACTER - 0.5
    make_room_for_texts(axes, rows['images_per_sec'].fillna(0), texts, width)
    most_lines = max(label.count('\n') + 1 for label in labels)
    figure.set_figheight(1.4 + len(rows) * (INCHES_PER_BAR + 0.14 * (most_lines - 1)))
    return sentences


def draw_scaling(figure, rows: pd.DataFrame) -> list[str]:
    """Days on the left and efficiency on the right, a bar for each number of GPUs and setting, the GPUs from the top;
    returns the sentences below the picture."""
    sentences = [*sentences_on(rows[rows['status'] == 'complete']),
                 'Efficiency: images/s per GPU, over those of the same setting on the fewest GPUs measured.']
    not_complete = rows.loc[rows['status'] != 'complete', 'status'].value_counts()
    if len(not_complete):
        runs = ', '.join(f'{count} {status}' for status, count in not_complete.items())
        sentences.append(f'Not drawn, since not complete: {runs}.')
    rows = rows[rows['status'] == 'complete']
    settings = rows.groupby(list(SETTINGS), sort=False).ngroup()  # the number of each row's setting
    rows = rows.assign(setting=settings).sort_values(['num_devices', 'setting'])
    if len(rows) > MOST_BARS:
        sentences.append(f'Not drawn: the {len(rows) - MOST_BARS} rows on the most GPUs.')
        rows = rows.head(MOST_BARS)

    positions = positions_in_groups(rows['num_devices'])
    colors = [COLORS[setting % len(COLORS)] for setting in rows['setting']]
    days_axes, efficiency_axes = figure.subplots(1, 2, sharey=True)
    panels = ((days_axes, 'days', rows['days']), (efficiency_axes, 'scaling_efficiency', rows['scaling_efficiency']))
    for axes, key, values in panels:
        texts = [printed_figure(key, value) or 'not measured' for value in values]
        draw_bars(axes, positions, values.fillna(0), texts, bar_styles(rows, colors))
        make_room_for_texts(axes, values.fillna(0), texts, (WIDTH_INCHES - 1.2) / 2)
    days_axes.set_xlabel('days')
    efficiency_axes.set_xlabel('scaling efficiency')
    efficiency_axes.axvline(1, color='0.65', lw=0.8, zorder=0)
    efficiency_axes.xaxis.set_major_formatter(lambda share, _: f'{share:.0%}')
    centers = pd.Series(positions).groupby(list(rows['num_devices'])).mean()
    days_axes.set_yticks(centers, [in_gpus(count) for count in centers.index])
    days_axes.invert_yaxis()
    add_legend(figure, rows, colors)
    figure.set_figheight(1.6 + 0.24 * (max(positions) + 1))
    return sentences


def draw_bars(axes, positions: list[float], values: pd.Series, texts: list[str], styles: list[dict]) -> None:
    """Horizontal bars from 0, each with its text behind its end."""
    for position, value, text, style in zip(positions, values, texts, styles, strict=True):
        axes.barh(position, value, height=0.72, **style)
        axes.annotate(without_formulas(text), (value, position), (4, 0), textcoords='offset points', va='center',
                      fontsize=9)
    axes.tick_params(axis='y', length=0)
    axes.spines[['top', 'right']].set_visible(False)


def bar_styles(rows: pd.DataFrame, colors: str | list[str]) -> list[dict]:
    """Filled for what was measured, hollow for what was extrapolated, pale for a run that did not end."""
    if isinstance(colors, str):
        colors = [colors for _ in range(len(rows))]
    styles = []
    for color, measured, status in zip(colors, rows['measured'], rows['status'], strict=True):
        style = {'facecolor': color, 'edgecolor': color}
        if status != 'complete':
            style['alpha'] = 0.35
        elif not measured:
            style['facecolor'] = 'none'
        styles.append(style)
    return styles


def make_room_for_texts(axes, values: pd.Series, texts: list[str], width: float) -> None:
    """Ends the axis where the last of the texts behind the bars ends; `width` is that of the axes in inches."""
    ends = [values.max() * 1.05]
    for value, text in zip(values, texts, strict=True):
        share_of_text = min(0.8, (len(text) + 2) * INCHES_PER_CHARACTER / width)
        ends.append(value / (1 - share_of_text))
    axes.set_xlim(0, max(ends))


def add_legend(figure, rows: pd.DataFrame, colors: list[str]) -> None:
    """The settings and their colors, below the title; nothing for a single setting."""
    from matplotlib.patches import Patch
    firsts = rows.assign(color=colors).drop_duplicates('setting').sort_values('setting')
    if len(firsts) == 1:
        return
    labels = [without_formulas(label) for label in labels_of_settings(firsts)]
    handles = [Patch(color=color) for color in firsts['color']]
    figure.legend(handles, labels, loc='outside upper left', frameon=False, fontsize=10)


def positions_in_groups(counts: pd.Series) -> list[float]:
    """Positions one apart, with a gap wherever the count changes."""
    new_group = counts.ne(counts.shift()).cumsum()
    return [index + 0.6 * group for index, group in enumerate(new_group - 1)]


def text_of_bar(row: pd.Series, num_measured: int) -> str:
    """What stands behind a bar: its images/s, how many times the first's they are, and why it was not measured."""
    if pd.isna(row['images_per_sec']):
        return textwrap.shorten(row['notes'] or row['status'], 60, placeholder=' …')
    text = printed_figure('images_per_sec', row['images_per_sec'])
    if num_measured > 1 and row['measured']:
        text += f'   {printed_figure("speed_over_first", row["speed_over_first"])}'
    if row['status'] != 'complete':
        text += f', {row["status"]}'
    elif not row['measured']:
        text += ', extrapolated'
    return text


def sentences_on(rows: pd.DataFrame) -> list[str]:
    """What all rows have in common, and what a bar that is not filled means."""
    differing = differing_settings(rows)
    packages = versions_in_all(rows)
    first = rows.iloc[0].copy()
    first['versions'] = ', '.join(packages)
    common = [words_of_setting(key, first[key]) for key in SETTINGS
              if first[key] and (key == 'versions' or key not in differing)]
    if rows['num_devices'].nunique() == 1:
        common.append(in_gpus(first['num_devices']))
    sentences = [f'{", ".join(common)}.']
    complete = rows['status'] == 'complete'
    if (complete & ~rows['measured']).any():
        sentences.append('Hollow bars are extrapolated, not measured.')
    if (~complete & rows['images_per_sec'].notna()).any():
        sentences.append('Pale bars are runs that did not end.')
    return sentences


def labels_of_records(rows: pd.DataFrame) -> list[str]:
    """The setting of each row in words, with its GPUs where they differ or nothing else does."""
    labels = labels_of_settings(rows)
    if rows['num_devices'].nunique() == 1 and any(labels):
        return labels
    return [', '.join(part for part in (label, in_gpus(count)) if part)
            for label, count in zip(labels, rows['num_devices'], strict=True)]


def labels_of_settings(rows: pd.DataFrame) -> list[str]:
    """In words, what the first row states of the settings that differ, and of each other row what differs from that."""
    differing = differing_settings(rows)
    packages = versions_in_all(rows)
    rows = rows.assign(versions=rows['versions'].map(lambda text: without_packages(text, packages)))
    first = rows.iloc[0]
    stated = [words_of_setting(key, first[key]) for key in differing if first[key]]
    label_of_first = ', '.join(stated) or ', '.join(words_of_setting(key, '') for key in differing)
    labels = []
    for _, row in rows.iterrows():
        changed = [words_of_setting(key, row[key]) for key in differing if row[key] != first[key]]
        labels.append(', '.join(changed) or label_of_first)
    return labels


def words_of_setting(key: str, value: str) -> str:
    """A setting as one says it: 'microbatch 16', 'compiled', 'no EMA'."""
    if not value:
        return f'{key} not stated'
    if (key, value) in WORDS:
        return WORDS[key, value]
    return TEMPLATES.get(key, '{}').format(value)


def in_gpus(count: int) -> str:
    if count == 1:
        return '1 GPU'
    return f'{count} GPUs'


def wrapped_label(label: str) -> str:
    """A label in at most three lines."""
    lines = textwrap.wrap(label, LABEL_CHARACTERS, max_lines=3, placeholder=' …')
    return without_formulas('\n'.join(lines))


def without_formulas(text: str) -> str:
    """The text for matplotlib, which takes what stands between dollars for a formula."""
    return text.replace('$', r'\$')
