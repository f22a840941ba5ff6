"""What every pipeline that may stand in a plan of several takes, by cut and recomputation.

Stages may have several parts (U), of which the slowest counts; K ways to recompute; positions count
the layers of the row from the embedding on.

Numbers come from the cost room's own units, hops and memory, so that a listed plan has the price
that `hetplan.cost.step_model` says. Passes and memory of a row do not depend on where on its
islands it lies; transfers do.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise, product

import numpy as np

from hetplan.cluster.spec import Cluster
from hetplan.cost.arrays import Floats, Ints
from hetplan.cost.replay.kernel import StageTimes, pipeline_ends
from hetplan.cost.step_model.hops import Hop, hop_arrays
from hetplan.cost.step_model.plan import PipelineWork, PlanCosts, StageWork, sends_wait
from hetplan.cost.step_model.pricer import stage_memory_use
from hetplan.cost.step_model.units import Unit, make_unit, settings_of
from hetplan.job.spec import Job
from hetplan.kernels import kernel
from hetplan.model.layer_units import LayerUnits
from hetplan.model.spec import ModelSpec
from hetplan.plans.assemble import assemble_pipeline, assemble_plan, device_ranges
from hetplan.plans.build import replica_of
from hetplan.plans.chosen import Shape
from hetplan.plans.plan import (
    LayerRange,
    Pipeline,
    Plan,
    RecomputeGranularity,
    Replica,
    Schedule,
    Sharding,
    Stage,
)
from hetplan.predict.predictor import Predictor
from hetplan.search.multi_pipeline.enumerate_rows import (
    NO_TIMES,
    Ended,
    Replicas,
    Row,
    Variants,
    cuts,
    least_of,
    times_of,
)
from hetplan.search.space.family import Mesh
from hetplan.search.space.stage_pricer import RECOMPUTE


@kernel
def variants(
    units: Ints,
    positions: Ints,
    choices: Ints,
    parts: Ints,
    most: Ints,
    seconds: Floats,
    microbatches: int,
    limit: float,
    cut: Ints,
    choice: Ints,
    slow: Ints,
    forward: Floats,
    backward: Floats,
    busy: Floats,
) -> int:
    """How many (cut, choice) fit and are busy for less than `limit`; fills the last six with them.

    units: [C, P] of every stage. positions: [C, P + 1] layers where stages begin. choices: [R, P].
    parts: [P] how many. most: [P, K] units that fit. seconds: [P, U, K, 3, layers + 1] of all
    layers before each position: forward, backward, again. slow, forward, backward: [., P].
    busy: max over stages of what is before one and its own passes of all microbatches.
    """
    found = 0
    stages = units.shape[1]
    for c in range(units.shape[0]):
        for r in range(choices.shape[0]):
            before = longest = 0.0
            s = 0
            while s < stages:
                k = choices[r, s]
                if units[c, s] > most[s, k]:
                    break
                start, stop = positions[c, s], positions[c, s + 1]
                whole, at = -1.0, 0
                for u in range(parts[s]):
                    total = 0.0
                    for way in range(3):
                        total += seconds[s, u, k, way, stop] - seconds[s, u, k, way, start]
                    if total > whole:
                        whole, at = total, u
                row = seconds[s, at, k]
                slow[found, s] = at
                forward[found, s] = row[0, stop] - row[0, start]
                backward[found, s] = row[1, stop] - row[1, start] + (row[2, stop] - row[2, start])
                own = forward[found, s] + backward[found, s]
                longest = max(longest, before + own * microbatches)
                before += own
                if longest >= limit:
                    break
                s += 1
            if s == stages:
                cut[found], choice[found], busy[found] = c, r, longest
                found += 1
    return found


@kernel
def ends_of(
    forward: Floats,
    backward: Floats,
    send_forward: Floats,
    send_backward: Floats,
    wire_latency: Floats,
    rendezvous_extra: Floats,
    depths: Ints,
    microbatches: int,
    rendezvous: bool,
    limit: float,
    busy: Floats,
    ends: Floats,
    last: Floats,
) -> int:
    """Fills `ends` [V, P] and `last` [V], infinite where no less than `limit`; how many replays."""
    replays = 0
    for v in range(forward.shape[0]):
        last[v] = np.inf
        if busy[v] >= limit:
            continue
        times = StageTimes(
            forward[v],
            backward[v],
            send_forward,
            send_backward,
            wire_latency,
            rendezvous_extra,
            depths,
            microbatches,
        )
        ends[v] = pipeline_ends(times, rendezvous)
        replays += 1
        most = ends[v].max()
        if most < limit:
            last[v] = most
    return replays


_PLAIN = Schedule(name="1f1b")


@dataclass(frozen=True, kw_only=True)
class Tables:
    """Of one padded vocabulary, and one sharding."""

    model: ModelSpec
    cluster: Cluster
    job: Job
    predictor: Predictor
    layer_units: LayerUnits
    recompute: tuple[RecomputeGranularity, ...]
    sharding: Sharding
    padded: int
    wires: PlanCosts | None = None
    """Where hops and collectives are kept that all tables share; None: its own."""
    spent: list[int] = field(default_factory=lambda: [0, 0])
    """Cuts looked at, pipelines replayed."""
    _units: dict[tuple[int, Shape, RecomputeGranularity], Unit] = field(default_factory=dict)
    _most: dict[tuple[object, ...], int] = field(default_factory=dict)
    _variants: dict[Row, Variants] = field(default_factory=dict)
    _fastest: dict[tuple[Mesh, Mesh], tuple[float, float, float, float]] = field(
        default_factory=dict
    )
    _ended: dict[tuple[Row, tuple[int, ...]], Ended] = field(default_factory=dict)

    @cached_property
    def plan(self) -> Plan:
        """One with these settings, to ask the cost room; its pipeline is of no account."""
        at = next(i for i, each in enumerate(self.cluster.islands) if each.num_usable_devices)
        shape = Shape(tp=1, dp=1, microbatch_size=1)
        whole = LayerRange(start=0, stop=len(self.model.layers))
        found = assemble_plan(
            self.model,
            self.cluster,
            self.job,
            [self._pipeline((self._replica(at, shape),), RecomputeGranularity.NONE, whole, 1, 1)],
            sharding=self.sharding,
        )
        return replace(found, padded_vocab_size=self.padded)

    @cached_property
    def costs(self) -> PlanCosts:
        """What the cost room keeps for such plans."""
        return PlanCosts(settings_of(self.plan, self.model, self.cluster, self.job, self.predictor))

    @property
    def shared(self) -> PlanCosts:
        """Where hops and collectives are kept."""
        return self.costs if self.wires is None else self.wires

    def _replica(self, island: int, shape: Shape) -> Replica:
        where = self.cluster.islands[island]
        return replica_of(shape, device_ranges(self.cluster, where, 0, shape.num_devices))

    def _pipeline(
        self,
        replicas: tuple[Replica, ...],
        recompute: RecomputeGranularity,
        layers: LayerRange,
        stages: int,
        microbatches: int,
        depth: int = 1,
    ) -> Pipeline:
        """So many times the same stage."""
        stage = Stage(
            chunks=(layers,),
            replicas=replicas,
            recompute=RECOMPUTE[recompute],
            warmup_depth=depth,
        )
        return replace(
            assemble_pipeline(
                self.cluster, self.job, [stage], num_microbatches=microbatches, schedule=_PLAIN
            ),
            stages=(stage,) * stages,
        )

    def unit(self, island: int, shape: Shape, recompute: RecomputeGranularity) -> Unit:
        """Costs of one part."""
        key = (island, shape, recompute)
        found = self._units.get(key)
        if found is None:
            found = self._units[key] = make_unit(
                self.costs.settings, self._replica(island, shape), RECOMPUTE[recompute]
            )
        return found

    # ---- memory

    def most_units(self, row: Row, mesh: Mesh, s: int, recompute: RecomputeGranularity) -> int:
        """Units of stage s that fit."""
        stages, depth = sum(row.stages), row.depths[s]
        key = (mesh.islands, mesh.shapes, s, stages, row.microbatches, depth, recompute)
        found = self._most.get(key)
        if found is None:
            low, high = 0, self.layer_units.count - stages + 1
            while low < high:
                middle = (low + high + 1) // 2
                if self._fits(row, mesh, s, recompute, middle):
                    low = middle
                else:
                    high = middle - 1
            found = self._most[key] = low
        return found

    def _fits(
        self, row: Row, mesh: Mesh, s: int, recompute: RecomputeGranularity, units: int
    ) -> bool:
        stages = sum(row.stages)
        first, last = s == 0, s == stages - 1
        each = self.layer_units
        start = 0 if first else 1 + each.layers(1, first=True, last=False)
        held = each.layers(units, first=first, last=last)
        layers = LayerRange(
            start=start, stop=len(self.model.layers) if last else start + held + first
        )
        if last and not first:
            layers = LayerRange(start=self._end - held, stop=len(self.model.layers))
        parts = zip(mesh.islands, mesh.shapes, strict=True)
        replicas = tuple(self._replica(*part) for part in parts)
        copies = sum(shape.dp for shape in mesh.shapes)
        plan = replace(self.plan, optimizer_shards=1 if self.sharding is Sharding.NONE else copies)
        pipeline = self._pipeline(
            replicas, recompute, layers, stages, row.microbatches, row.depths[s]
        )
        units_of = tuple(
            self.unit(island, shape, recompute)
            for island, shape in zip(mesh.islands, mesh.shapes, strict=True)
        )
        work = StageWork(units_of, units_of[0], (), (), (), (), 0.0, 0.0)
        hops = hop_arrays([()], [pipeline])[0]
        asked = PipelineWork(pipeline, [work] * stages, hops)
        use = stage_memory_use(self.costs, plan, asked, s)
        return use.total_bytes <= use.available_bytes

    @property
    def _end(self) -> int:
        """Position behind the last transformer layer."""
        return 1 + self.model.num_layers

    # ---- passes

    def variants(self, row: Row, limit: float) -> Variants:
        """What fits and is busy for less than the limit of the first call."""
        found = self._variants.get(row)
        if found is None:
            found = self._variants[row] = self._list(row, limit)
        return found

    def _list(self, row: Row, limit: float) -> Variants:
        slots, count = row.slots, sum(row.stages)
        units = cuts(self.layer_units.count, count)
        choices = np.array([*product(range(len(self.recompute)), repeat=count)], dtype=np.int64)
        positions = self._positions(units)
        most = np.array(
            [
                [self.most_units(row, mesh, s, k) for k in self.recompute]
                for s, mesh in enumerate(slots)
            ]
        )
        width = max(len(mesh.islands) for mesh in slots)
        seconds = np.zeros((count, width, len(self.recompute), 3, len(self.model.layers) + 1))
        for s, mesh in enumerate(slots):
            for u, part in enumerate(zip(mesh.islands, mesh.shapes, strict=True)):
                for k, recompute in enumerate(self.recompute):
                    unit = self.unit(*part, recompute)
                    seconds[s, u, k] = unit.forward, unit.backward, unit.again
        size = len(units) * len(choices)
        self.spent[0] += size
        cut, choice = np.empty(size, np.int64), np.empty(size, np.int64)
        slow = np.empty((size + 1, count), np.int64)
        forward, backward = np.empty((size + 1, count)), np.empty((size + 1, count))
        busy = np.empty(size)
        found = variants(
            units,
            positions,
            choices,
            np.array([len(mesh.islands) for mesh in slots]),
            most,
            seconds,
            row.microbatches,
            limit,
            cut,
            choice,
            slow,
            forward,
            backward,
            busy,
        )
        return Variants(
            positions=positions[cut[:found]],
            units=units[cut[:found]],
            choices=choices[choice[:found]],
            slow=slow[:found].copy(),
            forward=forward[:found].copy(),
            backward=backward[:found].copy(),
            busy=busy[:found].copy(),
        )

    def _positions(self, units: Ints) -> Ints:
        """[C, P + 1]: layers where stages begin."""
        each = self.layer_units
        found = np.zeros((len(units), units.shape[1] + 1), dtype=np.int64)
        found[:, 1:] = 1 + each.front_layers + np.cumsum(units, axis=1) * each.layers_per_unit
        found[:, -1] = len(self.model.layers)
        return found

    # ---- ends

    def least_seconds(self, row: Row, limit: float) -> float:
        """No placement of the row ends earlier; infinite where none ends below the limit."""
        slots = row.slots
        hops = [self._fastest_hop(left, right) for left, right in pairwise(slots)]
        each = self.variants(row, limit)
        size, count = each.forward.shape
        if not size:
            return math.inf
        last = np.empty(size)
        columns = np.array(hops, dtype=np.float64).reshape(count - 1, 4).T.copy()
        self.spent[1] += ends_of(
            each.forward,
            each.backward,
            columns[0],
            columns[1],
            columns[2],
            columns[3],
            np.array(row.depths, dtype=np.int64),
            row.microbatches,
            sends_wait(self.plan),
            limit,
            each.busy,
            np.empty((size, count)),
            last,
        )
        return float(last.min())

    def _fastest_hop(self, left: Mesh, right: Mesh) -> tuple[float, float, float, float]:
        """Least of each of a hop's times over all places of the two stages."""
        key = (left, right)
        found = self._fastest.get(key)
        if found is None:
            hops = [times_of(self._hop(*pair)) for pair in self._neighbours(left, right)]
            found = self._fastest[key] = least_of(hops) if hops else NO_TIMES
        return found

    def _neighbours(
        self, left: Mesh, right: Mesh
    ) -> list[tuple[tuple[Replica, ...], tuple[Replica, ...]]]:
        """Where two stages may lie; none where these are many ways."""
        if len(left.islands) > 1 or len(right.islands) > 1:
            return []
        if left.islands != right.islands:
            return [
                (
                    (self._replica(left.islands[0], left.shapes[0]),),
                    (self._replica(right.islands[0], right.shapes[0]),),
                )
            ]
        at, shape = left.islands[0], left.shapes[0]
        island = self.cluster.islands[at]
        size = shape.num_devices
        step = min(size, island.devices_per_node)
        starts = range(0, island.num_usable_devices - size + 1, step)
        replicas = {
            start: (replica_of(shape, device_ranges(self.cluster, island, start, size)),)
            for start in starts
        }
        return [
            (replicas[one], replicas[two])
            for one, two in product(starts, repeat=2)
            if abs(one - two) >= size
        ]

    def ended(self, row: Row, replicas: Replicas, limit: float) -> Ended:
        """When variants of this placement end, those below the limit (or one that was larger)."""
        hops = tuple(self._hop(left, right) for left, right in pairwise(replicas))
        key = (row, tuple(map(id, hops)))
        found = self._ended.get(key)
        if found is None or found.limit < limit:
            found = self._ended[key] = self._replayed(row, hops, limit)
        return found

    def _hop(self, left: tuple[Replica, ...], right: tuple[Replica, ...]) -> Hop:
        whole = LayerRange(start=0, stop=1)
        one, two = (Stage(chunks=(whole,), replicas=each, warmup_depth=1) for each in (left, right))
        return self.shared.hop(one, two, nics=True)

    def _replayed(self, row: Row, hops: tuple[Hop, ...], limit: float) -> Ended:
        each = self.variants(row, limit)
        size, count = each.forward.shape
        ends, last = np.empty((size, count)), np.empty(size)

        def floats(name: str) -> Floats:
            return np.array([getattr(hop, name) for hop in hops], dtype=np.float64)

        self.spent[1] += ends_of(
            each.forward,
            each.backward,
            floats("send_forward_seconds"),
            floats("send_backward_seconds"),
            floats("wire_latency_seconds"),
            floats("rendezvous_extra_seconds"),
            np.array(row.depths, dtype=np.int64),
            row.microbatches,
            sends_wait(self.plan),
            limit,
            each.busy,
            ends,
            last,
        )
        order = np.argsort(last, kind="stable")
        order = order[: int(np.count_nonzero(last < math.inf))]
        return Ended(which=order, ends=ends[order], last=last[order], limit=limit, hops=hops)
