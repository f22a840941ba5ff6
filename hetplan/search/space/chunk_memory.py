"""How many layer units fit on each slot of an interleaved pipeline, and what it has in flight.

A stage keeps what a microbatch left in a chunk from its forward pass there to its backward pass.
How many microbatches each chunk has in flight follows from the order of the passes
(`hetplan.cost.schedules`); how many bytes that is, from the layers of the chunks. So the moments
are counted once per place in the pipeline, and every number of layers is judged by them.

The formulas are those of `hetplan.cost.memory.device` for stages of several chunks; a test holds
the two equal. Of a stage on several islands the part with least room counts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from hetplan.cost.arrays import Floats, Ints
from hetplan.kernels import kernel
from hetplan.plans.plan import Recompute
from hetplan.search.space.family import Family, Mesh
from hetplan.search.space.row import INSIDE
from hetplan.search.space.stage_pricer import StagePricer
from hetplan.search.space.stage_table import FIRST, LAST


class Kept(NamedTuple):
    """Bytes of the chunks of one stage; [2] of the first chunk, and of the others.

    The first stage's first chunk and the last stage's last one hold more than layer units: `ends`
    has what they have besides.
    """

    each: float
    """Kept by a microbatch per layer unit."""
    fixed: float
    """Kept besides in every chunk: what was sent."""
    working: float
    """Most that a backward pass needs besides, in a chunk of units."""
    first_fixed: float
    """Instead of `fixed` in the first chunk; the same where that has units only."""
    first_before: float
    """Working memory of what stands before the units of the first chunk, none of them freed."""
    first_released: float
    """Of that, free again per unit."""
    last_fixed: float
    """Instead of `fixed` in the last chunk."""
    last_working: float
    """Instead of `working` in the last chunk: a head's own; it frees its part first."""


def moments(stage: int, stages: int, microbatches: int, chunks: int) -> Ints:
    """[moments, v + 1] microbatches in flight per chunk, and the chunk that runs backward.

    m is a multiple of P.
    """
    # From the second group on the order repeats itself until the last two.
    return _moments(stage, stages, min(microbatches, 4 * stages), chunks)


@lru_cache(maxsize=65536)
def _moments(stage: int, stages: int, microbatches: int, chunks: int) -> Ints:
    found: Ints = _worst_ones(_count(stage, stages, microbatches, chunks))
    return found


@kernel
def _worst_ones(every: Ints) -> Ints:
    """Without moments that another one of the same chunk's backward pass is nowhere below."""
    kept = 0
    width = every.shape[1]
    for row in range(every.shape[0]):
        worse = False
        for other in range(kept):
            if every[other, width - 1] == every[row, width - 1]:
                worse = True
                for c in range(width - 1):
                    if every[row, c] > every[other, c]:
                        worse = False
                        break
                if worse:
                    break
        if worse:
            continue
        still = 0
        for other in range(kept):
            covers = every[other, width - 1] == every[row, width - 1]
            if covers:
                for c in range(width - 1):
                    if every[other, c] > every[row, c]:
                        covers = False
                        break
            if not covers:
                if still < other:
                    every[still] = every[other]
                still += 1
        every[still] = every[row]
        kept = still + 1
    return every[:kept].copy()


