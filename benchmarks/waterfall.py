"""Draw the waterfall chart for benchmarks/savings.py."""
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.patches import Patch

PUBLISHED = '#1f3b73'
FORECAST = '#6aa8e0'
SAVED = '#e3e8f0'
ADDED = '#d9730d'
TEXT = 15  # points; the page shows the chart at half its size


def draw(path: str, rows: pd.DataFrame) -> None:
    """Write a chart with a bar for each step: the cost of the training after the step, and in pale what the step saves.

    Args:
        path: file of the chart.
        rows: the steps. The first two are published, and all others are forecasts.
    """
    # Draw the bars, each with its cost and the ratio to the bar above it.
    figure = Figure(figsize=(11, 2 + 0.52 * len(rows)), layout='constrained')
    axes = figure.subplots()
    first, last = rows['dollars'].iloc[[0, -1]]
    before = first
    for position, row in rows.iterrows():
        after = row['dollars']
        text = f' \\${after:,.0f}'
        if after < before:
            text += f'    {before / after:.2f} times less'
        elif after > before:
            text += f'    {after / before:.2f} times more'
        if row['measured (forecast)']:
            text += f' ({row["measured (forecast)"].split()[0]} measured on an H100)'
        axes.barh(position, max(before, after), color=ADDED if after > before else SAVED, height=0.7)
        axes.barh(position, min(before, after), color=PUBLISHED if position < 2 else FORECAST, height=0.7)
        weight = 'bold' if position in (0, len(rows) - 1) else 'normal'
        axes.text(max(before, after), position, text, va='center', fontsize=TEXT, fontweight=weight)
        before = after

    # Label the bars with the steps, and hide the axes.
    axes.set_yticks(rows.index, rows['step'].str.replace('$', r'\$'), fontsize=TEXT)
    axes.tick_params(left=False, bottom=False, labelbottom=False)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.7 * first)
    axes.spines[:].set_visible(False)
    title = (f'Training Stable Diffusion 2 from scratch:\n\\${first:,.0f} in 2022, \\${last:,.0f} by forecast in 2026, '
             f'{first / last:.0f} times less')
    figure.suptitle(title, x=0.01, ha='left', fontsize=TEXT + 4, fontweight='bold')
    kinds = {'published': PUBLISHED, 'forecast': FORECAST, 'saved by the step': SAVED, 'added by the price': ADDED}
    figure.legend(handles=[Patch(color=color, label=label) for label, color in kinds.items()], ncols=4, frameon=False,
                  loc='outside lower left', fontsize=TEXT)
    figure.savefig(path, dpi=140)
