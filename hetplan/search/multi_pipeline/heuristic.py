"""Good plans of several pipelines: columns, their flows, whole plans, and a search around them.

1. At a guess T of the step, candidates (the best columns of every island alone, and what the
   bound met) and the flows that do most sequences (`most_sequences`); T is corrected until they do
   the batch.
2. Every choice of flows becomes a plan whose pipelines end together (`assembly`), priced whole.
3. The best plans are changed a little at a time (`improved`): layers between stages, what stages
   recompute. Every change is priced whole, with the microbatches dealt out anew, because reductions
   between pipelines of unlike cuts are priced nowhere else.

A column is a row of meshes (island, tp, microbatch size) with so many stages on each. Its layers
and recomputation are those with the least bottleneck; a pipeline of `flow` sequences per microbatch
has dp = flow / microbatch size on every stage and takes the same time for any flow.

Flows say how many copies of each column there are. At a step of T seconds a column does m(T)
microbatches; its flow x (sequences per microbatch) is whole, and such that every stage divides a
node or is whole nodes. Wanted: flows whose devices are there and which do the whole batch, at the
least T.

Memory depends on how many ranks share the optimizer's state, so columns are made for several
least numbers of them, and may then only be used with as many data-parallel ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from hetplan.cluster.spec import Cluster
from hetplan.cost.arrays import Floats, Ints
from hetplan.cost.replay.times import StageTimes, pipeline_ends
from hetplan.kernels import kernel
from hetplan.plans.assemble import stages_with_room
from hetplan.plans.chosen import ChosenPipeline, ChosenPlan, Shape
from hetplan.plans.plan import NO_RECOMPUTE, Sharding
from hetplan.search.multi_pipeline.assembly import Assembler, PricedPlan, pipeline_of
from hetplan.search.multi_pipeline.stage_options import MeshOptions, OptionsMaker, PartOptions
from hetplan.search.multi_pipeline.within import Worth
from hetplan.search.space.family import Mesh
from hetplan.search.space.stage_table import FIRST, LAST

_MAX_PIPELINES = (2, 3, 4, 6)
_TURNS = 3
_SHARD_LEVELS = (1, 8, 16, 32)
"""Least numbers of ranks that share the optimizer's state."""
_KEPT = 60
"""Candidates of every island and number of shards."""
_MAX_STAGES = 32
_EFFORT = 2.0
"""Deterministic seconds of the integer program; it mostly needs a tenth of a second."""


# ---- columns


MeshChoice = tuple[int, tuple[int, ...]]
"""Stages of one shape on one island: (its position in the cluster's, positions in the options, one
per recomputation)."""


