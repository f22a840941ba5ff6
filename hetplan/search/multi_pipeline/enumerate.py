"""Exhaustive search over plans of several pipelines, for small jobs.

Every row is replayed with the fastest transfers that it can have; rows that are done within a limit
must do the batch together (`least_prices`), and are then put into sequences and placed. Of each
the variants of every pipeline are replayed once; combinations of them come by the latest end with
the least reduction, which no step is below, then by the step composed of their reductions and
updates, and what is left is placed and priced whole. Links that several transfers share, which only
make steps longer, count in the last of these alone.

Prices p_i >= 0 of a device of island i such that no row (samples b_r, devices n_ri) is worth more
than its devices, b_r <= sum_i n_ri p_i, bound what any rows do together: sum_i N_i p_i samples on
N_i devices. Where even the least such sum is below the batch, no plan consists of these rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from scipy.optimize import linprog

from hetplan.cluster.spec import Cluster
from hetplan.cost.arrays import Floats, Ints
from hetplan.cost.replay.times import Exchange
from hetplan.cost.step_model.plan import PlanCosts, exchange_of
from hetplan.job.spec import Job
from hetplan.model.layer_units import LayerUnits
from hetplan.plans.assemble import device_ranges, positions
from hetplan.plans.build import replica_of
from hetplan.plans.chosen import ChosenPipeline, ChosenPlan
from hetplan.plans.plan import RecomputeGranularity, Replica, Schedule, Sharding
from hetplan.plans.targets import target
from hetplan.search.multi_pipeline.assembly import Assembler
from hetplan.search.multi_pipeline.enumerate_rows import (
    Ended,
    Replicas,
    Row,
    Rows,
    TooManyError,
    Variants,
    number_of_variants,
)
from hetplan.search.multi_pipeline.enumerate_steps import Known, Steps
from hetplan.search.multi_pipeline.enumerate_tables import Tables
from hetplan.search.solver import Best
from hetplan.search.space.families import Families
from hetplan.search.space.plan_evaluator import PlanEvaluator

_SURE = 1e-7
"""Accuracy of the linear program."""


def least_prices(needs: Ints, samples: Ints, devices: Ints) -> Floats:
    """Prices with the least sum; needs: [R, I] devices of every row on every island."""
    found = linprog(devices, A_ub=-needs, b_ub=-samples, bounds=(0, None), method="highs")
    if found.x is None:  # no rows
        return np.zeros(len(devices))
    prices: Floats = np.maximum(found.x, 0.0)
    # What the program's accuracy leaves below a row's samples.
    worth = needs @ prices
    short = float(np.max(samples / np.maximum(worth, 1e-300), initial=1.0))
    return prices * max(1.0, short)


def enough(needs: Ints, samples: Ints, devices: Ints, batch: int) -> bool:
    """Whether these rows may do the batch."""
    if not len(samples):
        return False
    return float(devices @ least_prices(needs, samples, devices)) >= batch * (1 - _SURE)


def least_step(
    seconds: Sequence[float], needs: Ints, samples: Ints, devices: Ints, batch: int
) -> float:
    """The least limit at which rows that take no longer may do the batch; infinite: never."""
    order = np.argsort(np.array(seconds), kind="stable")
    finite = int(np.count_nonzero(np.array(seconds) < np.inf))
    low, high = 0, finite
    if not enough(needs[order[:high]], samples[order[:high]], devices, batch):
        return float("inf")
    while high - low > 1:
        middle = (low + high) // 2
        some = order[:middle]
        if enough(needs[some], samples[some], devices, batch):
            high = middle
        else:
            low = middle
    return float(seconds[order[high - 1]])


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Rows that may stand in one plan, those that are done first before the others."""

    rows: tuple[Row, ...]
    seconds: dict[Row, float]
    """No plan with the row has a shorter step."""
    needs: Ints
    """[R, I] devices."""
    samples: Ints
    devices: Ints
    """[I] usable ones."""
    least: float
    """No plan of these rows has a shorter step."""

    @staticmethod
    def of(some: Sequence[tuple[float, Row]], cluster: Cluster, job: Job) -> Group:
        """Of (seconds, row)."""
        order = sorted(range(len(some)), key=lambda at: (some[at][0], at))
        rows = tuple(some[at][1] for at in order)
        seconds = [some[at][0] for at in order]
        islands = cluster.islands
        needs = np.array([row.devices(len(islands)) for row in rows], dtype=np.int64)
        samples = np.array([row.samples for row in rows], dtype=np.int64)
        devices = np.array([island.num_usable_devices for island in islands], dtype=np.int64)
        return Group(
            rows=rows,
            seconds=dict(zip(rows, seconds, strict=True)),
            needs=needs,
            samples=samples,
            devices=devices,
            least=least_step(seconds, needs, samples, devices, job.global_batch_size),
        )

    def below(self, limit: float) -> tuple[tuple[Row, ...], Floats]:
        """Rows below the limit, and prices of devices at which none is worth more than it needs."""
        count = sum(seconds < limit for seconds in self.seconds.values())
        prices = least_prices(self.needs[:count], self.samples[:count], self.devices)
        return self.rows[:count], prices


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """Variants of one pipeline, as plain numbers, by when they end and have reduced at least."""

    last: list[float]
    positions: list[list[int]]
    units: list[list[int]]
    choices: list[list[int]]
    slow: list[list[int]]
    ends: list[list[float]]

    @staticmethod
    def of(ended: Ended, each: Variants, reductions: Floats, limit: float) -> Columns:
        """Of one placement of a row; reductions: [P, parts, layers + 1, layers + 1] at least."""
        which = ended.which
        cut, slow = each.positions[which], each.slow[which]
        stages = np.arange(slow.shape[1])
        done = ended.ends + reductions[stages, slow, cut[:, :-1], cut[:, 1:]]
        last = done.max(axis=1)
        order = np.argsort(last, kind="stable")[: int(np.count_nonzero(last < limit))]
        return Columns(
            last=last[order].tolist(),
            positions=cut[order].tolist(),
            units=each.units[which][order].tolist(),
            choices=each.choices[which][order].tolist(),
            slow=slow[order].tolist(),
            ends=ended.ends[order].tolist(),
        )


