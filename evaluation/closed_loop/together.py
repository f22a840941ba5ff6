"""HETHUB's question: how near do all kinds together come to the sum of each alone?

Each kind alone has the part of the batch that its hosts' speed deserves, so that a step takes about
as long as one of all together; only its own reduction and update depend on that. No pipeline has
more than 64 microbatches in a step, alone or together:

    ratio   tokens/s together / sum over the kinds of tokens/s alone, all measured
    bound   the least step that the plan's own layers and bubble allow, over the measured one

The least step is that of its slowest pipeline: `max_s(sum_{j<s} c_j + m c_s)`, c_s the compute of a
microbatch on stage s, forward and backward, m microbatches; with virtual stages `max_s m c_s`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from evaluation.closed_loop.measuring import PLAIN, search_plan
from evaluation.closed_loop.plans import (
    PoolSpace,
    draw_pool,
    loop_plan,
    price_pool,
    speeds_of,
)
from evaluation.closed_loop.results import invalid_reasons, spread, verdict_of
from evaluation.closed_loop.training import TrainingTask, train_missing
from evaluation.closed_loop.values import (
    TOGETHER_JOB_FILE,
    HethubMeasured,
    LoopInputs,
    LoopPlan,
    Row,
    TrainedPlan,
)
from hetplan.cost.step_model.pricer import Pricer
from hetplan.errors import InputError
from hetplan.job.load import load_job
from hetplan.job.spec import Job
from hetplan.plans.plan import Plan
from hetplan.plans.ranks import launch_faults
from hetplan.predict.fit import load_predictor
from hetplan.predict.predictor import Predictor
from hetplan.search.files import load_legal_plan

MAX_MICROBATCHES = 64
"""Of a pipeline in a step: with more, every pipeline's bubble vanishes."""
ANY_FORM, ONE_PIPELINE = "hetplan, any form", "hetplan, one pipeline"
WARMUP_STEPS, STEPS = 1, 2
"""A step takes ten seconds and more."""
MIN_RATIO = 0.975
MIN_OF_BOUND = 0.99
POOL_SIZE = 300
_SIZES = (1, 2, 3, 4, 6, 8)
"""Microbatch sizes of one rank, and samples of a pipeline's microbatch, that are drawn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A plan for HETHUB's figure, and its job, whose batch is the plan's own."""

    what: str
    plan: LoopPlan
    job: Job
    bound_seconds: float

    @property
    def tokens_per_second(self) -> float:
        """As predicted."""
        return tokens(self.job) / self.plan.predicted_seconds


def train_together(inputs: LoopInputs) -> HethubMeasured:
    """Each kind alone, then all together, under hetplan's plans."""
    predictor = load_predictor(inputs.predictor(PLAIN))
    candidates = tuple(Planner(inputs, load_job(TOGETHER_JOB_FILE), predictor).candidates())
    tasks = [
        TrainingTask(name=str(number), plan=candidate.plan, job=candidate.job)
        for number, candidate in enumerate(candidates)
    ]
    trained = train_missing(
        inputs, PLAIN, "together", tasks, warmup_steps=WARMUP_STEPS, steps=STEPS
    )
    kinds = {island.device.kind for island in inputs.cluster.islands}
    return measured(kinds, candidates, trained)


def measured(
    kinds: set[str], candidates: Sequence[Candidate], trained: Sequence[TrainedPlan]
) -> HethubMeasured:
    """The figures of what was trained; a candidate named like a kind is that kind alone."""
    pairs = list(zip(candidates, trained, strict=True))
    alone = [pair for pair in pairs if pair[0].what in kinds]
    whole = sum(tokens(candidate.job) / run.measured_seconds for candidate, run in alone)
    together = tuple(_row(*pair, whole) for pair in pairs if pair[0].what not in kinds)
    reasons = tuple(
        dict.fromkeys(
            f"{run.name}: {reason}"
            for run in trained
            for reason in invalid_reasons(
                run.overrun, spread(run.step_seconds), run.load_average, run.steal
            )
        )
    )
    verdict, reasons = verdict_of(reasons, _missed_goals(together))
    return HethubMeasured(
        alone=tuple(_row(*pair, None) for pair in alone),
        together=together,
        alone_tokens_per_second=whole,
        verdict=verdict,
        reasons=reasons,
    )


def _row(candidate: Candidate, run: TrainedPlan, whole: float | None) -> Row:
    rate = tokens(candidate.job) / run.measured_seconds
    return {
        "what": candidate.what,
        "name": candidate.plan.name,
        "samples": candidate.job.global_batch_size,
        "tokens_per_second": rate,
        "ratio": None if whole is None else rate / whole,
        "bound_ratio": None if whole is None else candidate.bound_seconds / run.measured_seconds,
        "trained": run,
    }


