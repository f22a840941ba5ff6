"""What a step costs beside its passes and their transfers, each part with its name.

A component is zero only with a note that says why. Seconds that are hidden run beside other work
and do not make the step longer. Where a prediction is behind a component its terms are kept, so
that its error goes into the interval of the step (`hetplan.cost.terms`).

Parts that are passes over memory when nobody measured them:

    time = bytes / (memory bandwidth * the prior of streaming passes, hetplan.predict.datasheet)

Optimizer state in host memory (ZeRO-Offload, arXiv 2101.06840, section 4): gradients go down, the
host updates, parameters come up. Cut into n pieces the three form a line in which all work at the
same time, so with times d, u, p of the whole it takes (d + u + p) / n + (n - 1) / n * max(d, u, p).

How much longer the slowest of many ranks takes than a typical one.

Devices of one kind differ: a rank takes m e^(s Z) for the same work, Z standard normal, s its
island's `speed_spread` (Sinha et al., SC 2022, arXiv 2208.11035: 8 % between the GPUs of a cluster
on average, outliers 1.5 times as slow). Whoever waits for n of them waits for the largest,

    F(t) = prod_i Phi(log(t / m_i) / s_i)^n_i          parts i: n_i ranks of median m_i
    mean = lower + integral of (1 - F),  p90 = F^-1(0.9)

which is exact here (Gauss-Legendre over log t). The spread is a device's own: the same device is
slow in every pass, so the maximum is taken once over all that wait for each other, not once per
pass. Tensor-parallel ranks wait in every layer, data-parallel ones at the end of the step, stages
for the slowest stage; a step waits for all of its devices.

Ranks are taken to err independently; those of a node, which share air and power, err partly
together, which lowers the maximum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

import numpy as np

from hetplan.cluster.devices import DeviceKind, capped_clock_ratio
from hetplan.cluster.spec import Island
from hetplan.cost.estimate_values import Component
from hetplan.cost.memory.device import gradient_bytes_per_parameter
from hetplan.cost.terms import Term, seconds_of
from hetplan.errors import InputError
from hetplan.job.spec import Job, Optimizer, Precision
from hetplan.job.trainer import trainer_settings
from hetplan.plans.targets import target
from hetplan.predict.datasheet import (
    ELEMENTWISE_EFFICIENCY_BACKWARD,
    ELEMENTWISE_LOG_HALFWIDTH,
)
from hetplan.predict.predictor import DATASHEET, Prediction

HOST_UPDATE_BYTES_PER_SECOND = 1.2e11
"""Memory traffic of a whole host's update, all its processors: geometric mean of 36 GB/s (28 bytes
for each of 3.09e9 parameters in a step of 2.38 s on 128 cores, DeepSpeed pull request 7474: at
least that) and of 410 GB/s (2 sockets x 8 channels x 25.6 GB/s of DDR4-3200: at most that)."""
HOST_UPDATE_LOG_HALFWIDTH = 1.2
"""log(410 / 120): both ends of it."""

_UPDATE_BYTES = {Optimizer.ADAMW: 28.0, Optimizer.SGD: 12.0}
"""Least float32 traffic per parameter: gradient read, parameter and moments read and written."""

HOST_INTERFACE_EFFICIENCY = 0.87
"""Geometric mean of .84 and .91: packets of 128 and 256 bytes of payload with 24 of headers, link
CRC and framing (PCI Express Base 5.0, chapters 2 and 3)."""
HOST_INTERFACE_LOG_HALFWIDTH = 0.3
"""Down to .65 where two directions, or devices behind one switch, are in each other's way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComponentCost:
    """One named part of a step."""

    component: Component
    seconds: float
    """What the step takes longer for it; below 0 where it saves time, as packing does."""
    hidden_seconds: float = 0.0
    """What of it runs beside other work."""
    note: str = ""
    """Where it comes from, what was assumed, or why it is zero."""
    terms: tuple[Term, ...] = ()
    """Predictions that `seconds` is the sum of; empty: a law, or the job's own figure."""

    def __post_init__(self) -> None:
        if self.seconds == 0 and self.hidden_seconds == 0 and not self.note:
            raise InputError(f"component {self.component.value} is zero and does not say why")


