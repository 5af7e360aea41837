"""Traces: a step with a plan, for known viewers: Perfetto, memory_viz."""

import json
import pickle
from itertools import accumulate
from pathlib import Path
from typing import Any

from recoup.errors import UsageError
from recoup.report.findings import (
    CATEGORIES,
    Findings,
    PlanView,
    RecomputedOperator,
    Step,
)
from recoup.report.timeline import NAMES

KINDS = {".json": "Perfetto and chrome://tracing", ".pickle": "pytorch.org/memory_viz"}
_FIRST_ADDRESS = 1 << 40


def check_trace(path: Path) -> None:
    """Raise `UsageError` unless the suffix is that of a kind of trace.

    Examples:
        >>> check_trace(Path("trace.json"))
    """
    if path.suffix.lower() not in KINDS:
        kinds = ", ".join(f"{suffix} ({viewer})" for suffix, viewer in KINDS.items())
        raise UsageError(
            f"expected a trace ending in one of {kinds}, got {path.name!r}."
        )


def trace(findings: Findings, kind: str) -> bytes:
    """Return the step with the active plan as a file of a kind, by its suffix.

    Operators of forward take their measured time; those of backward share theirs
    equally; recomputed operators run before the operator that needs them.
    """
    step, view = findings.step, findings.plan
    if kind == ".pickle":
        return pickle.dumps(memory_snapshot(step, view))
    return json.dumps(trace_events(step, view, findings.title)).encode()


def trace_events(step: Step, view: PlanView, title: str) -> dict[str, Any]:
    """Return operators as slices and memory as a counter, in Chrome's trace format."""
    starts, reruns = _microseconds(step, view)
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": title}},
        {
            "ph": "M",
            "pid": 1,
            "tid": 1,
            "name": "thread_name",
            "args": {"name": view.name},
        },
    ]

    def add(
        name: str, category: str, start: float, seconds: float, **more: Any
    ) -> None:
        slice_ = {"name": name, "cat": category, "ts": start, "dur": seconds * 1e6}
        events.append({"ph": "X", "pid": 1, "tid": 1, **slice_, "args": more})

    for rerun, start in reruns:
        name = f"recompute {step.parts[rerun.part].block}"
        add(name, "recompute", start, rerun.seconds, operators=rerun.operators)
    counters = _by_category(step, view)
    for number, (moment, start) in enumerate(zip(step.moments, starts, strict=True)):
        phase = [name for name, first in step.phases if first <= number][-1]
        name = step.operators[moment.operator]
        name = name if phase.startswith("forward") else f"gradient: next {name}"
        module = step.parts[moment.part].module if step.parts else ""
        add(name, phase, start, moment.seconds, module=module, moment=number)
        in_use = {key: counters[key][number] for key in counters}
        events.append(
            {"ph": "C", "pid": 1, "name": "memory", "ts": start, "args": in_use}
        )
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def memory_snapshot(step: Step, view: PlanView) -> dict[str, Any]:
    """Return allocations in the format of torch's memory snapshots.

    Memory that no plan changes is one block for each change of it.
    """
    starts, _ = _microseconds(step, view)
    blocks: list[tuple[int, int, int, str, str]] = []  # first, last, bytes, what, where
    resident = sum(nbytes for _, nbytes in step.resident)
    last = len(step.moments) - 1
    blocks += [(0, last, nbytes, name, "the model") for name, nbytes in step.resident]
    if step.reserved_bytes:
        blocks.append((0, last, step.reserved_bytes, "room for the optimizer", ""))
    for number, moment in enumerate(step.moments):
        rest = max(moment.other_bytes - resident, 0)
        blocks.append((number, number, rest, "gradients, batch and workspace", ""))
    for each in view.allocations:
        what = NAMES.get(CATEGORIES[each.category], "saved for backward")
        if each.maker >= 0:
            what = f"{step.operators[step.moments[each.maker].operator]}: {what}"
        where = step.parts[each.part].module if each.part >= 0 else ""
        blocks.append((each.first, each.last, each.bytes, what, where))
    entries: list[tuple[tuple[int, int], dict[str, Any]]] = []
    address = _FIRST_ADDRESS
    for first, last, nbytes, what, where in blocks:
        if nbytes:
            frames = [{"name": what, "filename": where or "the step", "line": 0}]
            block = {"addr": address, "size": nbytes, "stream": 0, "frames": frames}
            born = {**block, "action": "alloc", "time_us": int(starts[first])}
            entries.append(((first, 1), born))
            # Blocks that end with one moment are freed before the next one's are made.
            for action in ("free_requested", "free_completed"):
                gone = {**block, "action": action, "time_us": int(starts[last])}
                entries.append(((last + 1, 0), gone))
            address += nbytes
    entries.sort(key=lambda entry: entry[0])
    return {"segments": [], "device_traces": [[entry for _, entry in entries]]}


def _microseconds(
    step: Step, view: PlanView
) -> tuple[list[float], list[tuple[RecomputedOperator, float]]]:
    """Return the start of each moment and of each replay."""
    before: dict[int, list[RecomputedOperator]] = {}
    for rerun in view.reruns:
        before.setdefault(rerun.moment, []).append(rerun)
    now, starts, reruns = 0.0, list[float](), list[tuple[RecomputedOperator, float]]()
    for number, moment in enumerate(step.moments):
        for rerun in before.get(number, ()):
            reruns.append((rerun, now))
            now += rerun.seconds * 1e6
        starts.append(now)
        now += moment.seconds * 1e6
    return starts, reruns


def _by_category(step: Step, view: PlanView) -> dict[str, list[int]]:
    """Return the bytes in use at each moment, by purpose."""
    changes = {name: [0] * (len(step.moments) + 1) for name in CATEGORIES[1:]}
    for each in view.allocations:
        changes[CATEGORIES[each.category]][each.first] += each.bytes
        changes[CATEGORIES[each.category]][each.last + 1] -= each.bytes
    fixed = [moment.other_bytes + step.reserved_bytes for moment in step.moments]
    sums = {name: list(accumulate(found[:-1])) for name, found in changes.items()}
    return {"fixed": fixed, **sums}
