"""tests/breaks.py: each break still finds what it breaks."""
import pytest

from tests.breaks import BREAKS, text_with
from tests.runs import ROOT


@pytest.mark.parametrize('name', BREAKS)
def test_a_break_finds_its_lines_and_leaves_python(name):
    broken = BREAKS[name]
    compile(text_with(broken), broken.file, 'exec')
    assert (ROOT / broken.test).is_file()
