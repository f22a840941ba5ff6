"""Every plan of several pipelines where they are few: the best one, by trying all that may be it.

Sequences of rows come by the least time that any of their cuts is busy. Of each placed sequence the
variants of every pipeline are replayed once; combinations of them come by the latest end, which no
step is below, then by the step composed of their reductions and updates, and what is left is placed
and priced whole. Links that several transfers share, which only make steps longer, count in the
last of these alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from hetplan.cost.priced.plan import PlanCosts
from hetplan.cost.priced.work import exchange_of
from hetplan.cost.replay.times import Exchange
from hetplan.job.trainer import trainer_settings
from hetplan.model.layer_units import LayerUnits
from hetplan.plans.chosen import ChosenPipeline, ChosenPlan, ChosenStage, Part
from hetplan.plans.placing import device_ranges, positions
from hetplan.plans.plan import (
    RecomputeGranularity,
    RecomputeModule,
    Replica,
    Schedule,
    Sharding,
)
from hetplan.plans.targets import target
from hetplan.search.several.assembling import Assembler
from hetplan.search.several.listing_rows import Row, Rows, TooManyError
from hetplan.search.several.listing_steps import Known, Steps
from hetplan.search.several.listing_tables import (
    Ended,
    Replicas,
    Tables,
    number_of_variants,
    replica_of,
)
from hetplan.search.solver import Best

_MOST_DEVICES = 16
"""Usable ones; with more, rows are not even counted."""
_MOST_ROWS = 60_000
"""Rows and sequences together: some 40 microseconds each."""
_MOST_VARIANTS = 3_000_000
"""Cuts and recomputations of all rows: about a microsecond each."""
_MOST_STEPS = 150_000
"""Composed steps: about 40 microseconds each."""
_MOST_PRICED = 1_500
"""Plans priced whole: about 4 milliseconds each."""


class _TooLongError(Exception):
    """The budget is spent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Columns:
    """Variants of one pipeline by their latest end, as plain numbers."""

    last: list[float]
    positions: list[list[int]]
    units: list[list[int]]
    choices: list[list[int]]
    slow: list[list[int]]
    ends: list[list[float]]

    @staticmethod
    def of(ended: Ended, tables: Tables, row: Row) -> _Columns:
        """Of one placement of a row."""
        each = tables.variants(row, math.inf)
        return _Columns(
            last=ended.last.tolist(),
            positions=each.positions[ended.which].tolist(),
            units=each.units[ended.which].tolist(),
            choices=each.choices[ended.which].tolist(),
            slow=each.slow[ended.which].tolist(),
            ends=ended.ends.tolist(),
        )


def _combinations(
    columns: Sequence[_Columns], limit: Callable[[], float], taken: tuple[int, ...] = ()
) -> Iterator[tuple[int, ...]]:
    """One variant of each pipeline, all with ends below the limit, which may fall meanwhile."""
    if len(taken) == len(columns):
        yield taken
        return
    for w, last in enumerate(columns[len(taken)].last):
        if last >= limit():
            return
        yield from _combinations(columns, limit, (*taken, w))


def _copies(rows: Sequence[Row]) -> list[int]:
    """Of the weights of every mesh that is used."""
    return [sum(shape.dp for shape in mesh.shapes) for row in rows for mesh in row.meshes]


