"""What is measured at once (a layer at one shape, or an operator), and the loop that measures it.

Every sample is kept before the next is measured, so that a kill loses one at most. `has` and `keep`
are the store of `hetplan profile`, or the file of measure.py.

Part of the stand-alone measure.py: Python 3.8 and torch 2.1 only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hetplan.profiling.bodies import layer_passes, layer_rows, operator_passes, operator_rows
from hetplan.profiling.timing import TimingLimits

# Columns of `hetplan.profiling.samples` that say what a sample measured, besides the device.
SIZES = (
    "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_kv_heads", "head_dim",
    "vocab_size", "sequence_length", "microbatch_size", "tp",
)  # fmt: skip
REFUSALS = (RuntimeError, NotImplementedError, MemoryError)
"""What torch raises where a device has no memory or no kernel for something."""


@dataclass(frozen=True)
class Work:
    """A layer at one shape, or an operator, with all its passes."""

    name: str
    keys: Sequence[dict[str, Any]]
    """Per sample the columns that say what it measures."""
    rows: Callable[[], Iterable[dict[str, Any]]]
    """Measures it: the columns of every sample, in the order of `keys`."""


def layer_keys(row: dict[str, Any]) -> list[dict[str, Any]]:
    """Per sample of a layer the columns that say what it measures; `row` as in `LayerSlice`."""
    common = {name: row[name] for name in ("architecture", "layer", "precision", *SIZES)}
    return [{**common, "phase": phase, "copies": copies} for phase, copies in layer_passes(row)]


def layer_work(
    row: dict[str, Any],
    backend: Any,
    limits: TimingLimits,
    wrap: Callable[[torch.nn.Module], torch.nn.Module] = lambda layer: layer,
) -> Work:
    """Both passes of a layer and its updates; `wrap` may slow the layer down (`pacing`)."""
    words = ("layer", "hidden_size", "sequence_length", "microbatch_size", "tp", "precision")
    name = "{} hidden {} sequence {} microbatch {} tp {} {}".format(*(row[each] for each in words))
    return Work(name, layer_keys(row), lambda: layer_rows(row, backend, limits, wrap=wrap))


def operator_work(
    op: Any, precision: str, architecture: str, device: str, backend: Any, limits: TimingLimits
) -> Work:
    """Every pass of an operator; `device` is the kind of its samples."""

    def rows() -> Iterator[dict[str, Any]]:
        for row in operator_rows(op, precision, architecture, backend, limits):
            yield {**row, "device": device}

    name = f"{op.operator!s} {op.batch} x [{op.m}, {op.n}, {op.k}] {precision}"
    return Work(name, operator_passes(op, precision), rows)


def measure_all(
    work: Sequence[Work],
    has: Callable[[dict[str, Any]], bool],
    keep: Callable[[dict[str, Any]], None],
    *,
    budget_seconds: float = float("inf"),
    on_progress: Callable[[int, int, float, str], None] = lambda *_: None,
    on_failure: Callable[[Work, Exception], None],
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Measure the samples that are not there, in the order of `work`: from cheap to expensive.

    What would end after the budget if it took as long as what came before it is not begun, and so
    is nothing after it. What the device refuses (out of memory, no such kernel) is passed over.
    `on_progress(finished, total, seconds, name)`: the seconds are the least that is left.
    """
    started = ended = clock()
    longest = 0.0
    missing = [each for each in work if not all(map(has, each.keys))]
    for number, each in enumerate(missing):
        if number and ended - started + longest > budget_seconds:
            return
        lacking = [keys for keys in each.keys if not has(keys)]
        try:
            for row in each.rows():
                # Of work that a kill cut in half some samples are there.
                if any(all(row[name] == keys[name] for name in keys) for keys in lacking):
                    keep(row)
        except REFUSALS as error:
            on_failure(each, error)
        begun, ended = ended, clock()
        longest = max(longest, ended - begun)
        left = longest * (len(missing) - number - 1)
        on_progress(number + 1, len(missing), min(left, budget_seconds), each.name)
