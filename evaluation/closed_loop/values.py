"""Values and files of the closed loop. All files are in one folder, so that a loop can resume."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from hetplan.cluster.spec import Cluster
from hetplan.emulation.values import Emulation
from hetplan.errors import InputError
from hetplan.files.encoding import encode
from hetplan.files.reading import decode, read_document
from hetplan.files.shipped import shipped_folder
from hetplan.files.writing import write_atomically
from hetplan.job.spec import Job
from hetplan.model.spec import ModelSpec
from hetplan.plans.plan import Plan
from hetplan.profiling.pacing import MAX_JITTER

SPEC_SCHEMA = "hetplan.closed-loop-spec/1"
Say = Callable[[str], None]
Row = dict[str, Any]

MAX_OVERRUN = 0.30
"""Largest valid fraction of paced passes that take longer than their pace."""
MIN_STALLED_FRACTION = 0.25
"""Fraction of the step from which a plan counts as one that tests more than compute."""
MAX_SPREAD = 0.03
"""Largest valid (longest - shortest) / shortest of one plan's trainings."""
MAX_PROFILE_EXCESS = 0.06
"""Largest valid mean by which a device kind's profile lies above its pace."""

CONFIGS = shipped_folder("configs")
MODEL_FILE = CONFIGS / "models" / "gpt-tiny.yaml"
CLUSTER_FILE = CONFIGS / "clusters" / "emulated-two-regions.yaml"
JOB_FILE = CONFIGS / "jobs" / "closed-loop.yaml"
SHORT_JOB_FILE = CONFIGS / "jobs" / "closed-loop-short.yaml"
TOGETHER_JOB_FILE = CONFIGS / "jobs" / "closed-loop-together.yaml"
"""Job of the kinds alone and together."""


