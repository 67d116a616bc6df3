"""Draw the pictures of a report: days over GPUs, and scores of evaluations.

matplotlib is imported only when there is something to draw.
"""
import textwrap

import pandas as pd

from sdbench.records.read import CONDITIONS, FORECAST, MEASURED, NETWORKS, SETTINGS, VERSIONS

COLORS = ('#1f3b73', '#d9730d', '#2a9d8f', '#9b2d5e', '#8fb339', '#7f7f7f', '#6aa8e0', '#f2b84b', '#c0392b')
LINE_INCHES = 0.2  # of text
LABEL_CHARACTERS = 50  # of a value in a legend
CAPTION_CHARACTERS = 130
TITLES = {'fid': 'FID', 'clip_score': 'CLIP score', 'images_seen': 'images seen'}
PANEL_INCHES = 4.8
PANEL_CHARACTERS = 60  # of a caption below a panel
# How a legend writes a setting, where its name and its value are not enough
IN_WORDS = {'device_train_microbatch_size': 'microbatch {}', 'image_size': '{} pixels', 'input': 'on {}',
            'model_name': '{}', 'batch_size': 'batch of {}', 'use_ema': 'EMA', 'model': '{}', 'weights': '{}',
            'guidance': 'guidance {:g}', 'trained_batches': 'batch {:,.0f}'}


def draw_days(path: str, rows: pd.DataFrame, training_images: int) -> None:
    """Write a picture of days over the number of GPUs, both logarithmic, with a line for each setting.

    Points that were measured are filled. Those that were extrapolated or forecast are hollow, a forecast with its
    range where it is known. A dashed line shows what each setting would reach if its speed grew as its GPUs do.

    Args:
        path: of the picture, whose suffix is its format.
        rows: the table of trainings; those without days are left out.
        training_images: images of a training, which the days are for.

    Raises ValueError if no row has days.
    """
    from matplotlib.figure import Figure

    # a line has one setting; a forecast takes the largest microbatch, which gets smaller with more GPUs
    rows = rows[rows['days'].notna()].sort_values('num_devices', kind='stable')
    if rows.empty:
        raise ValueError(f'--figure {path}: no training in these records has days; of the model tiny, '
                         '--training_images asks for them')
    is_forecast = rows['status'] == FORECAST
    rows['device_train_microbatch_size'] = rows['device_train_microbatch_size'].mask(is_forecast, '')
    rows['setting'] = rows['setting'].mask(is_forecast, -1)
    rows['legend'] = legend_labels(rows)
    lines = rows.groupby(['setting', 'legend'], sort=False)

    # a figure with a caption
    caption = wrapped(f'All: {settings_in_common(rows)}', CAPTION_CHARACTERS)
    height = PANEL_INCHES + LINE_INCHES * (caption.count('\n') + 1)
    figure = Figure(figsize=(10, height), layout='constrained')
    figure.supxlabel(caption, x=0.01, ha='left', fontsize=9)
    axes = figure.subplots()

    # the lines, and what their marks mean
    for number, ((_, label), points) in enumerate(lines):
        draw_line(axes, points, COLORS[number % len(COLORS)], label)
    axes.plot([], [], 'o', color='black', label='measured')
    hollow = 'extrapolated, or forecast'
    if rows['images_per_sec_least'].notna().any():
        hollow += ' with its range'
    axes.plot([], [], 'o', color='black', markerfacecolor='white', label=hollow)
    axes.plot([], [], '--', color='black', linewidth=0.8, label='ideal: twice the GPUs, half the days')

    set_days_axes(axes, sorted(rows['num_devices'].unique()), training_images)
    figure.savefig(path, dpi=160)


def set_days_axes(axes, counts: list[int], training_images: int) -> None:
    """Label the axes of the picture of days, with a tick for each number of GPUs, and place its legend."""
    from matplotlib.ticker import FuncFormatter, LogLocator

    axes.set(xscale='log', yscale='log', xlabel='GPUs', ylabel=f'days for {training_images:,} images')
    axes.set_xticks(counts, counts)
    axes.minorticks_off()
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda days, _: f'{days:g}'))
    axes.grid(alpha=0.3)
    axes.spines[['top', 'right']].set_visible(False)
    axes.legend(frameon=False, fontsize=9, loc='center left', bbox_to_anchor=(1.01, 0.5))


