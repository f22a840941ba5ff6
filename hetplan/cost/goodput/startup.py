"""From the start of the processes to the first step: a law fitted on MLPerf's start-up times.

    seconds = started + grouped x ranks x stages + loaded x parameters
              + compiled (where CUDA graphs are captured)  [+ warmed x step, in MLPerf alone]

`init_s` of 47 results of MLPerf Training v4.0 and v4.1 (4 to 11,616 GPUs, 11 submitters; "not
verified by MLCommons") is fitted on relative error with non-negative coefficients
(`hetplan.predict.regression`). `python -m evaluation startup` fits it again and prints the error on
systems left out; a test compares its coefficients with these.

All ranks take part in the creation of every process group and meet in one store; every stage has
groups of its own. Of the forms that were tried for it (ranks x groups of a rank, ranks^1.5, ranks x
stages, also with chunks) ranks x stages has the least error on systems left out. The rows have two
models: what starts with the processes and what grows with the model's size cannot be told apart
well, so coefficients are held near equal parts of a start-up. MLPerf runs steps on made-up data
before it starts its clock; a trainer's first steps train, so a prediction leaves them out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from hetplan.plans.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class StartUpLaw:
    """Coefficients of the start-up, all at least 0."""

    started_seconds: float
    """Processes, libraries, the first group."""
    grouped_seconds: float
    """Process groups: for each rank and each stage of its pipeline."""
    loaded_seconds: float
    """For each parameter of the model: building it, and loading its weights."""
    compiled_seconds: float
    """Capture of CUDA graphs, or compilation."""
    log_halfwidth: float
    """Of the 90 % interval, by systems left out."""

    def start_up(self, ranks_times_stages: float, parameters: float, compiles: bool) -> StartUp:
        """The start-up of a run."""
        return StartUp(
            started_seconds=self.started_seconds,
            grouped_seconds=self.grouped_seconds * ranks_times_stages,
            loaded_seconds=self.loaded_seconds * parameters,
            compiled_seconds=self.compiled_seconds if compiles else 0.0,
            extrapolates=ranks_times_stages > LARGEST_RANKS_TIMES_STAGES,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StartUp:
    """Seconds of one start by what takes them."""

    started_seconds: float
    grouped_seconds: float
    loaded_seconds: float
    compiled_seconds: float
    extrapolates: bool = False
    """Whether the plan has more ranks and stages than any result of the law."""

    @property
    def seconds(self) -> float:
        """All of them."""
        return (
            self.started_seconds
            + self.grouped_seconds
            + self.loaded_seconds
            + self.compiled_seconds
        )

    @property
    def least(self) -> StartUp:
        """With groups that are created as fast as anybody has, where the law extrapolates."""
        grouped = min(self.grouped_seconds, SCALABLE_GROUPED_SECONDS)
        return replace(self, grouped_seconds=grouped) if self.extrapolates else self


MLPERF = StartUpLaw(
    started_seconds=11.24,
    grouped_seconds=9.789e-3,
    loaded_seconds=4.995e-10,
    compiled_seconds=64.98,
    log_halfwidth=0.3612,
)
"""`python -m evaluation startup` on runs/mlperf_v4.csv of the reference data."""

LARGEST_RANKS_TIMES_STAGES = 11616 * 6
"""Of those results. MegaScale (arXiv 2402.15627) creates groups orders of magnitude faster with
another store and order: beyond the results the law says what happens where nobody does that."""

SCALABLE_GROUPED_SECONDS = 30.0
"""Of all process groups of more than 10,000 ranks, where somebody does that (MegaScale)."""


def ranks_times_stages(plan: Plan) -> int:
    """Sum over all ranks of the stages of their pipeline."""
    return sum(
        len(pipeline.stages) * replica.num_devices
        for pipeline in plan.pipelines
        for stage in pipeline.stages
        for replica in stage.replicas
    )