def nothing(component: Component, why: str) -> ComponentCost:
    """A component that costs nothing, and why."""
    return ComponentCost(component=component, seconds=0.0, note=why)


def of_terms(component: Component, terms: tuple[Term, ...], note: str = "") -> ComponentCost:
    """The sum of these predictions, all of it exposed; zero where there are none."""
    if not terms:
        return nothing(component, note or "no such work in this plan")
    seconds = seconds_of(terms)
    if not seconds:
        return nothing(component, note or "predicted to take no time")
    return ComponentCost(component=component, seconds=seconds, note=note, terms=terms)


# ---- optimizer


def optimizer(update: Term) -> ComponentCost:
    """The update on the device, as predicted for the parameters whose state it keeps."""
    if not update.count:
        return nothing(Component.OPTIMIZER, "all optimizer state is in host memory")
    return of_terms(Component.OPTIMIZER, (update,))


def host_optimizer(
    device: DeviceKind,
    job: Job,
    parameters: float,
    *,
    devices_per_host: int,
    gradient_bytes: float,
    parameter_bytes: float,
    pieces: int = 1,
) -> ComponentCost:
    """The update of so many parameters per device whose state is in host memory.

    `gradient_bytes`, `parameter_bytes`: of one, as they cross to and from the host.
    `devices_per_host` devices share the host's memory and update at the same time. `pieces`: how
    many the transfers and the update are cut into so that they run at the same time; 1: one after
    the other. An InputError where the device's host interface is not known.
    """
    if not parameters:
        return nothing(Component.OFFLOAD, "no optimizer state is in host memory")
    down, update, up = host_update_seconds(
        device,
        job.optimizer,
        job.precision,
        parameters,
        devices_per_host=devices_per_host,
        gradient_bytes=gradient_bytes,
        parameter_bytes=parameter_bytes,
    )
    total = down + update + up
    seconds = total / pieces + (pieces - 1) / pieces * max(down, update, up)
    wide = HOST_INTERFACE_LOG_HALFWIDTH * (down + up) + HOST_UPDATE_LOG_HALFWIDTH * update
    prediction = Prediction(seconds=seconds, log_halfwidth=wide / total, source=DATASHEET)
    return ComponentCost(
        component=Component.OFFLOAD,
        seconds=seconds,
        hidden_seconds=total - seconds,
        note=f"{device.kind}: gradients down {down:.3g} s, update {update:.3g} s at "
        f"{HOST_UPDATE_BYTES_PER_SECOND / 1e9:g} GB/s of the host (assumed), parameters up "
        f"{up:.3g} s",
        terms=(
            Term(what="host update", cause=f"{device.kind} host", count=1, prediction=prediction),
        ),
    )


def host_update_seconds(
    device: DeviceKind,
    rule: Optimizer,
    precision: Precision,
    parameters: float,
    *,
    devices_per_host: int,
    gradient_bytes: float,
    parameter_bytes: float,
) -> tuple[float, float, float]:
    """(gradients down, update, parameters up) of one device's parameters."""
    if device.host is None:
        raise InputError(
            f"device kind {device.kind} has no host interface, so its transfers to host memory "
            "are not known; add host to its entry, or keep the optimizer on the device"
        )
    rate = device.host.bandwidth_bytes_per_second * HOST_INTERFACE_EFFICIENCY
    # In 16 bit the host also writes the parameter's copy that goes up.
    traffic = _UPDATE_BYTES[rule] + (0.0 if precision is Precision.FLOAT32 else parameter_bytes)
    return (
        parameters * gradient_bytes / rate,
        parameters * devices_per_host * traffic / HOST_UPDATE_BYTES_PER_SECOND,
        parameters * parameter_bytes / rate,
    )


