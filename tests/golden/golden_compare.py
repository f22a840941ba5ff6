"""One small comparison of a run with its plan, written out by hand."""

from hetplan.comparison.compare import Comparison, MemoryRow
from hetplan.comparison.parts import Culprit, PartRow, TimerRow
from hetplan.comparison.steps import LeftOut, StepSpread
from hetplan.cost.estimate_values import Interval

COMPARISON = Comparison(
    trainer="megatron",
    files=("train.log",),
    model="gpt-tiny",
    cluster="this-machine",
    measured=StepSpread(
        count=19, median_seconds=2.0, p10_seconds=1.9, p90_seconds=2.2, iterations="20, 30"
    ),
    left_out=(LeftOut(reason="checkpoint in it", count=1, iterations="40"),),
    predicted_step_seconds=1.6,
    predicted_interval=Interval(p10_seconds=1.4, mean_seconds=1.6, p90_seconds=1.9),
    timers=(
        TimerRow(
            timer="all-grads-sync",
            quantity="gradient reduction",
            ranks="all ranks",
            measured_least_seconds=0.3,
            measured_most_seconds=0.5,
            predicted_least_seconds=0.1,
            predicted_most_seconds=None,
            note="what nothing hides",
        ),
    ),
    parts=(
        PartRow(
            part="gradient reduction",
            components=("dp",),
            predicted_seconds=0.1,
            measured_seconds=0.5,
            note="what nothing hides",
        ),
    ),
    culprit=Culprit(
        part="gradient reduction",
        difference_seconds=0.4,
        meaning="slower than its link",
        measure="hetplan profile --link ib",
    ),
    memory=MemoryRow(kind="allocated", measured_bytes=6e10, predicted_bytes=5.5e10),
    notes=("only 3 logged steps count",),
)
