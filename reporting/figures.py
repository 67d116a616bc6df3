"""Pictures of a report: the ladder of records as bars, and days and efficiency against GPUs.

matplotlib is imported here and nowhere else, once there is something to draw.
"""

import textwrap

import pandas as pd

from reporting.records import SETTINGS
from reporting.tables import COLUMNS, differing_settings, printed_figure, versions_in_all, without_packages

COLORS = ('#1f3b73', '#d9730d', '#2a9d8f', '#9b2d5e', '#8fb339', '#7f7f7f', '#6aa8e0', '#f2b84b')  # one a setting
MOST_BARS = 60
WIDTH_INCHES = 10
INCHES_PER_CHARACTER = 0.085  # of the labels, rather too much than too little
LABEL_CHARACTERS = 36         # of a line of a bar's label
FOOTER_CHARACTERS = 140
LEGEND_CHARACTERS = 110
TITLE_STYLE = {'size': 14, 'weight': 'bold'}

TEMPLATES = {  # how the value of a setting reads in words; a setting that is not here is its value alone
    'image_size': '{} px', 'stage': 'stage {}', 'batch_size': 'batch {}',
    'device_train_microbatch_size': 'microbatch {}', 'use_ema': 'EMA {}', 'encoders': 'encoders {}',
    'encoder_precision': 'encoders in {}', 'dataset': '{} data', 'num_workers': '{} workers',
    'channels_last': 'channels last {}', 'compile': 'compile {}', 'attention': '{} attention',
    'gradient_checkpointing': 'gradient checkpointing {}', 'fused_optimizer': 'fused optimizer {}',
    'half_precision_norms': 'norms in half precision {}', 'channels_last_norms': 'channels-last norms {}',
    'cast_weights_once': 'weights cast once {}', 'cudnn_benchmark': 'cuDNN benchmark {}',
    'compile_blocks': 'compiled in blocks {}', 'allreduce_precision': 'gradients sent in {}',
    'clip_grad_norm': 'gradients clipped to {}', 'ema_start': 'EMA from {} on',
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
    ('half_precision_norms', 'yes'): 'norms in half precision',
    ('half_precision_norms', 'no'): 'norms in float32',
    ('channels_last_norms', 'yes'): 'channels-last norms',
    ('channels_last_norms', 'no'): "torch's group norms",
    ('cast_weights_once', 'yes'): 'weights cast once a batch',
    ('cast_weights_once', 'no'): 'weights cast for each microbatch',
    ('cudnn_benchmark', 'yes'): 'cuDNN benchmark',
    ('cudnn_benchmark', 'no'): 'no cuDNN benchmark',
    ('compile_blocks', 'yes'): 'block by block',
    ('compile_blocks', 'no'): 'not block by block',
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
    if has_several_counts(trainings) and not as_ladder:
        footer = draw_scaling(figure, trainings, training_images)
    else:
        footer = draw_ladder(figure, trainings, training_images)
    if len(trainings) < len(rows):
        footer.append(f'Not drawn: {len(rows) - len(trainings)} rows of encoding.')
    lines = [line for sentence in footer for line in textwrap.wrap(sentence, FOOTER_CHARACTERS)]
    figure.supxlabel(without_formulas('\n'.join(lines)), x=0.01, ha='left', fontsize=9, color='0.35')
    figure.set_size_inches(WIDTH_INCHES, figure.get_figheight() + 0.16 * len(lines))
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
    if len(rows) == 1:
        row = rows.iloc[0]
        sentences.append(f'At this speed {training_images:,} images take {printed_figure("days", row["days"])} days.')
    if len(rows) > MOST_BARS:
        sentences.append(f'Not drawn: the last {len(rows) - MOST_BARS} records.')
        rows = rows.head(MOST_BARS)

    labels = [lines_of_label(label, LABEL_CHARACTERS) for label in labels_of_bars(rows)]
    heights = [max(1, 0.5 * len(lines)) for lines in labels]  # of a bar and its label, in bars of one line
    bottoms = pd.Series(heights).cumsum()
    positions = list(bottoms - pd.Series(heights) / 2)
    speeds = rows['images_per_sec'].fillna(0)
    texts = [text_of_bar(row, rows['measured'].sum()) for _, row in rows.iterrows()]

    figure.suptitle('Images per second in training Stable Diffusion', x=0.01, ha='left', **TITLE_STYLE)
    axes = figure.add_subplot(xlabel='images/s')
    draw_bars(axes, positions, speeds, texts, bar_styles(rows, [COLORS[0] for _ in positions]))
    axes.set_yticks(positions, [without_formulas('\n'.join(lines)) for lines in labels], fontsize=10)
    axes.set_ylim(bottoms.iloc[-1], 0)  # the first bar on top
    most_characters = max(len(line) for lines in labels for line in lines)
    make_room_for_texts(axes, speeds, texts, WIDTH_INCHES - most_characters * INCHES_PER_CHARACTER - 0.5)
    figure.set_figheight(0.95 + 0.36 * sum(heights))
    return sentences


def draw_scaling(figure, rows: pd.DataFrame, training_images: int) -> list[str]:
    """Days on the left and efficiency on the right, a bar for each number of GPUs and setting, the fewest GPUs on top;
    returns the sentences below the picture."""
    complete = rows[rows['status'] == 'complete']
    settings = complete.groupby(list(SETTINGS), sort=False).ngroup()  # the number of each row's setting
    complete = complete.assign(setting=settings).sort_values(['num_devices', 'setting'])
    drawn = complete[complete['setting'] < len(COLORS)].head(MOST_BARS)
    sentences = [*sentences_on(drawn),
                 'Efficiency: images/s per GPU, over those of the same setting on the fewest GPUs measured.']
    if len(drawn) < len(complete):
        sentences.append(f'Not drawn: {len(complete) - len(drawn)} rows of more than {len(COLORS)} settings or '
                         f'{MOST_BARS} bars; --compare draws a bar for each record.')
    if len(complete) < len(rows):
        sentences.append(f'Not drawn: {len(rows) - len(complete)} runs that did not end.')

    positions = positions_in_groups(drawn['num_devices'])
    styles = bar_styles(drawn, [COLORS[setting] for setting in drawn['setting']])
    axes_of = dict(zip(('days', 'scaling_efficiency'), figure.subplots(1, 2, sharey=True), strict=True))
    for key, axes in axes_of.items():
        values = drawn[key].fillna(0)
        texts = [printed_figure(key, value) or 'not measured' for value in drawn[key]]
        draw_bars(axes, positions, values, texts, styles)
        make_room_for_texts(axes, values, texts, (WIDTH_INCHES - 1.4) / 2)
        axes.set_xlabel(COLUMNS[key][0])
    axes_of['scaling_efficiency'].xaxis.set_major_formatter(lambda share, _: f'{share:.0%}')
    centers = pd.Series(positions).groupby(list(drawn['num_devices'])).mean()
    axes_of['days'].set_yticks(centers, [in_gpus(count) for count in centers.index])
    axes_of['days'].invert_yaxis()
    figure.get_layout_engine().set(wspace=0.06)  # or the last tick of one panel runs into the first of the other
    legend_lines = add_title_and_legend(figure, f'Days to train Stable Diffusion on {training_images:,} images', drawn)
    figure.set_figheight(1.2 + 0.24 * (positions[-1] + 1) + 0.2 * legend_lines)
    return sentences


def draw_bars(axes, positions: list[float], values: pd.Series, texts: list[str], styles: list[dict]) -> None:
    """Horizontal bars from 0, each with its text behind its end."""
    for position, value, text, style in zip(positions, values, texts, styles, strict=True):
        axes.barh(position, value, height=0.72, **style)
        axes.annotate(without_formulas(text), (value, position), (4, 0), textcoords='offset points', va='center',
                      fontsize=9)
    axes.tick_params(axis='y', length=0)
    axes.xaxis.set_major_formatter('{x:,g}')
    axes.spines[['top', 'right']].set_visible(False)


def bar_styles(rows: pd.DataFrame, colors: list[str]) -> list[dict]:
    """Filled for what was measured, hollow for what was extrapolated, pale for a run that did not end."""
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


def add_title_and_legend(figure, title: str, rows: pd.DataFrame) -> int:
    """The title and, for several settings, their colors below it; returns how many lines these take."""
    from matplotlib.patches import Patch
    firsts = rows.drop_duplicates('setting').sort_values('setting')
    if len(firsts) == 1:
        figure.suptitle(title, x=0.01, ha='left', **TITLE_STYLE)
        return 0
    labels = ['\n'.join(lines_of_label(label, LEGEND_CHARACTERS)) for label in labels_of_settings(firsts)]
    handles = [Patch(color=COLORS[setting]) for setting in firsts['setting']]
    figure.legend(handles, [without_formulas(label) for label in labels], loc='outside upper left', frameon=False,
                  title=title, title_fontproperties=TITLE_STYLE, alignment='left', borderaxespad=0.3)
    return sum(label.count('\n') + 1 for label in labels)


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
    told_apart_by = settings_that_tell_apart(rows)
    stated_by_some = [key for key in differing if key not in told_apart_by]
    if stated_by_some:
        sentences.append(f'Not named, since only some records state it: {", ".join(stated_by_some)}.')
    complete = rows['status'] == 'complete'
    if (complete & ~rows['measured']).any():
        sentences.append('Hollow bars are extrapolated, not measured.')
    if (~complete & rows['images_per_sec'].notna()).any():
        sentences.append('Pale bars are runs that did not end.')
    return sentences


def labels_of_bars(rows: pd.DataFrame) -> list[str]:
    """The setting of each row in words, with its GPUs where they differ or nothing else does."""
    labels = labels_of_settings(rows)
    if rows['num_devices'].nunique() == 1 and any(labels):
        return labels
    return [', '.join(part for part in (label, in_gpus(count)) if part)
            for label, count in zip(labels, rows['num_devices'], strict=True)]


def labels_of_settings(rows: pd.DataFrame) -> list[str]:
    """In words, what the first row states of the settings that differ, and of each other row what differs from that."""
    packages = versions_in_all(rows)
    rows = rows.assign(versions=rows['versions'].map(lambda text: without_packages(text, packages)))
    keys = settings_that_tell_apart(rows)
    first = rows.iloc[0]
    labels = []
    for _, row in rows.iterrows():
        changed = [words_of_setting(key, row[key]) for key in keys if row[key] != first[key]]
        if not changed:  # the first row, or one of the same setting
            changed = [words_of_setting(key, row[key]) for key in keys]
        labels.append(', '.join(changed))
    return labels


def lines_of_label(label: str, width: int) -> list[str]:
    """At most eight lines of `width` characters, broken between two settings and not within one."""
    unbroken = label.replace(' ', '\u00a0').replace(',\u00a0', ', ')
    lines = textwrap.wrap(unbroken, width, max_lines=8, placeholder=' …', break_on_hyphens=False)
    return [line.replace('\u00a0', ' ') for line in lines]


def settings_that_tell_apart(rows: pd.DataFrame) -> list[str]:
    """The settings that rows state differently; and those that only some rows state, if it takes them to tell the rows
    apart."""
    differing = differing_settings(rows)
    stated_differently = [key for key in differing if rows.loc[rows[key] != '', key].nunique() > 1]
    if stated_differently and rows.groupby(stated_differently).ngroups == rows.groupby(differing).ngroups:
        return stated_differently
    return differing


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


def without_formulas(text: str) -> str:
    """The text for matplotlib, which takes what stands between dollars for a formula."""
    return text.replace('$', r'\$')
