"""tests/breaks.py: each break still finds what it breaks, and the table of tests/README.md lists them all."""
import re

import pytest

from tests.breaks import BREAKS, text_with
from tests.runs import ROOT


@pytest.mark.parametrize('name', BREAKS)
def test_a_break_finds_its_lines_and_leaves_python(name):
    broken = BREAKS[name]
    compile(text_with(broken), broken.file, 'exec')
    assert (ROOT / broken.test).is_file()


def test_the_table_lists_every_break_with_its_file_and_test():
    table = (ROOT / 'tests/README.md').read_text()
    rows = re.findall(r'^\| `(\w+)` \| (.*?) \| `(.*?)` \| `(.*?)` \|', table, re.MULTILINE)
    assert rows == [(name, broken.what, broken.file, broken.test) for name, broken in BREAKS.items()]
