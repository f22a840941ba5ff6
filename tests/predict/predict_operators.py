"""Synthetic operator measurements whose truth is known."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

from predict_samples import DEVICE

from hetplan.model.operators import OperatorClass
from hetplan.predict.operator.values import column_value, sample_operator
from hetplan.profiling.samples import OperatorSample

FLOPS_PER_SECOND, BYTES_PER_SECOND, LAUNCH, FLOOR = 200e12, 1e12, 5e-6, 60e-6
HIDDEN = (1024, 2560, 7168)


def operator_sample(
    operator: OperatorClass,
    phase: str = "forward",
    *,
    m: int,
    n: int,
    k: int = 0,
    batch: int = 1,
    seconds: float = 1.0,
    precision: str = "bfloat16",
    output: str = "",
    device: str = DEVICE.kind,
) -> OperatorSample:
    return OperatorSample(
        device=device,
        operator=operator.value,
        phase=phase,
        precision=precision,
        output_precision=output or precision,
        batch=batch,
        m=m,
        n=n,
        k=k,
        median_seconds=seconds,
        p10_seconds=seconds,
        p90_seconds=seconds,
        repeats=1,
        outliers=0,
    )


def true_seconds(sample: OperatorSample, *, floor: float = FLOOR) -> float:
    op = sample_operator(sample)
    work = LAUNCH
    for column, rate in (("flops", FLOPS_PER_SECOND), ("bytes", BYTES_PER_SECOND)):
        work += column_value(column, op, sample.phase, sample.precision) / rate
    return max(floor, work)


def shapes() -> Iterator[OperatorSample]:
    """Everything that a Megatron layer runs, at three sizes and four microbatch sizes."""
    c = OperatorClass
    for hidden in HIDDEN:
        heads, width = hidden // 64, 64 + HIDDEN.index(hidden) * 32
        for microbatch in (1, 2, 4, 8):
            m = 2048 * microbatch
            for n, k in ((3 * hidden, hidden), (hidden, hidden), (4 * hidden, hidden)):
                yield operator_sample(c.MATRIX_PRODUCT, m=m, n=n, k=k)
                yield operator_sample(c.MATRIX_PRODUCT, "input_gradient", m=m, n=k, k=n)
            for phase in ("forward", "backward"):
                batch = heads * microbatch
                yield operator_sample(
                    c.ATTENTION_SCORE, phase, batch=batch, m=2048, n=2048, k=width
                )
                yield operator_sample(
                    c.ATTENTION_CONTEXT, phase, batch=batch, m=2048, n=width, k=2048
                )
                yield operator_sample(c.SOFTMAX, phase, m=batch * 2048, n=2048)
                yield operator_sample(c.ATTENTION_DROPOUT, phase, m=batch * 2048, n=2048)
                yield operator_sample(c.NORM, phase, m=m, n=hidden)
                yield operator_sample(c.ACTIVATION, phase, m=m, n=4 * hidden, k=4 * hidden)
                yield operator_sample(c.ADDITION, phase, m=m, n=hidden, k=1)


def operator_grid(
    noise: float = 0.0, seed: int = 0, floor: float = FLOOR
) -> tuple[OperatorSample, ...]:
    rng = random.Random(seed)
    result = []
    for sample in shapes():
        seconds = true_seconds(sample, floor=floor) * (1.0 + noise * rng.uniform(-1, 1))
        result.append(
            replace(sample, median_seconds=seconds, p10_seconds=seconds, p90_seconds=seconds)
        )
    return tuple(result)
