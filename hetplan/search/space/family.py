"""What a family of plans is: all that the stages of a pipeline share, and the meshes to choose.

A mesh is one way to run stages on one island, or on several that share every stage. A family has
one tick (sequences per microbatch), one schedule and one way to shard; its plans differ in which
meshes they use, in their order, the number of stages on each, and the layers and the recomputation
of every stage.

A `FamilyTable` has the families of a question in columns: one family is made only where it is
looked at. Families come in blocks: one tuple of meshes with schedules, shardings and recomputations
of all kinds. Of thousands a search looks at a few, once bounds of all are known
(`order_free_table`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from operator import eq
from typing import overload

import numpy as np

from hetplan.cost.arrays import Floats, Ints
from hetplan.cost.memory.lines import Lines, StageBytes
from hetplan.job.spec import SPLIT_WEIGHTS
from hetplan.plans.check_job import SEARCHED_SPLIT
from hetplan.plans.chosen import ChosenPipeline, ChosenPlan, ChosenStage, Part, Shape
from hetplan.plans.pieces import experts_as_the_rest
from hetplan.plans.plan import Recompute, Schedule, Sharding


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Mesh:
    """Stages of one kind: how many devices each takes of which islands."""

    islands: tuple[int, ...]
    """Positions in the cluster's islands, increasing; of several every stage has a part on each."""
    shapes: tuple[Shape, ...]
    """One per island."""
    max_stages: int
    """How many such stages these islands have room for."""

    @property
    def mask(self) -> int:
        """The islands as bits."""
        return sum(1 << island for island in self.islands)

    @property
    def samples(self) -> int:
        """Sequences of one microbatch."""
        return sum(shape.samples for shape in self.shapes)

    def stage(
        self,
        island_names: Sequence[str],
        layers: tuple[int, ...],
        recompute: Recompute,
        warmup_depth: int,
    ) -> ChosenStage:
        """One stage of this mesh; `island_names` are those of the cluster."""
        parts = zip(self.islands, self.shapes, strict=True)
        return ChosenStage(
            parts=tuple(Part(island=island_names[at], shape=shape) for at, shape in parts),
            layers=layers,
            recompute=recompute,
            warmup_depth=warmup_depth,
        )