def offloaded_update(
    island: Island, job: Job, parameters: float, offload: float, on_device: Term
) -> tuple[ComponentCost, ...]:
    """The update of one rank's parameters of which the part `offload` is kept on the host.

    `on_device`: the prediction for all of them; the device updates the rest, then the host its
    part (Megatron-LM's order). Of 16-bit training float32 gradients go down and 16-bit parameters
    come up, as they are kept.
    """
    kept = optimizer(on_device.times(1.0 - offload))
    host = host_optimizer(
        island.device,
        job,
        offload * parameters,
        devices_per_host=island.devices_per_node,
        gradient_bytes=gradient_bytes_per_parameter(job),
        parameter_bytes=job.precision.bytes_per_element,
    )
    return kept, host


# ---- gradient norm


def clips_gradients(job: Job) -> bool:
    """Whether the job's gradients are clipped by their global norm."""
    if job.gradient_clipping is not None:
        return job.gradient_clipping
    return target(job.target).clips_gradients


def gradient_norm(
    device: DeviceKind,
    job: Job,
    gradients: float,
    gradient_bytes: float,
    update: Prediction,
    sums: tuple[Term, ...],
) -> ComponentCost:
    """Norm of all gradients, and scaling them by it; zero where the job does not clip.

    `gradients`: elements that this rank keeps after the reduction; each is read for the norm, and
    read and written where it is scaled. `sums`: the all_reduce of one scalar over all ranks, as
    predicted (16 bit with loss scaling, float16: a second one says whether a value overflowed).
    `update`: the optimizer's prediction; from a datasheet in 16 bit its bytes hold the pass of the
    norm already.
    """
    if not clips_gradients(job):
        why = f"target {job.target} does not clip gradients"
        if job.gradient_clipping is False:
            why = "the job does not clip gradients"
        return nothing(Component.NORM, why)
    counted = update.source == DATASHEET and job.precision is not Precision.FLOAT32
    passes = 2.0 if counted else 3.0
    local = streaming(device, passes * gradients * gradient_bytes, update, gradients, job)
    rounds = 2.0 if job.precision is Precision.FLOAT16 else 1.0
    terms = (
        Term(what="gradient norm and scaling", cause=device.kind, count=1, prediction=local),
        *(term.times(rounds) for term in sums),
    )
    note = "the norm's pass is in the optimizer's bytes" if counted else ""
    return of_terms(Component.NORM, terms, note)


def gradient_passes(
    device: DeviceKind,
    job: Job,
    held: float,
    own: float,
    copies: int,
    update: Prediction,
) -> ComponentCost:
    """What a trainer with gradients in one buffer does to them beside norm and update.

    `held`: gradients of this rank, as they are kept; `own`: those it updates, in float32; `copies`:
    ranks that hold the same. Megatron-LM (megatron/core/distributed/param_and_grad_buffer.py and
    distributed_data_parallel.py, megatron/core/optimizer/optimizer.py) zeroes all of them (written
    once), divides them by the number of copies (read and written) and looks for values that are no
    number (read), in float16 with loss scaling instead while it divides its own by the scale (read
    and written). Nothing for targets that do not say so (`Target.gradient_buffer`). On DeepSpeed's
    pipeline engine (`blocking_sends`) gradients have no buffer: where others hold the same they are
    copied into one, divided and copied back, each read and written (deepspeed/runtime/engine.py,
    `allreduce_bucket` and `allreduce_and_copy`).
    """
    if not target(job.target).gradient_buffer:
        return nothing(Component.OPTIMIZER, f"target {job.target} makes none that are known")
    scales = job.precision is Precision.FLOAT16
    if trainer_settings(job).blocking_sends:
        passes = 6.0 if copies > 1 else 0.0
    else:
        passes = 1.0 + (2.0 if copies > 1 else 0.0) + (0.0 if scales else 1.0)
    moved = passes * held * gradient_bytes_per_parameter(job)
    moved += (2.0 * own * Precision.FLOAT32.bytes_per_element) if scales else 0.0
    local = streaming(device, moved, update, own, job)
    term = Term(what="passes over the gradients", cause=device.kind, count=1, prediction=local)
    return of_terms(Component.OPTIMIZER, (term,))


