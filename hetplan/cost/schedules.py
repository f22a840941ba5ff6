"""The order in which a stage runs its passes.

P stages, v chunks (virtual stages) on each, m microbatches. A forward pass F makes activations, a
backward pass B the gradient of its inputs and of its weights; where the schedule splits it, B
makes the gradient of the inputs and W that of the weights.

1f1b          w[s] forward passes (P - s unless told otherwise), then B and F in turn, then the
              backward passes left (arXiv 2104.04473, section 2.2). A deeper w[s] hides long links.
gpipe         every F, then every B in the same order of microbatches (arXiv 1811.06965, as
              torch.distributed.pipelining's ScheduleGPipe runs it).
interleaved-1f1b
              microbatches in groups of P: chunk 0 for the whole group, then chunk 1, and so on;
              backward passes in the same order with the chunks counted from the last.
              2 (P - s - 1) + (v - 1) P forward passes first, then F and B in turn (arXiv
              2104.04473, section 2.2; Megatron-LM's get_schedule_table with groups of P). Where P
              does not divide m, the order is that of the next multiple of P without the passes of
              the microbatches that are not there: never a deadlock, and the in-flight passes of the
              full order. Megatron-LM refuses such m with groups of P. (Its table with a smaller
              last group waits for itself: P = 4, m = 5, v = 3.)
zb-h1         1f1b with split backward passes: after backward pass i stage s runs the W of
              backward pass i - s, and the W left over at the end (arXiv 2401.10241, section 2.1).
              The later a stage, the fewer microbatches it keeps and the more W it may delay, so
              that no stage keeps more than stage 0 of 1f1b. With several chunks torch's
              ScheduleInterleavedZeroBubble: microbatches in groups as interleaved-1f1b has them,
              (v - 1) P + P - s - 1 forward passes, then F, B and W in turn.
zbv, dualpipev, v-half, v-min
              `hetplan.plans.v_schedules`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import pairwise

from hetplan.errors import InputError
from hetplan.plans.plan import SCHEDULES
from hetplan.plans.v_schedules import Pass, PassKind, chunks_fault, is_v, v_order


def passes(
    schedule: str,
    *,
    stage: int,
    num_stages: int,
    num_microbatches: int,
    virtual_stages: int = 1,
    warmup: Sequence[int] | None = None,
) -> tuple[Pass, ...]:
    """Every pass of one stage, in the order in which the stage runs them.

    warmup: forward passes of each stage before its first backward pass; read for 1f1b only, the
    other schedules have depths of their own (`warmup_depths`). InputError for an unknown schedule,
    chunks where the schedule has none, counts below 1, and depths below 1 or growing downstream.
    """
    check_shape(schedule, num_stages, num_microbatches, virtual_stages, warmup)
    if not 0 <= stage < num_stages:
        raise InputError(f"stage {stage} of {num_stages} stages; stages count from 0")
    depth = int(warmup[stage]) if warmup is not None and schedule == "1f1b" else num_stages - stage
    return _passes(schedule, stage, num_stages, num_microbatches, virtual_stages, depth)


def warmup_depths(
    schedule: str, num_stages: int, num_microbatches: int, virtual_stages: int = 1
) -> tuple[int, ...]:
    """Forward passes of each stage before its first backward pass, without extra depth."""
    return tuple(
        forwards_first(
            passes(
                schedule,
                stage=stage,
                num_stages=num_stages,
                num_microbatches=num_microbatches,
                virtual_stages=virtual_stages,
            )
        )
        for stage in range(num_stages)
    )


def forwards_first(order: Sequence[Pass]) -> int:
    """Forward passes before the first backward pass."""
    return next(at for at, one in enumerate(order) if one.kind in ("B", "BW"))


def check_shape(
    schedule: str,
    num_stages: int,
    num_microbatches: int,
    virtual_stages: int,
    warmup: Sequence[int] | None,
) -> None:
    """InputError where no order of passes has this shape (see `passes`)."""
    if schedule not in SCHEDULES:
        raise InputError(f"unknown schedule {schedule!r}; known: {', '.join(SCHEDULES)}")
    if min(num_stages, num_microbatches, virtual_stages) < 1:
        raise InputError(
            f"{num_stages} stages, {num_microbatches} microbatches and {virtual_stages} virtual "
            "stages; at least 1 each"
        )
    fault = chunks_fault(schedule, virtual_stages)
    if fault:
        raise InputError(f"{virtual_stages} virtual stages {fault}")
    if schedule == "dualpipev" and num_microbatches < 2 * num_stages:
        raise InputError(
            f"{num_microbatches} microbatches with {num_stages} stages; dualpipev needs at least "
            f"two per stage, {2 * num_stages}"
        )
    if warmup is None:
        return
    if len(warmup) != num_stages:
        raise InputError(f"{len(warmup)} warm-up depths for {num_stages} stages; give one each")
    if schedule == "1f1b" and (
        min(warmup) < 1 or any(left < right for left, right in pairwise(warmup))
    ):
        raise InputError(
            f"warm-up depths {[int(w) for w in warmup]} must be at least 1 and not grow downstream"
        )


@lru_cache(maxsize=4096)
def _passes(
    schedule: str, stage: int, num_stages: int, m: int, v: int, depth: int
) -> tuple[Pass, ...]:
    if schedule == "gpipe":
        return tuple(Pass(kind, 0, i) for kind in _FORWARD_THEN_BACKWARD for i in range(m))
    if is_v(schedule):
        return v_order(schedule, stage, num_stages, m)
    if schedule == "zb-h1":
        return tuple(_zero_bubble(stage, num_stages, m, v))
    if schedule == "interleaved-1f1b" and v > 1:
        return tuple(_interleaved(stage, num_stages, m, v))
    return tuple(_alternating([Pass("F", 0, i) for i in range(m)], [*_backward(m)], depth))


_FORWARD_THEN_BACKWARD: tuple[PassKind, ...] = ("F", "B")


def _backward(m: int) -> Iterator[Pass]:
    return (Pass("B", 0, i) for i in range(m))


def _alternating(forward: list[Pass], backward: list[Pass], depth: int) -> Iterator[Pass]:
    """`depth` forward passes, then backward and forward passes in turn."""
    depth = min(depth, len(forward))
    yield from forward[:depth]
    for at, one in enumerate(backward):
        yield one
        yield from forward[depth + at : depth + at + 1]


def _table(num_stages: int, m: int, v: int) -> list[tuple[int, int]]:
    """(chunk, microbatch) of the forward passes, in whole groups of microbatches."""
    return [
        (chunk, i)
        for first in range(0, m, num_stages)
        for chunk in range(v)
        for i in range(first, first + num_stages)
    ]


def _interleaved(stage: int, num_stages: int, m: int, v: int) -> Iterator[Pass]:
    table = _table(num_stages, m, v)
    # Megatron-LM counts one fewer: its steady state begins with the forward pass of a pair.
    depth = 2 * (num_stages - stage - 1) + (v - 1) * num_stages + 1
    forward = [Pass("F", chunk, i) for chunk, i in table]
    backward = [Pass("B", v - 1 - chunk, i) for chunk, i in table]
    return (one for one in _alternating(forward, backward, depth) if one.microbatch < m)


def _zero_bubble(stage: int, num_stages: int, m: int, v: int) -> Iterator[Pass]:
    table = _table(num_stages, m, v) if v > 1 else [(0, i) for i in range(m)]
    backward = [Pass("B", v - 1 - chunk, i) for chunk, i in table]
    depth = (v - 1) * num_stages + num_stages - stage
    both = [*_alternating([Pass("F", chunk, i) for chunk, i in table], backward, depth)]
    late = [Pass("W", one.chunk, one.microbatch) for one in backward]
    order, done = [], 0
    for one in both:
        order.append(one)
        if one.kind == "B":
            done += 1
            order += late[done - 1 - stage : done - stage] if done > stage else []
    order += late[max(0, done - stage) :]
    return (one for one in order if one.microbatch < m)
