"""Claims about the page of report.py --html, in the file and in Chromium without a network."""
import csv
import json
import re
import sys
import xml.etree.ElementTree as ElementTree

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


def body_of(path) -> str:
    """Return the HTML of a page's body, without the style and the library of its tables."""
    return path.read_text().partition('<main>')[2].partition('</footer>')[0]


def hovers_of(body: str) -> list[str]:
    """Return the tooltips of all points in the figures."""
    found = []
    for figure in re.findall('<svg .*?</svg>', body, re.DOTALL):
        found += [title.text for title in ElementTree.fromstring(figure).iter('{http://www.w3.org/2000/svg}title')]
    return found


def test_without_itables_one_line_says_how_to_install_it(tmp_path, monkeypatch, capfd):
    monkeypatch.setitem(sys.modules, 'itables', None)
    line = one_error_line([str(PUBLISHED), '--html', str(tmp_path / 'page.html')], capfd, report.main)
    assert 'an HTML page needs itables' in line and 'pip install itables' in line


def test_markup_in_a_record_stays_text_on_the_page_and_in_its_figures(page):
    path = page(H200, DOUBTFUL, FAILED, H200 | {'device': f'NVIDIA {HTML}', 'program': 'other'})
    assert '<script>alert' not in path.read_text() and '<img' not in path.read_text()
    assert HTML in ''.join(ElementTree.fromstring(re.search('<svg .*?</svg>', body_of(path), re.DOTALL)[0]).itertext())
    assert path.read_text().count('<script') == 1


def test_a_point_shows_what_was_measured(page):
    trained = TRAINED | {'learning_rate': 1e-3, 'eval_loss': 0.25, 'evaluations': [[100, 0.5], [200, 0.25]]}
    hovers = hovers_of(body_of(page(trained)))
    assert any(hover.endswith('\nimages seen 200\neval loss 0.2500\ndollars $2.00\n2026-01-02') for hover in hovers)


def test_a_point_of_repeated_trainings_has_the_days_and_dollars_of_their_median_speed(page):
    trainings = [TRAINED | {'images_per_sec': speed, 'eval_loss': speed / 10_000} for speed in (600.0, 1000.0)]
    [hover] = hovers_of(body_of(page(*trainings)))
    days = 2_867_200_000 / 800 / 86_400
    assert f'days {days:.2f}\nimages/s 800.0\ndollars ${days * 24 * 8 * 2:,.0f}\n' in hover


@pytest.mark.long
@pytest.mark.skipif(CHROMIUM is None, reason='needs Chromium: apt-get install chromium')
def test_in_chromium_the_page_requests_nothing_and_its_tables_sort_and_filter(page, tmp_path):
    pytest.importorskip('websockets', reason='needs websockets: pip install websockets')
    path = page(PUBLISHED, H200, DOUBTFUL, FAILED)
    with open(PUBLISHED) as file:
        published = list(csv.DictReader(file))
    with browser(tmp_path / 'profile') as tab:
        tab.open(path)

        def rows(heading: str) -> list[str]:
            """Return the text in the cells of a column, in the order on the page."""
            headings = tab.run('[...document.querySelectorAll("thead th .dt-column-title")].map(x => x.textContent)')
            return tab.run('[...document.querySelectorAll("tbody tr")].map(row => '
                           f'row.cells[{headings.index(heading)}].textContent)')

        # The page shows the speeds in the records.
        assert tab.run('document.querySelectorAll("th:not([scope])").length') == 0
        speeds = [float(speed.replace(',', '')) for speed in rows('images/s') if speed]
        recorded = [float(record['images_per_sec']) for record in published]
        assert sorted(speeds) == sorted(round(speed, 1) for speed in (*recorded, 800.0, 800.0))
        doubtful = tab.run('[...document.querySelectorAll("tr.doubtful")].map(row => row.innerText)')
        assert [words in row for words, row in zip((HTML[:20], 'not reliable'), doubtful, strict=True)] == [True, True]

        # A click on a heading sorts by numbers, and a click in the list of a column filters.
        press = '[...document.querySelectorAll("{}")].find(found => found.textContent.trim() == "{}").click()'
        tab.run(press.format('thead .dt-column-title', 'images/s'))
        shown = [float(speed.replace(',', '')) for speed in rows('images/s') if speed]
        assert shown == sorted(speeds)
        tab.run('document.querySelector("thead .dtcc-button").click()')
        tab.run(press.format('.dtcc-list-buttons button', 'H200'))
        assert rows('device') == ['H200'] * 3

        # The first point of the published line has a tooltip under the mouse.
        hover = tab.run('(() => { const point = document.querySelector("use > title").parentElement;'
                        'point.scrollIntoView({block: "center"}); const box = point.getBoundingClientRect();'
                        'const found = document.elementFromPoint(box.x + box.width / 2, box.y + box.height / 2);'
                        'return found.querySelector("title").textContent })()')
        assert hover.startswith('8 x A100 40GB on images\n')
        assert hover.endswith('\ndays 258.85\nimages/s 128.2\ndollars $99,400\nmeasured')
        assert tab.requests() == [path.as_uri()]
        assert tab.console() == []
