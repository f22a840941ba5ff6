"""How near do all kinds together come to the sum of each alone? HETHUB's question, measured.

Each kind alone has the part of the batch that its hosts' speed deserves, so that a step takes about
as long as one of all together; nothing but its own reduction and update depends on that. No
pipeline has more than 64 microbatches in a step, alone or together:

    ratio   tokens/s together / sum over the kinds of tokens/s alone, all measured
    bound   the least step that the plan's own layers and bubble allow, over the measured one

The least step is that of its slowest pipeline: `max_s(sum_{j<s} c_j + m c_s)`, c_s the compute of a
microbatch on stage s, forward and backward, m microbatches (`hetplan.cost.bounds`); with virtual
stages `max_s m c_s`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from hetplan.benchmarks.closed_loop import measuring
from hetplan.benchmarks.closed_loop.asked import Asked, ToTrain, train_missing
from hetplan.benchmarks.closed_loop.choosing import loop_plan, price_pool, speeds_of
from hetplan.benchmarks.closed_loop.judging import invalid, spread
from hetplan.benchmarks.closed_loop.measuring import PLAIN
from hetplan.benchmarks.closed_loop.pool import at_most, dealt_out, draw_pool
from hetplan.benchmarks.closed_loop.values import (
    HethubMeasured,
    LoopPlan,
    TogetherRow,
    TrainedPlan,
    Verdict,
)
from hetplan.cost.priced.pricer import Pricer
from hetplan.emulation.values import Emulation
from hetplan.errors import InputError
from hetplan.job.load import load_job
from hetplan.job.spec import Job
from hetplan.plans.build import plan_of
from hetplan.plans.chosen import ChosenPipeline, ChosenPlan, ChosenStage, Part, Shape
from hetplan.plans.pieces import own_depth
from hetplan.plans.plan import Plan, Schedule
from hetplan.plans.ranks import launch_faults
from hetplan.predict.fit import load_predictor
from hetplan.predict.predictor import Predictor
from hetplan.search.files import load_plan

MAX_MICROBATCHES = 64
"""Of a pipeline in a step: with more, every pipeline's bubble vanishes."""
TOGETHER = "together"
ANY_FORM, ONE_PIPELINE = "hetplan, any form", "hetplan, one pipeline"
WARMUP_STEPS, STEPS = 1, 2
"""A step takes ten seconds and more."""
MIN_RATIO = 0.975
MIN_OF_BOUND = 0.99
POOL = 300
_SIMPLE_SAMPLES = 2
"""Of a microbatch of one pipeline that needs no planner."""
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


def train_together(asked: Asked, emulation: Emulation) -> HethubMeasured:
    """Each kind alone, then all together, under hetplan's plans and under simpler ones."""
    candidates = planned(asked, emulation)
    trained = train_missing(
        asked,
        emulation,
        PLAIN,
        TOGETHER,
        [
            ToTrain(name=str(number), plan=each.plan, job=each.job)
            for number, each in enumerate(candidates)
        ],
        warmup_steps=WARMUP_STEPS,
        steps=STEPS,
    )
    return measured(asked, candidates, trained)


def measured(
    asked: Asked, candidates: Sequence[Candidate], trained: Sequence[TrainedPlan]
) -> HethubMeasured:
    """The figures of what was trained; the kinds alone come first in both."""
    kinds = {island.device.kind for island in asked.cluster.islands}
    pairs = list(zip(candidates, trained, strict=True))
    alone = [pair for pair in pairs if pair[0].what in kinds]
    whole = sum(tokens(each.job) / one.measured_seconds for each, one in alone)
    together = tuple(_row(each, one, whole) for each, one in pairs if each.what not in kinds)
    reasons = tuple(
        dict.fromkeys(
            f"{one.name}: {reason}"
            for one in trained
            for reason in invalid(
                one.overrun, spread(one.step_seconds), one.load_average, one.steal
            )
        )
    )
    verdict = Verdict.INVALID
    if not reasons:
        reasons = tuple(_missed(together))
        verdict = Verdict.MISSED if reasons else Verdict.REACHED
    return HethubMeasured(
        alone=tuple(_row(each, one, None) for each, one in alone),
        together=together,
        alone_tokens_per_second=whole,
        verdict=verdict,
        reasons=reasons,
    )