class Verdict(StrEnum):
    """What a pass of the loop says."""

    REACHED = "goals reached"
    MISSED = "goals missed"
    INVALID = "INVALID"
    """The machine was too busy to measure: neither reached nor missed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopSpec:
    """Options of a loop. Equal specs have equal plans, so that an interrupted loop can resume."""

    plans: int = 20
    seed: int = 0
    warmup_steps: int = 1
    steps: int = 4
    """Measured steps of each plan."""
    repeats: int = 3
    """Trainings of the searched plan, spread over the pass."""
    jitter: float = 0.05
    """Jitter of the second pass; 0: there is none."""
    hethub: bool = True
    short: bool = False
    """A smaller job and fewer measurements, at the pace of the shipped profile of a core."""

    @staticmethod
    def of_short(seed: int = 0) -> LoopSpec:
        """A loop of a minute and a half."""
        return LoopSpec(
            plans=6, seed=seed, steps=2, repeats=2, jitter=0.0, hethub=False, short=True
        )

    def __post_init__(self) -> None:
        for name, least in (("plans", 2), ("warmup_steps", 0), ("steps", 1), ("repeats", 1)):
            if getattr(self, name) < least:
                raise InputError(f"{name} is {getattr(self, name)}; it is at least {least}")
        if self.seed < 0:
            raise InputError(f"seed is {self.seed}; it is at least 0")
        if not 0 <= self.jitter <= MAX_JITTER:
            raise InputError(f"jitter is {self.jitter}; it is 0 to {MAX_JITTER}")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopInputs:
    """What every part of the loop reads."""

    spec: LoopSpec
    folder: Path
    emulation: Emulation
    model: ModelSpec
    cluster: Cluster
    job: Job
    say: Say

    @property
    def job_file(self) -> Path:
        """Job of the plans that are compared."""
        return SHORT_JOB_FILE if self.spec.short else JOB_FILE

    def path(self, name: str) -> Path:
        """A file or folder of the loop."""
        return self.folder / name

    def predictor(self, kind: str) -> Path:
        """The fit of a pass, `plain` or `jitter`."""
        return self.folder / f"predictor-{kind}.json"

    def pace(self, kind: str) -> Path:
        """The pace of a pass."""
        return self.folder / f"pace-{kind}.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopPlan:
    """A priced plan of the loop."""

    name: str
    """Stages in order, islands and layers, degrees and shares: identifies the plan."""
    form: str
    """Kind of plan, such as `one pipeline`, for the stratified choice."""
    plan: Plan
    predicted_seconds: float
    stalled: float
    """Predicted fraction of the step in bubble or exposed communication."""
    searched: bool = False
    """The plan that `hetplan plan` returned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopPlans:
    """The plans of a pass, and how many there were to choose from."""

    plans: tuple[LoopPlan, ...]
    pool: int
    """Legal plans that were priced."""
    left_out_slow: int
    """Plans of the pool that are predicted to take longer than the loop waits for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedPlan:
    """One training of a plan."""

    name: str
    predicted_seconds: float
    measured_seconds: float
    """Median of `step_seconds`."""
    step_seconds: tuple[float, ...]
    """Steps after the warm-up."""
    losses: tuple[float, ...]
    """Of all steps, warm-up included."""
    paced_passes: int
    overruns: int
    counted_long_bytes: float
    """Bytes over the long link per step, both ways, as the trainer counts them."""
    ledger_long_bytes: float
    """The same as the cost model counts them."""
    carried_long_bytes: int
    """What the relay carried over all steps: headers, barriers, set-up and warm-up too."""
    all_steps: int
    """Steps in which it did."""
    load_average: float
    steal: float
    """Fraction of the cores' time that other virtual machines took meanwhile."""

    @property
    def error(self) -> float:
        """Predicted over measured, less 1."""
        return self.predicted_seconds / self.measured_seconds - 1.0

    @property
    def overrun(self) -> float:
        """Fraction of the paced passes that took longer than their pace."""
        return self.overruns / self.paced_passes if self.paced_passes else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopRow:
    """One plan of a pass, predicted and measured."""

    name: str
    form: str
    searched: bool
    stalled: float
    trained: TrainedPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopPass:
    """All plans, once, with or without jitter."""

    jitter: float
    rows: tuple[LoopRow, ...]
    """By predicted step."""
    profile_excess: float
    """Mean by which profiled layers of the worst kind took longer than their pace: the profile of
    a busy machine, not of the device."""
    repeats: tuple[TrainedPlan, ...]
    """All trainings of the searched plan, the row's own first."""
    totals: dict[str, float]
    verdict: Verdict
    reasons: tuple[str, ...]
    """Why it is invalid, or which goals it missed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Goals:
    """Numbers to reach."""

    mape: float = 0.03
    spearman: float = 0.98
    regret: float = 0.01

    @staticmethod
    def of(spec: LoopSpec) -> Goals:
        """Those of the loop; wider for the short one, whose few steps say less."""
        return Goals(mape=0.10, spearman=0.9, regret=0.05) if spec.short else Goals()


@dataclass(frozen=True, slots=True, kw_only=True)
class HethubMeasured:
    """Every kind alone, then all together.

    Rows: `what` is trained, the plan's `name`, its `samples` (global batch), `tokens_per_second`,
    `trained`, and of all together the `ratio` over the sum of the kinds alone and the
    `bound_ratio`: the part of the throughput that its layers and its bubble allow.
    """

    alone: tuple[Row, ...]
    together: tuple[Row, ...]
    alone_tokens_per_second: float
    verdict: Verdict
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedLoop:
    """Result of `python -m evaluation closed-loop`."""

    machine: str
    spec: LoopSpec
    weight: str
    """Why the loop's processes had no more weight than others; empty: they had."""
    passes: tuple[LoopPass, ...]
    hethub: HethubMeasured | None
    pool: int
    left_out_slow: int


def open_folder(folder: Path, spec: LoopSpec) -> None:
    """Make or reopen the folder of this loop; an InputError where it belongs to something else."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot write to folder {folder}: {error.strerror or error}") from error
    file = folder / "spec.json"
    if file.exists():
        earlier = decode(read_document(file), LoopSpec, schema=SPEC_SCHEMA)
        if earlier != spec:
            raise InputError(
                f"{folder} has a closed loop with other options ({earlier}); give another --out, "
                "or remove it"
            )
    elif any(folder.iterdir()):
        raise InputError(f"{folder} is not empty and has no closed loop; give another --out")
    else:
        write_atomically(file, encode(spec, schema=SPEC_SCHEMA))
