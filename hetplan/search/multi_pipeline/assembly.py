"""Pipelines, and whole plans of several: when they end, how many microbatches each gets, the price.

A row is one pipeline without its cuts. Its variants (cuts, and the recomputation of every stage)
have the numbers of `stage_options` and the fastest transfers that its stages can have; both are
lower bounds wherever the row lies.

How many microbatches each pipeline of a plan gets is decided on the plan's own times. A pipeline p
with G_p sequences per microbatch needs seconds T_p(m), which never falls with m. Wanted are whole
m_p >= least_p with the sum of m_p G_p equal to the batch, and the least largest T_p(m_p). Exact: of
all values that T_p(m) takes the least is found by bisection at which a sum of multiples, none above
what each pipeline does in that time, is the batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import combinations, pairwise, product

import numpy as np

from hetplan.cluster.spec import Cluster
from hetplan.cost.arrays import Floats, Ints
from hetplan.cost.replay.times import StageTimes, pipeline_ends
from hetplan.cost.step_model.plan import PipelineWork, sends_wait
from hetplan.errors import InputError
from hetplan.job.spec import Job
from hetplan.kernels import kernel
from hetplan.plans.chosen import ChosenPipeline, ChosenPlan, Shape
from hetplan.plans.plan import FULL_RECOMPUTE, NO_RECOMPUTE, Recompute, Schedule, Sharding
from hetplan.plans.targets import target
from hetplan.search.multi_pipeline.stage_options import MeshOptions, OptionsMaker
from hetplan.search.space.allowed import matches
from hetplan.search.space.family import Mesh
from hetplan.search.space.plan_evaluator import PlanEvaluator, fits
from hetplan.search.space.stage_pricer import StagePricer
from hetplan.search.space.stage_table import FIRST, LAST
from hetplan.search.space.transfers import Transfers

# ---- when a pipeline ends by itself


@dataclass(frozen=True, kw_only=True, eq=False)
class Row:
    """One pipeline without its cuts."""

    slots: tuple[Mesh, ...]
    """The mesh of every stage."""
    microbatches: int

    @cached_property
    def samples(self) -> int:
        """Sequences of a step."""
        return self.slots[0].samples * self.microbatches

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Warm-up depth of every stage."""
        return tuple(min(depth, self.microbatches) for depth in range(len(self.slots), 0, -1))

    @cached_property
    def shapes(self) -> frozenset[Shape]:
        """Of all parts."""
        return frozenset(shape for mesh in self.slots for shape in mesh.shapes)

    def devices(self, islands: int) -> tuple[int, ...]:
        """Of every island."""
        counts = [0] * islands
        for mesh in self.slots:
            for island, shape in zip(mesh.islands, mesh.shapes, strict=True):
                counts[island] += shape.num_devices
        return tuple(counts)


def cuts(units: int, stages: int) -> Ints:
    """[C, P] every way to deal so many units out, at least one to each stage."""
    dealt = [
        [b - a for a, b in pairwise((0, *inner, units))]
        for inner in combinations(range(1, units), stages - 1)
    ]
    return np.array(dealt, dtype=np.int64).reshape(len(dealt), stages)


@kernel
def _ends(
    forward: Floats,
    backward: Floats,
    hops: Floats,
    depths: Ints,
    microbatches: int,
    rendezvous: bool,
) -> Floats:
    """[V, P] when every stage ends; passes [V, P]; hops [4, P - 1] as `pipeline_ends` has them."""
    ends = np.empty(forward.shape)
    for v in range(forward.shape[0]):
        times = StageTimes(
            forward[v], backward[v], hops[0], hops[1], hops[2], hops[3], depths, microbatches
        )
        ends[v] = pipeline_ends(times, rendezvous)
    return ends


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Variants:
    """Cuts and recomputations of a row that fit and end below a limit; V of them, P stages."""

    units: Ints
    """[V, P]"""
    recompute: Ints
    """[V, P] of the job's recomputations."""
    ends: Floats
    """[V, P] seconds at which every stage ends, at least."""

    @property
    def last(self) -> Floats:
        """[V] when the pipeline ends, at least."""
        last: Floats = self.ends.max(axis=1)
        return last


