"""Exhaustive search over plans of several pipelines, for small jobs.

    row       one pipeline without its cuts: the mesh of every stage, microbatches
    variant   a cut of a row with the recomputation of every stage
    sequence  rows whose samples make up the batch and whose devices are there; order counts,
              because stages are placed in it

Variants of every row are replayed once, with the numbers of `stage_options` and the fastest
transfers that its stages can have: lower bounds wherever the row lies. Rows that end within a limit
must do the batch together (`least_prices`), and are put into sequences. Of a placed sequence,
variants are combined by their last end with the least reduction that their stages can have, which
no step is below; combinations are composed as the cost room does (`_Placed.seconds`), every
pipeline with its links for itself, and priced whole where that leaves them below the best.

Prices p_i >= 0 of a device of island i such that no row (samples b_r, devices n_ri) is worth more
than its devices, b_r <= sum_i n_ri p_i, bound what any rows do together: sum_i N_i p_i samples on
N_i devices. Where even the least such sum is below the batch, no plan consists of these rows.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise, product

import numpy as np

from hetplan.cost.arrays import Floats, Ints
from hetplan.cost.replay.times import Exchange
from hetplan.cost.step_model.end_of_step import EndOfStep, clips_gradients
from hetplan.cost.step_model.groups import copies_of, holders_of
from hetplan.cost.step_model.plan import PipelineWork, PlanCosts, exchange_of, sends_wait
from hetplan.cost.step_model.step import compose, norm_parts
from hetplan.cost.terms import seconds_of_parts
from hetplan.errors import InputError
from hetplan.job.spec import Job
from hetplan.job.trainer import trainer_settings
from hetplan.plans.chosen import ChosenPlan
from hetplan.plans.plan import LayerRange, Plan, Recompute, Sharding
from hetplan.plans.targets import target
from hetplan.search.multi_pipeline.assembly import (
    Assembler,
    Row,
    RowTables,
    Variants,
    pipeline_of,
    unshared_ends,
)
from hetplan.search.multi_pipeline.stage_options import OptionsMaker
from hetplan.search.solver import Best
from hetplan.search.space.allowed import mesh_matches
from hetplan.search.space.family import Mesh
from hetplan.search.space.transfers import Transfers

_SURE = 1e-7
"""Accuracy of the linear program, and of its prices."""

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
_MAX_KEPT = 2_000
"""Placed sequences that are kept: about 50 kB each."""
_WIDTHS = (1.1, 1.5, math.inf)
"""Limits that are tried one after the other, over the least step: a good plan closes the rest."""

_SIMPLER = 10
"""The part of a budget that a list of simple rows has."""
_TRIED = 200
"""Sequences of simple rows below one limit, once there is a plan."""
_SHARES = 8
"""Simple rows do whole eighths of a batch."""
_FEW_STAGES = 3
"""Most stages of a simple row."""


class TooManyError(Exception):
    """There are more than it is worth to look at."""


# ---- rows and sequences


@dataclass(kw_only=True)
class Rows:
    """Rows and sequences of one job."""

    maker: OptionsMaker
    most: int
    """Rows, or rows put one after the other, above which TooManyError is raised."""
    simple: bool = False
    """Only rows of one mesh, with few stages and rounded shares."""
    counted: int = 0

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        """Every pipeline that leaves something of the batch for others."""
        job = self.maker.pricer.job
        return tuple(
            row
            for samples, meshes in self.maker.meshes.items()
            for m in self._microbatches((job.global_batch_size - 1) // samples)
            for row in self._of_meshes(meshes, m)
            if not job.pin.same_degrees or len(row.shapes) == 1
        )

    def _microbatches(self, most: int) -> range:
        step = 1 if not self.simple else max(1, -(-(most + 1) // _SHARES))
        return range(step, most + 1, step)

    def _of_meshes(self, meshes: Sequence[Mesh], m: int) -> Iterator[Row]:
        pricer = self.maker.pricer
        pin, units = pricer.job.pin, pricer.units.count
        trainer = target(pricer.job.target)
        limit = units if trainer.fewer_microbatches_than_stages else min(units, m)
        limit = limit if pin.pp is None else min(limit, pin.pp)
        if self.simple and pin.pp is None:
            limit = min(limit, _FEW_STAGES)
        for slots in self._orders(meshes, limit, (), 0):
            if (
                pin.pp in (None, len(slots))
                and mesh_matches(slots[0], pricer.cluster, pin.embedding_on)
                and mesh_matches(slots[-1], pricer.cluster, pin.head_on)
            ):
                self._count()
                yield Row(slots=slots, microbatches=m)

    def _orders(
        self, meshes: Sequence[Mesh], room: int, slots: tuple[Mesh, ...], mask: int
    ) -> Iterator[tuple[Mesh, ...]]:
        """Meshes in every order behind these, no island twice, with up to `room` more stages."""
        self._count()
        if slots:
            yield slots
        if slots and self.simple:
            return
        for mesh in meshes:
            if mask & mesh.mask:
                continue
            for count in range(1, min(mesh.max_stages, room) + 1):
                longer = (*slots, *[mesh] * count)
                yield from self._orders(meshes, room - count, longer, mask | mesh.mask)

    def sequences(self, rows: Sequence[Row], prices: Sequence[float]) -> Iterator[tuple[Row, ...]]:
        """Every sequence of these rows that may have room.

        prices: of a device of every island, so that no row has more samples than its devices cost.
        """
        islands = self.maker.pricer.cluster.islands
        needs = [(row, row.devices(len(islands))) for row in rows]
        room = tuple(island.num_usable_devices for island in islands)
        return self._longer((), self.maker.pricer.job.global_batch_size, room, needs, prices)

    def _longer(
        self,
        taken: tuple[Row, ...],
        left: int,
        room: tuple[int, ...],
        needs: Sequence[tuple[Row, tuple[int, ...]]],
        prices: Sequence[float],
    ) -> Iterator[tuple[Row, ...]]:
        pin = self.maker.pricer.job.pin
        wanted = pin.pipelines
        if left == 0:
            if len(taken) > 1 and wanted in (None, len(taken)):
                yield taken
            return
        worth = sum(price * free for price, free in zip(prices, room, strict=True))
        if len(taken) == wanted or worth < left * (1 - _SURE):
            return
        for row, need in needs:
            samples = row.samples
            if samples > left or (len(taken) + 1 == wanted and samples < left):
                continue
            if taken and pin.same_degrees and taken[0].shapes != row.shapes:
                continue
            rest = tuple([a - b for a, b in zip(room, need, strict=True)])
            if min(rest) >= 0:
                self._count()
                yield from self._longer((*taken, row), left - samples, rest, needs, prices)

    def _count(self) -> None:
        self.counted += 1
        if self.counted > self.most:
            raise TooManyError


def least_prices(needs: Ints, samples: Ints, devices: Ints) -> Floats:
    """Prices with the least sum; needs: [R, I] devices of every row on every island."""
    from scipy.optimize import linprog

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

    seconds: dict[Row, float]
    """No plan with the row has a shorter step."""
    needs: Ints
    """[R, I] devices."""
    samples: Ints
    devices: Ints
    """[I] usable ones."""

    def least(self, batch: int) -> float:
        """No plan of these rows has a shorter step."""
        if not self.seconds:
            return math.inf
        seconds = [*self.seconds.values()]
        return least_step(seconds, self.needs, self.samples, self.devices, batch)

    def below(self, limit: float) -> tuple[list[Row], Floats]:
        """Rows below the limit, and prices of devices at which none is worth more than it needs."""
        rows = [row for row, seconds in self.seconds.items() if seconds < limit]
        count = len(rows)
        return rows, least_prices(self.needs[:count], self.samples[:count], self.devices)


# ---- placed sequences
@dataclass(kw_only=True)
class _Placed:
    """Rows of a sequence on their devices, with the variants of each."""

    plan: Plan
    """With some cuts."""
    costs: PlanCosts
    variants: Sequence[Variants]
    starts: Sequence[Sequence[Sequence[int]]]
    """Of every variant of each row the layers where its stages begin, and the number of layers."""
    legal: Sequence[Recompute]
    """What the job may recompute."""
    last: list[Floats] = field(default_factory=list)
    """[V] when the first pipelines have reduced their weights, at least."""
    _known: dict[tuple[int, int], tuple[PipelineWork, Floats]] = field(default_factory=dict)

    @cached_property
    def work(self) -> Sequence[PipelineWork]:
        """Pipelines with the plan's cuts."""
        return self.costs.work(self.plan)

    def seconds(self, picks: Sequence[int]) -> float:
        """The step with one variant of each row, if every pipeline had its links for itself."""
        work, ends = zip(*[self._pipeline(p, v) for p, v in enumerate(picks)], strict=True)
        group = self.plan.reduction_groups[0]
        cuts = sorted({at for p, v in enumerate(picks) for at in self.starts[p][v]})
        # Whose they are follows from the layers; devices do not matter to the price.
        groups = tuple(
            replace(group, layers=LayerRange(start=begin, stop=stop))
            for begin, stop in pairwise(cuts)
        )
        plan = replace(self.plan, reduction_groups=groups)
        return compose(plan, self.costs, work, ends).step_seconds

    def _pipeline(self, p: int, v: int) -> tuple[PipelineWork, Floats]:
        """A variant of row p and its ends: they do not depend on the other rows' variants."""
        found = self._known.get((p, v))
        if found is None:
            pipelines, recompute = [*self.plan.pipelines], self.variants[p].recompute[v]
            pieces = zip(pipelines[p].stages, pairwise(self.starts[p][v]), recompute, strict=True)
            stages = tuple(
                replace(
                    stage,
                    chunks=(LayerRange(start=begin, stop=stop),),
                    recompute=self.legal[again],
                )
                for stage, (begin, stop), again in pieces
            )
            pipelines[p] = replace(pipelines[p], stages=stages)
            plan = replace(self.plan, pipelines=tuple(pipelines))
            work, microbatches = self.costs.work(plan)[p], pipelines[p].num_microbatches
            ends = unshared_ends(work, microbatches, rendezvous=sends_wait(plan))
            found = self._known[p, v] = work, ends
        return found


