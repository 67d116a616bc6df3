"""docs/planning.md: the figures of its first sentence and of its example are what the report prints today."""
import shlex

import pytest

import report
from tests.runs import ROOT
from tests.test_docs import command_lines
from tests.test_report import tables

PAGE = ROOT / 'docs/planning.md'
EXAMPLE = PAGE.read_text().partition('## An example')[2]


def plans_of(command: str, capsys) -> list[dict]:
    """Return the rows of the plans that a command of the page prints."""
    report.main(shlex.split(command)[2:])
    return tables(capsys.readouterr().out)[0]


@pytest.fixture(autouse=True)
def in_this_repository(monkeypatch):
    """Commands name files in recipes/ and docs/."""
    monkeypatch.chdir(ROOT)


def test_the_example_shows_rows_of_the_plans_that_its_command_prints(capsys):
    [command] = [line for line in command_lines(PAGE) if 'docs/plan.jsonl' in line and '--max_days 10' in line]
    plans = plans_of(command, capsys)
    for row in tables(EXAMPLE)[0]:
        assert row in [{key: plan[key] for key in row} for plan in plans]


def test_the_first_sentence_has_the_cheapest_plans_on_demand(capsys):
    plans = plans_of('python report.py docs/plan.jsonl @recipes/plan.txt @recipes/prices-on-demand.txt', capsys)
    b200, h100 = ([plan for plan in plans if plan['GPUs'] == name][0] for name in ('8 x B200', '8 x H100 80GB'))
    text = ' '.join(PAGE.read_text().split())
    assert (f'{b200["days"]} days and {b200["cost"]} on 8 B200, or {h100["days"]} days and {h100["cost"]} on 8 H100.'
            in text)
    assert f'On demand, the cheapest costs {plans[0]["cost"]}' in text
