"""How far is memory from enough? The leanest plans' layers, counted island by island.

Of every way to slice (tp, cp, ep) the family with the smallest tick, full recomputation and a
sharded optimizer needs least. With one microbatch in flight a stage of a mesh holds n layer units
at most; an island holds n times its stages. Where the sum over islands is below the model's units
no row of stages exists; where it is not, a row fails at some position, by what is in flight there
or by the embedding or head.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import nsmallest

import numpy as np

from hetplan.cost.arrays import Ints
from hetplan.errors import InputError
from hetplan.plans.plan import FULL_RECOMPUTE, Sharding
from hetplan.predict.predictor import Predictor
from hetplan.search.result import Question
from hetplan.search.space.family import Family, FamilyTable, Mesh
from hetplan.search.space.stage_pricer import StagePricer
from hetplan.search.space.stage_table import BOTH
from hetplan.search.table_maker import TableMaker
from hetplan.units import format_bytes, format_each

_MAX_COMPARED = 8
"""Ways to slice whose stages are looked at one by one: those that hold most by `held_units`, which
leaves out the embedding and the head. DeepSeek-V3 on 112 devices of three libraries has 305."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Held:
    """What the stages of one mesh hold."""

    mesh: Mesh
    stages: int
    units: int
    """Of one stage, at the place in the pipeline where it holds most."""
    role: int
    """That place: first, last, between (`hetplan.search.space.stage_table`), or alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Room:
    """What one family's meshes hold, a mesh for each island."""

    family: Family
    held: tuple[_Held, ...]

    @property
    def total(self) -> int:
        return sum(each.stages * each.units for each in self.held)


def room_lines(asked: Question, predictor: Predictor) -> tuple[str, ...]:
    """What the leanest plan lacks; nothing where no degrees divide at all."""
    maker = TableMaker.of(asked, predictor)
    try:
        rooms = [_room(maker, family) for family in _leanest(maker)]
        if not rooms:
            return ()
        best = max(rooms, key=lambda room: room.total)
        return tuple(_lines(asked, maker, best, predictor))
    except InputError:
        return ()


def _leanest(maker: TableMaker) -> list[Family]:
    """One family of every way to slice, and of every set of islands that may train together: least
    tick, most recomputed, most sharded. Those that hold most.
    """
    table = maker.families
    blocks: dict[int, int] = {}
    for at in leanest_first(table, np.arange(len(table))):
        blocks.setdefault(int(table.block[at]), at)
    found: dict[tuple[object, ...], int] = {}
    for block, at in blocks.items():
        meshes = table.blocks[block].meshes
        slices = {(shape.tp, shape.cp, shape.ep) for m in meshes for shape in m.shapes}
        islands = {island for mesh in meshes for island in mesh.islands}
        found.setdefault((*sorted(islands), *sorted(slices)), at)
    held = maker.held_units()
    return [table[at] for at in nsmallest(_MAX_COMPARED, found.values(), lambda at: -held[at])]


def leanest_first(table: FamilyTable, families: Ints) -> list[int]:
    """These families, what needs least memory first: full recomputation, shards, few chunks, small
    microbatches.
    """
    keys = [
        (
            FULL_RECOMPUTE not in kind.recompute,
            kind.sharding is Sharding.NONE,
            -kind.offload,
            kind.virtual_stages,
        )
        for kind in table.kinds
    ]
    place = {key: number for number, key in enumerate(sorted(set(keys)))}
    greed = np.array([place[key] for key in keys], dtype=np.int64)[table.kind[families]]
    samples = np.array([block.samples for block in table.blocks], dtype=np.int64)
    found: list[int] = families[np.lexsort((samples[table.block[families]], greed))].tolist()
    return found


def _room(maker: TableMaker, family: Family) -> _Room:
    space = maker.space(family)
    # Any recomputation, one microbatch in flight; [4, M].
    most = np.asarray(space.most_layers[..., 1].max(axis=0))
    # A stage that is first and last is the only one.
    at = int(most[BOTH].argmax())
    alone = _Held(mesh=family.meshes[at], stages=1, units=int(most[BOTH, at]), role=BOTH)
    most[BOTH] = 0
    best = most.max(axis=0)
    taken: set[int] = set()
    found = []
    for at in sorted(range(len(family.meshes)), key=lambda m: -best[m] * space.max_stages[m]):
        mesh = family.meshes[at]
        if taken.isdisjoint(mesh.islands):
            taken.update(mesh.islands)
            stages, units = int(space.max_stages[at]), int(best[at])
            role = int(most[:, at].argmax())
            found.append(_Held(mesh=mesh, stages=stages, units=units, role=role))
    rooms = [_Room(family=family, held=each) for each in (tuple(found), (alone,))]
    return max(rooms, key=lambda room: room.total)


def _lines(asked: Question, maker: TableMaker, room: _Room, predictor: Predictor) -> Iterator[str]:
    units, model = maker.units(), asked.model
    if room.total >= units.count:
        yield (
            f"memory: the layers of {model.name} fit one by one, but no row of stages holds them "
            "with the embedding, the head and the microbatches in flight at every position "
            f"(closest: {_degrees(room.family, [each.mesh for each in room.held])})"
        )
        return
    placed = StagePricer(model=model, cluster=maker.cluster, job=asked.job, predictor=predictor)
    for held in room.held:
        yield _island_line(asked, placed, room.family, held)
    layers = room.total * units.layers_per_unit
    yield (
        f"memory: together at most {min(layers, model.num_layers)} of {model.num_layers} "
        "transformer layers fit (the most of all degrees that divide)"
    )


def _island_line(asked: Question, placed: StagePricer, family: Family, held: _Held) -> str:
    mesh = held.mesh
    shape = mesh.shapes[0]
    recompute = family.recompute[-1]
    if FULL_RECOMPUTE in family.recompute:
        recompute = FULL_RECOMPUTE
    needed = placed.stage_bytes(mesh.islands[0], shape, recompute, held.role, family.virtual_stages)
    lines = family.lines(needed, mesh, 0)
    islands = [placed.cluster.islands[at] for at in mesh.islands]
    room = min(each.memory_bytes for each in islands) * (1 - asked.job.memory_reserve_fraction)
    each = placed.units.layers_per_unit
    what = "one transformer layer" if each == 1 else f"{each} transformer layers"
    states, hold = lines.last.each, held.units * each
    working = lines.total_bytes(1, 1) - states
    return (
        f"memory: {what} of {asked.model.name} needs {format_bytes(states)} of states and "
        f"{format_bytes(max(0.0, working))} of activations and buffers per device at "
        f"{_degrees(family, (mesh,))}; a device of {' and '.join(i.name for i in islands)} offers "
        f"{format_bytes(room)}: {hold} {'layer' if hold == 1 else 'layers'} a stage, "
        f"{held.stages} {'stage' if held.stages == 1 else 'stages'}"
    )


def _degrees(family: Family, meshes: Sequence[Mesh]) -> str:
    shapes = [shape for mesh in meshes for shape in mesh.shapes]

    def some(name: str) -> str:
        return format_each(getattr(shape, name) for shape in shapes)

    words = [f"tp {some('tp')}"]
    words += [f"{name} {some(name)}" for name in ("cp", "ep") if some(name) != "1"]
    words += [f"dp {some('dp')}", f"microbatch size {some('microbatch_size')}"]
    full = FULL_RECOMPUTE in family.recompute
    words.append("full recompute" if full else "no full recompute")
    if family.sharding is not Sharding.NONE:
        words.append("sharded optimizer")
    if family.offload:
        words.append("optimizer in host memory")
    return ", ".join(words)