def island_masks(meshes: Sequence[Mesh]) -> Ints:
    """[M] the islands of each mesh as bits, numbered among those of all of them."""
    used = sorted({island for mesh in meshes for island in mesh.islands})
    bit = {island: 1 << at for at, island in enumerate(used)}
    return np.array([sum(map(bit.__getitem__, mesh.islands)) for mesh in meshes], dtype=np.int64)


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Family:
    """Plans of one pipeline that share tick, schedule and sharding."""

    samples: int
    """Sequences of one microbatch over all data-parallel ranks of a stage, the same for all."""
    num_microbatches: int
    schedule: str
    """`1f1b`, `interleaved-1f1b`, or one of `SEARCHED_SPLIT` of `hetplan.plans.check_job`."""
    virtual_stages: int = 1
    sharding: Sharding
    recompute: tuple[Recompute, ...]
    """What every stage may choose by itself; one entry where all stages must do the same."""
    early_sends: bool = False
    """Sends do not wait for their receivers (`OverlapSettings.send`)."""
    most_extra_depth: int = 0
    """Most microbatches in flight beyond the schedule's own, which only early sends make use of."""
    offload: float = 0.0
    """Part of the optimizer state in host memory."""
    sharing_ranks: int = 0
    """Ranks that share the state, neighbours; 0: all copies of a weight."""
    meshes: tuple[Mesh, ...]
    """Every one has `samples`; where the target needs equal degrees they have one shape."""

    @property
    def one_stage(self) -> bool:
        """Whether its pipelines have one stage: trainers with stages keep what else is split whole
        (torch/distributed/pipelining/stage.py; DeepSpeed's pipelines refuse ZeRO-2 and -3).
        """
        return self.sharding in SPLIT_WEIGHTS

    @property
    def splits(self) -> bool:
        """Whether the gradients of the weights are passes of their own."""
        return self.schedule in SEARCHED_SPLIT

    def shards(self, mesh: Mesh, part: int) -> tuple[int, int]:
        """Ranks that share optimizer state, and that of routed experts (`cost.memory.device`)."""
        if self.sharding is Sharding.NONE:
            return 1, 1
        shape = mesh.shapes[part]
        shards = self.sharing_ranks or sum(each.dp * each.cp for each in mesh.shapes)
        if experts_as_the_rest(shape):
            return shards, shards
        return shards, math.gcd(shards, shape.num_devices // (shape.ep * shape.etp))

    def lines(self, held: StageBytes, mesh: Mesh, part: int) -> Lines:
        """Memory of a stage's part, under the state that its ranks share."""
        return held.lines(
            self.sharding,
            *self.shards(mesh, part),
            self.num_microbatches,
            early_sends=self.early_sends,
            offload=self.offload,
        )

    def plan(self, stages: Sequence[ChosenStage]) -> ChosenPlan:
        """The family's plan of these stages."""
        pipeline = ChosenPipeline(
            stages=tuple(stages),
            num_microbatches=self.num_microbatches,
            schedule=Schedule(name=self.schedule, virtual_stages=self.virtual_stages),
        )
        return ChosenPlan(
            pipelines=(pipeline,),
            sharding=self.sharding,
            early_sends=self.early_sends,
            optimizer_offload=self.offload,
            sharing_ranks=self.sharing_ranks,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """What families share that differ in schedule, sharding and recomputation only."""

    samples: int
    num_microbatches: int
    meshes: tuple[Mesh, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """What the families of a block differ in."""

    schedule: str
    virtual_stages: int
    early_sends: bool
    most_extra_depth: int
    sharding: Sharding
    recompute: tuple[Recompute, ...]
    offload: float = 0.0
    sharing_ranks: int = 0

    @property
    def order(self) -> tuple[object, ...]:
        """Among families of one tick."""
        return (
            *(self.schedule, self.virtual_stages, self.early_sends),
            *(self.sharding, self.recompute, self.offload, self.sharing_ranks),
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FamilyTable(Sequence[Family]):
    """Families in order; those of a block share their meshes, those of a kind what it says."""

    blocks: tuple[Block, ...]
    kinds: tuple[Kind, ...]
    block: Ints
    """[N] of every family."""
    kind: Ints
    """[N]"""
    _made: dict[int, Family] = field(default_factory=dict, repr=False)
    _degrees: list[Floats] = field(default_factory=list, repr=False)
    """[blocks, 6] as of `_doublings`, once they are known."""
    _loosest: dict[tuple[object, ...], Family] = field(default_factory=dict, repr=False)
    _loosest_kinds: dict[tuple[object, ...], Kind | None] = field(default_factory=dict, repr=False)

    def __len__(self) -> int:
        return len(self.block)

    def __eq__(self, other: object) -> bool:
        """Whether both have equal families in the same order."""
        if not isinstance(other, FamilyTable):
            return NotImplemented
        return len(self) == len(other) and all(map(eq, self, other))

    __hash__ = None  # type: ignore[assignment]

    @overload
    def __getitem__(self, at: int) -> Family: ...

    @overload
    def __getitem__(self, at: slice) -> list[Family]: ...

    def __getitem__(self, at: int | slice) -> Family | list[Family]:
        if isinstance(at, slice):
            return [self[each] for each in range(*at.indices(len(self)))]
        if not -len(self) <= at < len(self):
            raise IndexError(at)
        at %= len(self)
        found = self._made.get(at)
        if found is None:
            found = self._made[at] = self._family(at)
        return found

    def _family(self, at: int) -> Family:
        block, kind = self.blocks[self.block[at]], self.kinds[self.kind[at]]
        return Family(
            samples=block.samples,
            num_microbatches=block.num_microbatches,
            schedule=kind.schedule,
            virtual_stages=kind.virtual_stages,
            sharding=kind.sharding,
            recompute=kind.recompute,
            early_sends=kind.early_sends,
            most_extra_depth=kind.most_extra_depth,
            offload=kind.offload,
            sharing_ranks=kind.sharing_ranks,
            meshes=block.meshes,
        )

    def samples(self) -> list[int]:
        """[N] sequences of one microbatch."""
        every = np.array([block.samples for block in self.blocks], dtype=np.int64)
        found: list[int] = every[self.block].tolist()
        return found

    def plain(self) -> list[int]:
        """Families with one chunk per stage; all where none has."""
        chunks = np.array([each.virtual_stages for each in self.kinds], dtype=np.int64)
        found = np.flatnonzero(chunks[self.kind] == 1)
        every: list[int] = (found if len(found) else np.arange(len(self))).tolist()
        return every

    def near(self, at: int) -> list[int]:
        """Families of one shape whose degrees are, in all, at most `_NEAR` doublings or halvings
        away from those of this family; none where it has meshes of several shapes.
        """
        if not self._degrees:
            self._degrees.append(np.array([_doublings(block) for block in self.blocks]))
        degrees = self._degrees[0]
        away = np.abs(degrees - degrees[self.block[at]]).sum(axis=1)
        found: list[int] = np.flatnonzero((away <= _NEAR)[self.block]).tolist()
        return found

    def loosest(self, family: Family) -> Family:
        """One family for all of this one's meshes that differ in recomputation, in whether the
        optimizer is sharded, and in the number of chunks, if that is not 1.

        Its stages recompute what any of them may, each for itself; the optimizer is sharded where
        one of them does that; and it has the fewest chunks. So a plan of any of them has a twin
        here with equal passes, no more state per device and no more messages. Its end of the step
        and its activations in flight are another matter.
        """
        key = (id(family.meshes), *_alike(family))
        found = self._loosest.get(key)
        if found is None:
            kind = self.loosest_kind(family)
            if kind is None:
                return family
            found = self._loosest[key] = replace(
                family,
                recompute=kind.recompute,
                sharding=kind.sharding,
                virtual_stages=kind.virtual_stages,
            )
        return found

    def loosest_kind(self, each: Family | Kind) -> Kind | None:
        """What the loosest family has instead of this one's kind; None where it is this one."""
        if each.sharding in SPLIT_WEIGHTS or each.schedule in SEARCHED_SPLIT:
            return None
        alike = _alike(each)
        if alike not in self._loosest_kinds:
            kinds = [kind for kind in self.kinds if _alike(kind) == alike]
            sharded = any(kind.sharding is Sharding.OPTIMIZER for kind in kinds)
            found = replace(
                kinds[0],
                recompute=tuple(dict.fromkeys(one for kind in kinds for one in kind.recompute)),
                sharding=Sharding.OPTIMIZER if sharded else Sharding.NONE,
                virtual_stages=min(kind.virtual_stages for kind in kinds),
            )
            self._loosest_kinds[alike] = found if len(kinds) > 1 else None
        return self._loosest_kinds[alike]

    def first_of_each_kind(self) -> tuple[Family, ...]:
        """The first family of every kind, in the table's order."""
        _, first = np.unique(self.kind, return_index=True)
        return tuple(self[at] for at in np.sort(first).tolist())

    def meshes(self) -> tuple[Mesh, ...]:
        """Those of all blocks; one may come several times."""
        return tuple(mesh for block in self.blocks for mesh in block.meshes)


_NEAR = 2.0
"""Doublings: a degree moves to another one, or two change by themselves."""


def _doublings(block: Block) -> tuple[float, ...]:
    """How often 1 is doubled for each degree of the block's shape; not a number for several."""
    shape = block.meshes[0].shapes[0]
    if any(each is not shape for mesh in block.meshes for each in mesh.shapes):
        return (math.nan,) * 6
    degrees = (shape.tp, shape.cp, shape.dp, shape.microbatch_size, shape.ep, shape.etp)
    return tuple(map(math.log2, degrees))


def _alike(each: Family | Kind) -> tuple[object, ...]:
    """Equal for what `FamilyTable.loosest` makes one family of."""
    return (
        *(each.schedule, each.early_sends, each.most_extra_depth),
        *(each.offload, each.sharing_ranks, each.sharding in SPLIT_WEIGHTS),
    )


def table_of(blocks: Sequence[tuple[Block, Sequence[Kind]]]) -> FamilyTable:
    """Every block with each of its kinds: by tick, then by kind; equal ones stay in this order."""
    numbers: dict[Kind, int] = {}
    rows: dict[tuple[Kind, ...], Ints] = {}
    columns = []
    for _, kinds in blocks:
        key = tuple(kinds)
        row = rows.get(key)
        if row is None:
            own = [numbers.setdefault(kind, len(numbers)) for kind in kinds]
            row = rows[key] = np.array(own, dtype=np.int64)
        columns.append(row)
    kind = np.concatenate(columns) if columns else np.zeros(0, dtype=np.int64)
    block = np.repeat(np.arange(len(blocks)), [len(column) for column in columns])
    places = {order: at for at, order in enumerate(sorted({each.order for each in numbers}))}
    place = np.array([places[each.order] for each in numbers], dtype=np.int64)
    samples = np.array([each.samples for each, _ in blocks], dtype=np.int64)
    order = np.lexsort((place[kind], samples[block])) if len(kind) else kind
    return FamilyTable(
        blocks=tuple(each for each, _ in blocks),
        kinds=tuple(numbers),
        block=block[order].astype(np.int64),
        kind=kind[order].astype(np.int64),
    )