def combinations(
    columns: Sequence[Columns], limit: Callable[[], float], taken: tuple[int, ...] = ()
) -> Iterator[tuple[int, ...]]:
    """One variant of each pipeline, all with ends below the limit, which may fall meanwhile."""
    if len(taken) == len(columns):
        yield taken
        return
    for w, last in enumerate(columns[len(taken)].last):
        if last >= limit():
            return
        yield from combinations(columns, limit, (*taken, w))


_MAX_DEVICES = 64
"""Usable ones; with more, rows are not even counted."""
_MAX_ROWS = 20_000
"""Rows: some 300 microseconds each."""
_MAX_SEQUENCES = 40_000
"""Rows put one after the other: about 100 microseconds each."""
_MAX_VARIANTS = 1_000_000
"""Cuts and recomputations of all rows: about a microsecond each."""
_MAX_STEPS = 100_000
"""Composed steps: about 40 microseconds each."""
_MAX_PRICED = 1_000
"""Plans priced whole: about 4 milliseconds each."""
_SIMPLER = 10
"""The part of a budget that a list of simple rows has."""
_TRIED = 200
"""Sequences of simple rows below one limit, once there is a plan."""
_WIDTHS = (1.1, 1.5, math.inf)
"""Limits that are tried one after the other, over the least step: a good plan closes the rest."""


class _TooLongError(Exception):
    """The budget is spent."""


def _copies(rows: Sequence[Row]) -> list[int]:
    """Of the weights of every mesh that is used."""
    return [sum(shape.dp for shape in mesh.shapes) for row in rows for mesh in row.meshes]


