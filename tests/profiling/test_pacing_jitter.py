"""A pace that scatters: how much, how far at most, and each device of a kind by itself."""

from __future__ import annotations

import statistics
from dataclasses import replace

import pytest
import torch
from torch import nn

from hetplan.errors import InputError
from hetplan.model.spec import LayerKind
from hetplan.profiling.pacing import JITTER_DEVIATIONS, PacedKind, PaceEntry, Pacer

JITTER = 0.05
KIND = PacedKind(
    device="some",
    slow_down=1.0,
    entries=tuple(
        PaceEntry(layer="head", phase=phase, microbatch_size=1, tp=1, seconds=1.0)
        for phase in ("forward", "backward")
    ),
    jitter=JITTER,
    seed=7,
)


class Clock:
    """Time passes only in sleeps, which are exact."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def pass_seconds(kind: PacedKind, stream: int, count: int = 400) -> list[float]:
    clock = Clock()
    pacer = Pacer(kind, stream=stream, clock=clock, sleep=clock.sleep)
    layer = pacer.wrap(nn.Identity(), LayerKind.HEAD, 1, 1)
    found = []
    for _ in range(count):
        before = clock.now
        layer(torch.zeros(1))
        found.append(clock.now - before)
    return found


def test_passes_scatter_as_asked_and_no_further() -> None:
    found = pass_seconds(KIND, 0)
    assert statistics.mean(found) == pytest.approx(1.0, abs=0.01)
    assert statistics.stdev(found) == pytest.approx(JITTER, rel=0.15)
    assert max(abs(each - 1.0) for each in found) <= JITTER_DEVIATIONS * JITTER + 1e-9


def test_devices_of_a_kind_scatter_by_themselves_and_seeds_repeat() -> None:
    found = pass_seconds(KIND, 0)
    assert found == pass_seconds(KIND, 0)
    others = (pass_seconds(KIND, 1), pass_seconds(replace(KIND, seed=8), 0))
    for other in others:
        assert abs(statistics.correlation(found, other)) < 0.2


@pytest.mark.parametrize("jitter", [-0.1, 0.5, float("nan")])
def test_a_jitter_out_of_range_is_refused(jitter: float) -> None:
    with pytest.raises(InputError, match="jitter"):
        replace(KIND, jitter=jitter)
