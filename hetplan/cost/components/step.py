"""What a step costs beside its passes and their transfers, and what makes devices slower.

Parts that are passes over memory when nobody measured them:

    time = bytes / (memory bandwidth * the prior of streaming passes, hetplan.predict.datasheet)

Optimizer state in host memory (ZeRO-Offload, arXiv 2101.06840, section 4): gradients go down, the
host updates, parameters come up, one after the other.

The slowest of many ranks. Devices of one kind differ: a rank takes m e^(s Z) for the same work, Z
standard normal, s its island's `speed_spread` (Sinha et al., SC 2022, arXiv 2208.11035: 8 % between
the GPUs of a cluster on average, outliers 1.5 times as slow). Whoever waits for n of them waits for
the largest,

    F(t) = Phi(log(t / m) / s)^n,    mean = lower + integral of (1 - F)

which is exact here (Gauss-Legendre over log t). The spread is a device's own: the same device is
slow in every pass, so the maximum is taken once over all that wait for each other, not once per
pass. Tensor-parallel ranks wait in every layer, data-parallel ones at the end of the step, stages
for the slowest stage; a step waits for all of its devices. Ranks are taken to err independently;
those of a node, which share air and power, err partly together, which lowers the maximum.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

import numpy as np

from hetplan.cluster.devices import DeviceKind, capped_clock_ratio
from hetplan.cluster.spec import Island
from hetplan.cost.estimate_values import Component
from hetplan.cost.memory.device import gradient_bytes_per_parameter
from hetplan.cost.terms import Part, Term
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


def _parts(component: Component, term: Term) -> tuple[Part, ...]:
    """Empty where it takes no time."""
    return (Part(component=component, term=term),) if term.seconds else ()


# ---- optimizer in host memory


def offloaded_update(
    island: Island, job: Job, parameters: float, offload: float, on_device: Term
) -> tuple[Part, ...]:
    """The update of one rank's parameters of which the part `offload` is kept on the host.

    `on_device`: the prediction for all of them; the device updates the rest, then the host its
    part (Megatron-LM's order). An InputError where the device's host interface is not known.
    """
    kept = _parts(Component.OPTIMIZER, on_device.times(1.0 - offload))
    if not offload * parameters:
        return kept
    down, update, up = host_update_seconds(island, job, offload * parameters)
    total = down + update + up
    wide = HOST_INTERFACE_LOG_HALFWIDTH * (down + up) + HOST_UPDATE_LOG_HALFWIDTH * update
    prediction = Prediction(seconds=total, log_halfwidth=wide / total, source=DATASHEET)
    cause = f"{island.device.kind} host"
    host = Term(what="host update", cause=cause, count=1, prediction=prediction)
    return (*kept, *_parts(Component.OFFLOAD, host))


def host_update_seconds(island: Island, job: Job, parameters: float) -> tuple[float, float, float]:
    """(gradients down, update, parameters up) of so many parameters of each device.

    All devices of a node share its host's memory and update at the same time. Of 16-bit training
    float32 gradients go down and 16-bit parameters come up, as they are kept.
    """
    device, size = island.device, job.precision.bytes_per_element
    if device.host is None:
        raise InputError(
            f"device kind {device.kind} has no host interface, so its transfers to host memory "
            "are not known; add host to its entry, or keep the optimizer on the device"
        )
    rate = device.host.bandwidth_bytes_per_second * HOST_INTERFACE_EFFICIENCY
    # In 16 bit the host also writes the parameter's copy that goes up.
    traffic = _UPDATE_BYTES[job.optimizer]
    traffic += 0.0 if job.precision is Precision.FLOAT32 else size
    return (
        parameters * gradient_bytes_per_parameter(job) / rate,
        parameters * island.devices_per_node * traffic / HOST_UPDATE_BYTES_PER_SECOND,
        parameters * size / rate,
    )


# ---- gradients


def clips_gradients(job: Job) -> bool:
    """Whether the job's gradients are clipped by their global norm."""
    if job.gradient_clipping is not None:
        return job.gradient_clipping
    return target(job.target).clips_gradients


def gradient_norm(
    device: DeviceKind, job: Job, gradients: float, gradient_bytes: float, update: Prediction
) -> tuple[Part, ...]:
    """This rank's part of the norm of all gradients, and scaling; none where the job does not clip.

    `gradients`: elements that this rank keeps after the reduction; each is read for the norm, and
    read and written where it is scaled. `update`: the optimizer's prediction; from a datasheet in
    16 bit its bytes hold the pass of the norm already. What all ranks sum is
    `hetplan.cost.step_model.step.norm_parts`.
    """
    if not clips_gradients(job):
        return ()
    counted = update.source == DATASHEET and job.precision is not Precision.FLOAT32
    passes = 2.0 if counted else 3.0
    local = streaming(device, passes * gradients * gradient_bytes, update, gradients, job)
    return _parts(
        Component.NORM,
        Term(what="gradient norm and scaling", cause=device.kind, count=1, prediction=local),
    )


def gradient_passes(
    device: DeviceKind,
    job: Job,
    held: float,
    own: float,
    copies: int,
    update: Prediction,
) -> tuple[Part, ...]:
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
        return ()
    scales = job.precision is Precision.FLOAT16
    if trainer_settings(job).blocking_sends:
        passes = 6.0 if copies > 1 else 0.0
    else:
        passes = 1.0 + (2.0 if copies > 1 else 0.0) + (0.0 if scales else 1.0)
    moved = passes * held * gradient_bytes_per_parameter(job)
    moved += (2.0 * own * Precision.FLOAT32.bytes_per_element) if scales else 0.0
    local = streaming(device, moved, update, own, job)
    term = Term(what="passes over the gradients", cause=device.kind, count=1, prediction=local)
    return _parts(Component.OPTIMIZER, term)


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


# ---- clocks and stragglers


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """At which clock an island's devices compute, over the one of their rates or samples."""

    ratio: float
    notes: tuple[str, ...] = ()


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


_NODES, _WEIGHTS = (tuple(map(float, part)) for part in np.polynomial.legendre.leggauss(48))
_PIECES = 4  # of 48 nodes each: with many ranks the distribution is steep in one of them
_TAIL = 1e-13  # probability left out at either end of the integral
_NORMAL = NormalDist()


@lru_cache(maxsize=4096)
def straggler_factor(spread: float | None, count: int) -> float:
    """Mean time of the slowest of `count` ranks over that of a typical one; 1 without a spread."""
    if not spread:
        return 1.0

    def below(log_time: float) -> float:
        return math.exp(count * _log_phi(log_time / spread))

    # Logarithms between which the largest time lies but for a probability of 1e-13 each.
    lowest = spread * _NORMAL.inv_cdf(math.exp(math.log(_TAIL) / count))
    # Upper tail by symmetry: 1 - (1 - tail)^(1 / n) is far below what 1 - x can hold.
    highest = -spread * _NORMAL.inv_cdf(-math.expm1(math.log1p(-_TAIL) / count))
    mean, width = math.exp(lowest), (highest - lowest) / _PIECES
    for piece in range(_PIECES):
        center = lowest + (piece + 0.5) * width
        for node, weight in zip(_NODES, _WEIGHTS, strict=True):
            x = center + 0.5 * width * node
            mean += 0.5 * width * weight * math.exp(x) * (1.0 - below(x))
    return mean


def _log_phi(z: float) -> float:
    """Logarithm of the standard normal distribution function."""
    if z < -37.0:
        return -math.inf  # below 1e-299
    upper = 0.5 * math.erfc(z / math.sqrt(2.0))
    return math.log1p(-upper) if z > 0 else math.log(0.5 * math.erfc(-z / math.sqrt(2.0)))
