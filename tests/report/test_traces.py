"""A trace equals the simulation: its bytes at every moment, and its time."""

import json
import pickle
from itertools import pairwise
from pathlib import Path

import pytest
from torch.cuda import _memory_viz

from recoup.core.simulation import simulate
from recoup.errors import UsageError
from recoup.report.traces import check_trace, trace
from tests.support.findings import small_findings, small_graph, small_solutions
from tests.support.trace_format import faults


def test_the_counter_of_a_trace_equals_the_simulation_at_every_moment():
    events = json.loads(trace(small_findings(), ".json"))["traceEvents"]
    counters = [event for event in events if event["ph"] == "C"]
    costs = simulate(small_graph(), small_solutions()[0].segments)
    assert tuple(sum(c["args"].values()) for c in counters) == costs.bytes_at
    slices = [event for event in events if event["ph"] == "X"]
    again = [s for s in slices if s["cat"] == "recompute"]
    assert len(again) == len(small_findings().plan.reruns) > 0
    total = sum(s["dur"] for s in slices) / 1e6
    assert total == pytest.approx(costs.step_seconds + costs.replay_seconds)
    ordered = sorted(slices, key=lambda s: s["ts"])
    for one, after in pairwise(ordered):
        assert one["ts"] + one["dur"] <= after["ts"] + 1e-6  # one after the other


def test_a_snapshot_has_the_peak_and_ends_empty():
    snapshot = pickle.loads(trace(small_findings(), ".pickle"))
    (entries,) = snapshot["device_traces"]
    in_use, peak, open_blocks = 0, 0, {}
    for entry in entries:
        if entry["action"] == "alloc":
            open_blocks[entry["addr"]] = entry["size"]
            in_use += entry["size"]
        elif entry["action"] == "free_completed":
            in_use -= open_blocks.pop(entry["addr"])
        peak = max(peak, in_use)
    assert peak == small_findings().plan.peak_bytes
    assert open_blocks == {}
    # As read by torch's own viewer.
    assert "<html" in _memory_viz.trace_plot(snapshot).lower()
    assert f"\n{len(entries)} entries\n" in _memory_viz.trace(snapshot)


def test_a_trace_has_the_format_that_perfetto_reads():
    text = trace(small_findings(), ".json").decode()
    assert faults(json.loads(text)) == []
    assert "NaN" not in text
    assert "Infinity" not in text


SLICE = {"ph": "X", "name": "a", "ts": 0.0, "dur": 5.0, "pid": 1, "tid": 1}
PROCESS = {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "p"}}
THREAD = {**PROCESS, "name": "thread_name", "tid": 1}
COUNTER = {"ph": "C", "name": "memory", "ts": 0, "pid": 1, "args": {"fixed": 3}}


def test_a_valid_trace_is_accepted():
    nested = {**SLICE, "ts": 1.0, "dur": 2.0}
    assert faults({"traceEvents": [PROCESS, THREAD, SLICE, nested, COUNTER]}) == []


@pytest.mark.parametrize(
    ("event", "fault"),
    [
        ({**SLICE, "ph": "Z"}, "of no known kind"),
        ({k: v for k, v in SLICE.items() if k != "tid"}, "has no tid"),
        ({**SLICE, "ts": "0"}, "ts is a str"),
        ({**SLICE, "dur": -1.0}, "dur is negative"),
        ({**SLICE, "bytes": 1}, "a field bytes"),
        ({**SLICE, "tid": 2}, "has no name"),
        ({**SLICE, "ts": 3.0}, "overlap"),
        ({**COUNTER, "args": {"fixed": "3"}}, "something else than numbers"),
        ({**COUNTER, "args": {}}, "something else than numbers"),
        ({**THREAD, "name": "thread"}, "names no metadata"),
    ],
)
def test_a_fault_of_a_trace_is_found(event, fault):
    (found,) = faults({"traceEvents": [PROCESS, THREAD, SLICE, event]})
    assert fault in found


def test_another_suffix_is_refused():
    with pytest.raises(UsageError, match=r"\.json \(Perfetto .*got 'trace\.txt'"):
        check_trace(Path("trace.txt"))
