"""A page is whole, safe and self-contained; in a browser its slider moves the plan."""

import dataclasses
import json
import os
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from recoup.errors import UsageError
from recoup.report.charts import frontier_chart, timeline_chart
from recoup.report.composition import compose
from recoup.report.files import from_json, to_json
from recoup.report.pages import fragment, page
from tests.support.findings import named_graph, small_findings

ROOT = Path(__file__).parents[2]
VOID = {"meta", "input", "link", "br", "hr", "img"}


class Reader(HTMLParser):
    """Collects tags, checks that they nest, and notes every address."""

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


def test_the_reader_finds_tags_that_do_not_nest():
    with pytest.raises(AssertionError):
        read("<p><b></p></b>")


def test_a_page_is_well_formed_and_loads_nothing():
    found = small_findings()
    reader = read(page(found))
    assert all(str(address).startswith("#plan-") for address in reader.addresses)
    assert len(set(reader.ids)) == len(reader.ids)
    for number in range(len(found.plans)):
        assert f"plan-{number}" in reader.ids
    assert reader.tags.count("svg") >= 1 + len(found.plans)
    assert "noscript" in reader.tags
    assert "url(" not in page(found)


NASTY = "<script>alert('x')</script>\"&`"


def test_nothing_that_comes_from_a_name_is_markup():
    found = compose(
        named_graph(NASTY),
        (),
        title=NASTY,
        environment=[(NASTY, NASTY)],
        budget_bytes=9,
    )
    for text in (page(found), fragment(found)):
        assert "<script>alert" not in text
        read(text)
    assert "&lt;script&gt;alert" in page(found)
    assert read(page(found)).tags.count("script") == 1


def test_a_chart_is_a_file_by_itself():
    found = small_findings()
    nasty = compose(named_graph(NASTY), (), title=NASTY)
    for text in (
        timeline_chart(found.plan.timeline, budget_bytes=1000),
        frontier_chart(found),
        timeline_chart(nasty.plan.timeline),
    ):
        root = ElementTree.fromstring(text)
        assert root.tag == "{http://www.w3.org/2000/svg}svg"


def test_findings_survive_a_file():
    found = small_findings()
    assert from_json(to_json(found)) == found


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"chosen": 99}, "chosen is 99"),
        ({"plans": 3}, "plans is 3"),
        ({"budget_bytes": True}, "budget_bytes is True"),
        ({"title": None}, "title is None"),
        ({"version": 7}, "'recoup findings' 7"),
        ({"more": 1}, "findings is"),
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
    ("change", "said"),
    [
        (lambda layer: layer["bytes_at"].pop(), "columns is"),
        (lambda layer: layer.update(category="sky"), "category is 'sky'"),
        (lambda layer: layer["bytes_at"].__setitem__(0, -1), "bytes_at is -1"),
    ],
)
def test_a_damaged_timeline_is_named(change, said):
    data = json.loads(to_json(small_findings()))
    change(data["plans"][0]["timeline"]["layers"][0])
    with pytest.raises(UsageError, match="file of findings") as caught:
        from_json(json.dumps(data))
    assert said in str(caught.value)


def test_findings_without_a_measurement_or_plans_are_shown():
    found = compose(named_graph("aten.mm"), ())
    assert "predicted" in page(found)
    assert read(page(found)).ids.count("plan-0") == 1
    slow = dataclasses.replace(found, plain_seconds=0.0)
    read(page(slow))


# The page in Chromium, where `PyQt6-WebEngine` is installed.


def browse(path: Path, actions: list[dict[str, object]], *more: str) -> dict[str, list]:
    # `find_spec`, not an import: the browser lives in a process of its own.
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


SHOWN = "[...document.querySelectorAll('.plan.shown')].map(p => p.id).join()"


@pytest.fixture
def page_file(tmp_path):
    path = tmp_path / "page.html"
    path.write_text(page(small_findings()), encoding="utf-8")
    return path


@pytest.mark.slow
def test_in_a_browser_the_slider_moves_the_plan(page_file):
    last = len(small_findings().plans) - 1
    said = "document.querySelector('.slider output').textContent"
    seen = browse(
        page_file,
        [
            {"script": SHOWN},
            {"script": "document.querySelector('.slider input').focus()"},
            {"key": "End"},
            {"script": SHOWN},
            {"script": said},
            {"key": "Left"},
            {"script": SHOWN},
            {"script": "document.querySelector('a[data-plan=\"0\"]').focus()"},
            {"key": "Return"},
            {"script": SHOWN},
        ],
    )
    assert seen["messages"] == []
    assert seen["requests"] == []
    shown = [result for result in seen["results"] if result]
    start = small_findings().chosen
    assert shown[0] == f"plan-{start}"
    assert shown[1] == f"plan-{last}"
    assert "100% of plain" in shown[2]
    assert shown[3] == f"plan-{last - 1}"
    assert shown[4] == "plan-0"


@pytest.mark.slow
def test_in_a_browser_the_page_fits_a_phone_the_dark_and_paper(page_file, tmp_path):
    paper = "getComputedStyle(document.body).backgroundColor"
    seen = browse(
        page_file,
        [
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