def _row(each: Candidate, one: TrainedPlan, whole: float | None) -> TogetherRow:
    rate = tokens(each.job) / one.measured_seconds
    return TogetherRow(
        what=each.what,
        name=each.plan.name,
        samples=each.job.global_batch_size,
        tokens_per_second=rate,
        ratio=None if whole is None else rate / whole,
        bound_ratio=None if whole is None else each.bound_seconds / one.measured_seconds,
        trained=one,
    )


def _missed(together: Sequence[TogetherRow]) -> Iterator[str]:
    best = max(row.ratio or 0.0 for row in together if row.what in (ANY_FORM, ONE_PIPELINE))
    if best < MIN_RATIO:
        yield f"{best:.1%} of the kinds alone; the goal is {MIN_RATIO:.1%}"
    for row in together:
        if row.what == ONE_PIPELINE and (row.bound_ratio or 0.0) < MIN_OF_BOUND:
            yield (
                f"the best single pipeline reaches {row.bound_ratio:.1%} of its own bound; the "
                f"goal is {MIN_OF_BOUND:.0%}"
            )


def planned(asked: Asked, emulation: Emulation) -> tuple[Candidate, ...]:
    """What is trained: each kind alone, hetplan's two plans, then the simple splits."""
    job = load_job(asked.files.together_job)
    predictor = load_predictor(asked.files.predictor(PLAIN))
    planner = _Planner(asked, emulation, job, predictor)
    speeds = planner.speeds
    islands = asked.cluster.islands
    hosts = [len(island.usable_nodes) for island in islands]
    weights = [count * speeds[island.name] for island, count in zip(islands, hosts, strict=True)]
    found = []
    for island, weight in zip(islands, weights, strict=True):
        # Every host of an island has as many samples, in microbatches of up to eight.
        share = job.global_batch_size * weight / sum(weights)
        unit = 8 * len(island.usable_nodes)
        samples = max(unit, round(share / unit) * unit)
        found.append(planner.best(island.device.kind, samples, only=(island.name,)))
    found.append(planner.best(ANY_FORM, job.global_batch_size, searched=True))
    singles = [
        planner.best(ONE_PIPELINE, MAX_MICROBATCHES * samples, single=True) for samples in (4, 8)
    ]
    found.append(max(singles, key=lambda each: each.tokens_per_second))
    return (*found, *planner.simple())


