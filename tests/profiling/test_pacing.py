import statistics
from statistics import median

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from hetplan.model.spec import TRAINED_KINDS, LayerKind
from hetplan.profiling.pacing import (
    DEBT_LIMIT_SECONDS,
    JITTER_DEVIATIONS,
    SAMPLE_DEBT_LIMIT_SECONDS,
    PacedKind,
    PaceEntry,
    Pacer,
)

FORWARD, BACKWARD = 0.010, 0.025


def paced_kind(forward: float = FORWARD, backward: float = BACKWARD) -> PacedKind:
    return PacedKind(
        device="slow",
        slow_down=2.0,
        entries=tuple(
            PaceEntry(layer=layer, phase=phase, microbatch_size=1, tp=1, seconds=seconds)
            for layer in TRAINED_KINDS
            for phase, seconds in (("forward", forward), ("backward", backward))
        ),
    )


class FakeTime:
    """A clock that only moves when somebody works or sleeps."""

    def __init__(self, oversleep: float = 0.0) -> None:
        self.now, self.slept, self.oversleep = 0.0, 0.0, oversleep

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept += seconds
        self.now += seconds + self.oversleep


class _Works(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, fake, forward, backward):
        ctx.fake, ctx.seconds = fake, backward
        fake.now += forward
        return x * 1.0

    @staticmethod
    def backward(ctx, gradient):
        ctx.fake.now += ctx.seconds
        return gradient, None, None, None


class Worker(torch.nn.Module):
    """Computes for given times, forward and backward."""

    def __init__(self, fake: FakeTime, forward: float, backward: float) -> None:
        super().__init__()
        self.fake, self.seconds = fake, (forward, backward)
        self.scale = torch.nn.Parameter(torch.ones(1))

    def forward(self, x):
        # The second product keeps its input, so that a checkpoint has something to recompute.
        return _Works.apply(x * self.scale, self.fake, *self.seconds) * self.scale


def paced_worker(fake: FakeTime, forward: float = 0.002, backward: float = 0.003):
    pacer = Pacer(paced_kind(), clock=fake.clock, sleep=fake.sleep)
    worker = Worker(fake, forward, backward)
    return pacer, pacer.wrap(worker, LayerKind.TRANSFORMER, 1, 1)


def test_both_passes_take_their_nominal_time() -> None:
    fake = FakeTime()
    pacer, layer = paced_worker(fake)
    x = torch.ones(3, requires_grad=True)
    y = layer(x)
    assert fake.now == pytest.approx(FORWARD)
    assert fake.slept == pytest.approx(FORWARD - 0.002)
    y.sum().backward()
    assert fake.now == pytest.approx(FORWARD + BACKWARD)
    assert (pacer.passes, pacer.overruns) == (2, 0)
    assert torch.equal(x.grad, torch.ones(3))


def test_an_overrun_is_counted_and_paid_back() -> None:
    fake = FakeTime()
    pacer, layer = paced_worker(fake, forward=0.013)
    y = layer(torch.ones(3, requires_grad=True))
    assert fake.now == pytest.approx(0.013)
    assert (pacer.passes, pacer.overruns) == (1, 1)
    y.sum().backward()
    # The 3 ms too many are taken off the backward pass.
    assert fake.now == pytest.approx(FORWARD + BACKWARD)
    assert (pacer.passes, pacer.overruns) == (2, 1)


@pytest.mark.parametrize(
    ("limit", "seconds"), [(SAMPLE_DEBT_LIMIT_SECONDS, 0.001), (DEBT_LIMIT_SECONDS, 0.0005)]
)
def test_the_median_pass_of_a_busy_machine(limit: float, seconds: float) -> None:
    """One sleep of ten takes 15 ms too long; what steps owe must not become a sample's time."""
    fake, passes = FakeTime(), []
    kind = paced_kind(forward=0.001)
    pacer = Pacer(kind, debt_limit_seconds=limit, clock=fake.clock, sleep=fake.sleep)
    layer = pacer.wrap(Worker(fake, 0.0002, 0.0), LayerKind.TRANSFORMER, 1, 1)
    for index in range(100):
        begun, fake.oversleep = fake.now, 0.0 if index % 10 else 0.015
        layer(torch.ones(3))
        passes.append(fake.now - begun)
    assert median(passes) == pytest.approx(seconds)


@pytest.mark.parametrize("early_stop", [True, False])
def test_recomputation_costs_one_more_forward_pass(early_stop: bool) -> None:
    from torch.utils.checkpoint import set_checkpoint_early_stop

    fake = FakeTime()
    pacer, layer = paced_worker(fake)
    _, other = paced_worker(fake)
    other.pacer = pacer

    def both(x):
        return layer(other(x))

    with set_checkpoint_early_stop(early_stop):
        y = checkpoint(both, torch.ones(3, requires_grad=True), use_reentrant=False)
        assert fake.now == pytest.approx(2 * FORWARD)
        y.sum().backward()
    assert fake.now == pytest.approx(2 * FORWARD + 2 * (FORWARD + BACKWARD))
    assert pacer.overruns == 0


# ---- a pace that scatters

JITTER = 0.05
SCATTERED = PacedKind(
    device="some",
    slow_down=1.0,
    entries=tuple(
        PaceEntry(layer="head", phase=phase, microbatch_size=1, tp=1, seconds=1.0)
        for phase in ("forward", "backward")
    ),
    jitter=JITTER,
    seed=7,
)


def pass_seconds(kind: PacedKind, stream: int, count: int = 400) -> list[float]:
    clock = FakeTime()
    pacer = Pacer(kind, stream=stream, clock=clock.clock, sleep=clock.sleep)
    layer = pacer.wrap(torch.nn.Identity(), LayerKind.HEAD, 1, 1)
    found = []
    for _ in range(count):
        before = clock.now
        layer(torch.zeros(1))
        found.append(clock.now - before)
    return found


def test_passes_scatter_as_asked_and_no_further() -> None:
    found = pass_seconds(SCATTERED, 0)
    assert statistics.mean(found) == pytest.approx(1.0, abs=0.01)
    assert statistics.stdev(found) == pytest.approx(JITTER, rel=0.15)
    assert max(abs(each - 1.0) for each in found) <= JITTER_DEVIATIONS * JITTER + 1e-9