class Slots(NamedTuple):
    """Stages of a pipeline whose layers and recomputation are open."""

    meshes: tuple[MeshChoice, ...]
    """Of every stage."""
    shards: int
    """Ranks that share the optimizer's state of every stage, at least."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Column:
    """A pipeline per sequence of a microbatch, first stage first."""

    islands: tuple[int, ...]
    options: tuple[int, ...]
    layers: tuple[int, ...]
    times: StageTimes
    """Of the number of microbatches that it was made for."""
    rendezvous: bool

    @property
    def bottleneck_seconds(self) -> float:
        """Of one microbatch on the slowest stage."""
        return float((self.times.forward + self.times.backward).max())

    @property
    def seconds(self) -> float:
        """Until the first stage has left its pipeline."""
        return float(pipeline_ends(self.times, self.rendezvous).max())


@kernel
def _capacity(
    seconds: float,
    layer: Floats,
    serial: Floats,
    most_layers: Ints,
    held: Ints,
    which: Ints,
) -> int:
    """Layers that stages hold within this stage time, [P, V] arrays; 0 where one holds none.

    Of equal numbers of layers the first recomputation counts.
    """
    total = 0
    for s in range(layer.shape[0]):
        best = 0
        for v in range(layer.shape[1]):
            fits = math.floor((seconds - serial[s, v]) / layer[s, v] * (1 + 1e-12))
            fits = min(fits, most_layers[s, v])
            if fits > best:
                best, which[s] = fits, v
        if best == 0:
            return 0
        held[s] = best
        total += best
    return total


@kernel
def least_bottleneck(
    layer: Floats, serial: Floats, most_layers: Ints, num_layers: int, held: Ints, which: Ints
) -> float:
    """The least stage time at which all layers fit; infinite where they never do.

    `held` and `which` get layers and recomputation of every stage.
    """
    high = 0.0
    for s in range(layer.shape[0]):
        for v in range(layer.shape[1]):
            high = max(high, serial[s, v] + layer[s, v] * most_layers[s, v])
    if _capacity(high, layer, serial, most_layers, held, which) < num_layers:
        return np.inf
    low = 0.0
    for _ in range(40):
        middle = 0.5 * (low + high)
        if _capacity(middle, layer, serial, most_layers, held, which) >= num_layers:
            high = middle
        else:
            low = middle
    excess = _capacity(high, layer, serial, most_layers, held, which) - num_layers
    for _ in range(excess):
        longest, most = -1, -1.0
        for s in range(layer.shape[0]):
            time = serial[s, which[s]] + layer[s, which[s]] * held[s]
            if held[s] > 1 and time > most:
                longest, most = s, time
        held[longest] -= 1
    for s in range(layer.shape[0]):
        # What need not be recomputed is not.
        for v in range(layer.shape[1]):
            if most_layers[s, v] >= held[s] and (
                serial[s, v] + layer[s, v] * held[s]
                < serial[s, which[s]] + layer[s, which[s]] * held[s]
            ):
                which[s] = v
    return high


class ColumnMaker:
    """Makes the columns of a row of slots."""

    def __init__(self, options: PartOptions, slots: Slots, most_stages: int) -> None:
        self._options, self._most_stages = options, most_stages
        self._islands = tuple(island for island, _ in slots.meshes)
        self._shards = min(slots.shards, options.most_shards)
        choices, last = [each for _, each in slots.meshes], len(slots.meshes) - 1
        width = max(map(len, choices))
        # [P, V] options, and [P, 1] roles, of every stage.
        self._at = np.array([(*each, *each[-1:] * width)[:width] for each in choices])
        roles = [FIRST * (s == 0) + LAST * (s == last) for s in range(last + 1)]
        self._roles = np.array(roles)[:, None]
        serial = (options.extra_forward + options.extra_backward)[self._roles, self._at]
        if options.rendezvous:
            wait = options.arrive_forward[self._at], options.arrive_backward[self._at]
            serial = serial + np.where(self._roles & FIRST, 0.0, wait[0])
            serial = serial + np.where(self._roles & LAST, 0.0, wait[1])
        self._layer, self._serial = (options.forward + options.backward)[self._at], serial

    def best(self, seconds: float) -> Column | None:
        """The column that does most microbatches in this time; None where none does any."""
        stages = len(self._islands)
        if stages > min(self._most_stages, self._options.num_layers):
            return None
        least = stages if self._options.enough_microbatches else 1
        best = self._within(least, seconds)
        if best is None:
            return None
        low, high = least, max(least, int(seconds / best.bottleneck_seconds))
        while low < high:
            middle = (low + high + 1) // 2
            other = self._within(middle, seconds)
            if other is None:
                high = middle - 1
            else:
                low, best = middle, other
        return best

    def _within(self, microbatches: int, seconds: float) -> Column | None:
        column = self._of(microbatches)
        if column is None or column.bottleneck_seconds * microbatches > seconds:
            return None
        return None if column.seconds > seconds else column

    def _of(self, microbatches: int) -> Column | None:
        """With the least bottleneck of so many microbatches."""
        options, count = self._options, len(self._islands)
        held, which = np.zeros(count, np.int64), np.zeros(count, np.int64)
        flight = np.arange(count, 0, -1)
        most = options.memory.most_layers(microbatches, self._most_stages, self._shards)
        seconds = least_bottleneck(
            self._layer,
            self._serial,
            most[self._roles, self._at, flight[:, None]],
            options.num_layers,
            held,
            which,
        )
        if seconds == np.inf:
            return None
        chosen, roles = self._at[np.arange(count), which], self._roles[:, 0]
        zero = np.zeros(count - 1)
        return Column(
            islands=self._islands,
            options=tuple(chosen.tolist()),
            layers=tuple(held.tolist()),
            times=StageTimes(
                options.forward[chosen] * held + options.extra_forward[roles, chosen],
                options.backward[chosen] * held + options.extra_backward[roles, chosen],
                options.arrive_forward[chosen[1:]],
                options.arrive_backward[chosen[:-1]],
                zero,
                zero,
                flight,
                microbatches,
            ),
            rendezvous=options.rendezvous,
        )


# ---- flows


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A column, and how it may be used."""

    column: Column
    use: dict[int, float]
    """Devices of each island per sequence of a microbatch."""
    flows: tuple[int, ...]
    """Sequences per microbatch."""
    worth: float
    """Microbatches per price of its devices."""

    @property
    def microbatches(self) -> int:
        """That it does in the time it was made for."""
        return self.column.times.num_microbatches