@dataclass(kw_only=True)
class Listing:
    """Tries all plans of one job."""

    assembler: Assembler
    units: LayerUnits
    scale: int = 1
    """Of all budgets."""
    simple: bool = False
    """Only simple rows (`Rows.simple`): for a first plan, which proves nothing."""
    known: Known = field(default_factory=Known)
    steps: int = 0
    """Composed."""
    priced: int = 0
    _tables: dict[tuple[int, Sharding], Tables] = field(default_factory=dict)
    _wires: PlanCosts | None = None

    @property
    def evaluator(self) -> PlanEvaluator:
        """Of the job's plans."""
        return self.assembler.evaluator

    def _budget(self, most: int) -> int:
        return most // _SIMPLER if self.simple else most * self.scale

    def run(self, solver: int, best: Best) -> float:
        """Offer what is better than the best; no plan that was not looked at is below the result.

        That is the best's target where everything was looked at.
        """
        ceiling = best.target
        groups = self._groups(ceiling, best)
        if groups is None:
            return 0.0
        bound = min((each.least for each in groups), default=math.inf)
        try:
            for width in _WIDTHS:
                if bound >= best.target:
                    break
                limit = min(best.target, bound * width)
                for each in groups:
                    self._below(each, limit, solver, best)
                bound = limit
        except (_TooLongError, TooManyError):
            return 0.0 if self.simple else bound
        finally:
            best.replays += self.priced
        if self.simple:
            return 0.0
        best.listed += 1
        return best.target

    # ---- what there is

    @cached_property
    def _rows(self) -> Rows:
        each = self.evaluator
        return Rows(
            model=each.model,
            cluster=each.cluster,
            job=each.job,
            units=self.units.count,
            most=self._budget(_MAX_ROWS),
            simple=self.simple,
        )

    def _groups(self, ceiling: float, best: Best) -> list[Group] | None:
        """Rows below the ceiling; None where they are too many."""
        each = self.evaluator
        devices = sum(island.num_usable_devices for island in each.cluster.islands)
        if devices > _MAX_DEVICES or exchange_of(each.job) is Exchange.DEEPSPEED:
            return None
        try:
            rows = self._rows.rows
        except TooManyError:
            return None
        stages = [sum(row.stages) for row in rows]
        if sum(number_of_variants(self.units.count, len(self.recompute), (n,)) for n in stages) > (
            self._budget(_MAX_VARIANTS)
        ):
            return None
        some = []
        for row in rows:
            best.check_time()
            seconds = self._least(row, ceiling)
            if seconds < ceiling:
                some.append((seconds, row))
        return [Group.of(some, each.cluster, each.job)] if some else []

    def _least(self, row: Row, ceiling: float) -> float:
        """No plan with this row has a shorter step."""
        job = self.evaluator.job
        shardings = self._shardings((row,))
        sharding = Sharding.OPTIMIZER if Sharding.OPTIMIZER in shardings else shardings[0]
        loading = job.data_loading_seconds
        return self._tables_of((row,), sharding).least_seconds(row, ceiling) + loading

    def _below(self, group: Group, limit: float, solver: int, best: Best) -> None:
        """Every plan of a group whose step is below the limit."""
        rows, prices = group.below(limit)
        if not rows:
            return
        self._rows.most, found = self._budget(_MAX_SEQUENCES), []
        cut_short = False
        if self.simple:
            self._rows.counted = 0
        try:
            for at, sequence in enumerate(self._rows.sequences(rows, prices.tolist())):
                if at % 256 == 0:
                    best.check_time()
                seconds = max(group.seconds[row] for row in sequence)
                found += [(seconds, at, sequence, each) for each in self._shardings(sequence)]
        except TooManyError:
            # Those that were met may still hold a good plan.
            cut_short = True
        found.sort(key=lambda each: each[:2])
        for tried, (seconds, _, sequence, sharding) in enumerate(found):
            if seconds >= min(limit, best.target):
                break
            if self.simple and tried > _TRIED and best.wanted(solver) < math.inf:
                raise _TooLongError
            best.check_time()
            self._try(sequence, sharding, min(limit, best.target), solver, best)
        if cut_short and not self.simple:
            raise TooManyError

    @cached_property
    def _legal(self) -> Families:
        each = self.evaluator
        return Families(model=each.model, cluster=each.cluster, job=each.job)

    @property
    def recompute(self) -> tuple[RecomputeGranularity, ...]:
        """What a stage may recompute."""
        return self._legal.recompute

    def _shardings(self, rows: Sequence[Row]) -> tuple[Sharding, ...]:
        return self._legal.shardings(max(_copies(rows)))

    def _tables_of(self, rows: Sequence[Row], sharding: Sharding) -> Tables:
        each = self.evaluator
        tps = {shape.tp for row in rows for mesh in row.meshes for shape in mesh.shapes}
        padded = target(each.job.target).padded_vocab_size(each.model.vocab_size, math.lcm(*tps))
        key = (padded, sharding)
        found = self._tables.get(key)
        if found is None:
            found = self._tables[key] = Tables(
                model=each.model,
                cluster=each.cluster,
                job=each.job,
                predictor=each.predictor,
                layer_units=self.units,
                recompute=self.recompute,
                sharding=sharding,
                padded=padded,
                wires=self._wires,
            )
            if self._wires is None:
                # Transfers are the same with every padding and sharding.
                self._wires = found.costs
                found = self._tables[key] = replace(found, wires=found.costs)
        return found

    # ---- one sequence

    def _try(
        self,
        rows: tuple[Row, ...],
        sharding: Sharding,
        limit: float,
        solver: int,
        best: Best,
    ) -> None:
        tables = self._tables_of(rows, sharding)
        placed = self._placed(rows)
        if placed is None:
            return
        ended: list[Ended] = []
        for row, replicas in zip(rows, placed, strict=True):
            ended.append(tables.ended(row, replicas, limit))
            if not ended[-1].which.size:
                return
        steps = Steps(
            tables=tables,
            rows=rows,
            placed=placed,
            hops=tuple(each.hops for each in ended),
            shards=1 if sharding is Sharding.NONE else math.lcm(*_copies(rows)),
            known=self.known,
        )
        after = steps.least_after
        if max(float(each.last[0]) for each in ended) + after >= limit:
            return
        columns: list[Columns] = []
        for p, (row, each) in enumerate(zip(rows, ended, strict=True)):
            reductions = steps.least_reductions(p)
            columns.append(Columns.of(each, tables.variants(row, limit), reductions, limit - after))
            if not columns[-1].last:
                return
        for picks in combinations(columns, lambda: min(limit, best.target) - after):
            self.steps += 1
            if self.steps > self._budget(_MAX_STEPS):
                raise _TooLongError
            pairs = [*zip(columns, picks, strict=True)]
            seconds = steps.seconds(
                [each.positions[w] for each, w in pairs],
                [each.ends[w] for each, w in pairs],
                [each.slow[w] for each, w in pairs],
            )
            if seconds < min(limit, best.target):
                self._offer(self._chosen(rows, tables, columns, picks), solver, best)

    def _offer(self, chosen: ChosenPlan, solver: int, best: Best) -> None:
        self.priced += 1
        if self.priced > self._budget(_MAX_PRICED):
            raise _TooLongError
        whole = self.assembler.whole(chosen)
        if whole is not None:
            best.offer(solver, whole.chosen, whole.seconds)

    def _placed(self, rows: Sequence[Row]) -> tuple[Replicas, ...] | None:
        """Devices of every stage, as `hetplan.plans.build` places them; None: they have no room."""
        cluster = self.evaluator.cluster
        slots = [row.slots for row in rows]
        wanted: dict[int, list[tuple[int, int, int]]] = {}
        for p, meshes in enumerate(slots):
            for s, mesh in enumerate(meshes):
                for part, at in enumerate(mesh.islands):
                    wanted.setdefault(at, []).append((p, s, part))
        found: dict[tuple[int, int, int], Replica] = {}
        for at, mine in wanted.items():
            island = cluster.islands[at]
            shapes = [slots[p][s].shapes[part] for p, s, part in mine]
            sizes = [shape.num_devices for shape in shapes]
            starts = positions(sizes, island.devices_per_node, len(island.usable_nodes))
            if starts is None:
                return None
            for where, shape, start in zip(mine, shapes, starts, strict=True):
                devices = device_ranges(cluster, island, start, shape.num_devices)
                found[where] = replica_of(shape, devices)
        return tuple(
            tuple(
                tuple(found[p, s, part] for part in range(len(mesh.islands)))
                for s, mesh in enumerate(meshes)
            )
            for p, meshes in enumerate(slots)
        )

    def _chosen(
        self,
        rows: Sequence[Row],
        tables: Tables,
        columns: Sequence[Columns],
        picks: Sequence[int],
    ) -> ChosenPlan:
        pipelines = tuple(
            self._pipeline(row, each.units[w], [tables.recompute[k] for k in each.choices[w]])
            for row, each, w in zip(rows, columns, picks, strict=True)
        )
        return ChosenPlan(pipelines=pipelines, sharding=tables.sharding)

    def _pipeline(
        self, row: Row, units: Sequence[int], recompute: Sequence[RecomputeGranularity]
    ) -> ChosenPipeline:
        islands, last = self.evaluator.cluster.islands, len(units) - 1
        names = [island.name for island in islands]
        return ChosenPipeline(
            stages=tuple(
                mesh.stage(
                    names,
                    (self.units.layers(int(units[s]), first=s == 0, last=s == last),),
                    recompute[s],
                    row.depths[s],
                )
                for s, mesh in enumerate(row.slots)
            ),
            num_microbatches=row.microbatches,
            schedule=Schedule(name="1f1b"),
        )
