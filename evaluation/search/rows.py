"""The best rows of stages by Sailor's formula, where neighbouring stages may share a room.

A row gives every stage D replicas of some (room, tp), for one microbatch size b. N microbatches
with D = ceil(batch / (b N)), the fewest replicas for them, so that D need not divide the batch: the
last microbatch is then not full, and charged as if it were, as in Sailor's own plans. Three sorts:

* in turn: the rooms in some order, each with its tp; replicas are dealt out stage by stage, so
  that at most one stage between two rooms has both (with a linear cost of devices no more are
  needed); also without the shared stages;
* alike: every stage lies on the same rooms;
* by kind: every stage lies on all rooms of one kind, stages of a kind next to each other.

For given (b, D, tp of the rooms) no row is below `bound`, which orders and prunes them; rows are
cut by `sailor_tables.cut`.

As a plan of hetplan a row's rooms are one island per tp, with nodes of tp devices: groups of tp
devices, powers of two that divide a node's devices, always have room in whole nodes. The job's
batch is the case's, rounded up to whole microbatches of every replica. The target is `any`: native
alone runs stages of several kinds.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, permutations, product

import numpy as np

from evaluation.search.cases import Case, SailorRoom, case_inputs, room_island, rooms_cluster
from evaluation.search.sailor import SailorFiles, SailorPlan, SailorReplicas
from evaluation.search.sailor_tables import ReplicaClass, Stage, Tables, cut
from hetplan.cost.arrays import Ints
from hetplan.plans.chosen import ChosenPipeline, ChosenPlan, ChosenStage, Part, Shape
from hetplan.plans.plan import Schedule
from hetplan.search.result import Inputs

_MAX_STAGES = 32
"""Of a row; also bounds the work of a cut."""
FEW_ROOMS = 3
"""Up to so many rooms each has its own tp and every order is tried; of more, rooms of one GPU have
one tp and those of a region stay together."""
_MAX_CUTS, _MAX_CUT_STAGES = 5_000, 25_000
"""Rows that are cut, and their stages, 20 us each (measured)."""
_WORTH_CUTTING = 1.3
"""Rows whose outlook is further above the best are not cut: a heuristic, no proof."""
_KEPT = 24
"""Best rows that are handed on, to be placed, checked and scored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A cut row."""

    step_seconds: float
    num_microbatches: int
    plan: SailorPlan


@dataclass(kw_only=True)
class Rows:
    """Answers for one case."""

    case: Case
    files: SailorFiles
    cuts: int = 0
    cut_stages: int = 0
    _tables: dict[int, Tables] = field(default_factory=dict)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Microbatch sizes that were profiled."""
        return tuple(sorted({key[1] for key in self.files.times}))

    def best(self, below_seconds: float = math.inf) -> tuple[Row, ...]:
        """The best rows below this step, at most `_KEPT`, no two with the same stages."""
        asked = sorted(
            (
                (*self._outlook(size, dp, count, tps), size, dp, count, tps)
                for size in self.sizes
                for dp, count in self._ticks(size)
                for tps in self._degrees(size)
            ),
            key=lambda each: each[:5],
        )
        found: list[Row] = []
        best = below_seconds
        for outlook, bound, size, dp, count, tps in asked:
            enough = self.cuts >= _MAX_CUTS or self.cut_stages >= _MAX_CUT_STAGES
            if enough or outlook > _WORTH_CUTTING * best:
                break
            if bound >= best:
                continue
            for stages in dict.fromkeys(self._rows(dp, tps)):
                if count >= len(stages):
                    row = self._cut(stages, size, dp, count)
                    if row is not None and row.step_seconds < best * 1.05:
                        best = min(best, row.step_seconds)
                        found.append(row)
        found.sort(key=lambda row: row.step_seconds)
        return tuple(found[:_KEPT])

    def bound(self) -> float:
        """No plan of one pipeline in Sailor's form is faster, whatever its stages."""
        return min(
            (
                self._bound(size, dp, count, None)
                for size in self.sizes
                for dp, count in self._ticks(size)
            ),
            default=math.inf,
        )

    # ---- what is tried

    def table(self, size: int) -> Tables:
        """Figures at this microbatch size."""
        if size not in self._tables:
            self._tables[size] = Tables(
                files=self.files, rooms=self.case.rooms, microbatch_size=size,
                devices_per_node=self.case.devices_per_node,
            )  # fmt: skip
        return self._tables[size]

    def _ticks(self, size: int) -> Iterator[tuple[int, int]]:
        """(D, N) with the fewest replicas of each N."""
        batch, devices = self.case.global_batch_size, sum(each.devices for each in self.case.rooms)
        most = math.ceil(batch / size)
        seen = set()
        for dp in range(1, min(devices, most) + 1):
            count = math.ceil(batch / (size * dp))
            if count not in seen:
                seen.add(count)
                yield dp, count

    def _degrees(self, size: int) -> Iterator[tuple[ReplicaClass | None, ...]]:
        """A class of every room; None: the room is not used."""
        table, rooms = self.table(size), range(len(self.case.rooms))
        choices = [table.classes(room) or (None,) for room in rooms]
        if len(choices) <= FEW_ROOMS:
            yield from product(*choices)
            return
        gpus = list(self.case.gpus)
        first = [
            next(c for room, c in zip(self.case.rooms, choices, strict=True) if room.gpu == gpu)
            for gpu in gpus
        ]
        for chosen in product(*first):
            tps = {gpu: each.tp for gpu, each in zip(gpus, chosen, strict=True) if each is not None}
            yield tuple(
                ReplicaClass(room, tps[self.case.rooms[room].gpu])
                if self.case.rooms[room].gpu in tps
                else None
                for room in rooms
            )

    def _bound(
        self, size: int, dp: int, count: int, tps: tuple[ReplicaClass | None, ...] | None
    ) -> float:
        """By work, and by the largest reduction that cannot be avoided.

        A replica of class i holds layers of at most K = max_s c_s seconds and takes tp_i devices,
        so dp <= sum_i K (devices_i / tp_i) / T_i, T_i the seconds of the whole model. All ticks but
        one take K, one passes the model. There are at most sum_i (devices_i / tp_i) / dp stages, of
        which one has that part of the parameters at least. tps None: any class in every room.
        """
        table = self.table(size)
        rate, whole, least_tp = 0.0, math.inf, 1
        replicas = [0] * len(self.case.rooms)
        for room, place in enumerate(self.case.rooms):
            classes = table.classes(room) if tps is None else tuple(c for c in (tps[room],) if c)
            seconds = [table.model_seconds(each) for each in classes]
            rate += place.devices * max(
                (1 / (each.tp * t) for each, t in zip(classes, seconds, strict=True)), default=0.0
            )
            whole = min([whole, *seconds])
            least_tp = max([least_tp, *(each.tp for each in classes)])
            replicas[room] = max((place.devices // each.tp for each in classes), default=0)
        stages = min(sum(replicas) // dp, self.files.num_layers)
        if not stages:
            return math.inf
        alone = (count - 1) * max(whole, dp / rate) + whole
        alone += table.least_reduction(replicas, dp, 1, least_tp)
        if stages == 1:
            return alone
        used = [each for room in range(len(replicas)) for each in table.classes(room)]
        used = used if tps is None else [each for each in tps if each]
        send = min(table.send(one, other) for one in used for other in used)
        several = (count - 1) * (dp / rate + send) + whole + 2 * send
        return min(alone, several + table.least_reduction(replicas, dp, stages, least_tp))

    def _outlook(
        self, size: int, dp: int, count: int, tps: tuple[ReplicaClass | None, ...]
    ) -> tuple[float, float]:
        """(About what the best row takes, a step that none is below)."""
        bound = self._bound(size, dp, count, tps)
        if bound == math.inf:
            return math.inf, math.inf
        table, rooms = self.table(size), self.case.rooms
        used = [each for each in tps if each]
        replicas = [rooms[each.room].devices // each.tp for each in used]
        stages = max(1, min(sum(replicas) // dp, self.files.num_layers, _MAX_STAGES))
        rate = sum(
            number / table.model_seconds(each) for each, number in zip(used, replicas, strict=True)
        )
        tick = dp / rate
        if stages > 1:
            tick += 2 * sum(table.send(each, each) for each in used) / len(used)
        padded = [0] * len(rooms)
        for each, number in zip(used, replicas, strict=True):
            padded[each.room] = number
        least = min(each.tp for each in used)
        reduced = table.least_reduction(padded, dp, stages, least)
        return (count - 1 + stages) * tick + reduced, bound

    def _rows(self, dp: int, tps: tuple[ReplicaClass | None, ...]) -> Iterator[tuple[Stage, ...]]:
        used = [(each, self.case.rooms[each.room].devices // each.tp) for each in tps if each]
        for order in self._orders(used):
            yield from _prefixes(_in_turn(order, dp, shared=True))
            yield from _prefixes(_in_turn(order, dp, shared=False))
        zones = {room.zone for room in self.case.rooms}
        if len(used) > 1:
            for some in range(2, len(used) + 1):
                for group in combinations(used, some):
                    yield from _alike(group, dp)
        if len(zones) > 1 and len(self.case.gpus) > 1:
            yield from self._by_kind(used, dp)

    def _orders(
        self, used: Sequence[tuple[ReplicaClass, int]]
    ) -> Iterator[tuple[tuple[ReplicaClass, int], ...]]:
        if len(used) <= FEW_ROOMS:
            yield from permutations(used)
            return
        rooms = self.case.rooms
        groups: dict[str, list[tuple[ReplicaClass, int]]] = {}
        for each in used:
            # A zone is named region-letter.
            groups.setdefault(rooms[each[0].room].zone.rpartition("-")[0], []).append(each)
        inside = []
        for group in groups.values():
            large = sorted(group, key=lambda each: -each[1])
            kinds = sorted(group, key=lambda each: (rooms[each[0].room].gpu, -each[1]))
            inside.append(list(dict.fromkeys(map(tuple, (large, large[::-1], kinds, kinds[::-1])))))
        for regions in permutations(inside):
            for chosen in product(*regions):
                yield tuple(each for group in chosen for each in group)

    def _by_kind(
        self, used: Sequence[tuple[ReplicaClass, int]], dp: int
    ) -> Iterator[tuple[Stage, ...]]:
        kinds = [
            [each for each in used if self.case.rooms[each[0].room].gpu == gpu]
            for gpu in self.case.gpus
        ]
        kinds = [kind for kind in kinds if kind]
        for chosen in product(*(tuple(_numbers(kind, dp)) for kind in kinds)):
            for order in permutations(chosen):
                stages = tuple(stage for number, stage in order for _ in range(number))
                if 0 < len(stages) <= _MAX_STAGES:
                    yield stages

    # ---- cutting

    def _cut(self, stages: tuple[Stage, ...], size: int, dp: int, count: int) -> Row | None:
        self.cuts += 1
        self.cut_stages += len(stages)
        table, last = self.table(size), len(stages) - 1
        if last >= self.files.num_layers:
            return None
        sends = sends_of(stages, table)
        if not np.all(np.isfinite(sends)):
            return None
        ticks, reductions = table.row(stages, sends)
        ends = np.zeros(len(stages), dtype=np.int64)
        step = cut(ticks, reductions, count, ends)
        if step == math.inf:
            return None
        return Row(step_seconds=step, num_microbatches=count, plan=self._plan(stages, size, ends))

    def _plan(self, stages: tuple[Stage, ...], size: int, ends: Ints) -> SailorPlan:
        rooms = self.case.rooms
        return SailorPlan(
            layers=tuple(int(each) for each in np.diff(ends, prepend=0)),
            stages=tuple(
                tuple(
                    SailorReplicas(
                        gpu=rooms[each.room].gpu, zone=rooms[each.room].zone, tp=each.tp,
                        devices_per_node=each.tp, count=number,
                    )
                    for each, number in stage
                )
                for stage in stages
            ),
            microbatch_size=size,
        )  # fmt: skip


def _in_turn(order: Sequence[tuple[ReplicaClass, int]], dp: int, *, shared: bool) -> list[Stage]:
    """Replicas dealt out stage by stage; what does not fill a stage is left over."""
    stages: list[Stage] = []
    open_runs: list[tuple[ReplicaClass, int]] = []
    missing = dp
    for each, room in order:
        left = room
        if not shared:
            open_runs, missing = [], dp
        while left and len(stages) < _MAX_STAGES:
            taken = min(left, missing)
            open_runs.append((each, taken))
            left, missing = left - taken, missing - taken
            if not missing:
                stages.append(tuple(open_runs))
                open_runs, missing = [], dp
    return stages


def _prefixes(stages: list[Stage]) -> Iterator[tuple[Stage, ...]]:
    for number in range(1, len(stages) + 1):
        yield tuple(stages[:number])
        if number < len(stages):
            yield tuple(stages[-number:])


def _shared(group: Sequence[tuple[ReplicaClass, int]], dp: int, stages: int) -> Stage | None:
    """A stage on all of these rooms, so that each has room for so many."""
    missing, runs = dp, []
    for at, (each, room) in enumerate(group):
        taken = min(room // stages, missing - (len(group) - 1 - at))
        if taken < 1:
            return None
        runs.append((each, taken))
        missing -= taken
    return tuple(runs) if not missing else None


def _alike(group: Sequence[tuple[ReplicaClass, int]], dp: int) -> Iterator[tuple[Stage, ...]]:
    for number, stage in _numbers(group, dp):
        if number:
            yield (stage,) * number


def _numbers(group: Sequence[tuple[ReplicaClass, int]], dp: int) -> Iterator[tuple[int, Stage]]:
    """Every number of stages that these rooms have room for together, 0 with them."""
    yield 0, ()
    for number in range(1, _MAX_STAGES + 1):
        stage = _shared(group, dp, number)
        if stage is None:
            return
        yield number, stage


def sends_of(stages: tuple[Stage, ...], table: Tables) -> list[float]:
    """x_s of every stage of a row; infinite where a path is not known."""
    last = len(stages) - 1
    found = []
    for s in range(len(stages)):
        forward = slowest_send(stages[s], stages[s + 1], table) if s < last else 0.0
        backward = slowest_send(stages[s], stages[s - 1], table) if s > 0 else 0.0
        if s == 0:
            found.append(forward if last <= 2 else 2 * forward)
        else:
            found.append(2 * backward if s == last else forward + backward)
    return found


def slowest_send(one: Stage, other: Stage, table: Tables) -> float:
    """Seconds of the slowest send between stages of equal dp; replica j meets replica j."""
    a = b = 0
    left, right = one[0][1], other[0][1]
    worst = table.send(one[0][0], other[0][0])
    while True:
        step = min(left, right)
        left, right = left - step, right - step
        if not left:
            a += 1
            if a == len(one):
                return worst
            left = one[a][1]
        if not right:
            b += 1
            right = other[b][1]
        worst = max(worst, table.send(one[a][0], other[b][0]))


def row_inputs(case: Case, files: SailorFiles, row: Row) -> Inputs:
    """Model, cluster and job of which the row is a plan."""
    replicas: Counter[tuple[SailorRoom, int]] = Counter()
    rooms = {(room.gpu, room.zone): room for room in case.rooms}
    for stage in row.plan.stages:
        for each in stage:
            replicas[rooms[each.gpu, each.zone], each.tp] += each.count
    islands = [
        (room, replace(
            room_island(case, room, files), name=_name(room.gpu, room.zone, tp),
            nodes=number, devices_per_node=tp,
        ))
        for (room, tp), number in sorted(
            replicas.items(), key=lambda each: (case.rooms.index(each[0][0]), each[0][1])
        )
    ]  # fmt: skip
    inputs = case_inputs(case, files)
    batch = row.num_microbatches * row.plan.microbatch_size * row.plan.dp(0)
    return replace(
        inputs,
        cluster=rooms_cluster(case.name, islands, files),
        job=replace(inputs.job, global_batch_size=batch, target="any"),
    )


def row_chosen(row: Row) -> ChosenPlan:
    """The row on the islands of `row_inputs`."""
    plan = row.plan
    last = len(plan.stages) - 1
    stages = tuple(
        ChosenStage(
            parts=_parts(replicas, plan.microbatch_size),
            layers=(layers - (s == 0) - (s == last),),
            warmup_depth=min(len(plan.stages) - s, row.num_microbatches),
        )
        for s, (layers, replicas) in enumerate(zip(plan.layers, plan.stages, strict=True))
    )
    pipeline = ChosenPipeline(
        stages=stages,
        num_microbatches=row.num_microbatches,
        schedule=Schedule(name="1f1b"),
    )
    return ChosenPlan(pipelines=(pipeline,))


def _parts(replicas: tuple[SailorReplicas, ...], microbatch_size: int) -> tuple[Part, ...]:
    return tuple(
        Part(
            island=_name(each.gpu, each.zone, each.tp),
            shape=Shape(tp=each.tp, dp=each.count, microbatch_size=microbatch_size),
        )
        for each in replicas
    )


def _name(gpu: str, zone: str, tp: int) -> str:
    return f"{gpu}-{zone}-tp{tp}"
