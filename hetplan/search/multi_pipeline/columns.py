"""Pipelines per sequence of a microbatch: which stages, before anyone knows how many copies.

A column is a row of meshes (island, tp, microbatch size) with so many stages on each. Its layers
and recomputation are those with the least bottleneck; a pipeline of `flow` sequences per microbatch
has dp = flow / microbatch size on every stage and takes the same time for any flow.

Flows say how many copies of each column there are. At a step of T seconds a column does m(T)
microbatches; its flow x (sequences per microbatch) is whole, and such that every stage divides a
node or is whole nodes. Wanted: flows whose devices are there and which do the whole batch, at the
least T.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from ortools.sat.python import cp_model

from hetplan.cluster.spec import Cluster
from hetplan.cost.arrays import Floats, Ints
from hetplan.cost.replay.times import StageTimes, pipeline_ends
from hetplan.kernels import kernel
from hetplan.plans.chosen import Shape
from hetplan.search.multi_pipeline.stage_options import PartOptions
from hetplan.search.space.stage_table import FIRST, LAST


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshChoice:
    """Stages of one shape on one island."""

    island: int
    """Position in the cluster's islands."""
    options: tuple[int, ...]
    """Positions in the options, one per recomputation."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Column:
    """A pipeline per sequence of a microbatch, first stage first."""

    islands: tuple[int, ...]
    options: tuple[int, ...]
    layers: tuple[int, ...]
    use: tuple[tuple[int, float], ...]
    """(island, devices per sequence of a microbatch)."""
    least_flow: int
    """Sequences of a microbatch are a multiple of this."""
    bottleneck_seconds: float
    forward: Floats
    backward: Floats
    send_forward: Floats
    send_backward: Floats

    def seconds(self, num_microbatches: int, *, rendezvous: bool) -> float:
        """Until the first stage has left its pipeline."""
        stages = len(self.options)
        zero = np.zeros(stages - 1)
        times = StageTimes(
            self.forward,
            self.backward,
            self.send_forward,
            self.send_backward,
            zero,
            zero,
            np.arange(stages, 0, -1),
            num_microbatches,
        )
        ends = pipeline_ends(times, rendezvous)
        return float(ends.max())


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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Rows:
    """Stages whose layers and recomputation are open, [P, V]."""

    stages: Sequence[MeshChoice]
    at: Ints
    roles: Ints
    layer: Floats
    serial: Floats


@dataclass(slots=True)
class ColumnMaker:
    """Columns of one job's options."""

    options: PartOptions
    most_stages: int
    shards: int = 1
    """Ranks that share the optimizer's state of every stage, at least."""
    known: dict[int, Ints] = field(default_factory=dict)

    def most_layers(self, microbatches: int) -> Ints:
        """[4, O, W + 1] units that fit in a pipeline of so many microbatches."""
        found = self.known.get(microbatches)
        if found is None:
            found = self.options.most_layers(
                microbatches, self.most_stages, min(self.shards, self.options.most_shards)
            )
            self.known[microbatches] = found
        return found

    def best(
        self, meshes: Sequence[MeshChoice], counts: Sequence[int], seconds: float
    ) -> tuple[Column, int] | None:
        """The column that does most microbatches in this time, and how many; None for none."""
        rows = self._rows(meshes, counts)
        if rows is None:
            return None
        least = len(rows.stages) if self.options.enough_microbatches else 1
        found = self._within(rows, least, seconds)
        if found is None:
            return None
        low, high = least, max(least, int(seconds / found.bottleneck_seconds))
        while low < high:
            middle = (low + high + 1) // 2
            other = self._within(rows, middle, seconds)
            if other is None:
                high = middle - 1
            else:
                low, found = middle, other
        return found, low

    def _within(self, rows: _Rows, microbatches: int, seconds: float) -> Column | None:
        found = self._made(rows, microbatches)
        if found is None or found.bottleneck_seconds * microbatches > seconds:
            return None
        if found.seconds(microbatches, rendezvous=self.options.rendezvous) > seconds:
            return None
        return found

    def _rows(self, meshes: Sequence[MeshChoice], counts: Sequence[int]) -> _Rows | None:
        options = self.options
        stages = [mesh for mesh, count in zip(meshes, counts, strict=True) for _ in range(count)]
        last = len(stages) - 1
        if last >= min(self.most_stages, options.num_layers):
            return None
        width = max(len(mesh.options) for mesh in stages)
        at = np.array([(*mesh.options, *mesh.options[-1:] * width)[:width] for mesh in stages])
        roles = np.array([FIRST * (s == 0) + LAST * (s == last) for s in range(last + 1)])[:, None]
        serial = options.extra_forward[roles, at] + options.extra_backward[roles, at]
        if options.rendezvous:
            serial = serial + np.where(roles & FIRST, 0.0, options.arrive_forward[at])
            serial = serial + np.where(roles & LAST, 0.0, options.arrive_backward[at])
        return _Rows(
            stages=stages,
            at=at,
            roles=roles,
            layer=options.forward[at] + options.backward[at],
            serial=serial,
        )

    def _made(self, rows: _Rows, microbatches: int) -> Column | None:
        count = len(rows.stages)
        held, which = np.zeros(count, np.int64), np.zeros(count, np.int64)
        flight = np.arange(count, 0, -1)[:, None]
        most = self.most_layers(microbatches)[rows.roles, rows.at, flight]
        seconds = least_bottleneck(
            rows.layer, rows.serial, most, self.options.num_layers, held, which
        )
        if seconds == np.inf:
            return None
        chosen = rows.at[np.arange(count), which]
        return self._column(rows.stages, chosen, held, rows.roles[:, 0])

    def _column(
        self, stages: Sequence[MeshChoice], chosen: Ints, held: Ints, roles: Ints
    ) -> Column:
        options = self.options
        forward = options.forward[chosen] * held + options.extra_forward[roles, chosen]
        backward = options.backward[chosen] * held + options.extra_backward[roles, chosen]
        sizes = [options.options[o].shape.microbatch_size for o in chosen.tolist()]
        use: dict[int, float] = {}
        for mesh, o in zip(stages, chosen.tolist(), strict=True):
            use[mesh.island] = use.get(mesh.island, 0.0) + float(options.use[o])
        return Column(
            islands=tuple(mesh.island for mesh in stages),
            options=tuple(chosen.tolist()),
            layers=tuple(held.tolist()),
            use=tuple(sorted(use.items())),
            least_flow=math.lcm(*sizes),
            bottleneck_seconds=float((forward + backward).max()),
            forward=forward,
            backward=backward,
            send_forward=options.arrive_forward[chosen[1:]],
            send_backward=options.arrive_backward[chosen[:-1]],
        )


