"""Pictures: PNG and SVG show the shapes of one description."""

import dataclasses
import struct
import sys
from xml.etree import ElementTree

import pytest

from recoup.errors import UnsupportedError, UsageError
from recoup.report.charts import (
    frontier_chart,
    frontier_steps,
    joined,
    memory_chart,
    timeline_chart,
)
from recoup.report.drawing import Area, Line, Mark, Words
from recoup.report.findings import Baseline
from recoup.report.timeline import timeline
from tests.support.findings import small_findings


def size_of(png: bytes) -> tuple[int, int]:
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    return struct.unpack(">II", png[16:24])


@pytest.mark.parametrize("chart", [memory_chart, frontier_chart])
def test_both_encodings_have_every_shape(chart):
    picture = chart(small_findings())
    counts = dict.fromkeys((Line, Area, Mark, Words), 0)
    for shape in picture.shapes:
        counts[type(shape)] += 1
    (axes,) = picture.figure().axes
    assert len(axes.patches) == counts[Area]
    assert len(axes.lines) == counts[Line] + counts[Mark]
    assert len(axes.texts) == counts[Words]
    root = ElementTree.fromstring(picture.svg())
    tags = [element.tag.rpartition("}")[2] for element in root.iter()]
    assert tags.count("polygon") == counts[Area]
    assert tags.count("polyline") == counts[Line]
    assert tags.count("circle") + tags.count("rect") == counts[Mark]
    assert tags.count("text") == counts[Words]


def test_the_bands_of_a_chart_are_the_layers():
    found = small_findings()
    layers = timeline(found.step, found.plan).layers
    shown = [s.label for s in memory_chart(found).shapes if isinstance(s, Area)]
    assert [label.split(": at most")[0] for label in shown] == [x.name for x in layers]
    for layer in layers:
        assert f"{layer.name}: at most" in memory_chart(found).svg()


def test_the_plans_and_rules_of_a_chart_are_the_findings():
    found = small_findings()
    marks = [s for s in frontier_chart(found).shapes if isinstance(s, Mark)]
    dots = [mark.label.split(":")[0] for mark in marks if not mark.is_square]
    assert dots == [view.name for view in found.plans]
    squares = [mark.label.split(":")[0] for mark in marks if mark.is_square]
    assert squares == [rule.name for rule in joined(found.baselines)]


def time_at(corners: list[tuple[int, float]], peak_bytes: int) -> float:
    """Return the height of a step line, to the right of its corners."""
    return min((s for b, s in corners if b <= peak_bytes), default=float("inf"))


def test_no_rule_is_below_the_line():
    found = small_findings()
    corners = frontier_steps(found)
    for rule in found.baselines:
        assert time_at(corners, rule.peak_bytes) <= rule.seconds
    better = Baseline("better", found.plans[1].peak_bytes, 0.0)
    assert time_at(corners, better.peak_bytes) > better.seconds


def test_a_dominated_plan_is_above_the_line():
    found = small_findings()
    slow = dataclasses.replace(found.plans[-1], seconds=10.0)
    corners = frontier_steps(dataclasses.replace(found, plans=(*found.plans, slow)))
    assert corners == frontier_steps(found)


@pytest.mark.parametrize("chart", [memory_chart, frontier_chart])
def test_a_picture_is_saved_in_the_format_of_its_suffix(tmp_path, chart):
    made = chart(small_findings())
    assert made.save(tmp_path / "a.svg").read_text() == made.svg() == made._repr_svg_()
    wide, high = size_of(made.save(str(tmp_path / "a.PNG")).read_bytes())
    assert wide > high > 500


def test_an_unknown_suffix_is_refused_and_nothing_is_written(tmp_path):
    with pytest.raises(UsageError, match=r"\.svg or \.png, got 'a\.jpg'"):
        memory_chart(small_findings()).save(tmp_path / "a.jpg")
    assert not list(tmp_path.iterdir())


def test_a_png_without_matplotlib_is_one_clear_error(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    picture = memory_chart(small_findings())
    with pytest.raises(UnsupportedError, match=r"or save the picture as \.svg"):
        picture.save(tmp_path / "a.png")
    assert not list(tmp_path.iterdir())
    picture.save(tmp_path / "a.svg")


def test_charts_with_one_scale_are_comparable():
    found = small_findings()
    drawn = timeline(found.step, found.plan)
    top = 2 * drawn.peak_bytes
    marked = [s for s in timeline_chart(drawn).shapes if isinstance(s, Mark)]
    lower = [
        s for s in timeline_chart(drawn, most_bytes=top).shapes if isinstance(s, Mark)
    ]
    assert lower[0].y > marked[0].y
