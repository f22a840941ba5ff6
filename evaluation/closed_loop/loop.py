"""The closed loop on emulated hosts: profile, fit, predict, really train, compare.

Everything measured is measured inside one emulation, by processes that share a control group with
more weight than others have. `closed_loop` goes on where an interrupted loop in the same folder
ended; nothing but that folder is left behind, also after a kill.

HETHUB's question is measured too: how near all kinds together come to the sum of each alone. Each
kind alone has the part of the batch that its hosts' speed deserves, so that a step takes about as
long as one of all together; nothing but its own reduction and update depends on that. No pipeline
has more than 64 microbatches in a step, alone or together:

    ratio   tokens/s together / sum over the kinds of tokens/s alone, all measured
    bound   the least step that the plan's own layers and bubble allow, over the measured one

The least step is that of its slowest pipeline: `max_s(sum_{j<s} c_j + m c_s)`, c_s the compute of a
microbatch on stage s, forward and backward, m microbatches; with virtual stages `max_s m c_s`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from evaluation.closed_loop import training
from evaluation.closed_loop.cgroup import weighted
from evaluation.closed_loop.plans import (
    MAX_LENGTH,
    POOL_SIZE,
    SAMPLES,
    SHORT_MAX_LENGTH,
    at_most,
    choose,
    dealt_out,
    draw_pool,
    loop_plan,
    price_pool,
    profile_excess,
    speeds_of,
)
from evaluation.closed_loop.results import invalid_reasons, judge, spread
from evaluation.closed_loop.training import (
    JITTER,
    PLAIN,
    LoopInputs,
    Say,
    TrainingTask,
    train_missing,
)
from evaluation.closed_loop.values import (
    PLANS_SCHEMA,
    ClosedLoop,
    Goals,
    HethubMeasured,
    LoopPass,
    LoopPlan,
    LoopPlans,
    LoopRow,
    LoopSpec,
    TogetherRow,
    TrainedPlan,
    Verdict,
    open_folder,
)
from hetplan.cluster.load import load_cluster
from hetplan.cluster.spec import Cluster
from hetplan.cost.step_model.pricer import Pricer
from hetplan.emulation.pace import least_headroom, slow_downs
from hetplan.emulation.running import emulated
from hetplan.emulation.tools import require
from hetplan.emulation.values import Emulation
from hetplan.errors import InputError
from hetplan.files.encoding import encode
from hetplan.files.reading import decode, read_document
from hetplan.files.writing import write_atomically
from hetplan.job.load import load_job
from hetplan.job.spec import Job
from hetplan.launchers.run_log import this_machine
from hetplan.model.load import load_model
from hetplan.plans.build import plan_of
from hetplan.plans.chosen import ChosenPipeline, ChosenPlan, ChosenStage, Part, Shape
from hetplan.plans.pieces import own_depth
from hetplan.plans.plan import Plan, Schedule
from hetplan.plans.ranks import launch_faults
from hetplan.predict.fit import load_predictor
from hetplan.predict.predictor import Predictor
from hetplan.profiling.pacing import load_pace
from hetplan.search.files import load_plan

MAX_MICROBATCHES = 64
"""Of a pipeline in a step: with more, every pipeline's bubble vanishes."""
TOGETHER = "together"
ANY_FORM, ONE_PIPELINE = "hetplan, any form", "hetplan, one pipeline"
WARMUP_STEPS, STEPS = 1, 2
"""A step takes ten seconds and more."""
MIN_RATIO = 0.975
MIN_OF_BOUND = 0.99
TOGETHER_POOL = 300
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


def train_together(inputs: LoopInputs, emulation: Emulation) -> HethubMeasured:
    """Each kind alone, then all together, under hetplan's plans and under simpler ones."""
    candidates = planned(inputs, emulation)
    trained = train_missing(
        inputs,
        emulation,
        PLAIN,
        TOGETHER,
        [
            TrainingTask(name=str(number), plan=each.plan, job=each.job)
            for number, each in enumerate(candidates)
        ],
        warmup_steps=WARMUP_STEPS,
        steps=STEPS,
    )
    return measured(inputs, candidates, trained)


def measured(
    inputs: LoopInputs, candidates: Sequence[Candidate], trained: Sequence[TrainedPlan]
) -> HethubMeasured:
    """The figures of what was trained; the kinds alone come first in both."""
    kinds = {island.device.kind for island in inputs.cluster.islands}
    pairs = list(zip(candidates, trained, strict=True))
    alone = [pair for pair in pairs if pair[0].what in kinds]
    whole = sum(tokens(each.job) / one.measured_seconds for each, one in alone)
    together = tuple(_row(each, one, whole) for each, one in pairs if each.what not in kinds)
    reasons = tuple(
        dict.fromkeys(
            f"{one.name}: {reason}"
            for one in trained
            for reason in invalid_reasons(
                one.overrun, spread(one.step_seconds), one.load_average, one.steal
            )
        )
    )
    verdict = Verdict.INVALID
    if not reasons:
        reasons = tuple(_missed_goals(together))
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


