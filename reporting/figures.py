"""Pictures of a report: the ladder of records as bars, and days and efficiency against GPUs.

matplotlib is imported here and nowhere else, once there is something to draw. It lays the pictures out.
"""

import sys
import textwrap
import warnings
from collections.abc import Iterable

import pandas as pd

from inputs.hub import SD2_BASE
from inputs.words import counted
from reporting.records import SETTINGS, settings_in_one
from reporting.tables import (
    COLUMNS,
    MEANING_OF_MARK,
    differing_settings,
    identity_that_differs,
    in_devices,
    labels_of_settings,
    marked,
    printed_figure,
    settings_in_words,
    versions_in_all,
)

COLORS = ('#1f3b73', '#d9730d', '#2a9d8f', '#9b2d5e', '#8fb339', '#7f7f7f', '#6aa8e0', '#f2b84b')  # one a setting
MOST_BARS = 60
WIDTH_INCHES = 10
LINE_INCHES = 0.18       # of a label
LABEL_CHARACTERS = 45    # of a line of a bar's label
FOOTER_CHARACTERS = 140
LEGEND_CHARACTERS = 110
MODEL_CHARACTERS = 40    # of its name in a title
MOST_LINES = 8           # of a label
STYLE = {
    'text.parse_math': False,  # a $ in a name begins no formula
    'axes.spines.top': False,
    'axes.spines.right': False,
    'ytick.major.size': 0,
    'figure.titlesize': 14,
    'figure.titleweight': 'bold',
    'legend.frameon': False,
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
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError('--figure needs matplotlib: pip install matplotlib') from None
    trainings = rows[rows['stage'] != 'encode']
    if not (trainings['status'] == 'complete').any():
        raise ValueError('--figure: no complete record to draw; give records of training')
    fonts, missing = fonts_for(trainings)
    if missing:
        print(f'warning: --figure {path} shows boxes for {missing}, which no font here has; install one that has them, '
              'such as Noto Sans CJK', file=sys.stderr)
    with matplotlib.rc_context(STYLE | {'font.sans-serif': fonts}):
        figure = Figure(layout='constrained')
        if has_several_counts(trainings) and not as_ladder:
            height, footer = draw_scaling(figure, trainings, training_images)
        else:
            height, footer = draw_ladder(figure, trainings, training_images, as_ladder)
        if len(trainings) < len(rows):
            footer.append(f'Not drawn: {counted(len(rows) - len(trainings), "row")} of encoding.')
        lines = [line for sentence in footer for line in textwrap.wrap(sentence, FOOTER_CHARACTERS)]
        figure.supxlabel('\n'.join(lines), x=0.01, ha='left', fontsize=9, color='0.35')
        figure.set_size_inches(WIDTH_INCHES, height + LINE_INCHES * len(lines))
        save(figure, path)


def save(figure, path: str, flag: str = '--figure') -> None:
    """Writes the file that a flag names. Raises ValueError if it cannot be written."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings('ignore', 'Glyph')  # a warning for each letter that no font has; one is enough
            figure.savefig(path, dpi=160)
    except OSError as error:
        raise ValueError(f'{flag} {path} cannot be written: {error.strerror}; name another file') from None
    except ValueError as error:
        raise ValueError(f'{flag} {path}: {error}') from None


def fonts_for(rows: pd.DataFrame) -> tuple[list[str], str]:
    """The font of the pictures, followed by installed ones that have the letters that it lacks; and the letters that
    none of them has."""
    from matplotlib.font_manager import findfont, fontManager, get_font
    fonts = ['DejaVu Sans']
    letters = set(''.join(rows[[*SETTINGS, 'notes']].to_numpy().ravel()))
    missing = letters - letters_of(get_font(findfont(fonts[0])))
    for entry in sorted(fontManager.ttflist, key=lambda entry: entry.name):
        if not missing:
            break
        if entry.name.startswith('Last Resort'):  # whose letters are boxes
            continue
        try:
            found = missing & letters_of(get_font(entry.fname))
        except (OSError, RuntimeError):  # it was removed since matplotlib listed it
            continue
        if found:
            fonts.append(entry.name)
            missing -= found
    return fonts, ''.join(sorted(missing))


def letters_of(font) -> set[str]:
    return {chr(code) for code in font.get_charmap()}


def has_several_counts(rows: pd.DataFrame) -> bool:
    """Whether any setting has days on two numbers of GPUs or more."""
    complete = rows[(rows['status'] == 'complete') & rows['days'].notna()]
    return bool((complete.groupby(settings_in_one(complete))['num_devices'].nunique() > 1).any())


def draw_ladder(figure, rows: pd.DataFrame, training_images: int, with_ratios: bool) -> tuple[float, list[str]]:
    """A bar for each row, in their order from the top; returns the height in inches, and the sentences below."""
    sentences = sentences_on(rows)
    days = rows['days'].iloc[0]
    if len(rows) == 1 and pd.notna(days):
        sentences.append(f'At this speed {training_images:,} images take {printed_figure("days", days)} days.')
    if len(rows) > MOST_BARS:
        sentences.append(f'Not drawn: the last {counted(len(rows) - MOST_BARS, "record")}.')
        rows = rows.head(MOST_BARS)

    labels = wrapped_apart(labels_of_bars(rows), LABEL_CHARACTERS)
    heights = pd.Series([max(2, label.count('\n') + 1.5) for label in labels])  # of a bar and its label, in lines
    centers = heights.cumsum() - heights / 2
    ratios = {printed_figure('speed_over_first', ratio) for ratio in rows['speed_over_first'][rows['measured']]}
    ratios_are_of_use = with_ratios and len(ratios) > 1

    figure.suptitle(f'Images per second in training {model_in_words(rows)}', x=0.01, ha='left')
    axes = figure.add_subplot(xlabel='images/s')
    bars = axes.barh(centers, rows['images_per_sec'].fillna(0), height=1.3)
    axes.bar_label(bars, [text_of_bar(row, ratios_are_of_use) for _, row in rows.iterrows()], padding=4, fontsize=9)
    axes.set_yticks(centers, labels)
    axes.set_ylim(heights.sum(), 0)  # the first bar on top
    axes.xaxis.set_major_formatter('{x:,g}')
    for bar, (_, row) in zip(bars, rows.iterrows(), strict=True):
        bar.set(**style_of_bar(row, COLORS[0]))
    return 0.95 + LINE_INCHES * heights.sum(), sentences


def draw_scaling(figure, rows: pd.DataFrame, training_images: int) -> tuple[float, list[str]]:
    """Days on the left and efficiency on the right, a bar for each number of GPUs and setting, the fewest GPUs on top;
    returns the height in inches, and the sentences below."""
    complete = rows[(rows['status'] == 'complete') & rows['days'].notna()]
    settings = complete.groupby(settings_in_one(complete), sort=False).ngroup()  # the number of each row's setting
    complete = complete.assign(setting=settings, place=in_devices(complete))
    complete = complete.sort_values(['num_devices', 'num_nodes', 'setting'])
    drawn = complete[complete['setting'] < len(COLORS)].head(MOST_BARS)
    drawn = drawn.assign(row=drawn['place'].ne(drawn['place'].shift()).cumsum() - 1)  # on the axis, from the top
    sentences = [*sentences_on(drawn),
                 'Efficiency: images/s per GPU, over those of the same setting on the fewest GPUs measured.']
    if len(drawn) < len(complete):
        left_out = counted(len(complete) - len(drawn), 'row')
        sentences.append(f'Not drawn: {left_out} of more than {len(COLORS)} settings or {MOST_BARS} bars; --compare '
                         'draws a bar for each record.')
    if len(complete) < len(rows):
        left_out = counted(len(rows) - len(complete), 'run')
        sentences.append(f'Not drawn: {left_out} without days: not ended, or in doubt.')

    num_settings = drawn['setting'].nunique()
    thickness = 0.8 / num_settings
    days_axes, efficiency_axes = figure.subplots(1, 2, sharey=True)
    for key, axes in (('days', days_axes), ('scaling_efficiency', efficiency_axes)):
        for number, (setting, bars_of_setting) in enumerate(drawn.groupby('setting')):
            draw_setting(axes, bars_of_setting, key, (number + 0.5) * thickness - 0.4, thickness, COLORS[setting])
        axes.set_xlabel(COLUMNS[key][0])
        axes.locator_params(axis='x', nbins=6)
    days_axes.xaxis.set_major_formatter('{x:,g}')
    efficiency_axes.xaxis.set_major_formatter(lambda share, _: f'{share:.0%}')
    days_axes.set_yticks(drawn['row'].unique(), drawn['place'].unique())
    days_axes.invert_yaxis()

    title = f'Days to train {model_in_words(drawn)} on {training_images:,} images'
    legend_lines = 0
    if num_settings == 1:
        figure.suptitle(title, x=0.01, ha='left')
    else:
        legend_lines = add_legend(figure, title, drawn)
    return 1.2 + 0.24 * (num_settings + 0.6) * (drawn['row'].max() + 1) + 0.2 * legend_lines, sentences


def draw_setting(axes, rows: pd.DataFrame, key: str, offset: float, thickness: float, color: str) -> None:
    """The bars of one setting in one panel, beside those of the others in each group."""
    bars = axes.barh(rows['row'] + offset, rows[key].fillna(0), height=0.85 * thickness)
    axes.bar_label(bars, [printed_figure(key, value) or 'not measured' for value in rows[key]], padding=4, fontsize=9)
    for bar, (_, row) in zip(bars, rows.iterrows(), strict=True):
        bar.set(**style_of_bar(row, color))


def add_legend(figure, title: str, rows: pd.DataFrame) -> int:
    """The title and below it the colors of the settings; returns how many lines these take."""
    from matplotlib.patches import Patch
    firsts = rows.drop_duplicates('setting').sort_values('setting')
    labels = wrapped_apart(labels_of_settings(firsts), LEGEND_CHARACTERS)
    handles = [Patch(color=COLORS[setting]) for setting in firsts['setting']]
    figure.legend(handles, labels, loc='outside upper left', title=title, alignment='left', borderaxespad=0.3,
                  title_fontproperties={'size': STYLE['figure.titlesize'], 'weight': STYLE['figure.titleweight']})
    return sum(label.count('\n') + 1 for label in labels)


def model_in_words(rows: pd.DataFrame) -> str:
    """What the title calls the model of all rows; a record that states none is of Stable Diffusion."""
    names = list(rows['model_name'].replace('', SD2_BASE).unique())
    if len(names) > 1:
        return f'{len(names)} models'
    if names[0] == SD2_BASE:
        return 'Stable Diffusion'
    return shortened(names[0].rstrip('/').rpartition('/')[2], MODEL_CHARACTERS)


def shortened(name: str, characters: int) -> str:
    """A name of at most so many characters."""
    if len(name) > characters:
        return f'{name[:characters]} …'
    return name


def style_of_bar(row: pd.Series, color: str) -> dict:
    """Filled for what was measured, hollow for what was extrapolated, pale for a run that did not end."""
    if row['status'] != 'complete':
        return {'facecolor': color, 'edgecolor': color, 'alpha': 0.35}
    if not row['measured']:
        return {'facecolor': 'none', 'edgecolor': color}
    return {'facecolor': color, 'edgecolor': color}


def text_of_bar(row: pd.Series, with_ratio: bool) -> str:
    """What stands behind a bar: its images/s, how many times the first's they are, and why it was not measured."""
    if pd.isna(row['images_per_sec']):
        return textwrap.shorten(row['notes'] or row['status'], 60, placeholder=' …')
    text = marked(printed_figure('images_per_sec', row['images_per_sec']), row['doubt'])
    if with_ratio and row['measured']:
        text += f'   {marked(printed_figure("speed_over_first", row["speed_over_first"]), row["doubt"])}'
    if row['status'] != 'complete':
        text += f', {row["status"]}'
    elif not row['measured']:
        text += ', extrapolated'
    return text


def sentences_on(rows: pd.DataFrame) -> list[str]:
    """What all rows have in common and is not at its default, and what a bar that is not filled means."""
    differing = differing_settings(rows)
    first = rows.iloc[0]
    common = settings_in_words(first, [key for key in SETTINGS if key not in ('stage', 'versions', *differing)])
    common += [package for package in versions_in_all(rows) if package.startswith('torch ')]
    if rows['num_devices'].nunique() == 1:
        common.append(in_devices(rows.iloc[[0]])[0])
    sentences = [f'{", ".join(common)}.']
    complete = rows['status'] == 'complete'
    if (complete & ~rows['measured']).any():
        sentences.append('Hollow bars are extrapolated, not measured.')
    if (~complete & rows['images_per_sec'].notna()).any():
        sentences.append('Pale bars are runs that no figure counts: failed, interrupted or profiled.')
    if rows['doubt'].any():
        sentences.append(MEANING_OF_MARK)
    return sentences


def labels_of_bars(rows: pd.DataFrame) -> list[str]:
    """What tells each row from the others: settings, devices, and date or commit where nothing else does."""
    labels = pd.Series(labels_of_settings(rows))
    if rows['num_devices'].nunique() > 1:
        labels = pd.Series(joined(labels, in_devices(rows)))
    for places in labels.groupby(labels).indices.values():
        alike = rows.iloc[places]
        for key in identity_that_differs(alike):
            labels.iloc[places] = joined(labels.iloc[places], alike[key])
    return [label or devices for label, devices in zip(labels, in_devices(rows), strict=True)]


def joined(labels: Iterable[str], more: Iterable[str]) -> list[str]:
    return [', '.join(filter(None, pair)) for pair in zip(labels, more, strict=True)]


def wrapped_apart(labels: list[str], characters: int) -> list[str]:
    """Labels in at most eight lines, or in as many as it takes where two of them differ only after these."""
    shortened = [wrapped(label, characters) for label in labels]
    if len(set(shortened)) < len(set(labels)):
        return [wrapped(label, characters, len(label)) for label in labels]
    return shortened


def wrapped(label: str, characters: int, most_lines: int = MOST_LINES) -> str:
    """A label in so many lines, broken between two settings, and within one only where it is longer than a line."""
    settings = [setting if len(setting) > characters else setting.replace(' ', '\u00a0')
                for setting in label.split(', ')]
    lines = []
    for line in textwrap.wrap(', '.join(settings), characters, break_long_words=False, break_on_hyphens=False):
        lines += textwrap.wrap(line, characters)  # a name that is longer than a line, at its hyphens
    if len(lines) > most_lines:
        lines = [*lines[:most_lines - 1], f'{lines[most_lines - 1]} …']
    return '\n'.join(lines)
