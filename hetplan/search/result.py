"""What a search returns: never a bare plan, always how good it is and what it was made from."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from hetplan.cluster.spec import Cluster, Island
from hetplan.cost.estimate_values import Estimate
from hetplan.job.spec import Job
from hetplan.model.spec import ModelSpec
from hetplan.plans.plan import Plan, searched_with_formats


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyBound:
    """The bound of a family of plans that its order-free bound does not exclude."""

    family: int
    """Its number in the list of families (`hetplan.search.space.families`)."""
    plans: str
    """What its plans have in common, in words."""
    bound_seconds: float | None
    """No plan of it has a shorter step; None: none is feasible."""
    grounds: str
    """What the bound rests on, a value of `hetplan.search.solver.Grounds`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """What the lower bound of a certificate rests on; `hetplan verify` recomputes it.

    The lower bound is the least of: the order-free bounds of all families but the `raised` ones,
    the bounds of these, and the bound of plans of several pipelines.
    """

    families: int
    """Families of plans of one pipeline, whether they fit or not."""
    families_sha256: str
    """Digest of their list: a proof belongs to one space."""
    raised: tuple[FamilyBound, ...]
    """Families whose order-free bound is below the certificate's, in the order of the list."""
    several_bound_seconds: float | None = None
    """No plan of several pipelines has a shorter step; None: there are none, or none feasible."""
    several_grounds: str = ""
    """What that rests on; empty: there are none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CoursePoint:
    """Where a search stood after so much work.

    Work, no seconds: a search whose input is equal takes the same steps on every machine.
    """

    steps: int
    """Families that were improved or proven, each time counted."""
    best_seconds: float
    """Step of the best plan by then."""
    lower_bound_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """How far the plan can be from the best plan of the space, under the replay cost."""

    lower_bound_seconds: float
    """No plan of the space has a shorter step."""
    gap: float
    """(step - lower bound) / step."""
    status: str
    """`optimal` (gap within the job's); `limit` or `interrupted` (the time limit or the user
    stopped it before that); `open`: it ended by itself with a wider gap, as some candidates are too
    large to close, or boundaries that share a link make the plan slower than the search has them,
    or the plan was chosen by another aim than the bound is about, or lies on parts of nodes and is
    faster than every plan that the search without limits has.
    """
    space: str
    """What was searched and what was fixed, in words."""
    candidates: int
    """Families of plans (degrees or tick, microbatch size, recomputation, schedule, sharding) that
    divide and fit, and one more for several pipelines."""
    pruned_by_bound: int
    """Candidates whose order-free bound excluded them without a search."""
    searched: int
    replays: int
    """Plans priced by replay."""
    closed_by_program: int = 0
    """Searched candidates that the programs over orders, cuts and depths closed at the target."""
    closed_by_listing: int = 0
    """Searched candidates of which every plan below the target was replayed."""
    left_open: int = 0
    """Candidates that may hold a plan below the target: the gap counts them."""
    explored: int = 0
    """Subproblems that programs solved."""
    proof: Proof | None = None
    """None in files of forms before 9, and where the search ended before it had looked at all."""
    course: tuple[CoursePoint, ...] = ()
    """Plan and bound where one of them changed, by the search's work; empty in files of forms
    before 13."""

    @staticmethod
    def from_older_form(data: dict[str, object]) -> dict[str, object]:
        """Data of forms before 5, which had a second bound, of the plan's own degrees."""
        return {key: each for key, each in data.items() if key != "integer_model_bound_seconds"}


LIMITS_LEFT_OUT = "the bound leaves limits of sites out"
OTHER_PARTS_LEFT_OUT = "the bound leaves out plans on parts of nodes that were not searched"

_EQUAL = 1e-9
"""Steps closer than this part of each other count as equal."""

