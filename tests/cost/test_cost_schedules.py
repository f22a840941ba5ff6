"""Orders of passes: sound, what the papers draw, and what they keep."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from hetplan.cost.schedules import (
    Pass,
    passes,
    warmup_depths,
)
from hetplan.errors import InputError
from hetplan.plans.plan import SCHEDULES


def peak_in_flight(order: Sequence[Pass]) -> int:
    """Most passes at once whose forward has been started and whose backward has not ended."""
    ahead = peak = 0
    for one in order:
        ahead += 1 if one.kind == "F" else -1 if one.kind == "B" else 0
        peak = max(peak, ahead)
    return peak


def orders(name: str, stages: int, m: int, chunks: int = 1) -> list[tuple[Pass, ...]]:
    return [
        passes(name, stage=s, num_stages=stages, num_microbatches=m, virtual_stages=chunks)
        for s in range(stages)
    ]


def text(order: tuple[Pass, ...]) -> str:
    return " ".join(f"{one.kind}{one.microbatch}" for one in order)


def runs_to_its_end(found: list[tuple[Pass, ...]], chunks: int) -> bool:
    """Whether the stages get through their orders when each pass waits for its inputs."""
    stages, done = len(found), set()
    at = [0] * stages
    moved = True
    while moved:
        moved = False
        for s, order in enumerate(found):
            while at[s] < len(order):
                one = order[at[s]]
                k, i = one.chunk * stages + s, one.microbatch
                needs = {
                    "F": [("F", k - 1, i)] if k else [],
                    "B": [("F", k, i)] + ([("B", k + 1, i)] if k + 1 < stages * chunks else []),
                    "W": [("B", k, i)],
                }[one.kind]
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
            for chunks in (1, 2, 3, 5) if name == "interleaved-1f1b" else (1,):
                found = orders(name, stages, m, chunks)
                assert runs_to_its_end(found, chunks), (stages, m, chunks)
                kinds = "FBW" if name == "zb-h1" else "FB"
                every = {Pass(k, c, i) for k in kinds for c in range(chunks) for i in range(m)}
                for order in found:
                    assert len(order) == len(every)
                    assert set(order) == every


def test_orders_by_hand() -> None:
    def one(name: str, stage: int, stages: int, m: int) -> str:
        return text(orders(name, stages, m)[stage])

    assert one("1f1b", 0, 3, 5) == "F0 F1 F2 B0 F3 B1 F4 B2 B3 B4"
    assert one("1f1b", 2, 3, 3) == "F0 B0 F1 B1 F2 B2"
    assert one("1f1b", 0, 4, 2) == "F0 F1 B0 B1"
    assert one("gpipe", 1, 2, 3) == "F0 F1 F2 B0 B1 B2"
    # Stage p delays the first p gradients of weights: the tail of arXiv 2401.10241, figure 3.
    assert one("zb-h1", 0, 3, 4) == "F0 F1 F2 B0 W0 F3 B1 W1 B2 W2 B3 W3"
    assert one("zb-h1", 2, 3, 4) == "F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3"


@pytest.mark.parametrize(("stages", "m", "chunks"), [(2, 4, 2), (4, 4, 2), (4, 12, 3), (5, 10, 4)])
def test_interleaved_order_is_megatrons_for_whole_groups(stages: int, m: int, chunks: int) -> None:
    # Megatron-LM, forward_backward_pipelining_with_interleaving: pass k is of microbatch and chunk
    # by position in a group of P * v; that many forward passes before the first pair of F and B.
    def place(k: int) -> tuple[int, int]:
        group, inside = divmod(k, stages * chunks)
        chunk, i = divmod(inside, stages)
        return chunk, group * stages + i

    for s, order in enumerate(orders("interleaved-1f1b", stages, m, chunks)):
        total = m * chunks
        first = min(2 * (stages - s - 1) + (chunks - 1) * stages, total)
        expected = [Pass("F", *place(k)) for k in range(first)]
        for k in range(total):
            if first + k < total:
                expected.append(Pass("F", *place(first + k)))
            chunk, i = place(k)
            expected.append(Pass("B", chunks - 1 - chunk, i))
        assert list(order) == expected


@pytest.mark.parametrize(("m", "chunks"), [(1, 2), (5, 2), (7, 3), (10, 4)])
def test_smaller_last_group_is_the_full_order_less_what_is_missing(m: int, chunks: int) -> None:
    full = orders("interleaved-1f1b", 4, -(-m // 4) * 4, chunks)
    for order, whole in zip(orders("interleaved-1f1b", 4, m, chunks), full, strict=True):
        assert list(order) == [one for one in whole if one.microbatch < m]
        assert peak_in_flight(order) <= peak_in_flight(whole)


def test_in_flight() -> None:
    stages, m = 4, 9
    peaks = {name: [peak_in_flight(o) for o in orders(name, stages, m)] for name in SCHEDULES}
    assert peaks["1f1b"] == peaks["zb-h1"] == [4, 3, 2, 1]
    assert peaks["gpipe"] == [9, 9, 9, 9]
    # 2 (P - s - 1) + (v - 1) P + 1 chunk passes: arXiv 2205.05198, section 4.2 (1 + (p - 1) / (p v)
    # of a whole model's activations on the first stage).
    assert [peak_in_flight(o) for o in orders("interleaved-1f1b", 4, 8, 3)] == [15, 13, 11, 9]


def test_depths() -> None:
    assert warmup_depths("1f1b", 4, 9) == (4, 3, 2, 1)
    assert warmup_depths("zb-h1", 4, 2) == (2, 2, 2, 1)
    assert warmup_depths("gpipe", 3, 5) == (5, 5, 5)
    assert warmup_depths("interleaved-1f1b", 4, 8, 3) == (15, 13, 11, 9)
    assert warmup_depths("interleaved-1f1b", 4, 4, 1) == (4, 3, 2, 1)


def test_what_has_no_order_is_refused() -> None:
    def order(name: str = "1f1b", **changes: object) -> None:
        shape: dict[str, object] = {"stage": 0, "num_stages": 2, "num_microbatches": 4}
        passes(name, **(shape | changes))  # type: ignore[arg-type]

    with pytest.raises(InputError, match="unknown schedule 'dualpipe'; known: 1f1b, gpipe"):
        order("dualpipe")
    with pytest.raises(InputError, match="2 virtual stages with schedule zb-h1"):
        order("zb-h1", virtual_stages=2)
    with pytest.raises(InputError, match="0 microbatches"):
        order(num_microbatches=0)
    with pytest.raises(InputError, match="stage 2 of 2 stages"):
        order(stage=2)
    with pytest.raises(InputError, match="must be at least 1 and not grow downstream"):
        order(warmup=(1, 2))
    with pytest.raises(InputError, match="must be at least 1 and not grow downstream"):
        order(warmup=(1, 0))
    with pytest.raises(InputError, match="3 warm-up depths for 2 stages"):
        order(warmup=(3, 2, 1))
