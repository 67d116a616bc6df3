"""Claims about the page of report.py --html, in the file and in Chromium without a network."""
import json
import re
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

import report
from tests.browser import CHROMIUM, browser
from tests.runs import ROOT, one_error_line

PUBLISHED = ROOT / 'published.csv'
HTML = '<script>alert("a stranger\'s")</script><img src="https://example.com/$^{$.png">'
H200 = {'device': 'NVIDIA H200', 'num_devices': 8, 'image_size': 512, 'images_per_sec': 800.0, 'program': HTML,
        'date': '2026-01-02'}
DOUBTFUL = H200 | {'num_devices': 16, 'drift': 0.5}
FAILED = H200 | {'status': 'failed', 'error': HTML, 'images_per_sec': None}
TRAINED = H200 | {'max_duration': '2ba', 'eval_remote': 'held-out', 'batch_size': 100, 'eval_batch': 2,
                  'trained_batches': 2, 'gpu_hours': 1.0}


@pytest.fixture
def page(tmp_path):
    """Return a function that calls report.py with records and flags, and returns the path of the page."""
    pytest.importorskip('itables', reason='needs itables: pip install itables')

    def page(*arguments):
        records = tmp_path / 'records.jsonl'
        records.write_text(''.join(json.dumps(record) + '\n' for record in arguments if isinstance(record, dict)))
        flags = [str(argument) for argument in arguments if not isinstance(argument, dict)]
        report.main([str(records), *flags, '--html', str(tmp_path / 'page.html')])
        return tmp_path / 'page.html'
    return page


def figures_of(path: Path) -> list[ElementTree.Element]:
    return [ElementTree.fromstring(figure) for figure in re.findall('<svg .*?</svg>', path.read_text(), re.DOTALL)]


def tooltips_of(path: Path) -> list[list[str]]:
    """Return the lines in the tooltip of each point in the figures."""
    return [title.text.splitlines() for figure in figures_of(path)
            for title in figure.iter('{http://www.w3.org/2000/svg}title')]


def test_without_itables_one_line_says_how_to_install_it(tmp_path, monkeypatch, capfd):
    monkeypatch.setitem(sys.modules, 'itables', None)
    line = one_error_line([str(PUBLISHED), '--html', str(tmp_path / 'page.html')], capfd, report.main)
    assert 'pip install itables' in line


def test_markup_in_a_record_stays_text_on_the_page_and_in_its_figures(page):
    path = page(H200, DOUBTFUL, FAILED, H200 | {'device': f'NVIDIA {HTML}', 'program': 'other'})
    text = path.read_text()
    assert '<script>alert' not in text and '<img' not in text
    assert text.count('<script') == 1
    assert HTML in ''.join(figures_of(path)[0].itertext())


def test_points_show_what_was_measured_and_for_repeated_trainings_the_days_and_dollars_of_their_median_speed(page):
    trained = TRAINED | {'learning_rate': 1e-3, 'eval_loss': 0.25, 'evaluations': [[100, 0.5], [200, 0.25]]}
    repeated = [TRAINED | {'images_per_sec': speed, 'eval_loss': speed / 10_000} for speed in (600.0, 1000.0)]
    days = 2_867_200_000 / 800 / 86_400
    for records, shown in (([trained], {'images seen 200', 'eval loss 0.2500', 'dollars $2.00', '2026-01-02'}),
                           (repeated, {f'days {days:.2f}', 'images/s 800.0', f'dollars ${days * 24 * 8 * 2:,.0f}'})):
        assert any(shown <= {*lines} for lines in tooltips_of(page(*records)))


@pytest.mark.long
@pytest.mark.skipif(CHROMIUM is None, reason='needs Chromium: apt-get install chromium')
def test_in_chromium_the_page_requests_nothing_and_its_tables_sort_and_filter(page, tmp_path):
    pytest.importorskip('websockets', reason='needs websockets: pip install websockets')
    path = page(PUBLISHED, H200, DOUBTFUL, FAILED)
    with browser(tmp_path / 'profile') as tab:
        tab.open(path)

        def column(heading: str) -> list[str]:
            """Return the text in the cells of a column, in the order on the page."""
            headings = tab.run('[...document.querySelectorAll("thead th .dt-column-title")].map(x => x.textContent)')
            return tab.run('[...document.querySelectorAll("tbody tr")].map(row => '
                           f'row.cells[{headings.index(heading)}].textContent)')

        def click(elements: str, text: str) -> None:
            tab.run(f'[...document.querySelectorAll("{elements}")].find(x => x.textContent.trim() == "{text}").click()')

        # A click on a heading sorts by numbers, and a click in the list of a column filters.
        speeds = [float(speed.replace(',', '')) for speed in column('images/s') if speed]
        click('thead .dt-column-title', 'images/s')
        assert [float(speed.replace(',', '')) for speed in column('images/s') if speed] == sorted(speeds) != speeds
        tab.run('document.querySelector("thead .dtcc-button").click()')
        click('.dtcc-list-buttons button', 'H200')
        assert column('device') == ['H200'] * 3

        # The first point of the published line has a tooltip under the mouse.
        tooltip = tab.run('(() => { const point = document.querySelector("use > title").parentElement;'
                          'point.scrollIntoView({block: "center"}); const box = point.getBoundingClientRect();'
                          'const found = document.elementFromPoint(box.x + box.width / 2, box.y + box.height / 2);'
                          'return found.querySelector("title").textContent })()')
        assert {'days 258.85', 'images/s 128.2', 'dollars $99,400'} <= {*tooltip.splitlines()}
        assert tab.requests() == [path.as_uri()]
        assert tab.console() == []
