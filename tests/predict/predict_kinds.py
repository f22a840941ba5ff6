"""Device kinds and operator samples whose truth is known: shares of a datasheet's figures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from predict_operators import operator_sample

from hetplan.cluster.devices import DeviceKind
from hetplan.model.operators import Operator, OperatorClass, operator_bytes, operator_flops
from hetplan.predict.fit import FittedLaws
from hetplan.predict.layer.laws import fit_layer_laws
from hetplan.predict.operator.laws import fit_operator_laws
from hetplan.profiling.samples import LayerSample, OperatorSample


def device(
    name: str,
    *,
    tflops: float,
    gigabytes: float,
    vendor: str = "test",
    watts: float = 0.0,
    others: tuple[tuple[str, float], ...] = (),
) -> DeviceKind:
    """A kind with this 16-bit rate and memory bandwidth."""
    peaks = (("bfloat16", tflops * 1e12), ("float16", tflops * 1e12), *others)
    return DeviceKind(
        kind=name,
        vendor=vendor,
        peak_flops_per_second=peaks,
        memory_bytes=80e9,
        memory_bandwidth_bytes_per_second=gigabytes * 1e9,
        provenance="datasheet",
        source="invented for tests",
        max_power_watts=watts,
    )


PRODUCT_SHARE, PASS_SHARE = 0.7, 0.8
"""Of the rate and of the bandwidth, that every kind of these tests reaches."""


def seconds(
    kind: DeviceKind, op: Operator, phase: str, precision: str, *, slower: float = 1.0
) -> float:
    """The truth: operations, or bytes, at a share of the datasheet, and 5 us."""
    width = 4 if precision == "float32" else 2
    work = operator_flops(op, phase) / (PRODUCT_SHARE * kind.peak(precision))
    if not work:
        moved = operator_bytes(op, phase, width)
        work = moved / (PASS_SHARE * kind.memory_bandwidth_bytes_per_second)
    return slower * (5e-6 + work)


def operators() -> Iterator[tuple[Operator, str]]:
    """Products and passes of several sizes, with their passes."""
    for width in (1024, 2048, 4096):
        for tokens in (2048, 8192):
            sizes = {
                OperatorClass.MATRIX_PRODUCT: (1, tokens, width, width),
                OperatorClass.FUSED_ATTENTION: (width // 64, tokens // 2, tokens // 2, 64),
                OperatorClass.NORM: (1, tokens, width, 0),
                OperatorClass.ACTIVATION: (1, tokens, 4 * width, 0),
                OperatorClass.ADDITION: (1, tokens, width, 0),
                OperatorClass.LOSS: (1, tokens, 8 * width, 0),
                OperatorClass.EMBEDDING: (1, tokens, width, 32000),
            }
            for name, (batch, m, n, k) in sizes.items():
                op = Operator(operator=name, what="sample", batch=batch, m=m, n=n, k=k)
                for phase in ("forward", "backward"):
                    yield op, phase


def samples(
    kind: DeviceKind,
    *,
    precision: str = "bfloat16",
    slower: float = 1.0,
) -> list[OperatorSample]:
    """Every operator of one kind, `slower` times the truth."""
    return [
        operator_sample(
            op.operator,
            phase,
            batch=op.batch,
            m=op.m,
            n=op.n,
            k=op.k,
            seconds=seconds(kind, op, phase, precision, slower=slower),
            precision=precision,
            device=kind.kind,
        )
        for op, phase in operators()
    ]


def laws(
    operators: Sequence[OperatorSample] = (), layers: Sequence[LayerSample] = ()
) -> FittedLaws:
    """The fit of these samples alone."""
    return FittedLaws(
        hetplan_version="0",
        layers=fit_layer_laws(layers),
        links=(),
        populations=(),
        notes=(),
        operators=fit_operator_laws(operators),
    )


KINDS = tuple(
    device(name, tflops=tflops, gigabytes=gigabytes)
    for name, tflops, gigabytes in (
        ("one", 125, 900),
        ("two", 312, 1555),
        ("three", 989, 3350),
        ("four", 71, 936),
    )
)
NEW = device("new", tflops=500, gigabytes=2500)
