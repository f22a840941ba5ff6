"""What measured runs said about a fit, as it stands in a predictor's file."""

from hetplan.predict.calibration.values import (
    Calibration,
    CauseFactor,
    GroupInterval,
    HeldBack,
    SlowTail,
)

CALIBRATION = Calibration(
    factors=(
        CauseFactor(cause="nvidia-kind", name="compute", factor=1.04, log_halfwidth=0.02, runs=9),
        CauseFactor(
            cause="link rack", name="communication", factor=0.97, log_halfwidth=0.05, runs=9
        ),
    ),
    held_back=HeldBack(
        runs=9,
        better=8,
        median_before=0.045,
        median_after=0.018,
        mean_before=0.05,
        mean_after=0.03,
        accepted=True,
    ),
    intervals=(
        GroupInterval(
            devices=("nvidia-kind",),
            regime="several nodes",
            log_halfwidth=0.06,
            rows=9,
            pooled=False,
            scale=0.8,
            least_log_halfwidth=0.018,
        ),
    ),
    tails=(
        SlowTail(
            devices=("nvidia-kind",),
            regime="several nodes",
            runs=20,
            slow=3,
            least=0.12,
            most=0.48,
        ),
    ),
    runs=9,
    sources=("run.log",),
    notes=("factors accepted; left-out runs: 8 of 9 better",),
)
