"""What is wrong in a trace, by the Trace Event Format's public description (object form).

Phases that hetplan writes: X (complete), M (metadata), C (counter), s and f (flow). Every event has
`ph`, `pid`, `tid` and `name`; all but metadata have a time. A flow's start and end have one id,
category and name; each lies inside a slice of its thread (`bp: e` for the end). Slices of one
thread lie inside each other or apart. Counters hold numbers.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

KEYS = {
    "X": {"ts", "dur"},
    "M": {"args"},
    "C": {"ts", "args"},
    "s": {"ts", "id", "cat"},
    "f": {"ts", "id", "cat", "bp"},
}
ROUNDING = 1e-6
"""Microseconds of a step's length that sums in another order may differ by."""


def trace_faults(text: str) -> list[str]:
    """Every fault of the document; empty where it is right."""
    document = json.loads(text)
    events = document.get("traceEvents") if isinstance(document, dict) else None
    if not isinstance(events, list):
        return ["no list of traceEvents"]
    faults = [fault for number, event in enumerate(events) for fault in _event(number, event)]
    return faults or [*_names(events), *_slices(events), *_flows(events), *_counters(events)]


def _event(number: int, event: dict[str, Any]) -> Iterator[str]:
    phase = event.get("ph")
    if phase not in KEYS:
        yield f"event {number}: phase {phase!r}"
        return
    missing = (KEYS[phase] | {"pid", "tid", "name"}) - event.keys()
    if missing:
        yield f"event {number} ({phase}) lacks {sorted(missing)}"
    for key in ("ts", "dur"):
        value = event.get(key, 0)
        if not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
            yield f"event {number}: {key} is {value!r}"
    if not all(isinstance(event.get(key, 0), int) for key in ("pid", "tid")):
        yield f"event {number}: process and thread are whole numbers"


def _names(events: list[dict[str, Any]]) -> Iterator[str]:
    named = {(e["name"], e["pid"], e["tid"]) for e in events if e["ph"] == "M"}
    for event in events:
        place = event["pid"], event["tid"]
        if event["ph"] == "X" and ("thread_name", *place) not in named:
            yield f"thread {place} has no name"
        if ("process_name", place[0], 0) not in named:
            yield f"process {place[0]} has no name"


def _slices(events: list[dict[str, Any]]) -> Iterator[str]:
    threads = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            threads[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    longest = max((end for spans in threads.values() for _, end in spans), default=0.0)
    for place, spans in threads.items():
        for (_, end), (start, after) in pairwise(sorted(spans)):
            if start < end - ROUNDING * longest and after > end + ROUNDING * longest:
                yield f"thread {place}: slices cross at {start} us"


def _flows(events: list[dict[str, Any]]) -> Iterator[str]:
    ends: dict[tuple[str, str, int], list[dict[str, Any]]] = defaultdict(list)
    starts = defaultdict(set)
    for event in events:
        if event["ph"] in "sf":
            ends[event["cat"], event["name"], event["id"]].append(event)
        elif event["ph"] == "X":
            starts[event["pid"], event["tid"]].add(event["ts"])
    for key, pair in ends.items():
        if sorted(event["ph"] for event in pair) != ["f", "s"]:
            yield f"flow {key} has no start and end"
            continue
        start, end = sorted(pair, key=lambda event: event["ph"], reverse=True)
        if end["ts"] < start["ts"]:
            yield f"flow {key} ends before it starts"
        for event in pair:
            if event["ts"] not in starts[event["pid"], event["tid"]]:
                yield f"flow {key} lies in no slice"


def _counters(events: list[dict[str, Any]]) -> Iterator[str]:
    last: dict[tuple[int, str], float] = {}
    for event in events:
        if event["ph"] != "C":
            continue
        key = event["pid"], event["name"]
        if event["ts"] < last.get(key, 0.0):
            yield f"counter {key} goes back in time"
        last[key] = event["ts"]
        numbers = event["args"].values()
        if not numbers or not all(isinstance(n, int | float) and n >= 0 for n in numbers):
            yield f"counter {key} holds {event['args']}"