@dataclass(slots=True)
class Listing:
    """Tries all plans of one job."""

    assembler: Assembler
    units: LayerUnits
    known: Known = field(default_factory=Known)
    steps: int = 0
    """Composed."""
    priced: int = 0
    _tables: dict[tuple[int, Sharding, bool], Tables] = field(default_factory=dict)
    _wires: PlanCosts | None = None

    def run(self, solver: int, best: Best) -> bool:
        """Offer what is better than the best; whether that was looked for everywhere."""
        sequences = self._sequences()
        if sequences is None:
            return False
        try:
            for _, rows, sharding in self._by_bound(sequences, best):
                best.check_time()
                self._try(rows, sharding, solver, best)
        except _TooLongError:
            return False
        finally:
            best.replays += self.priced
        best.listed += 1
        return True

    # ---- what there is

    def _sequences(self) -> tuple[tuple[Row, ...], ...] | None:
        """All of them; None where they are too many, or their sends are not as replayed here."""
        each = self.assembler
        devices = sum(island.num_usable_devices for island in each.cluster.islands)
        if devices > _MOST_DEVICES or exchange_of(each.job) is Exchange.DEEPSPEED:
            return None
        rows = Rows(
            model=each.model,
            cluster=each.cluster,
            job=each.job,
            units=self.units.count,
            most=_MOST_ROWS,
        )
        try:
            found = tuple(rows.sequences())
        except TooManyError:
            return None
        used = {row: None for sequence in found for row in sequence}
        many = sum(
            number_of_variants(self.units.count, len(self.recompute), (sum(row.stages),))
            for row in used
        )
        return found if many <= _MOST_VARIANTS else None

    @property
    def recompute(self) -> tuple[RecomputeGranularity, ...]:
        """What a stage may recompute."""
        job = self.assembler.job
        trainer, pin = target(job.target), job.pin.recompute
        found = [] if pin else [RecomputeGranularity.NONE]
        attention = RecomputeModule.CORE_ATTENTION in trainer.recompute_modules
        if pin is None and attention and not trainer_settings(job).fused_attention:
            found.append(RecomputeGranularity.SELECTIVE)
        if pin is not False and trainer.full_recompute:
            found.append(RecomputeGranularity.FULL)
        return tuple(found)

    def _shardings(self, rows: Sequence[Row]) -> tuple[Sharding, ...]:
        job, most = self.assembler.job, max(_copies(rows))
        pin, can = job.pin.sharded_optimizer, target(job.target).sharding
        if most == 1:
            return (Sharding.NONE,)
        found = [] if pin else [Sharding.NONE]
        if pin is not False and Sharding.OPTIMIZER in can:
            found.append(Sharding.OPTIMIZER)
        return tuple(found)

    def _by_bound(
        self, sequences: Sequence[tuple[Row, ...]], best: Best
    ) -> Iterator[tuple[float, tuple[Row, ...], Sharding]]:
        """Those that may hold a better plan, likeliest first."""
        found = []
        for at, rows in enumerate(sequences):
            if at % 256 == 0:
                best.check_time()
            for sharding in self._shardings(rows):
                tables = self._tables_of(rows, sharding)
                bound = 0.0
                for row in rows:
                    busy = tables.variants(row, best.target).busy
                    bound = max(bound, float(busy.min())) if busy.size else math.inf
                    if bound >= best.target:
                        break
                if bound < best.target:
                    found.append((bound, at, sharding))
        found.sort(key=lambda each: each[:2])
        for bound, at, sharding in found:
            if bound < best.target:
                yield bound, sequences[at], sharding

    def _tables_of(self, rows: Sequence[Row], sharding: Sharding) -> Tables:
        each = self.assembler
        tps = {shape.tp for row in rows for mesh in row.meshes for shape in mesh.shapes}
        padded = target(each.job.target).padded_vocab_size(each.model.vocab_size, math.lcm(*tps))
        key = (padded, sharding, rows[0].early_sends)
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
                early_sends=rows[0].early_sends,
                wires=self._wires,
            )
            if self._wires is None:
                # Transfers are the same with every padding and sharding.
                self._wires = found.costs
                found = self._tables[key] = replace(found, wires=found.costs)
        return found

    # ---- one sequence

    def _try(self, rows: tuple[Row, ...], sharding: Sharding, solver: int, best: Best) -> None:
        tables = self._tables_of(rows, sharding)
        placed = self._placed(rows)
        if placed is None:
            return
        ended: list[Ended] = []
        for row, replicas in zip(rows, placed, strict=True):
            ended.append(tables.ended(row, replicas, best.target))
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
        columns = [_Columns.of(each, tables, row) for each, row in zip(ended, rows, strict=True)]
        for picks in _combinations(columns, lambda: best.target - after):
            self.steps += 1
            if self.steps > _MOST_STEPS:
                raise _TooLongError
            pairs = [*zip(columns, picks, strict=True)]
            seconds = steps.seconds(
                [each.positions[w] for each, w in pairs],
                [each.ends[w] for each, w in pairs],
                [each.slow[w] for each, w in pairs],
            )
            if seconds < best.target:
                chosen = self._chosen(rows, tables, columns, picks)
                self._offer(chosen, solver, best)

    def _offer(self, chosen: ChosenPlan, solver: int, best: Best) -> None:
        self.priced += 1
        if self.priced > _MOST_PRICED:
            raise _TooLongError
        whole = self.assembler.whole(chosen)
        if whole is not None:
            best.offer(solver, whole.chosen, whole.seconds)

    def _placed(self, rows: Sequence[Row]) -> tuple[Replicas, ...] | None:
        """Devices of every stage, as `hetplan.plans.build` places them; None: they have no room."""
        cluster = self.assembler.cluster
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
        columns: Sequence[_Columns],
        picks: Sequence[int],
    ) -> ChosenPlan:
        pipelines = tuple(
            self._pipeline(row, each.units[w], [tables.recompute[k] for k in each.choices[w]])
            for row, each, w in zip(rows, columns, picks, strict=True)
        )
        return ChosenPlan(
            pipelines=pipelines, sharding=tables.sharding, early_sends=tables.early_sends
        )

    def _pipeline(
        self, row: Row, units: Sequence[int], recompute: Sequence[RecomputeGranularity]
    ) -> ChosenPipeline:
        islands, last = self.assembler.cluster.islands, len(units) - 1
        return ChosenPipeline(
            stages=tuple(
                ChosenStage(
                    parts=tuple(
                        Part(island=islands[at].name, shape=shape)
                        for at, shape in zip(mesh.islands, mesh.shapes, strict=True)
                    ),
                    layers=(self.units.layers(int(units[s]), first=s == 0, last=s == last),),
                    recompute=recompute[s],
                    warmup_depth=row.depths[s],
                )
                for s, mesh in enumerate(row.slots)
            ),
            num_microbatches=row.microbatches,
            schedule=Schedule(name="1f1b"),
        )