@dataclass(kw_only=True)
class RowTables:
    """Makes variants of one job's rows."""

    maker: OptionsMaker
    transfers: Transfers
    _hop_times: dict[tuple[Mesh, Mesh], tuple[float, ...]] = field(default_factory=dict)
    _variants: dict[tuple[Row, Sharding], Variants] = field(default_factory=dict)

    def number_of_variants(self, row: Row) -> int:
        """Cuts and recomputations of a pipeline with as many stages."""
        units, stages = self.maker.pricer.units.count, len(row.slots)
        return math.comb(units - 1, stages - 1) * int(
            len(self.maker.legal.plain_recompute) ** stages
        )

    def variants(self, row: Row, sharding: Sharding, limit: float) -> Variants:
        """Those below the limit, or below that of an earlier call; limits do not rise."""
        found = self._variants.get((row, sharding))
        if found is None:
            options = self.maker.stages(sharding).get(row.slots[0].samples)
            if options is None:  # no stage with so many samples fits
                none = np.zeros((0, len(row.slots)))
                found = Variants(units=none.astype(int), recompute=none.astype(int), ends=none)
            else:
                found = self._below(row, options, limit)
            self._variants[row, sharding] = found
        return found

    def _below(self, row: Row, options: MeshOptions, limit: float) -> Variants:
        slots, m = row.slots, row.microbatches
        units = cuts(options.num_layers, len(slots))
        kinds = range(len(self.maker.legal.plain_recompute))
        choices = np.array([*product(kinds, repeat=len(slots))])
        most = options.memory.most_layers(m, options.num_layers)
        shape = (len(units), len(choices))
        forward, backward = np.zeros((*shape, len(slots))), np.zeros((*shape, len(slots)))
        fits, before, busy = np.ones(shape, dtype=np.bool_), np.zeros(shape), np.zeros(shape)
        for s, mesh in enumerate(slots):
            role = FIRST * (s == 0) + LAST * (s == len(slots) - 1)
            number, n = options.alike[mesh], units[:, None, s]
            for k in kinds:
                mine = choices[:, s] == k
                at = np.flatnonzero((options.mesh == number) & (options.recompute == k))
                if not at.size:
                    fits[:, mine] = False
                    continue
                o = int(at[0])
                fits[:, mine] &= n <= most[role, o, row.depths[s]]
                forward[:, mine, s] = options.extra_forward[role, o] + n * options.forward[o]
                backward[:, mine, s] = options.extra_backward[role, o] + n * options.backward[o]
            own = forward[..., s] + backward[..., s]
            np.maximum(busy, before + m * own, out=busy)
            before += own
        c, r = np.nonzero(fits & (busy < limit))
        ends = _ends(
            np.ascontiguousarray(forward[c, r]),
            np.ascontiguousarray(backward[c, r]),
            self._hops(row),
            np.array(row.depths, dtype=np.int64),
            m,
            options.rendezvous,
        )
        below = ends.max(axis=1, initial=0.0) < limit
        return Variants(units=units[c[below]], recompute=choices[r[below]], ends=ends[below])

    def _hops(self, row: Row) -> Floats:
        """[4, P - 1] the fastest transfers that the row can have."""
        times = np.zeros((4, len(row.slots) - 1))
        for s, pair in enumerate(pairwise(row.slots)):
            if pair not in self._hop_times:
                self._hop_times[pair] = self._hop(*pair)
            times[:, s] = self._hop_times[pair]
        return times

    def _hop(self, left: Mesh, right: Mesh) -> tuple[float, ...]:
        """Least of each of a hop's times over all places of the two stages."""
        if len(left.islands) > 1 or len(right.islands) > 1:
            return (0.0,) * 4
        links, node_links, _, _ = self.transfers.between((left, right))
        if left != right:
            return tuple(links[:, 0, 1].tolist())
        times = node_links[:, 0].tolist()
        if self.transfers.side(left).stages_per_node == 1:
            return tuple(times)
        inside = links[:, 0, 0].tolist()
        return tuple(min(pair) for pair in zip(times, inside, strict=True))

    def positions(self, units: Ints) -> Ints:
        """[V, P + 1] layers where the stages of [V, P] units begin, and the number of layers."""
        how = self.maker.pricer.units
        starts = np.zeros((len(units), units.shape[1] + 1), dtype=np.int64)
        starts[:, 1:] = 1 + how.front_layers + np.cumsum(units, axis=1) * how.layers_per_unit
        starts[:, -1] = len(self.maker.pricer.model.layers)
        return starts


