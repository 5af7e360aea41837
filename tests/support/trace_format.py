"""The trace event format that Perfetto and chrome://tracing read, as a checker.

Written after "Trace Event Format" of the Chromium project: which fields an event of
each kind must and may have, and how they hang together.
"""

from collections.abc import Mapping
from numbers import Real
from typing import Any

REQUIRED = {
    "X": {"ph": str, "name": str, "ts": Real, "dur": Real, "pid": int, "tid": int},
    "C": {"ph": str, "name": str, "ts": Real, "pid": int, "args": dict},
    "M": {"ph": str, "name": str, "pid": int, "args": dict},
}
"""Of the kinds that are used here: complete slices, counters and metadata."""

OPTIONAL = {"cat": str, "args": dict, "tid": int}
METADATA = {"process_name", "thread_name"}


def faults(trace: Any) -> list[str]:
    """What a viewer would refuse or draw wrongly; nothing, if all is well."""
    if not isinstance(trace, dict) or not isinstance(trace.get("traceEvents"), list):
        return ["a trace is an object with a list `traceEvents`"]
    found: list[str] = []
    if trace.get("displayTimeUnit", "ms") not in ("ms", "ns"):
        found.append("displayTimeUnit is neither ms nor ns")
    events = trace["traceEvents"]
    for number, event in enumerate(events):
        found += [f"event {number}: {fault}" for fault in _event_faults(event)]
    return found or [*_track_faults(events)]


def _event_faults(event: Any) -> list[str]:
    if not isinstance(event, dict) or event.get("ph") not in REQUIRED:
        return [f"of no known kind: {event}"]
    fields = REQUIRED[event["ph"]]
    found = [f"has no {name}" for name in fields if name not in event]
    for name, value in event.items():
        kind = fields.get(name) or OPTIONAL.get(name)
        if kind is None:
            found.append(f"has a field {name} that the format does not have")
        elif not isinstance(value, kind) or isinstance(value, bool):
            found.append(f"{name} is a {type(value).__name__}")
    if found:
        return found
    found += [f"{name} is negative" for name in ("ts", "dur") if event.get(name, 0) < 0]
    if event["ph"] == "C" and not _are_numbers(event.get("args")):
        found.append("a counter has something else than numbers")
    if event["ph"] == "M" and event.get("name") not in METADATA:
        found.append(f"names no metadata: {event.get('name')}")
    return found


def _are_numbers(args: Any) -> bool:
    return (
        isinstance(args, Mapping)
        and len(args) > 0
        and all(isinstance(v, Real) and not isinstance(v, bool) for v in args.values())
    )


def _track_faults(events: list[dict[str, Any]]) -> list[str]:
    """Slices of a thread nest, and every track has a name."""
    found: list[str] = []
    named = {(e["name"], e["pid"], e.get("tid")) for e in events if e["ph"] == "M"}
    processes = {pid for name, pid, _ in named if name == "process_name"}
    threads = {(pid, tid) for name, pid, tid in named if name == "thread_name"}
    slices: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in events:
        if event["pid"] not in processes:
            found.append(f"process {event['pid']} has no name")
        if event["ph"] == "X":
            track = slices.setdefault((event["pid"], event["tid"]), [])
            track.append((event["ts"], event["ts"] + event["dur"]))
    for thread, spans in slices.items():
        if thread not in threads:
            found.append(f"thread {thread} has no name")
        open_until: list[float] = []
        for start, stop in sorted(spans, key=lambda span: (span[0], -span[1])):
            while open_until and open_until[-1] <= start + 1e-6:
                open_until.pop()
            if open_until and stop > open_until[-1] + 1e-6:
                found.append(f"slices of thread {thread} overlap at {start}")
            open_until.append(stop)
    return found
