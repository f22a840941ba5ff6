"""Values and files of the closed loop, all in one folder that an interrupted loop goes on from."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from hetplan.errors import InputError
from hetplan.files.encoding import encode
from hetplan.files.reading import decode, read_document
from hetplan.files.shipped import shipped_folder
from hetplan.files.writing import write_atomically
from hetplan.plans.plan import Plan
from hetplan.profiling.pacing import MAX_JITTER

SPEC_SCHEMA = "hetplan.closed-loop-spec/1"
PLANS_SCHEMA = "hetplan.closed-loop-plans/1"
PASS_SCHEMA = "hetplan.closed-loop-pass/1"

MAX_OVERRUN = 0.30
"""Part of the paced passes that may take longer than their pace."""
MIN_STALLED_FRACTION = 0.25
"""Part of a step, from which a plan counts as one that tests more than compute."""
MAX_SPREAD = 0.03
"""(longest - shortest) / shortest of the same plan trained several times."""

MAX_PROFILE_EXCESS = 0.06
"""Mean by which the profile of a device kind may lie above the pace that it was held to."""


class Verdict(StrEnum):
    """What a pass of the loop says."""

    REACHED = "goals reached"
    MISSED = "goals missed"
    INVALID = "INVALID"
    """The machine was too busy to measure: neither reached nor missed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopSpec:
    """Options of a loop: equal specs have equal plans, so that an interrupted loop can go on."""

    plans: int = 20
    seed: int = 0
    warmup_steps: int = 1
    steps: int = 4
    """Measured ones of every plan."""
    repeats: int = 3
    """How often the searched plan is trained, spread over the pass."""
    jitter: float = 0.05
    """Of the second pass; 0: there is none."""
    hethub: bool = True
    short: bool = False
    """A smaller job, of which less is measured, at the pace of the shipped profile of a core."""

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
class LoopPlan:
    """A plan of the loop before it is trained."""

    name: str
    """Stages in order, islands and layers, degrees and shares: says what the plan is."""
    form: str
    """Kind of plan, such as `one pipeline`, for the stratified choice."""
    plan: Plan
    predicted_seconds: float
    stalled: float
    """Predicted part of the step in bubble, or in communication that nothing hides."""
    searched: bool = False
    """The plan that `hetplan plan` found."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopPlans:
    """The plans of a pass, and how many there were to choose from."""

    plans: tuple[LoopPlan, ...]
    pool: int
    """Legal plans that were priced."""
    left_out_slow: int
    """Of them, those predicted to take more than the loop waits for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedPlan:
    """One training of a plan."""

    name: str
    predicted_seconds: float
    measured_seconds: float
    """Median of the steps that count."""
    step_seconds: tuple[float, ...]
    """Those steps."""
    losses: tuple[float, ...]
    """Of all steps, the warm-up's too."""
    paced_passes: int
    overruns: int
    counted_long_bytes: float
    """Over the long link in one step, both ways, as the trainer counts what it sends."""
    ledger_long_bytes: float
    """The same as the cost model has it."""
    carried_long_bytes: int
    """What the relay carried meanwhile, both ways: headers, barriers, set-up and warm-up too."""
    all_steps: int
    """Steps in which it did."""
    load_average: float
    steal: float
    """Part of the cores' time that other virtual machines took meanwhile."""

    @property
    def error(self) -> float:
        """Signed, of the prediction, as a part of what was measured."""
        return self.predicted_seconds / self.measured_seconds - 1.0

    @property
    def spread(self) -> float:
        """(longest - shortest) / shortest of the steps that count."""
        return max(self.step_seconds) / min(self.step_seconds) - 1.0

    @property
    def overrun(self) -> float:
        """Part of the paced passes that took longer than their pace."""
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
class LoopTotals:
    """One pass in numbers; fractions."""

    mape: float
    worst: float
    """Largest |error|."""
    bias: float
    """Mean signed error."""
    spearman: float
    regret: float
    """Measured step of the searched plan over the least measured one, less 1."""
    repeats_spread: float
    """(longest - shortest) / shortest of the medians of the searched plan."""
    overrun: float
    """Part of all paced passes."""
    range: float
    """Longest measured step over the shortest."""
    stalled_plans: int
    """Plans with a quarter or more of their step in bubble or exposed communication."""
    load_average: float
    """Largest of one minute that was seen after a training."""
    steal: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopPass:
    """All plans, once, with or without jitter."""

    jitter: float
    rows: tuple[LoopRow, ...]
    """By predicted step."""
    profile_excess: float
    """By how much a kind's profiled layers took longer than their pace, the mean of the worst kind:
    such a profile is of a busy machine, not of the device."""
    repeats: tuple[TrainedPlan, ...]
    """All trainings of the searched plan, the row's own first."""
    totals: LoopTotals
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
        """Those of the loop; wider of the short one, whose few steps say less."""
        return Goals(mape=0.10, spearman=0.9, regret=0.05) if spec.short else Goals()