def streaming(
    device: DeviceKind, moved: float, update: Prediction, parameters: float, job: Job
) -> Prediction:
    """A pass over so many bytes: by the device's bandwidth, or as fast as its measured update."""
    bandwidth = device.memory_bandwidth_bytes_per_second
    if bandwidth:
        return Prediction(
            seconds=moved / (bandwidth * ELEMENTWISE_EFFICIENCY_BACKWARD),
            log_halfwidth=ELEMENTWISE_LOG_HALFWIDTH,
            source=DATASHEET,
        )
    whole = parameters * _UPDATE_BYTES[job.optimizer]
    return Prediction(
        seconds=update.seconds * moved / whole if whole else 0.0,
        log_halfwidth=math.hypot(update.log_halfwidth, ELEMENTWISE_LOG_HALFWIDTH),
        source=update.source,
        extrapolating=update.extrapolating,
    )


# ---- data


def data_loading(job: Job) -> ComponentCost:
    """What the devices wait for their data, as the job says."""
    if not job.data_loading_seconds:
        return nothing(
            Component.DATA_LOADING, "prefetched beside the step before; data_loading says more"
        )
    return ComponentCost(
        component=Component.DATA_LOADING, seconds=job.data_loading_seconds, note="as the job says"
    )


# ---- clocks


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """At which clock an island's devices compute, over the one of their rates or samples."""

    ratio: float
    notes: tuple[str, ...] = ()

    def time_factor(self, compute_share: float = 1.0) -> float:
        """How many times as long work takes of which this part waits for the clock, not memory."""
        return 1.0 - compute_share + compute_share / self.ratio


def clock(island: Island) -> Clock:
    """The island's sustained clock, and what its power cap makes of it.

    An InputError where the cap is no more than what the device draws standing still
    (`hetplan.cluster.devices.capped_clock_ratio` has the law).
    """
    notes = []
    if island.clock_ratio != 1:
        notes.append(f"{island.name}: clock at {island.clock_ratio:g} of its reference")
    cap, board = island.power_cap_watts, island.device.max_power_watts
    if cap is None or not board or cap >= board:
        if cap is not None and not board:
            notes.append(f"{island.name}: the power cap is not priced, its board's is not known")
        return Clock(ratio=island.clock_ratio, notes=tuple(notes))
    capped = capped_clock_ratio(cap / board)
    notes.append(
        f"{island.name}: capped at {cap:g} of {board:g} W, assumed to hold {capped:.2f} of its "
        "clock, as if it drew all of its limit without a cap"
    )
    return Clock(ratio=island.clock_ratio * capped, notes=tuple(notes))


def clock_factor(island: Island, compute_share: float = 1.0) -> float:
    """How many times as long the island's compute takes as at its reference clock."""
    return clock(island).time_factor(compute_share)


