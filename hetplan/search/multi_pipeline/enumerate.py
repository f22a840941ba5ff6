"""Exhaustive search over plans of several pipelines, for small jobs.

    row       one pipeline without its cuts: meshes in order, stages of each, microbatches
    variant   a cut of a row with the recomputation of every stage (`enumerate_rows`)
    sequence  rows whose samples make up the batch and whose devices are there; order counts,
              because stages are placed in it

Variants of every row are replayed once, with the fastest transfers that they can have. Rows that
end within a limit must do the batch together (`least_prices`), and are put into sequences. Of a
placed sequence, variants are combined by their last end with the least reduction that their stages
can have, which no step is below; combinations are composed as the cost room does
(`_Placed.seconds`), every pipeline with its links for itself, and priced whole where that leaves
them below the best.

Prices p_i >= 0 of a device of island i such that no row (samples b_r, devices n_ri) is worth more
than its devices, b_r <= sum_i n_ri p_i, bound what any rows do together: sum_i N_i p_i samples on
N_i devices. Where even the least such sum is below the batch, no plan consists of these rows.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise, product

import numpy as np
from scipy.optimize import linprog

from hetplan.cost.arrays import Floats, Ints
from hetplan.cost.replay.times import Exchange
from hetplan.cost.step_model.end_of_step import EndOfStep
from hetplan.cost.step_model.groups import copies_of, holders_of
from hetplan.cost.step_model.plan import PipelineWork, PlanCosts, exchange_of, sends_wait
from hetplan.cost.step_model.step import compose, norm_parts
from hetplan.cost.terms import seconds_of_parts
from hetplan.errors import InputError
from hetplan.plans.chosen import ChosenPipeline, ChosenPlan
from hetplan.plans.plan import LayerRange, Plan, RecomputeGranularity, Schedule, Sharding
from hetplan.search.multi_pipeline.assembly import Assembler, unshared_ends
from hetplan.search.multi_pipeline.enumerate_rows import (
    Row,
    Rows,
    RowTables,
    TooManyError,
    Variants,
    number_of_variants,
)
from hetplan.search.solver import Best
from hetplan.search.space.families import Families
from hetplan.search.space.stage_pricer import RECOMPUTE
from hetplan.search.table_maker import TableMaker

_SURE = 1e-7
"""Accuracy of the linear program."""


def least_prices(needs: Ints, samples: Ints, devices: Ints) -> Floats:
    """Prices with the least sum; needs: [R, I] devices of every row on every island."""
    solution = linprog(devices, A_ub=-needs, b_ub=-samples, bounds=(0, None), method="highs")
    if solution.x is None:  # no rows
        return np.zeros(len(devices))
    prices: Floats = np.maximum(solution.x, 0.0)
    # What the program's accuracy leaves below a row's samples.
    short = float(np.max(samples / np.maximum(needs @ prices, 1e-300), initial=1.0))
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

    def may(count: int) -> bool:
        return enough(needs[order[:count]], samples[order[:count]], devices, batch)

    if not may(finite):
        return math.inf
    return float(seconds[order[bisect_left(range(finite), True, lo=1, key=may) - 1]])


@dataclass(frozen=True, slots=True, kw_only=True)
class _OpenRows:
    """Rows that may stand in a plan below the target, earliest end first."""

    rows: tuple[Row, ...]
    seconds: dict[Row, float]
    """No plan with the row has a shorter step."""
    needs: Ints
    """[R, I] devices."""
    samples: Ints
    devices: Ints
    """[I] usable ones."""

    def least(self, batch: int) -> float:
        """No plan of these rows has a shorter step."""
        seconds = [*self.seconds.values()]
        return least_step(seconds, self.needs, self.samples, self.devices, batch)

    def below(self, limit: float) -> tuple[tuple[Row, ...], Floats]:
        """Rows below the limit, and prices of devices at which none is worth more than it needs."""
        count = sum(seconds < limit for seconds in self.seconds.values())
        prices = least_prices(self.needs[:count], self.samples[:count], self.devices)
        return self.rows[:count], prices


_MAX_DEVICES = 64
"""Usable ones; with more, rows are not even counted."""
_MAX_ROWS = 20_000
"""Rows: some 300 microseconds each."""
_MAX_SEQUENCES = 40_000
"""Rows put one after the other: about 100 microseconds each."""
_MAX_VARIANTS = 1_000_000
"""Cuts and recomputations of all rows: about a microsecond each."""
_MAX_COMPOSED = 20_000
"""Composed steps: about half a millisecond each."""
_MAX_PRICED = 1_000
"""Plans priced whole: about 4 milliseconds each."""
_SIMPLER = 10
"""The part of a budget that a list of simple rows has."""
_TRIED = 200
"""Sequences of simple rows below one limit, once there is a plan."""
_WIDTHS = (1.1, 1.5, math.inf)
"""Limits that are tried one after the other, over the least step: a good plan closes the rest."""


@dataclass(frozen=True, slots=True)
class _Placed:
    """Rows of a sequence on their devices."""

    plan: Plan
    """With some cuts."""
    costs: PlanCosts

    def seconds(
        self,
        starts: Sequence[Sequence[int]],
        recompute: Sequence[Sequence[RecomputeGranularity]],
    ) -> float:
        """The step with other cuts, if every pipeline had its links for itself.

        `starts`: of each pipeline the layers where its stages begin, and the number of layers.
        """
        pipelines = [
            replace(
                pipeline,
                stages=tuple(
                    replace(
                        stage,
                        chunks=(LayerRange(start=begin, stop=stop),),
                        recompute=RECOMPUTE[again],
                    )
                    for stage, (begin, stop), again in zip(
                        pipeline.stages, pairwise(row), choices, strict=True
                    )
                ),
            )
            for pipeline, row, choices in zip(self.plan.pipelines, starts, recompute, strict=True)
        ]
        group, cuts = self.plan.reduction_groups[0], sorted({at for row in starts for at in row})
        plan = replace(
            self.plan,
            pipelines=tuple(pipelines),
            # Whose they are follows from the layers; devices do not matter to the price.
            reduction_groups=tuple(
                replace(group, layers=LayerRange(start=begin, stop=stop))
                for begin, stop in pairwise(cuts)
            ),
        )
        work, rendezvous = self.costs.work(plan), sends_wait(plan)
        ends = [
            unshared_ends(each, each.pipeline.num_microbatches, rendezvous=rendezvous)
            for each in work
        ]
        return compose(plan, self.costs, work, ends).step_seconds


class _TooLongError(Exception):
    """The budget is spent."""


@dataclass(kw_only=True)
class Enumeration:
    """Tries all plans of one job."""

    maker: TableMaker
    assembler: Assembler
    scale: int = 1
    """Of all budgets."""
    simple: bool = False
    """Only simple rows (`Rows.simple`): for a first plan, which proves nothing."""
    composed: int = 0
    priced: int = 0
    _rates: dict[tuple[object, ...], float] = field(default_factory=dict)

    def _budget(self, most: int) -> int:
        return most // _SIMPLER if self.simple else most * self.scale

    @cached_property
    def _legal(self) -> Families:
        maker = self.maker
        return Families(model=maker.model, cluster=maker.cluster, job=maker.job)

    @cached_property
    def _tables(self) -> RowTables:
        return RowTables(maker=self.maker, recompute=self._legal.recompute)

    @cached_property
    def _rows(self) -> Rows:
        return Rows(maker=self.maker, most=self._budget(_MAX_ROWS), simple=self.simple)

    def run(self, solver: int, best: Best) -> float:
        """Offer what is better than the best; no plan that was not looked at is below the result.

        That is the best's target where everything was looked at.
        """
        rows = self._open_rows(best)
        if rows is None:
            return 0.0
        bound = rows.least(self.maker.job.global_batch_size) if rows.rows else math.inf
        try:
            for width in _WIDTHS:
                if bound >= best.target:
                    break
                limit = min(best.target, bound * width)
                self._below(rows, limit, solver, best)
                bound = limit
        except (_TooLongError, TooManyError):
            return 0.0 if self.simple else bound
        finally:
            best.replays += self.priced
        if self.simple:
            return 0.0
        best.listed += 1
        return best.target

    def _open_rows(self, best: Best) -> _OpenRows | None:
        """Rows below the target; None where they are too many."""
        cluster, job = self.maker.cluster, self.maker.job
        devices = [island.num_usable_devices for island in cluster.islands]
        if sum(devices) > _MAX_DEVICES or exchange_of(job) is Exchange.DEEPSPEED:
            return None
        try:
            rows = self._rows.rows
        except TooManyError:
            return None
        units, choices = self.maker.units().count, len(self._legal.recompute)
        count = sum(number_of_variants(units, choices, len(row.slots)) for row in rows)
        if count > self._budget(_MAX_VARIANTS):
            return None
        seconds = {}
        for row in rows:
            best.check_time()
            least = self._least(row, best.target)
            if least < best.target:
                seconds[row] = least
        seconds = dict(sorted(seconds.items(), key=lambda each: each[1]))
        needs = [row.devices(len(devices)) for row in seconds]
        return _OpenRows(
            rows=tuple(seconds),
            seconds=seconds,
            needs=np.array(needs, dtype=np.int64).reshape(len(seconds), len(devices)),
            samples=np.array([row.samples for row in seconds], dtype=np.int64),
            devices=np.array(devices, dtype=np.int64),
        )

    def _least(self, row: Row, ceiling: float) -> float:
        """No plan with this row has a shorter step."""
        shardings = self._shardings((row,))
        sharding = Sharding.OPTIMIZER if Sharding.OPTIMIZER in shardings else shardings[0]
        last = self._tables.variants(row, sharding, ceiling).last
        return float(last.min(initial=math.inf)) + self.maker.job.data_loading_seconds

    def _shardings(self, rows: Sequence[Row]) -> tuple[Sharding, ...]:
        copies = [sum(shape.dp for shape in mesh.shapes) for row in rows for mesh in row.meshes]
        return self._legal.shardings(max(copies))

    def _below(self, rows: _OpenRows, limit: float, solver: int, best: Best) -> None:
        """Every plan of these rows whose step is below the limit."""
        some, prices = rows.below(limit)
        if not some:
            return
        self._rows.most, cut_short = self._budget(_MAX_SEQUENCES), False
        if self.simple:
            self._rows.counted = 0
        sequences: list[tuple[float, tuple[Row, ...], Sharding]] = []
        try:
            for at, sequence in enumerate(self._rows.sequences(some, prices.tolist())):
                if at % 256 == 0:
                    best.check_time()
                seconds = max(rows.seconds[row] for row in sequence)
                sequences += [(seconds, sequence, each) for each in self._shardings(sequence)]
        except TooManyError:
            # Those that were met may still hold a good plan.
            cut_short = True
        sequences.sort(key=lambda each: each[0])
        for tried, (seconds, sequence, sharding) in enumerate(sequences):
            if seconds >= min(limit, best.target):
                break
            if self.simple and tried > _TRIED and best.wanted(solver) < math.inf:
                raise _TooLongError
            best.check_time()
            self._try(sequence, sharding, limit, solver, best)
        if cut_short and not self.simple:
            raise TooManyError

    # ---- one sequence

    def _try(
        self,
        rows: tuple[Row, ...],
        sharding: Sharding,
        limit: float,
        solver: int,
        best: Best,
    ) -> None:
        variants = [self._tables.variants(row, sharding, limit) for row in rows]
        if not all(each.last.size for each in variants):
            return
        evaluator = self.assembler.evaluator
        try:
            plan = evaluator.place(self._chosen(rows, sharding, variants, [0] * len(rows)))
        except InputError:
            return  # they have no room beside each other
        placed = _Placed(plan, evaluator.pricer.costs(plan))
        costs, work = placed.costs, placed.costs.work(plan)
        after = self._after(costs, work)
        columns = []
        for p, (row, each) in enumerate(zip(rows, variants, strict=True)):
            last = self._reduced(costs, work, p, row, each)
            open_ones = np.flatnonzero(last < min(limit, best.target) - after)
            if not open_ones.size:
                return
            order = open_ones[np.argsort(last[open_ones], kind="stable")]
            columns.append([(float(last[v]), v) for v in order.tolist()])
        starts = [self._tables.positions(each.units).tolist() for each in variants]
        for picks in _combinations(columns, lambda: min(limit, best.target) - after):
            self.composed += 1
            if self.composed > self._budget(_MAX_COMPOSED):
                raise _TooLongError
            seconds = placed.seconds(
                [each[v] for each, v in zip(starts, picks, strict=True)],
                [
                    [self._legal.recompute[k] for k in each.recompute[v]]
                    for each, v in zip(variants, picks, strict=True)
                ],
            )
            if seconds < min(limit, best.target):
                self._offer(self._chosen(rows, sharding, variants, picks), solver, best)

    def _offer(self, chosen: ChosenPlan, solver: int, best: Best) -> None:
        self.priced += 1
        if self.priced > self._budget(_MAX_PRICED):
            raise _TooLongError
        whole = self.assembler.whole(chosen)
        if whole is not None:
            best.offer(solver, whole.chosen, whole.seconds)

    def _after(self, costs: PlanCosts, work: Sequence[PipelineWork]) -> float:
        """What follows the last reduction, at least."""
        loading = self.maker.job.data_loading_seconds
        firsts_known = all(len(pipeline.stages[0].units) == 1 for pipeline in work)
        if not self._tables.clips or not firsts_known:
            return loading
        return loading + seconds_of_parts(norm_parts(costs, work))

    def _reduced(
        self,
        costs: PlanCosts,
        work: Sequence[PipelineWork],
        p: int,
        row: Row,
        variants: Variants,
    ) -> Floats:
        """[V] when the last stage of pipeline p has reduced its weights, at least.

        Per parameter of a stage a piece of its layers takes no less than the best of all pieces,
        with whatever stages of the other pipelines.
        """
        done = variants.ends.copy()
        cuts = self._tables.positions(variants.units)
        others = [range(len(each.stages)) for q, each in enumerate(work) if q != p]
        for s in range(len(row.slots)):
            rate = min(
                self._rate(costs, work, [*met[:p], s, *met[p:]], p) for met in product(*others)
            )
            weights = _weights(work[p], s).min(axis=0)
            done[:, s] += rate * weights[cuts[:, s], cuts[:, s + 1]]
        last: Floats = done.max(axis=1)
        return last

    def _rate(
        self, costs: PlanCosts, work: Sequence[PipelineWork], stages: Sequence[int], p: int
    ) -> float:
        """Least seconds per parameter of pipeline p's stage, where these stages reduce together."""
        settings, members = costs.settings, [work[q].stages[s] for q, s in enumerate(stages)]
        replicas = [unit.replica for stage in members for unit in stage.units]
        key = (settings.sharding, settings.model.vocab_size, p, *replicas, settings.shards)
        found = self._rates.get(key)
        if found is None:
            copies = copies_of(
                settings.cluster, holders_of(replicas, expert=False), settings.shards
            )
            group = EndOfStep(
                known=settings.known,
                island=members[0].unit.island,
                job=settings.job,
                reduction_precision=settings.reduction_precision,
                dense=copies,
                experts=copies,
                sharding=settings.sharding,
                offload=settings.offload,
                predictor=settings.predictor,
            )
            own = _weights(work[p], stages[p]).max(axis=0)
            sent = np.max([_weights(work[q], s).min(axis=0) for q, s in enumerate(stages)], axis=0)
            pieces = {*zip(own.ravel().tolist(), sent.ravel().tolist(), strict=True)}
            found = self._rates[key] = min(
                seconds_of_parts(group.reduction(most)) / held for held, most in pieces if held
            )
        return found

    def _chosen(
        self,
        rows: Sequence[Row],
        sharding: Sharding,
        variants: Sequence[Variants],
        picks: Sequence[int],
    ) -> ChosenPlan:
        names, units = self.maker.island_names, self.maker.units()
        pipelines = []
        for row, each, v in zip(rows, variants, picks, strict=True):
            last = len(row.slots) - 1
            stages = [
                mesh.stage(
                    names,
                    (units.layers(int(each.units[v, s]), first=s == 0, last=s == last),),
                    self._legal.recompute[each.recompute[v, s]],
                    row.depths[s],
                )
                for s, mesh in enumerate(row.slots)
            ]
            pipelines.append(
                ChosenPipeline(
                    stages=tuple(stages),
                    num_microbatches=row.microbatches,
                    schedule=Schedule(name="1f1b"),
                )
            )
        return ChosenPlan(pipelines=tuple(pipelines), sharding=sharding)


def _combinations(
    columns: Sequence[Sequence[tuple[float, int]]],
    limit: Callable[[], float],
    taken: tuple[int, ...] = (),
) -> Iterator[tuple[int, ...]]:
    """One variant of each pipeline, all with ends below the limit, which may fall meanwhile."""
    if len(taken) == len(columns):
        yield taken
        return
    for last, variant in columns[len(taken)]:
        if last >= limit():
            return
        yield from _combinations(columns, limit, (*taken, variant))


def _weights(work: PipelineWork, s: int) -> Floats:
    """[parts, starts, stops] parameters of every run of layers on the parts of a stage."""
    found = []
    for unit in work.stages[s].units:
        before = np.array(unit.parameters)
        held = np.maximum(before[None, :] - before[:, None], 0.0)
        held[0, -1] -= unit.shared_parameters
        found.append(held)
    return np.stack(found)