@dataclass(frozen=True, slots=True, kw_only=True)
class TogetherRow:
    """One way to train on all kinds, or a kind alone, for HETHUB's figure."""

    what: str
    name: str
    """Of its plan."""
    samples: int
    """Global batch."""
    tokens_per_second: float
    ratio: float | None
    """Over the sum of the kinds alone; None of a kind alone."""
    bound_ratio: float | None
    """The most its layers and its bubble leave it, of its own throughput: 1 is all."""
    trained: TrainedPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class HethubMeasured:
    """Every kind alone, then all together."""

    alone: tuple[TogetherRow, ...]
    together: tuple[TogetherRow, ...]
    alone_tokens_per_second: float
    verdict: Verdict
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedLoop:
    """What `python -m evaluation closed-loop` found."""

    machine: str
    spec: LoopSpec
    weight: str
    """Why the loop's processes had no more weight than others; empty: they had."""
    passes: tuple[LoopPass, ...]
    hethub: HethubMeasured | None
    pool: int
    left_out_slow: int


SMALL_JOB, SHORT_JOB = "closed-loop", "closed-loop-short"
TOGETHER_JOB = "closed-loop-together"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopFiles:
    """Files of one loop."""

    folder: Path
    short: bool = False
    """Files of the short version."""

    @property
    def model(self) -> Path:
        """The model that is trained."""
        return shipped_folder("configs") / "models" / "gpt-tiny.yaml"

    @property
    def cluster(self) -> Path:
        """The emulated cluster."""
        return shipped_folder("configs") / "clusters" / "emulated-two-regions.yaml"

    @property
    def job(self) -> Path:
        """The job of the plans that are compared."""
        name = SHORT_JOB if self.short else SMALL_JOB
        return shipped_folder("configs") / "jobs" / f"{name}.yaml"

    @property
    def together_job(self) -> Path:
        """The job of all kinds together."""
        return shipped_folder("configs") / "jobs" / f"{TOGETHER_JOB}.yaml"

    @property
    def searched_together(self) -> Path:
        """What `hetplan plan` found for it."""
        return self.folder / "searched-together.json"

    @property
    def spec(self) -> Path:
        """What the loop was inputs."""
        return self.folder / "spec.json"

    @property
    def core_store(self) -> Path:
        """Measurements of one core of this machine, of which the pace is made."""
        return self.folder / "core"

    @property
    def link_store(self) -> Path:
        """Measurements of the emulated links."""
        return self.folder / "links"

    def done(self, what: str) -> Path:
        """There as soon as something was measured whole."""
        return self.folder / f"{what}.done"

    def pace(self, kind: str) -> Path:
        """The pace of a pass, `plain` or `jitter`."""
        return self.folder / f"pace-{kind}.json"

    def device_store(self, kind: str) -> Path:
        """Measurements of the device kinds at that pace."""
        return self.folder / f"devices-{kind}"

    def predictor(self, kind: str) -> Path:
        """The fit of both."""
        return self.folder / f"predictor-{kind}.json"

    @property
    def searched(self) -> Path:
        """What `hetplan plan` found."""
        return self.folder / "searched.json"

    @property
    def plans(self) -> Path:
        """The plans that are trained."""
        return self.folder / "plans.json"

    def trained(self, kind: str, name: str) -> Path:
        """What one training of a pass measured."""
        return self.folder / f"trained-{kind}" / f"{name}.json"


def open_folder(folder: Path, spec: LoopSpec) -> LoopFiles:
    """The folder of this loop, new or as it was left; an InputError where another one is there."""
    files = LoopFiles(folder=folder, short=spec.short)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot write to folder {folder}: {error.strerror or error}") from error
    if files.spec.exists():
        there = decode(read_document(files.spec), LoopSpec, schema=SPEC_SCHEMA)
        if there != spec:
            raise InputError(
                f"{folder} has a closed loop with other options ({there}); give another "
                "--out, or remove it"
            )
    elif any(folder.iterdir()):
        raise InputError(f"{folder} is not empty and has no closed loop; give another --out")
    else:
        write_atomically(files.spec, encode(spec, schema=SPEC_SCHEMA))
    return files
