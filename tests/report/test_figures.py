"""Figures: the PNG shows the numbers that the SVG shows."""

import re
import struct
import sys

import pytest

from recoup.errors import UnsupportedError, UsageError
from recoup.report.charts import frontier_chart, joined, timeline_chart
from recoup.report.figures import FrontierFigure, MemoryFigure, memory_figure
from recoup.report.painting import paint_frontier, paint_timeline
from tests.support.findings import small_findings


def size_of(png: bytes) -> tuple[int, int]:
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    return struct.unpack(">II", png[16:24])


def test_the_bands_of_both_pictures_are_the_layers():
    view = small_findings().plan
    (axes,) = paint_timeline(view.timeline, budget_bytes=700_000).axes
    bands = [patch for patch in axes.patches if patch.get_label()[0] != "_"]
    names = [layer.name for layer in view.timeline.layers]
    assert [band.get_label() for band in bands] == names
    lower = [0] * len(view.timeline.moments)
    for band, layer in zip(bands, view.timeline.layers, strict=True):
        upper = [a + b for a, b in zip(lower, layer.bytes_at, strict=True)]
        assert list(band.get_data().values) == upper
        assert list(band.get_data().baseline) == lower
        lower = upper
    svg = timeline_chart(view.timeline, budget_bytes=700_000)
    for layer in view.timeline.layers:
        assert f"{layer.name}: at most" in svg
    assert view.timeline.peak_place in axes.get_title(loc="left")


def test_the_plans_and_rules_of_both_pictures_are_the_findings():
    found = small_findings()
    (axes,) = paint_frontier(found).axes
    line = axes.lines[0]
    plans = [(view.peak_bytes, view.seconds) for view in found.plans]
    assert list(zip(*line.get_data(), strict=True)) == plans
    named = {text.get_text(): text.xy for text in axes.texts}
    rules = joined(found.baselines)
    assert named == {rule.name: (rule.peak_bytes, rule.seconds) for rule in rules}
    svg = frontier_chart(found)
    assert len(re.findall("data-plan=", svg)) == len(plans)
    for rule in rules:
        assert rule.name in svg


@pytest.mark.parametrize("figure", [memory_figure, FrontierFigure])
def test_a_figure_is_saved_as_its_ending_says(tmp_path, figure):
    made = figure(small_findings())
    assert made.save(tmp_path / "a.svg").read_text() == made.svg() == made._repr_svg_()
    wide, high = size_of(made.save(str(tmp_path / "a.PNG")).read_bytes())
    assert wide > high > 500


def test_another_ending_is_refused_and_nothing_written(tmp_path):
    with pytest.raises(UsageError, match=r"\.svg or \.png: got 'a\.jpg'"):
        memory_figure(small_findings()).save(tmp_path / "a.jpg")
    assert not list(tmp_path.iterdir())


def test_without_matplotlib_a_png_is_one_clear_error(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    figure = memory_figure(small_findings())
    with pytest.raises(UnsupportedError, match=r"or save the figure as \.svg"):
        figure.save(tmp_path / "a.png")
    assert not list(tmp_path.iterdir())
    figure.save(tmp_path / "a.svg")


def test_figures_of_one_scale_can_be_compared():
    timeline = small_findings().plan.timeline
    top = 2 * timeline.peak_bytes
    (axes,) = paint_timeline(timeline, most_bytes=top).axes
    assert axes.get_ylim()[1] > top
    assert MemoryFigure(timeline, most_bytes=top).svg() != MemoryFigure(timeline).svg()