_NODES, _WEIGHTS = (tuple(map(float, part)) for part in np.polynomial.legendre.leggauss(48))
_PIECES = 4  # of 48 nodes each: with many ranks the distribution is steep in one of them
_TAIL = 1e-13  # probability left out at either end of the integral
_NORMAL = NormalDist()


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """Ranks that do the same work on devices of one island."""

    seconds: float
    """Of a typical rank: the median."""
    spread: float
    """Standard deviation of the logarithm of their times; 0: all alike."""
    count: int

    def __post_init__(self) -> None:
        if self.count < 1 or not 0 <= self.spread < math.inf or not 0 < self.seconds < math.inf:
            raise InputError(
                f"{self.count} ranks of {self.seconds} s with spread {self.spread}; there must be "
                "at least one, with a time above 0 and a spread of at least 0"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Slowest:
    """Time of the slowest of some ranks."""

    mean_seconds: float
    p90_seconds: float


def slowest(ranks: Sequence[Ranks]) -> Slowest:
    """Mean and p90 of the largest time of independent ranks, which may be of unlike islands."""
    if not ranks:
        raise InputError("there are no ranks, so none of them is the slowest")
    return _slowest(tuple(ranks))


def straggler_factors(spread: float, count: int) -> Slowest:
    """The same as factors on the time of a typical one of `count` ranks of one island."""
    return slowest((Ranks(seconds=1.0, spread=spread, count=count),))


def stragglers(
    step_seconds: float, spread: float | None, count: int
) -> tuple[ComponentCost, ComponentCost]:
    """(mean, p90) of what waiting for the slowest of `count` ranks adds to a step of typical ones.

    With islands of unlike spreads: the difference of `slowest` and the slowest typical rank.
    """
    why = ""
    if spread is None:
        why = "speed_spread of the islands is not given"
    elif spread == 0:
        why = "all devices are alike, as the cluster file says"
    if why or spread is None:
        none = nothing(Component.STRAGGLERS, why)
        return none, none
    found = straggler_factors(spread, count)
    note = f"slowest of {count} ranks with a spread of {spread:g}"

    def cost(factor: float) -> ComponentCost:
        return ComponentCost(
            component=Component.STRAGGLERS, seconds=step_seconds * (factor - 1.0), note=note
        )

    return cost(found.mean_seconds), cost(found.p90_seconds)


@lru_cache(maxsize=4096)
def _slowest(ranks: tuple[Ranks, ...]) -> Slowest:
    floor = max((math.log(each.seconds) for each in ranks if each.spread == 0), default=-math.inf)
    varied = [each for each in ranks if each.spread > 0]
    if not varied:
        return Slowest(mean_seconds=math.exp(floor), p90_seconds=math.exp(floor))

    def below(log_time: float) -> float:
        return math.exp(
            sum(
                each.count * _log_phi((log_time - math.log(each.seconds)) / each.spread)
                for each in varied
            )
        )

    ends = [_ends(each) for each in varied]
    lowest = max(floor, *(low for low, _ in ends))
    highest = max(lowest, *(high for _, high in ends))
    return _of_distribution(below, lowest, highest)


def _of_distribution(below: Callable[[float], float], lowest: float, highest: float) -> Slowest:
    """Mean and p90 of a time whose logarithm is at most x with probability below(x).

    All of it lies between the two ends; what lies below `lowest` is at `lowest`.
    """
    if below(lowest) >= 0.9:
        p90 = lowest
    else:
        low, high = lowest, highest
        for _ in range(60):
            middle = 0.5 * (low + high)
            low, high = (middle, high) if below(middle) < 0.9 else (low, middle)
        p90 = high
    mean, width = math.exp(lowest), (highest - lowest) / _PIECES
    for piece in range(_PIECES):
        center = lowest + (piece + 0.5) * width
        for node, weight in zip(_NODES, _WEIGHTS, strict=True):
            x = center + 0.5 * width * node
            mean += 0.5 * width * weight * math.exp(x) * (1.0 - below(x))
    return Slowest(mean_seconds=mean, p90_seconds=math.exp(p90))


def _ends(ranks: Ranks) -> tuple[float, float]:
    """Logarithms between which the largest time lies but for a probability of 1e-13 each."""
    n = ranks.count
    low = _NORMAL.inv_cdf(math.exp(math.log(_TAIL) / n))
    # Upper tail by symmetry: 1 - (1 - tail)^(1 / n) is far below what 1 - x can hold.
    high = -_NORMAL.inv_cdf(-math.expm1(math.log1p(-_TAIL) / n))
    middle = math.log(ranks.seconds)
    return middle + ranks.spread * low, middle + ranks.spread * high


def _log_phi(z: float) -> float:
    """Logarithm of the standard normal distribution function."""
    if z < -37.0:
        return -math.inf  # below 1e-299
    upper = 0.5 * math.erfc(z / math.sqrt(2.0))
    return math.log1p(-upper) if z > 0 else math.log(0.5 * math.erfc(-z / math.sqrt(2.0)))
