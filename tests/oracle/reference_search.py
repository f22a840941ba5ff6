"""A planner in plain Python, to be read from top to bottom before the search.

It answers the question that the search answers, with nothing that makes the search fast: one
pipeline under 1F1B, islands one after another, layers and recomputation of every stage. On small
jobs both must find plans of the same step; `tests/search/test_search_reference.py` holds them
against each other.

1. The problem   a job on a cluster, and prices
2. Outlines      everything about a pipeline but its layers and recomputation
3. Stage times   seconds of one microbatch on a stage, from its layers
4. The bound     no way to give out the layers that are left takes less
5. The search    branch and bound, stage by stage
6. The validator checks an answer from its devices and layers, without the search

What it leaves out: interleaving, several pipelines, stages over several islands, context and expert
parallelism, deeper warm-up than 1F1B's own, optimizers in host memory, layers that are not alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import permutations, product

from hetplan.cluster.spec import Island
from hetplan.cost.step_model.pricer import Pricer
from hetplan.cost.step_model.units import make_unit
from hetplan.errors import InputError
from hetplan.job.spec import SPLIT_WEIGHTS, Job
from hetplan.model.layers import Experts
from hetplan.plans.build import plan_of
from hetplan.plans.check import check_plan
from hetplan.plans.chosen import ChosenPipeline, ChosenPlan, ChosenStage, Part, Shape
from hetplan.plans.plan import Plan, Recompute, Schedule, Sharding, expand
from hetplan.plans.targets import Target, target
from hetplan.search.space.families import Families

SAME_SECONDS = 1e-9
"""Relative difference of two sums of the same numbers in another order."""


# ---- 1. The problem


@dataclass(frozen=True)
class Solution:
    """The fastest plan, and how it was found."""

    chosen: ChosenPlan
    plan: Plan
    step_seconds: float
    plans_priced: int
    branches_cut: int
    """Sets of plans that the bound ruled out without pricing them."""


@dataclass(frozen=True)
class Problem:
    """Which plan of one pipeline makes the shortest step, of all that the job's target can run?

    InputError where the transformer layers are not alike.
    """

    pricer: Pricer

    def __post_init__(self) -> None:
        if len({run.layer for run in self.pricer.model.layer_runs}) > 1:
            raise InputError("the reference planner takes models of equal layers only")

    @property
    def job(self) -> Job:
        """The training job."""
        return self.pricer.job

    @property
    def num_layers(self) -> int:
        """Transformer layers; position 0 of the row of layers is the embedding."""
        return self.pricer.model.num_layers

    @cached_property
    def trainer(self) -> Target:
        """What the job's target can run."""
        return target(self.job.target)

    @cached_property
    def usable_nodes(self) -> dict[str, tuple[int, ...]]:
        """Nodes that the job may use, by island."""
        out = {f"{name}/{node}" for name, node in self._nodes_out()}
        return {
            island.name: tuple(n for n in range(island.nodes) if f"{island.name}/{n}" not in out)
            for island in self.pricer.cluster.islands
        }

    def _nodes_out(self) -> Iterator[tuple[str, int]]:
        forbid = self.job.forbid
        for island in self.pricer.cluster.islands:
            for node in range(island.nodes):
                forbidden = island.name in forbid.islands or f"{island.name}/{node}" in forbid.nodes
                if node in island.nodes_out or forbidden:
                    yield island.name, node

    @cached_property
    def recomputation(self) -> tuple[Recompute, ...]:
        """What a stage may recompute."""
        pricer = self.pricer
        return Families(model=pricer.model, cluster=pricer.cluster, job=self.job).recompute


# ---- 2. Outlines


@dataclass(frozen=True)
class Run:
    """Equal stages that follow each other on one island."""

    island: str
    shape: Shape
    stages: int


@dataclass(frozen=True)
class Outline:
    """A pipeline whose layers and recomputation are open."""

    runs: tuple[Run, ...]
    sharding: Sharding
    num_microbatches: int

    @property
    def parts(self) -> tuple[Part, ...]:
        """Where every stage lies."""
        return tuple(
            Part(island=run.island, shape=run.shape) for run in self.runs for _ in range(run.stages)
        )

    def chosen(self, layers: tuple[int, ...], recompute: tuple[Recompute, ...]) -> ChosenPlan:
        """The plan with these transformer layers and this recomputation per stage."""
        stages, m = len(layers), self.num_microbatches
        return ChosenPlan(
            pipelines=(
                ChosenPipeline(
                    stages=tuple(
                        ChosenStage(
                            parts=(part,),
                            layers=(layers[s],),
                            recompute=recompute[s],
                            # 1F1B: as many microbatches in flight as stages from here to the end.
                            warmup_depth=min(stages - s, m),
                        )
                        for s, part in enumerate(self.parts)
                    ),
                    num_microbatches=m,
                    schedule=Schedule(name="1f1b"),
                ),
            ),
            sharding=self.sharding,
        )