@dataclass(slots=True)
class _Planner:
    asked: Asked
    emulation: Emulation
    job: Job
    predictor: Predictor

    @property
    def speeds(self) -> dict[str, float]:
        """Of a host of each island."""
        return speeds_of(self.asked.model, self.asked.cluster, self.job, self.predictor)

    def best(
        self,
        what: str,
        samples: int,
        *,
        only: tuple[str, ...] | None = None,
        single: bool = False,
        searched: bool = False,
    ) -> Candidate:
        """The best predicted plan of this batch on the hosts of these islands."""
        asked, job = self.asked, replace(self.job, global_batch_size=samples)
        pricer = Pricer(asked.model, asked.cluster, job, self.predictor)
        pool = price_pool(
            pricer,
            draw_pool(
                asked.model,
                asked.cluster,
                job,
                speeds=self.speeds,
                seed=asked.spec.seed,
                size=POOL,
                most_microbatches=MAX_MICROBATCHES,
                samples=_SIZES if only is None else (*_SIZES, 12, 16),
                microbatch_sizes=_SIZES,
                only=only,
                single=single,
            ),
            asked.cluster,
            asked.model,
        )
        plans = [*pool, *(self._searched(pricer) if searched else ())]
        if not plans:
            raise InputError(f"{what}: no plan of {samples} samples was found")
        plan = min(plans, key=lambda each: each.predicted_seconds)
        return self._candidate(what, plan, job, pricer)

    def _searched(self, pricer: Pricer) -> Iterator[LoopPlan]:
        """What `hetplan plan` finds, where the trainer and the devices that are played can run it.

        That is: no more microbatches than allowed, of sizes that were profiled.
        """
        asked, files = self.asked, self.asked.files
        measuring.plan(
            files, self.emulation, PLAIN, files.together_job, files.searched_together, asked.say
        )
        plan = load_plan(files.searched_together).plan
        sizes = {
            replica.microbatch_size
            for pipeline in plan.pipelines
            for stage in pipeline.stages
            for replica in stage.replicas
        }
        played = at_most(plan, MAX_MICROBATCHES) and max(sizes) <= max(_SIZES)
        if played and not any(launch_faults(plan)):
            yield loop_plan(pricer, plan, asked.cluster, asked.model, searched=True)

    def simple(self) -> Iterator[Candidate]:
        """What needs no planner: equal parts, and parts by peak rate."""
        islands = self.asked.cluster.islands
        hosts = [island.name for island in islands for _ in island.usable_nodes]
        rates = [
            dict(island.device.peak_flops_per_second)[self.job.precision]
            for island in islands
            for _ in island.usable_nodes
        ]
        even = [1.0] * len(hosts)
        count = MAX_MICROBATCHES
        for what, weights in (("even layers", even), ("layers by peak rate", rates)):
            layers = dealt_out(self.asked.model.num_layers, weights, least=1)
            yield self._simple(
                f"{what}, one pipeline",
                [_pipeline(hosts, layers, count, _SIMPLE_SAMPLES)],
                count * _SIMPLE_SAMPLES,
            )
        for what, weights in (("even shares", even), ("shares by peak rate", rates)):
            samples, shares = shares_of(self.job.global_batch_size, weights)
            layers = [self.asked.model.num_layers]
            yield self._simple(
                f"{what}, a pipeline per host",
                [
                    _pipeline([host], layers, share, samples)
                    for host, share in zip(hosts, shares, strict=True)
                ],
                self.job.global_batch_size,
            )

    def _simple(self, what: str, pipelines: Sequence[ChosenPipeline], samples: int) -> Candidate:
        """`samples` is the batch."""
        asked = self.asked
        job = replace(self.job, global_batch_size=samples)
        plan = plan_of(asked.model, asked.cluster, job, ChosenPlan(pipelines=tuple(pipelines)))
        pricer = Pricer(asked.model, asked.cluster, job, self.predictor)
        priced = loop_plan(pricer, plan, asked.cluster, asked.model)
        return self._candidate(what, priced, job, pricer)

    def _candidate(self, what: str, plan: LoopPlan, job: Job, pricer: Pricer) -> Candidate:
        return Candidate(
            what=what, plan=plan, job=job, bound_seconds=bound_seconds(pricer, plan.plan)
        )


def shares_of(batch: int, weights: Sequence[float]) -> tuple[int, list[int]]:
    """(samples of a microbatch, microbatches of each pipeline) of a batch dealt out by weight.

    The smallest microbatches with which no pipeline has more than are allowed.
    """
    for samples in _SIZES:
        if batch % samples == 0 and batch // samples >= len(weights):
            shares = dealt_out(batch // samples, weights, least=1)
            if max(shares) <= MAX_MICROBATCHES:
                return samples, shares
    raise InputError(
        f"a batch of {batch} cannot be dealt out to {len(weights)} pipelines of at most "
        f"{MAX_MICROBATCHES} microbatches of up to {_SIZES[-1]} samples"
    )


def _pipeline(
    hosts: Sequence[str], layers: Sequence[int], count: int, samples: int
) -> ChosenPipeline:
    shape = Shape(tp=1, dp=1, microbatch_size=samples)
    return ChosenPipeline(
        stages=tuple(
            ChosenStage(
                parts=(Part(island=host, shape=shape),),
                layers=(held,),
                warmup_depth=own_depth("1f1b", at, len(hosts), count),
            )
            for at, (host, held) in enumerate(zip(hosts, layers, strict=True))
        ),
        num_microbatches=count,
        schedule=Schedule(name="1f1b"),
    )


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
    """Of one step."""
    return job.global_batch_size * job.sequence_length