@kernel
def _count(stage: int, stages: int, microbatches: int, chunks: int) -> Ints:
    groups = -(-microbatches // stages)
    total = groups * stages * chunks
    depth = min(2 * (stages - stage - 1) + (chunks - 1) * stages + 1, total)
    found = np.zeros((microbatches * chunks, chunks + 1), np.int64)
    flight = np.zeros(chunks, np.int64)
    row = done = 0
    for y in range(total):
        while done < min(total, y + depth):
            group, place = done // (stages * chunks), done % (stages * chunks)
            if group * stages + place % stages < microbatches:
                flight[place // stages] += 1
            done += 1
        group, place = y // (stages * chunks), y % (stages * chunks)
        if group * stages + place % stages < microbatches:
            chunk = chunks - 1 - place // stages
            found[row, :chunks] = flight
            found[row, chunks] = chunk
            row += 1
            flight[chunk] -= 1
    return found


@kernel
def worst_bytes(found: Ints, kept: Kept, units: int) -> float:
    """Most bytes that are kept, and needed besides, in any of these moments."""
    chunks = found.shape[1] - 1
    bytes_of, working = np.empty(chunks), np.empty(chunks)
    for c in range(chunks):
        held = units // chunks + (1 if c < units % chunks else 0)
        bytes_of[c] = held * kept.each + kept.fixed
        working[c] = kept.working
        if c == chunks - 1:
            bytes_of[c] += kept.last_fixed - kept.fixed
            working[c] = kept.last_working
        if c == 0:
            bytes_of[c] += kept.first_fixed - kept.fixed
            working[c] = max(working[c], kept.first_before - held * kept.first_released)
    worst = 0.0
    for row in range(found.shape[0]):
        now = working[found[row, chunks]]
        for c in range(chunks):
            now += found[row, c] * bytes_of[c]
        worst = max(worst, now)
    return worst


@kernel
def most_that_fit(
    found: Ints, kept: Kept, base: Floats, update: Floats, room: float, most: int
) -> int:
    """Most layer units of a stage, at most `most`; 0 where not every chunk can have one.

    base, update [2]: bytes that are there whatever is in flight, and during the update: fixed, and
    per unit.
    """
    chunks = found.shape[1] - 1
    fit = 0
    for n in range(chunks, most + 1):
        now = base[0] + n * base[1] + worst_bytes(found, kept, n)
        if max(now, update[0] + n * update[1]) > room:
            break
        fit = n
    return fit


_SEVERAL = 2
"""Stands for chunks; only that there are several counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """Memory of one part of a stage: what stands there, what is kept, and the room for it."""

    kept: Kept
    base: Floats
    update: Floats
    room: float
    most: int
    """Units whose optimizer the host has room for."""


@dataclass(frozen=True, slots=True)
class ChunkMemory:
    """What fits on the slots of a family's pipelines."""

    pricer: StagePricer
    family: Family
    _parts: dict[tuple[int, int, int], tuple[_Part, ...]] = field(
        default_factory=dict, repr=False, compare=False
    )
    _most: dict[tuple[int, int, int, int], int] = field(
        default_factory=dict, repr=False, compare=False
    )

    def most_units(self, mesh: Sequence[int]) -> Ints:
        """[P, V] layer units that fit on each slot of these meshes; 0: none fits."""
        slots, variants = len(mesh), len(self.family.recompute)
        most = np.zeros((slots, variants), dtype=np.int64)
        for s, at in enumerate(mesh):
            for v in range(variants):
                most[s, v] = self._fits(at, v, s, slots)
        return most

    def _fits(self, at: int, variant: int, slot: int, slots: int) -> int:
        key = (at, variant, slot, slots)
        fits = self._most.get(key)
        if fits is None:
            family = self.family
            places = moments(slot, slots, family.num_microbatches, family.virtual_stages)
            fits = self._most[key] = min(
                most_that_fit(places, part.kept, part.base, part.update, part.room, part.most)
                for part in self._of_stage(
                    at, variant, FIRST * (slot == 0) + LAST * (slot == slots - 1)
                )
            )
        return int(fits)

    def _of_stage(self, at: int, variant: int, role: int) -> tuple[_Part, ...]:
        key = (at, variant, role)
        parts = self._parts.get(key)
        if parts is None:
            mesh = self.family.meshes[at]
            parts = self._parts[key] = tuple(
                self._part(mesh, number, self.family.recompute[variant], role)
                for number in range(len(mesh.islands))
            )
        return parts

    def _part(self, mesh: Mesh, number: int, recompute: Recompute, role: int) -> _Part:
        pricer, family, shape = self.pricer, self.family, mesh.shapes[number]
        island = mesh.islands[number]
        own = pricer.stage_bytes(island, shape, recompute, role, _SEVERAL)
        middle = pricer.stage_bytes(island, shape, recompute, 0, _SEVERAL)
        # The state of a stage is the same however many chunks it is dealt over.
        lines = family.lines(own, mesh, number)
        sent = middle.kept.fixed
        # A pass of a middle chunk, with the messages of this role beside it.
        working = middle.working_alone + (own.working - own.working_alone)
        room = pricer.room_bytes(island)
        return _Part(
            kept=Kept(
                each=own.kept.each,
                fixed=sent,
                working=working,
                first_fixed=own.kept.fixed if role & FIRST else sent,
                first_before=own.before if role & FIRST else -math.inf,
                first_released=own.released,
                last_fixed=own.kept.fixed if role & LAST else sent,
                last_working=own.working if role & LAST else working,
            ),
            base=np.array([lines.last.fixed - own.working, lines.last.each]),
            update=np.array([lines.update.fixed, lines.update.each]),
            room=room * (1 + INSIDE),
            most=lines.host_units(pricer.host_bytes(island), pricer.units.count),
        )