NO_TIME = "not searched alone: no time was left"
"""Reason of a kind of which nothing is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KindAlone:
    """Best plan of one device kind by itself, for the homogeneous sum."""

    device: str
    devices: int
    tokens_per_second: float
    """0 where the kind cannot hold the model; then `roofline_tokens_per_second` counts."""
    roofline_tokens_per_second: float | None
    """Peak rate of all devices over the model's operations per token; None without a peak rate."""
    gap: float
    """Proven distance of that plan to the kind's best; 0 without a plan."""
    reason: str
    """Empty, or why there is no plan of the kind alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HomogeneousSum:
    """The plan against the sum of what each kind would reach alone (HETHUB's figure of merit).

    Predicted on both sides; a ratio measured on real accelerators is another thing.
    """

    kinds: tuple[KindAlone, ...]
    homogeneous_sum_ratio: float | None
    """None where a kind was not searched, or cannot train alone and has no peak rate to stand in
    for it."""
    roofline_ratio: float | None
    """None where a kind has no peak rate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What a search answers; what-ifs change it and search again (`hetplan.whatif`)."""

    model: ModelSpec
    cluster: Cluster
    job: Job

    def changed(self, *, cluster: Cluster | None = None, job: Job | None = None) -> Question:
        """The question with another cluster or job."""
        return Question(
            model=self.model,
            cluster=self.cluster if cluster is None else cluster,
            job=self.job if job is None else job,
        )

    def looser(self, gap: float, seconds: float | None = None) -> Question:
        """The question with at least this gap and, where one is given, this time limit."""
        job = replace(self.job, gap=max(self.job.gap, gap))
        return self.changed(
            job=job if seconds is None else replace(job, time_limit_seconds=seconds)
        )

    def with_island(self, island: Island) -> Question:
        """The question where this island takes the place of the one of the same name."""
        return self.changed(cluster=self.cluster.with_island(island))

    def without_islands(self, *names: str) -> Question:
        """The question where these islands are forbidden too; equal questions have equal jobs."""
        out = {*self.job.forbid.islands, *names}
        kept = tuple(each.name for each in self.cluster.islands if each.name in out)
        return self.with_job(forbid=replace(self.job.forbid, islands=kept))

    def with_job(self, **values: Any) -> Question:
        """The question with these fields of its job."""
        return self.changed(job=replace(self.job, **values))

    def with_pins(self, **values: Any) -> Question:
        """The question with these pins; None frees one."""
        return self.with_job(pin=replace(self.job.pin, **values))


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs(Question):
    """The question of a search and the sha256 of each file it came from."""

    sha256: tuple[tuple[str, str], ...]
    """(name of the input, hex digest): model, cluster, job, predictor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Restriction:
    """What the plan's target costs: the same job for a trainer that can run more."""

    target: str
    """The other trainer."""
    libraries: tuple[str, ...] = ()
    """Libraries of collectives that it can have in one plan, and the plan's target cannot."""
    mixed: bool = False
    """Whether its plan has devices of several of them."""
    step_seconds: float
    """Its best plan that was found."""
    lower_bound_seconds: float
    """No plan of it has a shorter step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """Another plan that is good by some aim, beside the best one."""

    why: str
    """What speaks for it, in words."""
    plan: Plan
    step_seconds: float
    quantile_seconds: float
    """What the step stays below with probability `quantile`."""
    quantile: float
    usd_per_step: float | None
    """With its part of the run's lost time where the job says its tokens; None: no price."""
    devices: int
    """In use."""
    run_seconds: float | None = None
    """The whole run with all that it loses; None where it was not asked, and in older files."""
    kwh_per_step: float | None = None
    """At the meter, likewise; None in files of forms before 14, as the next."""
    gap: float | None = None
    """Part of its step by which another plan of its own question could be shorter, proven."""
    usd_gap: float | None = None
    """Part of its cost by which any plan could be cheaper, proven; None: no price, or not asked."""
    kwh_gap: float | None = None
    """The same of its energy, as the power law has it."""
    worst_seconds: float | None = None
    """Mean step in the worst tenth of all draws of what varies (`Job.vary`); None where the aim is
    another, or the plan was beaten before all were priced, and in forms before 16."""
    median_seconds: float | None = None
    """Median step of the same draws."""


class IdleCause(StrEnum):
    """What keeps an island out of the best plan: mended, the best plan uses it."""

    LIBRARY = "library"
    """The trainer has one library of collectives, and the island another than the plan."""
    BANDWIDTH = "bandwidth"
    """Of its links to other islands."""
    ROUND_TRIP = "round trip"
    """Of the same links."""
    MEMORY = "memory"
    """Of its devices: twice as much would do."""
    LIMIT = "limit"
    """Of its site, of all sites or of its hosts' cores."""
    BATCH = "batch"
    """It does not divide over the island's devices, or has too few microbatches for them."""
    DEGREES = "degrees"
    """The trainer gives all stages the same tp, dp and microbatch size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakEven:
    """From where an island pays, all else as it is."""

    name: str
    """What is changed: bandwidth, round_trip, memory or global_batch_size."""
    unit: str
    """Of all figures: bytes/s, s, bytes or sequences."""
    today: float
    value: float
    """The nearest to today's at which a plan that was found uses more of the island and is faster
    than all found that do not."""
    lower: float
    """`value` and the nearest on its other side at which no plan found does, in order: the
    resolution of what was asked."""
    upper: float
    gap: float
    """Part of the step by which a plan could be faster there, by the proof of that search."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleReason:
    """Why a plan leaves an island out or gives it less to do than others."""

    island: str
    idle_devices: int
    usable_devices: int
    busy_share: float
    """Part of the step in which its usable devices compute, their mean."""
    causes: tuple[IdleCause, ...]
    """The fewest changes that were found to make the best plan use more of it; empty: none does."""
    other: str = ""
    """The other island of the link, the target without this cause, or the limits."""
    gain: float = 0.0
    """Part by which tokens/s grow with the causes gone."""
    seconds_with_it: float | None = None
    """Step of the best plan that was found to use the island today; None: none was found."""
    break_even: BreakEven | None = None
    """None where no single figure would have to change."""


class ChangeKind(StrEnum):
    """What a change of the question changes."""

    NODE = "node"
    """One more node of an island."""
    NODES = "nodes"
    """A tenth more of them."""
    WIDER = "wider"
    """Twice the bandwidth of a link."""
    NARROWER = "narrower"
    """Half of it."""
    NEARER = "nearer"
    """Half the round trip of a link."""
    MEMORY = "memory"
    """More of an island's."""
    DEMAND = "demand"
    """Another value in the job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShadowPrice:
    """One change and what it is worth, planned again."""

    kind: ChangeKind
    words: str
    least_gain: float
    """Part by which tokens/s grow with the best plan found; 0 where it is today's, negative where
    they shrink."""
    most_gain: float | None
    """No plan with the change is better; None where nothing was shown in time."""
    same_plan_gain: float | None
    """Of the layout as it is; None where it is not legal with the change."""
    changed: bool
    """Whether another layout than today's is best."""
    note: str = ""
    """Why there is no price."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BestAlone:
    """The best device kind by itself, beside a plan that may use several."""

    target: str
    """Trainer: the plan's, or Megatron-LM where a kind alone is faster under that."""
    kind: KindAlone


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """The plan and everything needed to judge, reproduce and launch it."""

    schema: str
    hetplan_version: str
    seed: int
    inputs: Inputs
    plan: Plan
    estimate: Estimate
    certificate: Certificate | None
    """None of local steps, and where the layout was given by the user and priced, not searched."""
    objective: str = ""
    """What the plan was chosen by where that is not the step time alone; the certificate is about
    the step time."""
    alternatives: tuple[Alternative, ...] = ()
    """Other plans worth a look, best first."""
    restriction: Restriction | None = None
    """None where it was not asked, or the target can run all that is searched."""
    idle: tuple[IdleReason, ...] = ()
    """Why devices are idle, where it was asked (`hetplan report --what-if`; so the prices)."""
    prices: tuple[ShadowPrice, ...] = ()
    """What single changes are worth, the largest first."""
    alone: BestAlone | None = None
    """None where it was not asked, there is one kind only, none has a plan alone, or the target
    cannot mix the libraries of the cluster's kinds."""
    seal: str = ""
    """sha256 of the file's text without this line's digest; empty in files of forms before 9."""

    @property
    def used_islands(self) -> tuple[Island, ...]:
        """Those on which the plan has ranks, each once."""
        firsts = (replica.devices[0].start for replica in self.plan.replicas)
        return tuple(dict.fromkeys(map(self.inputs.cluster.island_of_device, firsts)))

    @property
    def unproven(self) -> str:
        """Why there is no certificate."""
        local = "bounds for its parts of the batch, of local steps, are not in the file"
        return local if self.plan.outer else "the layout was given, not searched"

    @property
    def is_front(self) -> bool:
        """Whether the alternatives are a Pareto front, which has the plan's own point too."""
        return any(each.plan == self.plan and each.gap is not None for each in self.alternatives)

    @staticmethod
    def from_older_form(data: dict[str, object]) -> dict[str, object]:
        """Data of forms before 8, whose plans did not name the formats of their reductions."""
        return searched_with_formats(data)


def certificate_beside(result: SearchResult, step_seconds: float) -> Certificate | None:
    """The step-time bound beside this plan's step.

    A plan below the bound is not one of the search's space (parts of nodes): nothing says that it
    is the best.
    """
    known = result.certificate
    if known is None or step_seconds == result.estimate.step_seconds:
        return known
    lower = min(known.lower_bound_seconds, step_seconds)
    gap = 1.0 - lower / step_seconds
    below = step_seconds < known.lower_bound_seconds * (1.0 - _EQUAL)
    status = known.status
    if status == "optimal" and (gap > result.inputs.job.gap or below):
        status = "open"
    return replace(known, lower_bound_seconds=lower, gap=gap, status=status)
