"""A page is complete, safe and self-contained; its slider moves the plan."""

import base64
import dataclasses
import json
import os
import re
import subprocess
import sys
import zlib
from collections.abc import Mapping, Sequence
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from recoup.core.graph import Graph
from recoup.core.simulation import simulate
from recoup.core.units import print_bytes
from recoup.errors import UsageError
from recoup.report.charts import frontier_chart, memory_chart
from recoup.report.composition import Known, compose
from recoup.report.findings import from_json, to_json
from recoup.report.pages import fragment, page
from tests.support.findings import (
    named_graph,
    small_findings,
    small_graph,
    small_solutions,
)

ROOT = Path(__file__).parents[2]
VOID = {"meta", "input", "link", "br", "hr", "img"}


class Reader(HTMLParser):
    """Collects tags, checks that they nest, and records every address."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str | None] = []
        self.tags: list[str] = []
        self.addresses: list[str | None] = []

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.tags.append(tag)
        self.addresses += [given[k] for k in ("src", "href") if k in given]
        if "id" in given:
            self.ids.append(given["id"])
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def read(text: str) -> Reader:
    reader = Reader()
    reader.feed(text)
    reader.close()
    assert reader.open == []
    return reader


def test_the_checker_finds_tags_that_do_not_nest():
    with pytest.raises(AssertionError):
        read("<p><b></p></b>")


def test_a_page_is_well_formed_and_loads_nothing():
    reader = read(page(small_findings()))
    assert reader.addresses == []
    assert len(set(reader.ids)) == len(reader.ids)
    assert reader.tags.count("svg") >= 2  # both charts are there without JavaScript
    assert "url(" not in page(small_findings())


NASTY = "<script>alert('x')</script>\"&`"


def test_names_are_escaped():
    known = Known(
        title=NASTY,
        environment=((NASTY, NASTY),),
        checks=((NASTY, NASTY),),
        resident=((NASTY, 5),),
        budget_bytes=9,
    )
    found = compose(named_graph(NASTY), known=known)
    for text in (page(found), fragment(found)):
        assert "<script>alert" not in text
        read(text)
    assert "&lt;script&gt;alert" in page(found)
    scripts = read(page(small_findings())).tags.count("script")
    assert read(page(found)).tags.count("script") == scripts


def test_a_chart_is_a_self_contained_file():
    nasty = compose(named_graph(NASTY), known=Known(title=NASTY))
    for found in (small_findings(), nasty):
        for chart in (memory_chart(found), frontier_chart(found)):
            root = ElementTree.fromstring(chart.svg())
            assert root.tag == "{http://www.w3.org/2000/svg}svg"


def data_in(text: str) -> str:
    """Return the findings that a page carries, as JSON."""
    (packed,) = re.findall(r'id="data">([^<]*)<', text)
    return zlib.decompress(base64.b64decode(packed)).decode()


def test_a_page_carries_its_findings():
    found = small_findings()
    assert from_json(data_in(page(found))) == found


def test_a_page_of_a_huge_step_carries_only_the_main_plans(monkeypatch):
    found = small_findings()
    monkeypatch.setattr("recoup.report.pages.MOST_DATA_BYTES", 1000)
    carried = from_json(data_in(page(found)))
    assert carried.plan == found.plan
    assert carried.plans[-1] == found.plans[-1]
    assert not any(view.allocations for view in carried.plans[1:-1])
    costs = [(view.peak_bytes, view.seconds) for view in found.plans]
    assert [(view.peak_bytes, view.seconds) for view in carried.plans] == costs


def test_findings_round_trip_through_a_file():
    found = small_findings()
    assert from_json(to_json(found)) == found


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"chosen": 99}, "chosen is 99"),
        ({"plans": 3}, "plans is 3"),
        ({"budget_bytes": True}, "budget_bytes is True"),
        ({"title": None}, "title is None"),
        ({"version": 7}, "'recoup findings' of version 7"),
        ({"version": 1}, "'recoup findings' of version 1"),
        ({"more": 1}, "findings has an unknown field, 'more'"),
        ({"environment": [["a"]]}, "environment is ['a']"),
        ({"budget_bytes": 10**400}, "budget_bytes is 1000"),
        ({"plain_peak_bytes": -5}, "plain_peak_bytes is -5"),
        ({"plain_seconds": float("inf")}, "plain_seconds is inf"),
        ({"measured_seconds": float("nan")}, "measured_seconds is nan"),
        ({"plain_seconds": 10**400}, "plain_seconds is 1000"),
        ({"title": "\ud800"}, r"title is '\ud800'"),
        ({"title": "\x1b[2J"}, r"title is '\x1b[2J'"),
        ({"environment": [["a", "b\nc"]]}, r"environment is 'b\nc'"),
    ],
)
def test_a_damaged_file_is_named(change, said):
    data = {**json.loads(to_json(small_findings())), **change}
    with pytest.raises(ValueError, match="file of findings") as caught:
        from_json(json.dumps(data))
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("column", "value", "said"),
    [
        ("category", 9, "an allocation is"),
        ("bytes", -1, "bytes is -1"),
        ("last", 10**6, "an allocation is"),
        ("part", 10**6, "an allocation is"),
        ("part", "0", "part is '0'"),
        ("maker", -(10**400), "maker is -1000"),
    ],
)
def test_a_damaged_allocation_is_named(column, value, said):
    data = json.loads(to_json(small_findings()))
    data["plans"]["allocations"][0][column][0] = value
    with pytest.raises(UsageError, match="file of findings") as caught:
        from_json(json.dumps(data))
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda data: data["step"]["moments"]["operator"].__setitem__(0, 999),
            "moment",
        ),
        (lambda data: data["step"]["phases"][0].__setitem__(1, 10**6), "forward is"),
        (lambda data: data["plans"]["costs"][0].clear(), "costs is"),
        (lambda data: data["plans"]["peak_moment"].__setitem__(0, 10**6), "peak_mom"),
    ],
)
def test_a_number_that_refers_to_nothing_is_named(change, said):
    data = json.loads(to_json(small_findings()))
    change(data)
    with pytest.raises(UsageError, match=f"file of findings is damaged.*{said}"):
        from_json(json.dumps(data))


def test_columns_of_different_lengths_are_refused():
    data = json.loads(to_json(small_findings()))
    data["step"]["moments"]["part"].pop()
    with pytest.raises(UsageError, match="the columns of moments is"):
        from_json(json.dumps(data))


def test_findings_without_a_measurement_or_plans_are_shown():
    found = compose(named_graph("aten.mm"))
    assert "smallest budget" in page(found)
    slow = dataclasses.replace(found, plain_seconds=0.0)
    read(page(slow))
    read(page(compose(Graph((), 0, (), (), (), (), ()))))


# The page in Chromium, where `PyQt6-WebEngine` is installed.


def browse(
    path: Path, actions: Sequence[Mapping[str, object]], *more: str
) -> dict[str, list]:
    # `find_spec`, not an import: the browser runs in its own process.
    from importlib.util import find_spec

    if find_spec("PyQt6") is None or find_spec("PyQt6.QtWebEngineCore") is None:
        pytest.skip("PyQt6-WebEngine is not installed: `pip install recoup[browser]`")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "tests.support.browser"),
            *(str(path), json.dumps(actions), *more),
        ],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    if "cannot open shared object file" in done.stderr:
        pytest.skip("this machine lacks a library that Chromium needs")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture
def page_file(tmp_path):
    path = tmp_path / "page.html"
    path.write_text(page(small_findings()), encoding="utf-8")
    return path


READY = {"await": "document.documentElement.dataset.ready === 'yes'"}


def text_of(selector: str) -> str:
    return f"document.querySelector({selector!r}).textContent"


# Where a moment is on the screen, by the chart's own scale: 76 at the left of 12.
AT = """(m => {
  const chart = document.querySelector('#memory svg');
  chart.scrollIntoView({block: 'center'});
  const box = chart.getBoundingClientRect(), count = %d;
  return [box.left + 76 + (m + 0.5) / count * (box.width - 88), box.top + 150];
})(%d)"""


@pytest.mark.slow
def test_in_a_browser_the_slider_moves_the_plan(page_file):
    found = small_findings()
    last = len(found.plans) - 1
    shown = "document.querySelector('[aria-current]').dataset.plan"
    said = text_of(".slider output")
    seen = browse(
        page_file,
        [
            READY,
            {"script": shown},
            {"script": "document.querySelector('.slider input').focus(); ''"},
            {"key": "End"},
            {"script": shown},
            {"script": said},
            {"key": "Left"},
            {"script": shown},
            {"script": "document.querySelector('a[data-plan=\"0\"]').focus(); ''"},
            {"key": "Return"},
            {"script": shown},
            {"script": text_of("#apply code")},
        ],
    )
    assert seen["messages"] == []
    assert seen["requests"] == []
    results = [result for result in seen["results"] if result]
    assert results[:2] == [f"{found.chosen}", f"{last}"]
    assert "100% of plain" in results[2]
    assert results[3:5] == [f"{last - 1}", "0"]
    assert "recoup.apply_plan(model, plan)" in results[5]


@pytest.mark.slow
def test_in_a_browser_every_moment_shows_the_bytes_in_use(page_file):
    found = small_findings()
    graph = small_graph()
    expected = simulate(graph, small_solutions()[0].segments).bytes_at
    count = graph.moments
    where = text_of("#where")
    keys: list[Mapping[str, object]] = [
        {"script": "document.querySelector('#memory svg').focus(); ''"}
    ]
    for key in ("Home", "Right", "Right", "End"):
        keys += [{"key": key}, {"script": text_of("#place")}, {"script": where}]
    middle = AT % (count, count // 2)
    (place,) = browse(page_file, [READY, {"script": middle}])["results"]
    pointed = [{"point": place}, {"script": text_of("#place")}, {"script": where}]
    first = browse(page_file, [READY, {"script": middle}, *pointed, *keys])
    assert first["messages"] == []
    results = [r for r in first["results"] if isinstance(r, str) and r]
    by_moment = zip(results[::2], results[1::2], strict=True)
    moments = (count // 2, 0, 1, 2, count - 1)
    for (place, said), moment in zip(by_moment, moments, strict=True):
        assert f"{moment + 1} of {count}" in place
        assert f"{print_bytes(expected[moment])} in use" in said
    part = found.step.parts[found.step.moments[0].part]
    assert (part.module or part.block) in results[3]


@pytest.mark.slow
def test_in_a_browser_the_chart_zooms_pans_and_overlays_plain(page_file):
    count = small_graph().moments
    chart = "document.querySelector('#memory svg')"
    pinned = text_of("#place")
    (x, y) = browse(page_file, [READY, {"script": AT % (count, count // 2)}])[
        "results"
    ][0]
    labels = f"[...{chart}.querySelectorAll('text')].map(t => t.textContent).join()"
    seen = browse(
        page_file,
        [
            READY,
            {"script": AT % (count, count // 2)},
            *({"wheel": [x, y, 1]} for _ in range(12)),
            {"point": [x + 1, y]},
            {"script": pinned},
            {"drag": [x, y, x - 300, y]},
            {"point": [x, y + 1]},
            {"script": pinned},
            {"script": f"{chart}.focus(); ''"},
            {"key": "0"},
            {"script": labels},
            {"script": f"{chart}.querySelectorAll('.overlay').length"},
            {"key": "O"},
            {"script": f"{chart}.querySelectorAll('.overlay').length"},
        ],
    )
    assert seen["messages"] == []
    _, zoomed, panned, _, whole, without, laid = seen["results"]
    middle, moved = (int(re.findall(r"(\d+) of", t)[0]) for t in (zoomed, panned))
    assert middle == count // 2 + 1  # what was under the mouse still is
    assert moved > middle
    assert "forward" in whole
    assert (without, laid) == (0, 1)


@pytest.mark.slow
def test_in_a_browser_blocks_fold_and_can_be_searched(page_file):
    names = "[...document.querySelectorAll('#tree .name')].map(b => b.textContent)"
    focus = "document.querySelector('#tree .name').focus(); ''"
    marks = "document.querySelectorAll('#memory .marked').length"
    seen = browse(
        page_file,
        [
            READY,
            {"script": names},
            {"script": focus},
            {"key": "Right"},
            {"script": names},
            {"key": "Down"},
            {"key": "Return"},
            {"script": marks},
            {"key": "Escape"},
            {"script": marks},
            {"key": "Slash"},
            *({"key": letter} for letter in "TANH"),
            {"script": names},
            {"script": "document.querySelector('#search').value"},
            {"script": marks},
            {"script": text_of("#tree td:nth-child(3)")},
        ],
    )
    assert seen["messages"] == []
    folded, _, opened, marked, cleared, matching, words, found, operators = seen[
        "results"
    ]
    assert folded[0] == "block 0 to block 4 (5)"
    assert opened[1:6] == [f"block {n}" for n in range(5)]
    assert (marked, cleared, found) == (1, 0, 1)
    assert words.lower() == "tanh"
    assert matching[0] == "block 0 to block 4 (5)"
    assert "the loss" not in matching
    assert operators == "5"


@pytest.mark.slow
def test_in_a_browser_the_page_fits_a_phone_dark_mode_and_print(page_file, tmp_path):
    paper = "getComputedStyle(document.body).backgroundColor"
    seen = browse(
        page_file,
        [
            READY,
            {"size": [360, 640]},
            {"script": "document.documentElement.scrollWidth <= window.innerWidth"},
            {"script": paper},
            {"save": str(tmp_path / "phone.png")},
            {"print": str(tmp_path / "page.pdf")},
        ],
        "dark",
    )
    assert seen["messages"] == []
    assert seen["results"] == [True, "rgb(18, 23, 29)"]
    assert (tmp_path / "phone.png").stat().st_size > 0
    assert (tmp_path / "page.pdf").read_bytes().startswith(b"%PDF")


@pytest.mark.slow
def test_the_browser_reports_an_error_and_a_request(tmp_path):
    path = tmp_path / "wrong.html"
    path.write_text(
        "<img src='http://127.0.0.1:9/x.png'><script>undefined_name()</script>"
    )
    seen = browse(path, [{"script": "1 + 1"}])
    assert seen["results"] == [2]
    assert "undefined_name" in seen["messages"][0]
    assert seen["requests"] == ["http://127.0.0.1:9/x.png"]
