"""V schedules: two chunks of layers per stage, down the stages and up again; orders and places.

P stages; stage s holds virtual stages s and 2 P - 1 - s, so that embedding and head are both on the
first stage, and nothing is sent between the virtual stages P - 1 and P. F is a forward pass, B the
gradient of the inputs, W that of the weights, BW both at once: its result leaves after both.

zbv         ZB-V as torch runs it (ScheduleZBVZeroBubble of torch.distributed.pipelining, torch
            2.13; arXiv 2401.10241, section 6): no bubble where F = B = W, memory as 1f1b.
dualpipev   ScheduleDualPipeV of torch 2.13 (half of arXiv 2412.19437's DualPipe). Its pairs of F
            and BW are one operation: what F made leaves after BW. Transfers inside a pass are not
            hidden by the pair, as in dense models. At least 2 P microbatches.
v-half, v-min
            Controllable memory (arXiv 2405.15362, section 4): the passes of one microbatch, as far
            apart from stage to stage as `_OFFSETS` says, are repeated every six passes. About half
            and a third of the activations of 1f1b.

Also here: what is true of all schedules and must be known without costs, passes and places of
virtual stages.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from functools import lru_cache
from itertools import product
from typing import Literal, NamedTuple, TypeAlias

V_SCHEDULES = ("zbv", "v-half", "v-min", "dualpipev")

_OFFSETS = {"v-half": (2, 1, 2, 1), "v-min": (1, 1, 1, 1)}
"""Passes between neighbouring stages: F of chunk 0, F of chunk 1, B of chunk 1, B of chunk 0. A
chunk is alive for as long as the four take together; with the same sum of the first and the last as
of the others every stage keeps as much (arXiv 2405.15362, section 4.2): 6 (P - 1) passes of six,
4 (P - 1) of six, of chunks of half a stage."""
_PERIOD = 6


PassKind: TypeAlias = Literal["F", "B", "W", "BW"]
"""Forward, backward (of the inputs only where `W` passes exist), gradients of the weights, both."""


class Pass(NamedTuple):
    """One pass of one microbatch through one chunk of a stage."""

    kind: PassKind
    chunk: int
    microbatch: int
    joined: bool = False
    """What it made leaves with what the next pass makes."""


def is_v(schedule: str) -> bool:
    """Whether the chunks lie in V shape."""
    return schedule in V_SCHEDULES


def stage_of(schedule: str, virtual_stage: int, num_stages: int) -> int:
    """The stage that holds this virtual stage."""
    if is_v(schedule) and virtual_stage >= num_stages:
        return 2 * num_stages - 1 - virtual_stage
    return virtual_stage % num_stages


def virtual_stage_of(schedule: str, stage: int, chunk: int, num_stages: int) -> int:
    """The virtual stage that is this chunk of the stage."""
    if is_v(schedule) and chunk:
        return 2 * num_stages - 1 - stage
    return chunk * num_stages + stage


def places(schedule: str, num_stages: int, chunks: int) -> list[tuple[int, int]]:
    """(stage, chunk) of every virtual stage, in the order of the model."""
    return [
        (stage_of(schedule, k, num_stages), k // num_stages) for k in range(num_stages * chunks)
    ]


def looped(layers: Sequence[int], schedule: str, num_stages: int) -> tuple[tuple[int, ...], ...]:
    """The layers of the chunks of each stage; they come in the order of the model."""
    rows: list[list[int]] = [[] for _ in range(num_stages)]
    for at, count in enumerate(layers):
        rows[stage_of(schedule, at, num_stages)].append(count)
    return tuple(map(tuple, rows))


def chunks_fault(schedule: str, virtual_stages: int) -> str:
    """What is wrong with so many chunks per stage, to follow their number; empty if nothing is."""
    if is_v(schedule) and virtual_stages != 2:
        return f"with {schedule}; V schedules have 2"
    if virtual_stages < 1:
        return f"with {schedule}; at least 1"
    if virtual_stages > 1 and schedule not in ("interleaved-1f1b", "zb-h1", *V_SCHEDULES):
        return f"with {schedule}; at least 1, and more only with interleaved-1f1b and zb-h1"
    return ""


def microbatch_multiple(schedule: str, virtual_stages: int, num_stages: int, count: int) -> int:
    """What a trainer that interleaves whole groups needs so many microbatches to be a multiple of.

    torch's ScheduleInterleavedZeroBubble has groups of at least P even without chunks.
    """
    if schedule == "interleaved-1f1b" or (schedule == "zb-h1" and virtual_stages > 1):
        return num_stages
    return max(1, count // num_stages) if schedule == "zb-h1" else 1


@lru_cache(maxsize=1024)
def v_order(schedule: str, stage: int, num_stages: int, num_microbatches: int) -> tuple[Pass, ...]:
    """Every pass of one stage under one of `V_SCHEDULES`, in order.

    dualpipev: of at least 2 P microbatches.
    """
    if schedule == "zbv":
        return _zbv(stage, num_stages, num_microbatches)
    if schedule == "dualpipev":
        return _dualpipev(stage, num_stages, num_microbatches)
    return _repeated(_OFFSETS[schedule], stage, num_stages, num_microbatches)


class _Writer:
    """An order while it is written: every kind and chunk counts its own microbatches."""

    def __init__(self) -> None:
        self.order: list[Pass] = []
        self.count: Counter[tuple[str, int]] = Counter()
        self.late: deque[tuple[int, int]] = deque()
        """(chunk, microbatch) of which W has not run."""

    def run(self, *words: str) -> None:
        """Passes such as F0, or a joined pair as F0+BW1."""
        for word in words:
            first, _, second = word.partition("+")
            self._one(first, joined=bool(second))
            if second:
                self._one(second, joined=False)

    def late_weights(self) -> None:
        """The W that has waited longest, if any."""
        if self.late:
            chunk, i = self.late.popleft()
            self.order.append(Pass("W", chunk, i))

    def _one(self, word: str, *, joined: bool) -> None:
        kind, chunk = word[:-1], int(word[-1])
        counted = "B" if kind == "BW" else kind
        i = self.count[counted, chunk]
        self.count[counted, chunk] += 1
        if kind == "B":
            self.late.append((chunk, i))
        self.order.append(Pass(kind, chunk, i, joined))  # type: ignore[arg-type]


def _zbv(s: int, p: int, m: int) -> tuple[Pass, ...]:
    # With fewer microbatches than 2 P - 1 it is the order of that many without the others.
    total = max(2 * p - 1, m)
    writer = _Writer()
    run, count = writer.run, writer.count
    for _ in range(2 * (p - s) - 1):
        run("F0")
    for _ in range(s):
        run("F1", "F0")
    for _ in range(p - s):
        run("F1", "B1", "W1")
    while count["F", 1] < total:
        if count["F", 0] < total:
            run("F0")
        run("B0", "W0", "F1", "B1", "W1")
    for _ in range(s):
        run("B0", "B1")
    for _ in range(p - s):
        run("B0", "W0")
    for chunk in (1, 0):
        while count["W", chunk] < total:
            run(f"W{chunk}")
    return tuple(one for one in writer.order if one.microbatch < m)


def _dualpipev(s: int, p: int, m: int) -> tuple[Pass, ...]:
    writer = _Writer()
    run, after = writer.run, p - s - 1
    for _ in range(2 * after):
        run("F0")
    for _ in range(s + 1):
        run("F0", "F1")
    for _ in range(after):
        run("B1")
        writer.late_weights()
        run("F1")
    for turn in range(m - 2 * p + s + 1):
        # On the last stage the first two do not wait for each other.
        run(*(("F0", "BW1") if turn == 0 and after == 0 else ("F0+BW1",)), "F1+BW0")
    for _ in range(after):
        run("BW1", "F1+BW0")
    # The later half of the last backward passes leaves W for the end.
    for turn in range(2 * (s + 1)):
        split = turn >= 2 * ((s + 1) // 2) + (s % 2 == 0)
        run(("B" if split else "BW") + "10"[turn % 2])
    for _ in range(after):
        writer.late_weights()
        run("B0")
    while writer.late:
        writer.late_weights()
    return tuple(writer.order)


@lru_cache(maxsize=256)
def _starts(offsets: tuple[int, int, int, int], p: int) -> tuple[int, int, int]:
    """Starts of F1 and B0 on the last stage and of B1 on the first one, without overlaps.

    Repeated every six passes no two of the four may meet on any stage; of all ways the one that
    waits least.
    """
    f0, f1, b1, _ = offsets
    for gaps in sorted(product(range(_PERIOD), repeat=3), key=lambda each: (sum(each), each)):
        at_f1 = f0 * (p - 1) + 1 + gaps[0]
        at_b1 = at_f1 + f1 * (p - 1) + 1 + gaps[1]
        at_b0 = at_b1 + b1 * (p - 1) + 1 + gaps[2]
        starts = at_f1, at_b0, at_b1
        if all(len(set(_phases(offsets, starts, s, p))) == 4 for s in range(p)):
            return starts
    raise AssertionError("unreachable: offsets of `_OFFSETS` always fit")


def _times(
    offsets: tuple[int, int, int, int], starts: tuple[int, int, int], s: int, p: int
) -> tuple[int, int, int, int]:
    """Starts of F0, F1, B1 and B0 of microbatch 0 on a stage."""
    f0, f1, b1, b0 = offsets
    up = p - 1 - s
    return f0 * s, starts[0] + f1 * up, starts[2] + b1 * s, starts[1] + b0 * up


def _phases(
    offsets: tuple[int, int, int, int], starts: tuple[int, int, int], s: int, p: int
) -> list[int]:
    return [at % _PERIOD for at in _times(offsets, starts, s, p)]


def _repeated(offsets: tuple[int, int, int, int], s: int, p: int, m: int) -> tuple[Pass, ...]:
    starts = _starts(offsets, p)
    at_f0, at_f1, at_b1, at_b0 = _times(offsets, starts, s, p)
    free = sorted(set(range(_PERIOD)) - set(_phases(offsets, starts, s, p)))
    # W of chunk 1 takes the free place that comes first after its B, W of chunk 0 the other one.
    free.sort(key=lambda place: (place - at_b1 - 1) % _PERIOD)
    at_w1, at_w0 = (
        at + 1 + (place - at - 1) % _PERIOD for at, place in zip((at_b1, at_b0), free, strict=True)
    )
    block = (
        (at_f0, "F", 0), (at_f1, "F", 1), (at_b1, "B", 1), (at_w1, "W", 1), (at_b0, "B", 0),
        (at_w0, "W", 0),
    )  # fmt: skip
    every = sorted(
        (at + _PERIOD * i, Pass(kind, chunk, i))  # type: ignore[arg-type]
        for i in range(m)
        for at, kind, chunk in block
    )
    return tuple(one for _, one in every)