def outlines(problem: Problem) -> Iterator[Outline]:
    """Every order of islands, with a shape and a number of stages for each.

    Whether a plan is legal is left to `hetplan.plans.check`; here is only what pins say and what
    divides.
    """
    pin, job = problem.job.pin, problem.job
    beyond = (pin.pipelines, pin.cp, pin.ep, pin.virtual_stages)
    other = pin.depth not in (None, 0) or pin.schedule not in (None, "1f1b")
    if any(value not in (None, 1) for value in beyond) or other:
        return
    islands = [island for island in problem.pricer.cluster.islands if _devices(problem, island)]
    for used in range(1, len(islands) + 1):
        for order in permutations(islands, used):
            if not (_lies_on(order[0], pin.embedding_on) and _lies_on(order[-1], pin.head_on)):
                continue
            for shapes in product(*(tuple(shapes_on(problem, island)) for island in order)):
                samples = {shape.samples for shape in shapes}
                if len(samples) > 1 or job.global_batch_size % samples.pop():
                    continue
                if not _may_stand_together(problem, shapes):
                    continue
                yield from _with_stages(problem, order, shapes)


def shapes_on(problem: Problem, island: Island) -> Iterator[Shape]:
    """Every tp, dp and microbatch size of a stage on this island."""
    job, pin, trainer = problem.job, problem.job.pin, problem.trainer
    experts = isinstance(problem.pricer.model.layer_runs[0].layer.mlp, Experts)
    for tp in range(1, island.devices_per_node + 1):
        if island.devices_per_node % tp or pin.tp not in (None, tp):
            continue
        sequence_parallel = tp > 1 and trainer.sequence_parallel and not job.sequence_length % tp
        if tp > 1 and pin.sequence_parallel is not None:
            if pin.sequence_parallel and not sequence_parallel:
                continue
            sequence_parallel = pin.sequence_parallel
        for dp in range(1, _devices(problem, island) // tp + 1):
            if pin.dp not in (None, dp):
                continue
            for size in range(1, job.global_batch_size // dp + 1):
                if pin.microbatch_size in (None, size):
                    yield Shape(
                        tp=tp,
                        dp=dp,
                        microbatch_size=size,
                        etp=tp if experts else 1,
                        sequence_parallel=sequence_parallel,
                    )


def _devices(problem: Problem, island: Island) -> int:
    return len(problem.usable_nodes[island.name]) * island.devices_per_node


def _lies_on(island: Island, where: str | None) -> bool:
    return where is None or where in (island.name, island.device.kind)


def _may_stand_together(problem: Problem, shapes: tuple[Shape, ...]) -> bool:
    differ = problem.trainer.stages_differ and not problem.job.pin.same_degrees
    return differ or len(set(shapes)) == 1


def _with_stages(
    problem: Problem, order: tuple[Island, ...], shapes: tuple[Shape, ...]
) -> Iterator[Outline]:
    """Numbers of stages for which there are devices and layers, and ways to shard."""
    job, pin = problem.job, problem.job.pin
    m = job.global_batch_size // shapes[0].samples
    room = [_devices(problem, i) // s.num_devices for i, s in zip(order, shapes, strict=True)]
    for counts in product(*(range(1, most + 1) for most in room)):
        if sum(counts) > problem.num_layers or pin.pp not in (None, sum(counts)):
            continue
        runs = tuple(
            Run(island.name, shape, count)
            for island, shape, count in zip(order, shapes, counts, strict=True)
        )
        for sharding in _shardings(problem, max(shape.dp for shape in shapes), sum(counts)):
            yield Outline(runs, sharding, m)


def _shardings(problem: Problem, copies: int, stages: int) -> Iterator[Sharding]:
    pin = problem.job.pin
    if copies == 1 or not pin.shares:
        yield Sharding.NONE
    if copies > 1 and pin.shares is not False:
        for sharding in problem.trainer.shardings(problem.job.optimizer)[1:]:
            split = sharding in SPLIT_WEIGHTS  # trainers with stages keep these whole
            if pin.sharding in (None, sharding) and not (split and stages > 1):
                yield sharding


# ---- 3. Stage times


@dataclass(frozen=True)
class StageSeconds:
    """Forward and backward seconds of one microbatch, for one stage and one recomputation."""

    per_layer: float
    fixed: float
    """Of the embedding on the first stage, of what follows the transformer layers on the last."""

    def of(self, layers: int) -> float:
        """With so many transformer layers."""
        return self.fixed + layers * self.per_layer


def stage_seconds(problem: Problem, plan: Plan) -> tuple[dict[Recompute, StageSeconds], ...]:
    """Of every stage, by recomputation; `plan` is any plan of the outline.

    Each stage alone: what stages take from each other makes a step longer, never shorter.
    """
    settings = problem.pricer.costs(plan).settings
    stages = plan.pipelines[0].stages
    tables = []
    for s, stage in enumerate(stages):
        table = {}
        for recompute in problem.recomputation:
            unit = make_unit(settings, stage.replicas[0], recompute)
            total = [sum(row) for row in zip(unit.forward, unit.backward, unit.again, strict=True)]
            after = 1 + problem.num_layers
            first = total[1] if s == 0 else 0.0
            last = total[-1] - total[after] if s == len(stages) - 1 else 0.0
            table[recompute] = StageSeconds(total[2] - total[1], first + last)
        tables.append(table)
    return tuple(tables)


# ---- 4. The bound


@dataclass(frozen=True)
class Partial:
    """The first stages of a pipeline, decided."""

    layers: tuple[int, ...] = ()
    recompute: tuple[Recompute, ...] = ()
    round_trip_seconds: float = 0.0
    """One microbatch, forward and backward, through the stages decided."""
    bound_seconds: float = 0.0
    """Below every step of a plan that begins like this."""

    def with_stage(
        self, layers: int, recompute: Recompute, seconds: float, num_microbatches: int
    ) -> Partial:
        """One stage more, which takes `seconds` per microbatch.

        A stage cannot begin before the first microbatch has come through the stages before it, it
        is busy for all microbatches, and after its last backward pass the gradients go back through
        those stages:

            step >= round trip before it + microbatches x its seconds
        """
        bound = self.round_trip_seconds + num_microbatches * seconds
        return Partial(
            (*self.layers, layers),
            (*self.recompute, recompute),
            self.round_trip_seconds + seconds,
            max(self.bound_seconds, bound),
        )


def rest_bound(
    partial: Partial, fastest: tuple[StageSeconds, ...], layers_left: int, num_microbatches: int
) -> float:
    """Below every step of a plan that gives the layers left to these stages, the next ones.

    With X the longest of them, n_j layers and f_j fixed seconds on stage j at t_j seconds a layer:
    X >= n_j t_j + f_j, so X / t_j >= n_j + f_j / t_j, and added up over all stages

        X >= (layers left + sum f_j / t_j) / sum 1 / t_j

    The stage that takes X comes after all that are decided.
    """
    if not fastest:
        return partial.bound_seconds
    rates = sum(1.0 / stage.per_layer for stage in fastest)
    fixed = sum(stage.fixed / stage.per_layer for stage in fastest)
    longest = (layers_left + fixed) / rates
    return max(partial.bound_seconds, partial.round_trip_seconds + num_microbatches * longest)


# ---- 5. The search


def solve(problem: Problem) -> Solution | None:
    """The fastest plan; None where no plan is legal and fits."""
    if not problem.recomputation:
        return None
    search = _Search(problem)
    prepared = [each for each in map(search.prepare, outlines(problem)) if each is not None]
    # The outline of the lowest bound first: it is likely to hold good plans, which cut the others.
    for each in sorted(prepared, key=lambda each: each.bound_seconds):
        search.branch(each, Partial())
    best = search.best
    if best is None:
        return None
    return replace(best, plans_priced=search.priced, branches_cut=search.cut)


@dataclass(frozen=True)
class _Prepared:
    """An outline with its stages' seconds."""

    outline: Outline
    tables: tuple[dict[Recompute, StageSeconds], ...]
    bound_seconds: float

    @property
    def fastest(self) -> tuple[StageSeconds, ...]:
        """Of every stage, the recomputation that takes least."""
        return tuple(min(t.values(), key=lambda each: each.per_layer) for t in self.tables)


@dataclass
class _Search:
    """Branch and bound over the layers and the recomputation of one stage after another."""

    problem: Problem
    best: Solution | None = None
    priced: int = 0
    cut: int = 0

    def prepare(self, outline: Outline) -> _Prepared | None:
        """Stage times and bound of an outline; None where no plan of it is legal."""
        problem, stages = self.problem, len(outline.parts)
        layers = (problem.num_layers - stages + 1, *(1,) * (stages - 1))
        recompute = (problem.recomputation[0],) * stages
        plan = self._legal(outline.chosen(layers, recompute))
        if plan is None:
            return None
        made = _Prepared(outline, stage_seconds(problem, plan), 0.0)
        bound = rest_bound(Partial(), made.fastest, problem.num_layers, outline.num_microbatches)
        return replace(made, bound_seconds=bound)

    def branch(self, prepared: _Prepared, partial: Partial) -> None:
        """Decide the next stage, in every way that may lead to a better plan."""
        problem, m = self.problem, prepared.outline.num_microbatches
        stage, stages = len(partial.layers), len(prepared.tables)
        left = problem.num_layers - sum(partial.layers)
        if not self._may_be_better(rest_bound(partial, prepared.fastest[stage:], left, m)):
            self.cut += 1
        elif stage == stages:
            self._price(prepared.outline.chosen(partial.layers, partial.recompute))
        else:
            # The last stage takes all that is left; every other one leaves a layer for the rest.
            after = stages - stage - 1
            for layers in range(1, left - after + 1) if after else (left,):
                for recompute, seconds in prepared.tables[stage].items():
                    alike = problem.trainer.recompute_per_stage or not partial.recompute
                    if alike or recompute == partial.recompute[0]:
                        self.branch(
                            prepared, partial.with_stage(layers, recompute, seconds.of(layers), m)
                        )

    def _may_be_better(self, bound_seconds: float) -> bool:
        return self.best is None or bound_seconds < self.best.step_seconds * (1 - SAME_SECONDS)

    def _price(self, chosen: ChosenPlan) -> None:
        plan = self._legal(chosen)
        if plan is None:
            return
        self.priced += 1
        cost = self.problem.pricer.step(plan)
        if not all(use.fits for stages in cost.memory for use in stages):
            return
        if self._may_be_better(cost.step_seconds):
            self.best = Solution(chosen, plan, cost.step_seconds, 0, 0)

    def _legal(self, chosen: ChosenPlan) -> Plan | None:
        pricer = self.problem.pricer
        try:
            plan = plan_of(pricer.model, pricer.cluster, pricer.job, chosen)
        except InputError:  # its stages have no room
            return None
        faults = check_plan(plan, pricer.model, pricer.cluster, pricer.job)
        return None if faults else plan


# ---- 6. The validator


def validate(problem: Problem, plan: Plan, step_seconds: float) -> tuple[str, ...]:
    """Which rules an answer breaks; empty where it is right.

    From the plan's devices and layers alone, rule by rule.
    """
    return tuple(_broken(problem, plan, step_seconds))


def _broken(problem: Problem, plan: Plan, step_seconds: float) -> Iterator[str]:
    cluster, job = problem.pricer.cluster, problem.job
    stages = plan.pipelines[0].stages

    ranges = [(chunk.start, chunk.stop) for stage in stages for chunk in stage.chunks]
    edges = [0, *(stop for _, stop in ranges)]
    if len(plan.pipelines) > 1 or [start for start, _ in ranges] != edges[:-1]:
        yield "layers: the stages do not hold every layer once, in order"
    if edges[-1] != len(problem.pricer.model.layers):
        yield "layers: the last stage does not end with the last layer"

    taken: set[int] = set()
    for s, stage in enumerate(stages):
        for replica in stage.replicas:
            devices = expand(replica.devices)
            if taken & {*devices}:
                yield f"devices: stage {s} has devices of another stage"
            taken |= {*devices}
            island = cluster.island_of_device(devices[0])
            first, per_node = cluster.first_device(island.name), island.devices_per_node
            for start in range(0, len(devices), replica.tp):
                ranks = devices[start : start + replica.tp]
                if len({(device - first) // per_node for device in ranks}) > 1:
                    yield f"devices: a tensor-parallel group of stage {s} leaves its node"
            nodes = {(device - first) // per_node for device in devices}
            if not nodes <= {*problem.usable_nodes[island.name]}:
                yield f"devices: stage {s} is on nodes that must not be used"
            dp = len(devices) // (replica.tp * replica.cp)
            samples = dp * replica.microbatch_size
            if samples * plan.pipelines[0].num_microbatches != job.global_batch_size:
                yield f"batch: stage {s} trains another number of sequences than the job"

    cost = problem.pricer.step(plan)
    for s, use in enumerate(cost.memory[0]):
        if use.total_bytes > use.available_bytes:
            yield f"memory: stage {s} needs more than its devices have"
    if abs(cost.step_seconds - step_seconds) > SAME_SECONDS * step_seconds:
        yield f"price: the plan takes {cost.step_seconds:.9g} s, not {step_seconds:.9g} s"