def _missed_goals(together: Sequence[Row]) -> Iterator[str]:
    best = max(row["ratio"] for row in together if row["what"] in (ANY_FORM, ONE_PIPELINE))
    if best < MIN_RATIO:
        yield f"{best:.1%} of the kinds alone; the goal is {MIN_RATIO:.1%}"
    for row in together:
        if row["what"] == ONE_PIPELINE and row["bound_ratio"] < MIN_OF_BOUND:
            yield (
                f"the best single pipeline reaches {row['bound_ratio']:.1%} of its own bound; the "
                f"goal is {MIN_OF_BOUND:.0%}"
            )


class Planner:
    """Plans of the job `closed-loop-together` and of its parts."""

    def __init__(self, inputs: LoopInputs, job: Job, predictor: Predictor) -> None:
        self._inputs, self._job, self._predictor = inputs, job, predictor

    def _pricer(self, samples: int) -> Pricer:
        """Of the job with this global batch."""
        job = replace(self._job, global_batch_size=samples)
        return Pricer(self._inputs.model, self._inputs.cluster, job, self._predictor)

    def candidates(self) -> Iterator[Candidate]:
        """What is trained: each kind alone, then hetplan's two plans."""
        batch, islands = self._job.global_batch_size, self._inputs.cluster.islands
        speeds = speeds_of(self._pricer(batch))
        weights = [len(island.usable_nodes) * speeds[island.name] for island in islands]
        for island, weight in zip(islands, weights, strict=True):
            # Every host of an island has as many samples, in microbatches of up to eight.
            unit = 8 * len(island.usable_nodes)
            samples = max(unit, round(batch * weight / sum(weights) / unit) * unit)
            pricer = self._pricer(samples)
            pool = self._pool(pricer, only=(island.name,), samples=(*_SIZES, 12, 16))
            yield _best(island.device.kind, pricer, pool)
        pricer = self._pricer(batch)
        yield _best(ANY_FORM, pricer, [*self._pool(pricer), *self._searched(pricer)])
        singles = []
        for samples in (4, 8):
            pricer = self._pricer(MAX_MICROBATCHES * samples)
            singles.append(_best(ONE_PIPELINE, pricer, self._pool(pricer, single=True)))
        yield max(singles, key=lambda candidate: candidate.tokens_per_second)

    def _pool(
        self,
        pricer: Pricer,
        *,
        only: tuple[str, ...] | None = None,
        single: bool = False,
        samples: tuple[int, ...] = _SIZES,
    ) -> tuple[LoopPlan, ...]:
        space = PoolSpace(
            model=pricer.model,
            cluster=pricer.cluster,
            job=pricer.job,
            speeds=speeds_of(pricer),
            samples=samples,
            microbatch_sizes=_SIZES,
            max_microbatches=MAX_MICROBATCHES,
            only=only,
            single=single,
        )
        pool = draw_pool(space, seed=self._inputs.spec.seed, size=POOL_SIZE)
        return price_pool(pricer, pool)

    def _searched(self, pricer: Pricer) -> Iterator[LoopPlan]:
        """The plan of `hetplan plan`, where the trainer and the devices that are played can run it.

        That is: no more microbatches than allowed, of sizes that were profiled.
        """
        out = self._inputs.path("searched-together.json")
        search_plan(self._inputs, TOGETHER_JOB_FILE, out)
        plan = load_legal_plan(out).plan
        played = (
            all(pipeline.num_microbatches <= MAX_MICROBATCHES for pipeline in plan.pipelines)
            and max(replica.microbatch_size for replica in plan.replicas) <= _SIZES[-1]
        )
        if played and not any(launch_faults(plan)):
            yield loop_plan(pricer, plan, searched=True)


def _best(what: str, pricer: Pricer, plans: Sequence[LoopPlan]) -> Candidate:
    """The plan with the least predicted step."""
    if not plans:
        raise InputError(f"{what}: there is no plan of {pricer.job.global_batch_size} samples")
    plan = min(plans, key=lambda plan: plan.predicted_seconds)
    bound = bound_seconds(pricer, plan.plan)
    return Candidate(what=what, plan=plan, job=pricer.job, bound_seconds=bound)


def bound_seconds(pricer: Pricer, plan: Plan) -> float:
    """The least step by the plan's own layers and bubble, as the module says."""
    longest = 0.0
    for work in pricer.step(plan).work:
        count, before = work.pipeline.num_microbatches, 0.0
        virtual = work.pipeline.schedule.virtual_stages > 1
        for stage in work.stages:
            compute = sum(stage.forward) + sum(stage.backward) + sum(stage.weight)
            longest = max(longest, count * compute + (0.0 if virtual else before))
            before += compute
    return longest


def tokens(job: Job) -> int:
    """Tokens of one step."""
    return job.global_batch_size * job.sequence_length