# ---- how the batch is dealt


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """One pipeline's part in the problem."""

    sequences: int
    """Of a microbatch, over all data-parallel ranks."""
    least: int
    """Fewest microbatches that it can run."""
    seconds: Callable[[int], float]
    """Of so many microbatches; must not fall."""


def balanced(shares: Sequence[Share], batch: int) -> tuple[int, ...] | None:
    """Microbatches of every pipeline; None where no numbers add up to the batch."""
    most = [batch // share.sequences for share in shares]
    known: list[dict[int, float]] = [{} for _ in shares]

    def seconds(p: int, count: int) -> float:
        if count not in known[p]:
            known[p][count] = shares[p].seconds(count)
        return known[p][count]

    def within(limit: float) -> tuple[int, ...] | None:
        highest = []
        for p, share in enumerate(shares):
            low, high = share.least - 1, most[p]
            while low < high:
                middle = (low + high + 1) // 2
                if seconds(p, middle) <= limit:
                    low = middle
                else:
                    high = middle - 1
            if low < share.least:
                return None
            highest.append(low)
        return _adds_up(shares, highest, batch)

    if any(high < share.least for high, share in zip(most, shares, strict=True)):
        return None
    best = _adds_up(shares, most, batch)
    if best is None:
        return None
    while True:
        # The longest pipeline of what was found must get fewer: the next smaller value.
        limit = max(seconds(p, count) for p, count in enumerate(best))
        # No numbers that add up take less than every pipeline with its fewest.
        low = max(seconds(p, share.least) for p, share in enumerate(shares)) * (1 - 1e-9)
        high = limit
        better = None
        for _ in range(50):
            middle = 0.5 * (low + high)
            counts = within(middle)
            if counts is None:
                low = middle
            else:
                better = counts
                high = max(seconds(p, count) for p, count in enumerate(counts))
            if high - low <= 1e-9 * high:
                break
        if better is None or high >= limit:
            return best
        best = better


def _adds_up(shares: Sequence[Share], most: Sequence[int], batch: int) -> tuple[int, ...] | None:
    """Numbers between least and most whose sequences add up to the batch; as many as possible for
    the first pipelines. A program over the pipelines and the sequences that are still missing.
    """
    missing = batch - sum(share.least * share.sequences for share in shares)
    if missing < 0:
        return None
    # reached[p]: bits of what pipelines p and later can take.
    reached = [1]
    mask = (1 << (missing + 1)) - 1
    for share, high in zip(reversed(shares), reversed(most), strict=True):
        bits, left, step = reached[-1], high - share.least, 1
        while left > 0:
            take = min(step, left)
            bits |= (bits << (take * share.sequences)) & mask
            left -= take
            step *= 2
        reached.append(bits)
    reached.reverse()
    if not reached[0] >> missing & 1:
        return None
    found = []
    for p, (share, high) in enumerate(zip(shares, most, strict=True)):
        count = min(high - share.least, missing // share.sequences)
        while not reached[p + 1] >> (missing - count * share.sequences) & 1:
            count -= 1
        found.append(share.least + count)
        missing -= count * share.sequences
    return tuple(found)


# ---- whole plans


def keeps_pins(chosen: ChosenPlan, cluster: Cluster, job: Job) -> bool:
    """Whether every choice that the job pins is as it says, of pipelines with the usual depths."""
    pin, pipelines = job.pin, chosen.pipelines
    stages = [stage for pipeline in pipelines for stage in pipeline.stages]
    shapes = {part.shape for stage in stages for part in stage.parts}
    has: dict[str, set[object]] = {
        "pipelines": {len(pipelines)},
        "pp": {len(each.stages) for each in pipelines},
        "virtual_stages": {each.schedule.virtual_stages for each in pipelines},
        "dp": {sum(part.shape.dp for part in stage.parts) for stage in stages},
        "tp": {shape.tp for shape in shapes},
        "cp": {shape.cp for shape in shapes},
        "ep": {shape.ep for shape in shapes},
        "microbatch_size": {shape.microbatch_size for shape in shapes},
        "sequence_parallel": {shape.sequence_parallel for shape in shapes if shape.tp > 1},
        "recompute": {_AS_PINNED.get(stage.recompute) for stage in stages},
    }
    for name, values in has.items():
        if getattr(pin, name) is not None and not values <= {getattr(pin, name)}:
            return False
    if pin.same_degrees and (len(shapes) > 1 or any(len(stage.parts) > 1 for stage in stages)):
        return False
    ends = [(each.stages[0], pin.embedding_on) for each in pipelines]
    ends += [(each.stages[-1], pin.head_on) for each in pipelines]
    if not all(matches(cluster.island(p.island), place) for end, place in ends for p in end.parts):
        return False
    # Where every stage has one copy of its weights there is nothing to shard, as pinned or not.
    copied = any(sum(p.shape.dp * p.shape.cp for p in stage.parts) > 1 for stage in stages)
    shards = chosen.sharding is Sharding.OPTIMIZER
    # Sends of several pipelines wait, so that none is deeper than usual.
    return not pin.depth and (pin.shares in (None, shards) or not (copied or shards))


_AS_PINNED = {FULL_RECOMPUTE: True, NO_RECOMPUTE: False}


def pipeline_of(
    pricer: StagePricer,
    stages: Sequence[tuple[Mesh, int, Recompute]],
    num_microbatches: int,
) -> ChosenPipeline:
    """The pipeline of these stages (mesh, layer units, recomputation), with the usual depths."""
    names, count = [island.name for island in pricer.cluster.islands], len(stages)
    return ChosenPipeline(
        stages=tuple(
            mesh.stage(
                names,
                (pricer.units.layers(units, first=s == 0, last=s == count - 1),),
                recompute,
                min(count - s, num_microbatches),
            )
            for s, (mesh, units, recompute) in enumerate(stages)
        ),
        num_microbatches=num_microbatches,
        schedule=Schedule(name="1f1b"),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedPlan:
    """A whole plan and what it costs."""

    chosen: ChosenPlan
    seconds: float


@dataclass(slots=True)
class Assembler:
    """Prices whole plans of one job; counts them."""

    evaluator: PlanEvaluator
    replays: int = 0

    def whole(self, chosen: ChosenPlan) -> PricedPlan | None:
        """The plan with its step; None where it is no legal plan, breaks a pin or does not fit."""
        evaluator = self.evaluator
        if not keeps_pins(chosen, evaluator.cluster, evaluator.job):
            return None
        plan = evaluator.legal(chosen)
        if plan is None:
            return None
        self.replays += 1
        try:
            cost = evaluator.pricer.step(plan)
        except InputError:
            # Warm-up depths that make rendezvous sends wait for themselves.
            return None
        return PricedPlan(chosen=chosen, seconds=cost.step_seconds) if fits(cost) else None

    def balanced(self, chosen: ChosenPlan) -> ChosenPlan | None:
        """The same with the microbatches dealt out so that all pipelines end together."""
        job = self.evaluator.job
        try:
            plan = self.evaluator.place(chosen)
        except InputError:
            return None
        work = self.evaluator.pricer.costs(plan).work(plan)
        enough = not target(job.target).fewer_microbatches_than_stages
        shares = [
            Share(
                sequences=sum(part.shape.samples for part in pipeline.stages[0].parts),
                least=len(pipeline.stages) if enough else 1,
                seconds=partial(_unshared_seconds, each, rendezvous=sends_wait(plan)),
            )
            for pipeline, each in zip(chosen.pipelines, work, strict=True)
        ]
        counts = balanced(shares, job.global_batch_size)
        if counts is None:
            return None
        return replace(
            chosen,
            pipelines=tuple(
                replace(
                    pipeline,
                    num_microbatches=count,
                    stages=tuple(
                        replace(stage, warmup_depth=min(len(pipeline.stages) - s, count))
                        for s, stage in enumerate(pipeline.stages)
                    ),
                )
                for pipeline, count in zip(chosen.pipelines, counts, strict=True)
            ),
        )


def unshared_ends(work: PipelineWork, num_microbatches: int, *, rendezvous: bool) -> Floats:
    """[P] when the stages of one pipeline end, as if it had its links for itself."""
    depths = np.arange(len(work.stages), 0, -1)
    times = work.plain_times()._replace(warmup=depths, num_microbatches=num_microbatches)
    return pipeline_ends(times, rendezvous)


def _unshared_seconds(work: PipelineWork, num_microbatches: int, *, rendezvous: bool) -> float:
    return float(unshared_ends(work, num_microbatches, rendezvous=rendezvous).max())