Flow = tuple[Column, int]
"""A column with its sequences per microbatch."""


def most_sequences(
    candidates: Sequence[Candidate], cluster: Cluster, *, most_pipelines: int, effort: float
) -> tuple[int, tuple[Flow, ...]]:
    """(most sequences per step, the flows that do them).

    `effort`: limit in the solver's own deterministic seconds.
    """
    from ortools.sat.python import cp_model  # with pandas half a second

    model = cp_model.CpModel()
    variables, used = [], []
    for each in candidates:
        values = [0, *each.flows] if each.microbatches else [0]
        variable = model.new_int_var_from_domain(cp_model.Domain.from_values(values), "")
        on = model.new_bool_var("")
        model.add(variable <= values[-1] * on)
        variables.append(variable)
        used.append(on)
    pairs = [*zip(candidates, variables, strict=True)]
    scale = 720720  # microbatch sizes up to 16 divide it: shares of devices become whole numbers
    for index, island in enumerate(cluster.islands):
        terms = [round(each.use[index] * scale) * x for each, x in pairs if index in each.use]
        if terms:
            model.add(sum(terms) <= round(island.num_usable_devices * scale))
    model.add(sum(used) <= most_pipelines)
    model.maximize(sum(each.microbatches * x for each, x in pairs))
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.max_deterministic_time = effort
    # It would leave the system's handler behind, with which Ctrl-C ends the process at once.
    solver.parameters.catch_sigint_signal = False
    status = solver.solve(model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return 0, ()
    flows = tuple((each.column, solver.value(x)) for each, x in pairs if solver.value(x))
    return int(solver.objective_value), flows


# ---- whole plans


@dataclass(kw_only=True)
class Primal:
    """Finds plans of one job."""

    maker: OptionsMaker
    options: PartOptions
    prices: Floats
    """[C] of a device, by class."""
    known: Sequence[Slots]
    """Pipelines that the bound met."""
    assembler: Assembler
    check: Callable[[], None]
    """Called every now and then; may raise."""
    on_whole: Callable[[PricedPlan], None]
    """Told of every plan at once."""

    @cached_property
    def _cluster(self) -> Cluster:
        return self.maker.pricer.cluster

    def plans(self, guess_seconds: float) -> list[PricedPlan]:
        """Whole plans near the best, best first; none where nothing fits."""
        plans: dict[ChosenPlan, PricedPlan] = {}
        seconds, batch = guess_seconds, self.maker.pricer.job.global_batch_size
        levels = [each for each in _SHARD_LEVELS if each <= self.options.most_shards]
        for turn in range(_TURNS):
            # The step is found roughly first; then every number of shards counts.
            last = turn == _TURNS - 1
            candidates = self._candidates(seconds, levels if last else levels[-2:])
            most = 0
            for count in _MAX_PIPELINES:
                sequences, flows = most_sequences(
                    candidates, self._cluster, most_pipelines=count, effort=_EFFORT
                )
                if sequences > most:
                    most = sequences
                    for whole in self._wholes(flows):
                        plans[whole.chosen] = whole
            seconds *= batch / most if most else 1.5
        return sorted(plans.values(), key=lambda whole: whole.seconds)

    def _candidates(self, seconds: float, levels: Sequence[int]) -> list[Candidate]:
        """The best ones for a step of so many seconds, likeliest first."""
        tried = [self._tried(row, seconds) for row in self.known]
        candidates = [each for each in tried if each is not None]
        for shards in levels:
            for island, choices in self._choices.items():
                candidates += self._on_island(island, choices, seconds, shards)
        return sorted(candidates, key=lambda each: -each.worth)

    def _on_island(
        self, island: int, choices: Sequence[tuple[int, ...]], seconds: float, shards: int
    ) -> list[Candidate]:
        """The best columns on one island."""
        rows = [
            Slots(((island, options),) * stages, shards)
            for options in choices
            for stages in range(1, self._most_stages + 1)
        ]
        tried = [self._tried(row, seconds) for row in rows]
        good = [each for each in tried if each is not None]
        return sorted(good, key=lambda each: -each.worth)[:_KEPT]

    @cached_property
    def _choices(self) -> dict[int, list[tuple[int, ...]]]:
        """Options of all shapes that a whole stage may have on each island, by recomputation."""
        found = {}
        for island, place in self.maker.class_of.items():
            shapes: dict[Shape, list[int]] = {}
            for o, option in enumerate(self.options.options):
                if option.place == place:
                    shapes.setdefault(option.shape, []).append(o)
            found[island] = [tuple(each) for each in shapes.values()]
        return found

    @property
    def _most_stages(self) -> int:
        return min(_MAX_STAGES, self.options.stage_limit)

    def _tried(self, row: Slots, seconds: float) -> Candidate | None:
        """The column of these slots that does most in this time."""
        self.check()
        options = self.options
        column = ColumnMaker(options, row, self._most_stages).best(seconds)
        if column is None:
            return None
        use: dict[int, float] = {}
        for island, o in zip(column.islands, column.options, strict=True):
            shape = options.options[o].shape
            use[island] = use.get(island, 0.0) + shape.tp / shape.microbatch_size
        flows = self._flows(column, use, row.shards)
        if not flows:
            return None
        use = dict(sorted(use.items()))
        price = sum(self.prices[self.maker.class_of[island]] * part for island, part in use.items())
        worth = column.times.num_microbatches / price if price > 0 else np.inf
        return Candidate(column=column, use=use, flows=flows, worth=worth)

    def _flows(self, column: Column, use: dict[int, float], shards: int) -> tuple[int, ...]:
        """Flows with which the column has room on empty islands and suits their nodes.

        They divide the batch: the space has no others (`stage_options`).
        Every stage has at least `shards` data-parallel ranks.
        """
        islands = self._cluster.islands
        shapes = [self.options.options[o].shape for o in column.options]
        batch = self.maker.pricer.job.global_batch_size
        rooms = [int(islands[at].num_usable_devices / part + 1e-9) for at, part in use.items()]
        step = math.lcm(*(shape.microbatch_size for shape in shapes))
        flows = []
        for flow in range(step, min(batch, *rooms) + 1, step):
            if batch % flow:
                continue
            sizes = [shape.tp * flow // shape.microbatch_size for shape in shapes]
            enough = all(flow >= shards * shape.microbatch_size for shape in shapes)
            suits = all(
                stages_with_room(islands[at], shape.tp, size)
                for at, shape, size in zip(column.islands, shapes, sizes, strict=True)
            )
            if enough and suits:
                flows.append(flow)
        return tuple(flows)

    def _wholes(self, flows: Sequence[Flow]) -> Iterator[PricedPlan]:
        """The plans of these flows, sharded and not."""
        several = self.options.most_shards > 1
        for sharding in (Sharding.OPTIMIZER, Sharding.NONE) if several else (Sharding.NONE,):
            if not flows:
                return
            pipelines = tuple(self._pipeline(*flow) for flow in flows)
            balanced = self.assembler.balanced(ChosenPlan(pipelines=pipelines, sharding=sharding))
            whole = None if balanced is None else self.assembler.whole(balanced)
            self.check()
            if whole is not None:
                self.on_whole(whole)
                yield whole

    def _pipeline(self, column: Column, flow: int) -> ChosenPipeline:
        stages = []
        for island, o, layers in zip(column.islands, column.options, column.layers, strict=True):
            option = self.options.options[o]
            shape = replace(option.shape, dp=flow // option.shape.microbatch_size)
            mesh = Mesh(islands=(island,), shapes=(shape,), max_stages=1)
            stages.append((mesh, layers, option.recompute))
        return pipeline_of(self.maker.pricer, stages, column.times.num_microbatches)


def known_rows(
    near: Sequence[Worth], stages: dict[int, MeshOptions], options: PartOptions
) -> tuple[Slots, ...]:
    """Rows of slots of pipelines whose meshes are on one island each.

    Islands of a class are taken in turn; stages: by samples per microbatch.
    """
    positions: dict[tuple[int, Shape], tuple[int, ...]] = {}
    for o, option in enumerate(options.options):
        key = (option.place, option.shape)
        positions[key] = (*positions.get(key, ()), o)
    classes = options.classes
    places = {island: c for c, each in enumerate(classes) for island in each.islands}
    rows: dict[Slots, None] = {}
    for worth in near:
        meshes = [stages[n].meshes[stages[n].mesh[o]] for n, o in reversed(worth.options)]
        kinds = [(places[mesh.islands[0]], replace(mesh.shapes[0], dp=1)) for mesh in meshes]
        if any(len(mesh.islands) > 1 for mesh in meshes) or not positions.keys() >= {*kinds}:
            continue
        for turn in range(max(len(each.islands) for each in classes)):
            islands = [classes[c].islands[turn % len(classes[c].islands)] for c, _ in kinds]
            choices = zip(islands, map(positions.__getitem__, kinds), strict=True)
            rows[Slots(tuple(choices), min(mesh.shapes[0].dp for mesh in meshes))] = None
    return tuple(rows)


# ---- a search around a plan


def improved(
    start: PricedPlan, assembler: Assembler, maker: OptionsMaker, *, budget: int
) -> PricedPlan:
    """The best that first improvements reach within so many prices."""
    best, spent, again = start, 0, True
    while again:
        again = False
        for chosen in _neighbours(best.chosen, maker):
            if spent >= budget:
                return best
            spent += 1
            dealt = assembler.balanced(chosen)
            whole = None if dealt is None else assembler.whole(dealt)
            if whole is not None and whole.seconds < best.seconds * (1 - 1e-9):
                best, again = whole, True
                break
    return best


def _neighbours(chosen: ChosenPlan, maker: OptionsMaker) -> Iterator[ChosenPlan]:
    step = maker.pricer.units.layers_per_unit
    for p, pipeline in enumerate(chosen.pipelines):
        changed = [*_moved_layers(pipeline, step)]
        if NO_RECOMPUTE in maker.legal.plain_recompute:
            changed += _less_recompute(pipeline)
        for each in changed:
            yield replace(
                chosen, pipelines=(*chosen.pipelines[:p], each, *chosen.pipelines[p + 1 :])
            )


def _moved_layers(pipeline: ChosenPipeline, step: int) -> Iterator[ChosenPipeline]:
    """One unit of so many layers from a stage to another, near ones first."""
    stages, count = pipeline.stages, len(pipeline.stages)
    for distance in range(1, count):
        for source in range(count):
            for goal in (source - distance, source + distance):
                if 0 <= goal < count and stages[source].layers[0] > step:
                    moved = [stage.layers[0] for stage in stages]
                    moved[source] -= step
                    moved[goal] += step
                    pairs = zip(stages, moved, strict=True)
                    yield replace(
                        pipeline,
                        stages=tuple(replace(stage, layers=(held,)) for stage, held in pairs),
                    )


def _less_recompute(pipeline: ChosenPipeline) -> Iterator[ChosenPipeline]:
    """One stage recomputes nothing."""
    none, stages = NO_RECOMPUTE, pipeline.stages
    for s, stage in enumerate(stages):
        if stage.recompute != none:
            less = replace(stage, recompute=none)
            yield replace(pipeline, stages=(*stages[:s], less, *stages[s + 1 :]))