def _missed_goals(together: Sequence[TogetherRow]) -> Iterator[str]:
    best = max(row.ratio or 0.0 for row in together if row.what in (ANY_FORM, ONE_PIPELINE))
    if best < MIN_RATIO:
        yield f"{best:.1%} of the kinds alone; the goal is {MIN_RATIO:.1%}"
    for row in together:
        if row.what == ONE_PIPELINE and (row.bound_ratio or 0.0) < MIN_OF_BOUND:
            yield (
                f"the best single pipeline reaches {row.bound_ratio:.1%} of its own bound; the "
                f"goal is {MIN_OF_BOUND:.0%}"
            )


def planned(inputs: LoopInputs, emulation: Emulation) -> tuple[Candidate, ...]:
    """What is trained: each kind alone, hetplan's two plans, then the simple splits."""
    job = load_job(inputs.files.together_job)
    predictor = load_predictor(inputs.files.predictor(PLAIN))
    planner = _Planner(inputs, emulation, job, predictor)
    speeds = planner.speeds
    islands = inputs.cluster.islands
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
    inputs: LoopInputs
    emulation: Emulation
    job: Job
    predictor: Predictor

    @property
    def speeds(self) -> dict[str, float]:
        """Of a host of each island."""
        return speeds_of(self.inputs.model, self.inputs.cluster, self.job, self.predictor)

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
        inputs, job = self.inputs, replace(self.job, global_batch_size=samples)
        pricer = Pricer(inputs.model, inputs.cluster, job, self.predictor)
        pool = price_pool(
            pricer,
            draw_pool(
                inputs.model,
                inputs.cluster,
                job,
                speeds=self.speeds,
                seed=inputs.spec.seed,
                size=TOGETHER_POOL,
                most_microbatches=MAX_MICROBATCHES,
                samples=_SIZES if only is None else (*_SIZES, 12, 16),
                microbatch_sizes=_SIZES,
                only=only,
                single=single,
            ),
            inputs.cluster,
            inputs.model,
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
        inputs, files = self.inputs, self.inputs.files
        training.search_plan(
            files, self.emulation, PLAIN, files.together_job, files.searched_together, inputs.say
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
            yield loop_plan(pricer, plan, inputs.cluster, inputs.model, searched=True)

    def simple(self) -> Iterator[Candidate]:
        """What needs no planner: equal parts, and parts by peak rate."""
        islands = self.inputs.cluster.islands
        hosts = [island.name for island in islands for _ in island.usable_nodes]
        rates = [
            dict(island.device.peak_flops_per_second)[self.job.precision]
            for island in islands
            for _ in island.usable_nodes
        ]
        even = [1.0] * len(hosts)
        count = MAX_MICROBATCHES
        for what, weights in (("even layers", even), ("layers by peak rate", rates)):
            layers = dealt_out(self.inputs.model.num_layers, weights, least=1)
            yield self._simple(
                f"{what}, one pipeline",
                [_pipeline(hosts, layers, count, _SIMPLE_SAMPLES)],
                count * _SIMPLE_SAMPLES,
            )
        for what, weights in (("even shares", even), ("shares by peak rate", rates)):
            samples, shares = shares_of(self.job.global_batch_size, weights)
            layers = [self.inputs.model.num_layers]
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
        inputs = self.inputs
        job = replace(self.job, global_batch_size=samples)
        plan = plan_of(inputs.model, inputs.cluster, job, ChosenPlan(pipelines=tuple(pipelines)))
        pricer = Pricer(inputs.model, inputs.cluster, job, self.predictor)
        priced = loop_plan(pricer, plan, inputs.cluster, inputs.model)
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


BEST_PLANS = 5
"""Of the pool's best predicted ones that are trained, where at least twice as many plans are."""
MORE_HEADROOM = 1.5
"""Times the least headroom of `hetplan emulate pace`: with sends that do not wait hosts compute
nearly all of the time, and one that is late makes the others late."""
STALLED_PLANS = 8
"""With a quarter of their step in bubble or exposed communication, of twenty."""


def closed_loop(spec: LoopSpec, folder: Path, *, say: Say) -> ClosedLoop:
    """Run the loop, or what is missing of it in this folder.

    InputError where the machine cannot emulate hosts, or the folder has another loop; LaunchError
    where a plan cannot be trained.
    """
    require()
    files = open_folder(folder, spec)
    inputs = LoopInputs(
        files=files,
        spec=spec,
        model=load_model(files.model),
        cluster=load_cluster(files.cluster),
        job=load_job(files.job),
        say=say,
    )
    machine = this_machine()
    passes = []
    hethub = None
    with weighted() as weight:
        if weight:
            say(f"the loop's processes have no more weight than others: {weight}")
        with emulated(inputs.cluster, name=f"closed-loop-{os.getpid()}") as emulation:
            training.make_paces(
                files,
                emulation,
                headroom=_headroom(inputs.cluster, inputs.job),
                jitter=spec.jitter,
                seed=spec.seed,
                say=say,
            )
            training.measure_links(files, emulation, inputs.cluster, say=say)
            plans = _plans(inputs, emulation)
            for kind in (PLAIN, JITTER) if spec.jitter else (PLAIN,):
                passes.append(_pass(inputs, emulation, plans, kind))
            if spec.hethub:
                from evaluation.closed_loop.loop import train_together

                hethub = train_together(inputs, emulation)
    return ClosedLoop(
        machine=(
            f"{machine.processor}, {machine.cores} cores, {machine.system}, Python "
            f"{machine.python_version}, torch {machine.torch_version}"
        ),
        spec=spec,
        weight=weight,
        passes=tuple(passes),
        hethub=hethub,
        pool=plans.pool,
        left_out_slow=plans.left_out_slow,
    )


def _headroom(cluster: Cluster, job: Job) -> float:
    factors = slow_downs(cluster, job.precision.value, {})
    return MORE_HEADROOM * least_headroom(cluster, factors, os.cpu_count() or 1)


def _plans(inputs: LoopInputs, emulation: Emulation) -> LoopPlans:
    """The plans of the loop; chosen when its devices were measured, before anything is trained."""
    files, spec, job = inputs.files, inputs.spec, inputs.job
    training.measure_devices(files, emulation, PLAIN, inputs.say)
    training.fit_devices(files, emulation, PLAIN, inputs.say)
    if files.plans.exists():
        return decode(read_document(files.plans), LoopPlans, schema=PLANS_SCHEMA)
    training.search_plan(files, emulation, PLAIN, files.job, files.searched, inputs.say)
    predictor = load_predictor(files.predictor(PLAIN))
    pricer = Pricer(inputs.model, inputs.cluster, job, predictor)
    result = load_plan(files.searched)
    faults = tuple(launch_faults(result.plan))
    if faults:
        raise InputError(*faults)
    searched = loop_plan(pricer, result.plan, inputs.cluster, inputs.model, searched=True)
    pool = draw_pool(
        inputs.model,
        inputs.cluster,
        job,
        speeds=speeds_of(inputs.model, inputs.cluster, job, predictor),
        seed=spec.seed,
        size=POOL_SIZE,
        samples=(2,) if spec.short else SAMPLES,
    )
    found = choose(
        price_pool(pricer, pool, inputs.cluster, inputs.model),
        searched,
        plans=spec.plans,
        best=min(BEST_PLANS, spec.plans // 2),
        stalled=STALLED_PLANS * spec.plans // 20,
        longest=SHORT_MAX_LENGTH if spec.short else MAX_LENGTH,
        seed=spec.seed,
    )
    write_atomically(files.plans, encode(found, schema=PLANS_SCHEMA))
    return found


def _pass(inputs: LoopInputs, emulation: Emulation, plans: LoopPlans, kind: str) -> LoopPass:
    """All plans trained once at a pace, the searched one as often as inputs."""
    files, spec = inputs.files, inputs.spec
    training.measure_devices(files, emulation, kind, inputs.say)
    training.fit_devices(files, emulation, kind, inputs.say)
    pricer = Pricer(inputs.model, inputs.cluster, inputs.job, load_predictor(files.predictor(kind)))
    priced = [
        loop_plan(pricer, each.plan, inputs.cluster, inputs.model, searched=each.searched)
        for each in plans.plans
    ]
    order = training_order(priced, spec.repeats)
    trained = train_missing(
        inputs,
        emulation,
        kind,
        kind,
        [TrainingTask(name=name, plan=plan, job=inputs.job) for name, plan in order],
        warmup_steps=spec.warmup_steps,
        steps=spec.steps,
    )
    by_name = dict(zip([name for name, _ in order], trained, strict=True))
    rows = [
        LoopRow(
            name=each.name,
            form=each.form,
            searched=each.searched,
            stalled=each.stalled,
            trained=by_name[str(number)],
        )
        for number, each in enumerate(priced)
    ]
    repeats = [one for (name, plan), one in zip(order, trained, strict=True) if plan.searched]
    return judge(
        rows,
        repeats,
        jitter=spec.jitter if kind == JITTER else 0.0,
        goals=Goals.of(spec),
        profile_excess=profile_excess(
            inputs.model, inputs.cluster, inputs.job, pricer.predictor, load_pace(files.pace(kind))
        ),
    )


def training_order(plans: Sequence[LoopPlan], repeats: int) -> list[tuple[str, LoopPlan]]:
    """(name of the training, plan) in the order in which they are trained.

    Trainings of the searched plan beyond its own are spread evenly over the others, the last one
    at the end, so that what changes on the machine meanwhile shows in their spread.
    """
    searched = next(plan for plan in plans if plan.searched)
    order = [(str(number), plan) for number, plan in enumerate(plans)]
    found = []
    for at, entry in enumerate(order, start=1):
        found.append(entry)
        for repeat in range(1, repeats):
            if at == round(repeat * len(order) / (repeats - 1)):
                found.append((f"repeat-{repeat}", searched))
    return found
