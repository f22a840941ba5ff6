"""Orders of passes: sound, what the papers draw, and what they keep."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from hetplan.cost.schedules import forwards_first, passes
from hetplan.errors import InputError
from hetplan.plans.pieces import own_depth
from hetplan.plans.plan import SCHEDULES, SPLIT_SCHEDULES
from hetplan.plans.v_schedules import Pass, is_v, virtual_stage_of


def peak_in_flight(order: Sequence[Pass]) -> int:
    """Most passes at once whose forward has been started and whose backward has not ended."""
    ahead = peak = 0
    for one in order:
        ahead += 1 if one.kind == "F" else -1 if one.kind in ("B", "BW") else 0
        peak = max(peak, ahead)
    return peak


def orders(name: str, stages: int, m: int, chunks: int = 1) -> list[tuple[Pass, ...]]:
    return [
        passes(name, stage=s, num_stages=stages, num_microbatches=m, virtual_stages=chunks)
        for s in range(stages)
    ]


def runs_to_its_end(name: str, found: list[tuple[Pass, ...]], chunks: int) -> bool:
    """Whether the stages get through their orders when each pass waits for its inputs."""
    stages, done = len(found), set()
    at = [0] * stages
    moved = True
    while moved:
        moved = False
        for s, order in enumerate(found):
            while at[s] < len(order):
                one = order[at[s]]
                k, i = virtual_stage_of(name, s, one.chunk, stages), one.microbatch
                below = {("B", k + 1, i), ("BW", k + 1, i)} & done or {("B", k + 1, i)}
                needs = {
                    "F": [("F", k - 1, i)] if k else [],
                    "B": [("F", k, i), *(below if k + 1 < stages * chunks else [])],
                    "W": [("B", k, i)],
                }[one.kind[0]]
                if not done.issuperset(needs):
                    break
                done.add((one.kind, k, i))
                at[s] += 1
                moved = True
    return all(at[s] == len(order) for s, order in enumerate(found))


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_order_is_complete_and_never_waits_for_itself(name: str) -> None:
    for stages in range(1, 8):
        for m in range(1, 2 * stages + 6):
            if name == "dualpipev" and m < 2 * stages:
                continue
            several = name in ("interleaved-1f1b", "zb-h1")
            for chunks in (1, 2, 3, 5) if several else (2 if is_v(name) else 1,):
                found = orders(name, stages, m, chunks)
                assert runs_to_its_end(name, found, chunks), (stages, m, chunks)
                kinds = "FBW" if name in SPLIT_SCHEDULES else "FB"
                every = {(k, c, i) for k in kinds for c in range(chunks) for i in range(m)}
                for order in found:
                    parts = [(k, o.chunk, o.microbatch) for o in order for k in o.kind]
                    assert len(parts) == len(every)
                    assert set(parts) == every
                    assert order[-1].joined is False
                depths = [own_depth(name, s, stages, m, chunks) for s in range(stages)]
                assert depths == list(map(forwards_first, found))


@pytest.mark.parametrize(("m", "chunks"), [(1, 2), (5, 2), (7, 3), (10, 4)])
def test_smaller_last_group_is_the_full_order_less_what_is_missing(m: int, chunks: int) -> None:
    full = orders("interleaved-1f1b", 4, -(-m // 4) * 4, chunks)
    for order, whole in zip(orders("interleaved-1f1b", 4, m, chunks), full, strict=True):
        assert list(order) == [one for one in whole if one.microbatch < m]
        assert peak_in_flight(order) <= peak_in_flight(whole)


def test_in_flight() -> None:
    stages, m = 4, 9
    plain = [name for name in SCHEDULES if not is_v(name)]
    peaks = {name: [peak_in_flight(o) for o in orders(name, stages, m)] for name in plain}
    assert peaks["1f1b"] == peaks["zb-h1"] == [4, 3, 2, 1]
    assert peaks["gpipe"] == [9, 9, 9, 9]
    # 2 (P - s - 1) + (v - 1) P + 1 chunk passes: arXiv 2205.05198, section 4.2 (1 + (p - 1) / (p v)
    # of a whole model's activations on the first stage).
    assert [peak_in_flight(o) for o in orders("interleaved-1f1b", 4, 8, 3)] == [15, 13, 11, 9]


def test_what_has_no_order_is_refused() -> None:
    def order(name: str = "1f1b", **changes: object) -> None:
        shape: dict[str, object] = {"stage": 0, "num_stages": 2, "num_microbatches": 4}
        passes(name, **(shape | changes))  # type: ignore[arg-type]

    with pytest.raises(InputError, match="unknown schedule 'dualpipe'; known: 1f1b, gpipe"):
        order("dualpipe")
    with pytest.raises(InputError, match="2 virtual stages with gpipe; at least 1, and more only"):
        order("gpipe", virtual_stages=2)
    with pytest.raises(InputError, match="1 virtual stages with zbv; V schedules have 2"):
        order("zbv")
    with pytest.raises(InputError, match="4 microbatches with 3 stages; dualpipev needs at least"):
        order("dualpipev", num_stages=3, virtual_stages=2)
    with pytest.raises(InputError, match="must be at least 1 and not grow downstream"):
        order(warmup=(1, 0))
    with pytest.raises(InputError, match="3 warm-up depths for 2 stages"):
        order(warmup=(3, 2, 1))
