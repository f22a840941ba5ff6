"""What a check of kinds' arithmetic writes, small and written by hand."""

from __future__ import annotations

from hetplan.job.spec import Optimizer, Precision
from hetplan.launchers.numerics import (
    Allowed,
    KindNumerics,
    Numerics,
    NumericsResult,
    NumericsSetup,
    Refused,
)

NUMERICS = Numerics(
    hetplan_version="1.0.0",
    setup=NumericsSetup(
        model="llama-2-70b",
        precision=Precision.BFLOAT16,
        optimizer=Optimizer.ADAMW,
        seed=7,
        tensor_parallel=(1, 2),
        microbatch_size=1,
        sequence_length=512,
    ),
    kinds=(
        KindNumerics(
            kind="acme-one-80gb",
            device_name="Acme One",
            driver="accl 1.2",
            torch_version="2.8.0",
            results=(
                NumericsResult(
                    operator="norm",
                    what="final norm",
                    tp=2,
                    tensor="gradient of input",
                    shape=(512, 8192),
                    reference_rms=1.0,
                    largest_deviation=0.0078125,
                    rms_deviation=0.00390625,
                    allowed=Allowed(rms=0.015625, largest=0.0625),
                    probes=(0.5, -1.25),
                ),
            ),
            refused=(
                Refused(operator="activation", what="activation", message="has no such kernel"),
            ),
        ),
    ),
)
