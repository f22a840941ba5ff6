"""How much of what its devices could do does a plan use (MFU), and how fast can it be at all?

    model FLOPs = 3 x (2 x parameters of matrix products x tokens + causal attention)
    MFU         = model FLOPs / (step x sum of the devices' dense peaks)

3 passes' worth: forward, and a backward pass of twice its operations. Attention is counted at half
of the square (`model.work`); the vocabulary without its padding, the embedding's look-up not at
all. What recomputation does again is kept apart. The peak is that of the number format of the
products (float8 where the job's products are). For float32 it is TF32's where the kind has that: a
trainer may run either. A device kind's own MFU has the work of its stages over the whole step: a
kind that waits for another has a low one.

    step >= max over stages of (model + recomputed FLOPs) / (devices x best sustained rate)

is the bound at which intervals begin (`predict.sustained`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from hetplan.cluster.devices import DeviceKind
from hetplan.cost.estimate_values import KindUse
from hetplan.cost.step_model.pricer import StepCost
from hetplan.cost.step_model.uneven_work import length_factors
from hetplan.job.spec import Job, Precision
from hetplan.model.spec import LayerKind, ModelSpec
from hetplan.model.work import layer_work_at
from hetplan.plans.plan import Recompute, RecomputeGranularity, RecomputeModule
from hetplan.predict.sustained import sustained_rate

PASSES = 3
"""A training step is a forward pass and a backward pass of twice its operations."""


def product_format(job: Job) -> str:
    """Number format of the products, as device kinds name their rates."""
    narrow = job.trainer.product_format
    return job.precision.value if narrow is None else narrow.rate


def flops_per_token(model: ModelSpec, job: Job) -> float:
    """Model FLOPs of one training step per token."""
    length = job.sequence_length
    row = range(len(model.layers))
    return PASSES * math.fsum(layer_work_at(model, at, 1, length).flops for at in row) / length


@dataclass(slots=True)
class _Work:
    """Work of one stage's devices in one step."""

    device: DeviceKind
    devices: int
    model: float = 0.0
    again: float = 0.0
    seconds: float = 0.0
    """At the best sustained rate; 0 where none is known."""


@dataclass(frozen=True, slots=True)
class Use:
    """What an estimate says of it."""

    kinds: tuple[KindUse, ...] = ()
    mfu: float | None = None
    flops_per_second: float = 0.0
    """Model FLOPs per second and device."""
    least_seconds: float = 0.0


def use_of(model: ModelSpec, job: Job, step: StepCost, seconds: float) -> Use:
    """MFU and bound of a priced step that takes so many seconds."""
    counter, work = _Counter(model, job), []
    for pipeline in step.work:
        for stage, planned in zip(pipeline.stages, pipeline.pipeline.stages, strict=True):
            for unit in stage.units:
                rows = unit.replica.dp * unit.replica.microbatch_size
                rows *= pipeline.pipeline.num_microbatches
                done = _Work(unit.island.device, unit.replica.num_devices)
                for start, stop in stage.ranges:
                    again = unit.repeated_range(start, stop)
                    counter.add(done, rows, (start, stop), again, planned.recompute)
                work.append(done)
    kinds: dict[str, list[_Work]] = {}
    for each in work:
        kinds.setdefault(each.device.kind, []).append(each)
    uses = tuple(_kind_use(row, product_format(job), seconds) for row in kinds.values())
    peaks = [peak_of(each.device, product_format(job)) * each.devices for each in work]
    whole = math.fsum(each.model for each in work)
    known = all(peaks) and seconds > 0
    return Use(
        kinds=uses,
        mfu=whole / (seconds * math.fsum(peaks)) if known else None,
        flops_per_second=whole / (seconds * sum(each.devices for each in work)),
        least_seconds=max((each.seconds for each in work), default=0.0),
    )


def peak_of(device: DeviceKind, number_format: str) -> float:
    """Dense rate in a format; 0 where none is known."""
    rates = dict(device.peak_flops_per_second)
    found = rates.get(number_format, 0.0)
    return max(found, rates.get("tf32", 0.0)) if number_format == Precision.FLOAT32 else found


def _kind_use(row: list[_Work], number_format: str, seconds: float) -> KindUse:
    device, devices = row[0].device, sum(each.devices for each in row)
    model = math.fsum(each.model for each in row)
    rate, top = model / (seconds * devices), peak_of(device, number_format)
    return KindUse(
        device=device.kind,
        devices=devices,
        model_flops=model,
        recomputed_flops=math.fsum(each.again for each in row),
        flops_per_second=rate,
        mfu=rate / top if top else None,
    )


@dataclass(slots=True)
class _Counter:
    """Work of ranges of layers."""

    model: ModelSpec
    job: Job
    _forward: dict[int, tuple[float, float, bool]] = field(default_factory=dict)

    def _of(self, at: int) -> tuple[float, float, bool]:
        """(matrix products, attention, whether its products are narrow) of one sequence."""
        if at not in self._forward:
            work = layer_work_at(self.model, at, 1, self.job.sequence_length)
            narrow = self.model.kind_at(at) is LayerKind.TRANSFORMER
            self._forward[at] = work.matrix_flops, work.attention_flops, narrow
        return self._forward[at]

    def add(
        self,
        done: _Work,
        rows: int,
        layers: tuple[int, int],
        repeated: tuple[int, int],
        recompute: Recompute,
    ) -> None:
        """Put so many sequences through these layers."""
        factors = length_factors(self.job)
        # Padding is computed and is no work of the model.
        useful, core = factors.tokens, min(factors.core, factors.tokens)
        plain = sustained_rate(done.device, self.job.precision.value)
        quick = sustained_rate(done.device, product_format(self.job))
        for at in range(*layers):
            matrix, attention, narrow = self._of(at)
            again = (0.0, 0.0)
            if repeated[0] <= at < repeated[1]:
                again = _again(recompute, matrix, attention)
            done.model += PASSES * rows * (matrix * useful + attention * core)
            done.again += rows * (again[0] * useful + again[1] * core)
            if plain and quick:
                products = rows * (PASSES * matrix + again[0]) / (quick if narrow else plain)
                scores = rows * (PASSES * attention + again[1]) * factors.core / plain
                done.seconds += (products + scores) / done.devices


def _again(recompute: Recompute, matrix: float, attention: float) -> tuple[float, float]:
    """What of products and attention runs again; other modules are small."""
    full = recompute.granularity is RecomputeGranularity.FULL
    core = RecomputeModule.CORE_ATTENTION in recompute.modules
    return matrix if full else 0.0, attention if full or core else 0.0