@dataclass(kw_only=True)
class Enumeration:
    """Tries all plans of one job."""

    maker: OptionsMaker
    transfers: Transfers
    assembler: Assembler
    scale: int = 1
    """Of all budgets."""
    simple: bool = False
    """Only simple rows (`Rows.simple`): for a first plan, which proves nothing."""
    composed: int = 0
    priced: int = 0
    _rates: dict[tuple[object, ...], float] = field(default_factory=dict)
    _known: dict[tuple[tuple[Row, ...], Sharding], _Placed | None] = field(default_factory=dict)

    def _budget(self, most: int) -> int:
        return most // _SIMPLER if self.simple else most * self.scale

    @property
    def _job(self) -> Job:
        return self.maker.pricer.job

    @cached_property
    def _tables(self) -> RowTables:
        return RowTables(maker=self.maker, transfers=self.transfers)

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
        bound = rows.least(self._job.global_batch_size)
        try:
            for width in _WIDTHS:
                if bound >= best.target:
                    break
                limit = min(best.target, bound * width)
                self._below(rows, limit, solver, best)
                bound = limit
        except TooManyError:
            return 0.0 if self.simple else bound
        finally:
            best.replays += self.priced
        best.listed += not self.simple
        return 0.0 if self.simple else best.target

    def _open_rows(self, best: Best) -> _OpenRows | None:
        """Rows below the target; None where they are too many."""
        islands = self.maker.pricer.cluster.islands
        devices = [island.num_usable_devices for island in islands]
        if sum(devices) > _MAX_DEVICES or exchange_of(self._job) is Exchange.DEEPSPEED:
            return None
        try:
            rows = self._rows.rows
        except TooManyError:
            return None
        if sum(map(self._tables.number_of_variants, rows)) > self._budget(_MAX_VARIANTS):
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
        return float(last.min(initial=math.inf)) + self._job.data_loading_seconds

    def _shardings(self, rows: Sequence[Row]) -> tuple[Sharding, ...]:
        copies = [sum(shape.dp for shape in mesh.shapes) for row in rows for mesh in row.slots]
        return self.maker.legal.shardings(max(copies))

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
                raise TooManyError
            best.check_time()
            self._try(sequence, sharding, limit, solver, best)
        if cut_short and not self.simple:
            raise TooManyError

    # ---- one sequence

    def _try(
        self, rows: tuple[Row, ...], sharding: Sharding, limit: float, solver: int, best: Best
    ) -> None:
        """Every plan of a sequence whose step is below the limit."""
        placed = self._place(rows, sharding, best.target)
        if placed is None:
            return
        after, columns = self._after(placed), []
        for p in range(len(rows)):
            if p == len(placed.last):
                placed.last.append(self._reduced(placed, p))
            last = placed.last[p]
            open_ones = np.flatnonzero(last < min(limit, best.target) - after)
            if not open_ones.size:
                return
            order = open_ones[np.argsort(last[open_ones], kind="stable")]
            columns.append([(float(last[v]), v) for v in order.tolist()])
        for picks in _combinations(columns, lambda: min(limit, best.target) - after):
            self.composed += 1
            if self.composed > self._budget(_MAX_COMPOSED):
                raise TooManyError
            if placed.seconds(picks) < min(limit, best.target):
                self._offer(self._chosen(rows, sharding, placed.variants, picks), solver, best)

    def _place(self, rows: tuple[Row, ...], sharding: Sharding, ceiling: float) -> _Placed | None:
        """None where a row has no variant below the ceiling, or rows have no room beside each
        other; kept for wider limits.
        """
        key = rows, sharding
        if key in self._known:
            return self._known[key]
        variants = [self._tables.variants(row, sharding, ceiling) for row in rows]
        placed, evaluator = None, self.assembler.evaluator
        if all(each.last.size for each in variants):
            chosen = self._chosen(rows, sharding, variants, [0] * len(rows))
            with suppress(InputError):
                plan = evaluator.place(chosen)
                placed = _Placed(
                    plan=plan,
                    costs=evaluator.pricer.costs(plan),
                    variants=variants,
                    starts=[self._tables.positions(each.units).tolist() for each in variants],
                    legal=self.maker.legal.plain_recompute,
                )
        if len(self._known) < _MAX_KEPT:
            self._known[key] = placed
        return placed

    def _offer(self, chosen: ChosenPlan, solver: int, best: Best) -> None:
        self.priced += 1
        if self.priced > self._budget(_MAX_PRICED):
            raise TooManyError
        whole = self.assembler.whole(chosen)
        if whole is not None:
            best.offer(solver, whole.chosen, whole.seconds)

    def _chosen(
        self,
        rows: Sequence[Row],
        sharding: Sharding,
        variants: Sequence[Variants],
        picks: Sequence[int],
    ) -> ChosenPlan:
        legal, pipelines = self.maker.legal.plain_recompute, []
        for row, each, v in zip(rows, variants, picks, strict=True):
            units, again = each.units[v].tolist(), [legal[k] for k in each.recompute[v]]
            stages = [*zip(row.slots, units, again, strict=True)]
            pipelines.append(pipeline_of(self.maker.pricer, stages, row.microbatches))
        return ChosenPlan(pipelines=tuple(pipelines), sharding=sharding)

    # ---- how late a sequence reduces, at least

    def _after(self, placed: _Placed) -> float:
        """What follows the last reduction, at least."""
        loading = self._job.data_loading_seconds
        firsts_known = all(len(pipeline.stages[0].units) == 1 for pipeline in placed.work)
        if not clips_gradients(self._job) or not firsts_known:
            return loading
        return loading + seconds_of_parts(norm_parts(placed.costs, placed.work))

    def _reduced(self, placed: _Placed, p: int) -> Floats:
        """[V] when the last stage of pipeline p has reduced its weights, at least.

        Per parameter of a stage a piece of its layers takes no less than the best of all pieces,
        with whatever stages of the other pipelines.
        """
        work, done = placed.work, placed.variants[p].ends.copy()
        starts = np.array(placed.starts[p])
        others = [range(len(each.stages)) for q, each in enumerate(work) if q != p]
        for s in range(done.shape[1]):
            rate = min(
                self._rate(placed.costs, work, [*met[:p], s, *met[p:]], p)
                for met in product(*others)
            )
            weights = _weights(work[p], s).min(axis=0)
            done[:, s] += rate * weights[starts[:, s], starts[:, s + 1]]
        last: Floats = done.max(axis=1)
        return last

    def _rate(
        self, costs: PlanCosts, work: Sequence[PipelineWork], stages: Sequence[int], p: int
    ) -> float:
        """Least seconds per parameter of pipeline p's stage, where these stages reduce together;
        0 where compute may hide them.
        """
        if trainer_settings(self._job).overlap_grad_reduce:
            return 0.0
        settings, members = costs.settings, [work[q].stages[s] for q, s in enumerate(stages)]
        replicas = [replica for stage in members for replica in stage.replicas]
        key = (settings.sharding, settings.model.vocab_size, p, *replicas, settings.shards)
        found = self._rates.get(key)
        if found is None:
            holders = holders_of(replicas, expert=False)
            copies = copies_of(settings.cluster, holders, settings.shards)
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
    parts = []
    for unit in work.stages[s].units:
        before = np.array(unit.parameters)
        held = np.maximum(before[None, :] - before[:, None], 0.0)
        held[0, -1] -= unit.shared_parameters
        parts.append(held)
    return np.stack(parts)