def draw_line(axes, points: pd.DataFrame, color: str, label: str) -> None:
    """Draw a line over its GPUs with its points and, dashed, its ideal; and its label in the legend."""
    first, last = points.iloc[0], points.iloc[-1]
    if len(points) > 1:
        ends = [first['num_devices'], last['num_devices']]
        ideal = [first['days'] * first['num_devices'] / count for count in ends]
        axes.plot(ends, ideal, color=color, linestyle='--', linewidth=0.8, alpha=0.6)
    axes.plot(points['num_devices'], points['days'], color=color, linewidth=1.2)
    draw_points(axes, points, color)

    # the legend has a filled mark if anything of the line was measured
    face = color
    if (points['status'] != MEASURED).all():
        face = 'white'
    axes.plot([], [], 'o-', color=color, markerfacecolor=face, label=label)


def draw_points(axes, points: pd.DataFrame, color: str) -> None:
    """Draw the points of a line over its GPUs: filled if measured, else hollow, with the range of a forecast."""
    is_measured = points['status'] == MEASURED
    for chosen, face in ((points[is_measured], color), (points[~is_measured], 'white')):
        axes.plot(chosen['num_devices'], chosen['days'], 'o', color=color, markerfacecolor=face, zorder=3)
    for _, point in points[points['images_per_sec_least'].notna()].iterrows():
        # days are inversely proportional to the speed
        longest = point['days'] * point['images_per_sec'] / point['images_per_sec_least']
        shortest = point['days'] * point['images_per_sec'] / point['images_per_sec_most']
        axes.plot([point['num_devices']] * 2, [shortest, longest], color=color, linewidth=1.2)


def legend_labels(rows: pd.DataFrame) -> list[str]:
    """Return the words of the setting of each row, such as 'A100 40GB, microbatch 4'.

    They are its GPU, and in what the settings that rows state differ.
    """
    keys = []
    for key in SETTINGS:
        stated = rows[key].replace('', None).nunique()
        if stated > 1 and key not in ('stage', 'device'):
            keys.append(key)
    labels = []
    for _, row in rows.iterrows():
        words = [short_name(row['device'])]
        for key in keys:
            if row[key]:
                words.append(setting_in_words(key, row[key]))
        if row['status'] == FORECAST:
            words.append('forecast')
        labels.append(', '.join(words))
    return labels


def settings_in_common(rows: pd.DataFrame) -> str:
    """Return in words the settings that all rows have, but for what is off."""
    words = []
    for key in SETTINGS:
        values = set(rows[key])
        if len(values) == 1 and not values & {'', 'no'} and key not in ('stage', *VERSIONS):
            words.append(setting_in_words(key, *values))
    return ', '.join(words)


def short_name(device: str) -> str:
    """Return the name of a GPU as people say it: 'A100 40GB' for 'NVIDIA A100-SXM4-40GB'."""
    for words in ('NVIDIA ', 'GeForce ', '-SXM4', ' HBM3'):
        device = device.replace(words, '')
    return device.replace('-', ' ')


def setting_in_words(key: str, value: str) -> str:
    """Return a setting as a legend has it: 'microbatch 4', 'compile', or 'no compile'."""
    name = key.replace('_', ' ')
    if value in ('yes', 'no'):
        name = IN_WORDS.get(key, name)
        return name if value == 'yes' else f'no {name}'
    return IN_WORDS.get(key, f'{name} {{}}').format(value)


def wrapped(text: str, characters: int) -> str:
    """Wrap each line of a text at so many characters."""
    return '\n'.join(textwrap.fill(line, characters) for line in text.splitlines())


def draw_quality(path: str, rows: pd.DataFrame, caption: str) -> None:
    """Write a picture of a table of scores.

    One panel shows FID against CLIP score, a line for each checkpoint over its guidance scales. Two show FID and CLIP
    score against the images of the training, a line for each model and guidance scale. Scores that differ in one of
    CONDITIONS, or in the columns of their NETWORKS, are never on one line. The notes of the scores stand below.

    Args:
        path: of the picture, whose suffix is its format.
        rows: the table.
        caption: text below the panels.

    Raises ValueError if there is nothing to draw.
    """
    from matplotlib.figure import Figure

    # which panels have scores: x, y, and the columns that a line agrees in
    panels = [('clip_score', 'fid', [*CONDITIONS, *NETWORKS['fid'], *NETWORKS['clip_score'], 'trained_batches']),
              ('images_seen', 'fid', [*CONDITIONS, *NETWORKS['fid'], 'guidance']),
              ('images_seen', 'clip_score', [*CONDITIONS, *NETWORKS['clip_score'], 'guidance'])]
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
        label = []
        for key in named:
            words = setting_in_words(key, points[key].iloc[0])
            label.append(textwrap.shorten(words, LABEL_CHARACTERS, placeholder=' ...'))
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