def mesh_choices(options: PartOptions, place: int, island: int) -> list[MeshChoice]:
    """All shapes on an island of this class that a whole stage may have."""
    found: dict[Shape, list[int]] = {}
    for o, option in enumerate(options.options):
        if option.place == place:
            found.setdefault(option.shape, []).append(o)
    return [MeshChoice(island=island, options=tuple(each)) for each in found.values()]


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A column, what it does in a time, and how it may be used."""

    column: Column
    microbatches: int
    flows: tuple[int, ...]
    """Sequences per microbatch."""
    worth: float
    """Microbatches per price of its devices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """A column with its sequences per microbatch and its microbatches."""

    column: Column
    flow: int
    microbatches: int


def flows_of(
    column: Column, options: PartOptions, cluster: Cluster, batch: int, shards: int
) -> tuple[int, ...]:
    """Flows with which the column has room on empty islands and suits their nodes.

    They divide the batch: the space has no others (`stage_options`).
    Every stage has at least `shards` data-parallel ranks.
    """
    most = batch
    for island, use in column.use:
        most = min(most, int(cluster.islands[island].num_usable_devices / use + 1e-9))
    found = []
    for flow in range(column.least_flow, most + 1, column.least_flow):
        if batch % flow:
            continue
        for island, o in zip(column.islands, column.options, strict=True):
            shape = options.options[o].shape
            size = shape.tp * flow // shape.microbatch_size
            per_node = cluster.islands[island].devices_per_node
            if flow < shards * shape.microbatch_size or (per_node % size and size % per_node):
                break
        else:
            found.append(flow)
    return tuple(found)


def most_sequences(
    candidates: Sequence[Candidate], cluster: Cluster, *, most_pipelines: int, effort: float
) -> tuple[int, tuple[Flow, ...]]:
    """(most sequences per step, the flows that do them).

    `effort`: limit in the solver's own deterministic seconds.
    """
    model = cp_model.CpModel()
    variables, used = [], []
    for each in candidates:
        values = [0, *each.flows] if each.microbatches else [0]
        variable = model.new_int_var_from_domain(cp_model.Domain.from_values(values), "")
        on = model.new_bool_var("")
        model.add(variable <= values[-1] * on)
        variables.append(variable)
        used.append(on)
    _room(model, [each.column for each in candidates], variables, cluster)
    model.add(sum(used) <= most_pipelines)
    pairs = [*zip(candidates, variables, strict=True)]
    model.maximize(sum(each.microbatches * x for each, x in pairs))
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.max_deterministic_time = effort
    status = solver.solve(model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return 0, ()
    chosen = tuple(
        Flow(column=each.column, flow=solver.value(x), microbatches=each.microbatches)
        for each, x in pairs
        if solver.value(x)
    )
    return int(solver.objective_value), chosen


def _room(
    model: cp_model.CpModel,
    columns: Sequence[Column],
    variables: Sequence[cp_model.IntVar],
    cluster: Cluster,
) -> None:
    scale = 720720  # microbatch sizes up to 16 divide it: shares of devices become whole numbers
    for index, island in enumerate(cluster.islands):
        terms = [
            round(use * scale) * x
            for column, x in zip(columns, variables, strict=True)
            for at, use in column.use
            if at == index
        ]
        if terms:
            model.add(sum(terms) <= round(island.num_usable_devices * scale))
