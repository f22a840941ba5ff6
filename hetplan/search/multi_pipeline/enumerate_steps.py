"""What is the step of several pipelines, once it is known when their stages leave them?

The composition of `hetplan.cost.step_model.step` for one sequence of placed rows: pieces of layers
are reduced last ones first, by all stages that hold them, each when all of them are there; a stage
then updates its weights and gathers them. What depends on stages alone is made once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise, product

import numpy as np

from hetplan.cost.arrays import Floats
from hetplan.cost.components.step import clips_gradients
from hetplan.cost.step_model.end_of_step import EndOfStep
from hetplan.cost.step_model.groups import copies_of
from hetplan.cost.step_model.hops import Hop
from hetplan.cost.step_model.step import norm_of, tied_between
from hetplan.cost.step_model.units import Unit
from hetplan.cost.step_model.values import seconds_of_parts
from hetplan.plans.plan import Replica, expand
from hetplan.search.multi_pipeline.enumerate_rows import Replicas, Row
from hetplan.search.multi_pipeline.enumerate_tables import Tables

_Members = tuple[tuple[Replica, ...], ...]


@dataclass(frozen=True, slots=True)
class _Piece:
    """One group's reduction."""

    seconds: float
    after: tuple[tuple[float, float], ...]
    """(gathering seconds, parameters whose state it keeps less those it has) of every member."""


@dataclass(slots=True)
class Known:
    """What sequences share."""

    groups: dict[tuple[object, ...], EndOfStep] = field(default_factory=dict)
    tied: dict[tuple[object, ...], float] = field(default_factory=dict)
    rates: dict[tuple[object, ...], float] = field(default_factory=dict)
    weights: dict[int, Floats] = field(default_factory=dict)
    """By a unit's id; tables keep the units."""


@dataclass(slots=True)
class Steps:
    """Steps of one sequence; a pick is (positions, ends, slow parts) of every pipeline."""

    tables: Tables
    rows: tuple[Row, ...]
    placed: tuple[Replicas, ...]
    hops: tuple[tuple[Hop, ...], ...]
    shards: int
    known: Known
    _pieces: dict[tuple[object, ...], _Piece] = field(default_factory=dict)
    _held: dict[tuple[int, int, int, int, int], float] = field(default_factory=dict)
    _updates: dict[tuple[int, int, int, float, float], float] = field(default_factory=dict)
    _norms: dict[tuple[int, ...], float] = field(default_factory=dict)

    def seconds(
        self,
        positions: Sequence[Sequence[int]],
        ends: Sequence[Sequence[float]],
        slow: Sequence[Sequence[int]],
    ) -> float:
        """The step of one choice of cuts and recomputations."""
        now = [list(each) for each in ends]
        began = [list(each) for each in ends]
        spent = [[0.0] * len(each) for each in ends]
        gathered = [[0.0] * len(each) for each in ends]
        held = [
            [self._parameters(p, s, slow[p][s], *pair) for s, pair in enumerate(pairwise(each))]
            for p, each in enumerate(positions)
        ]
        own = [list(each) for each in held]
        starts = sorted({at for each in positions for at in each})
        stage = [len(each) for each in ends]
        for start, stop in reversed([*pairwise(starts)]):
            members = []
            for p, each in enumerate(positions):
                # Pieces come last ones first: stages are left from behind.
                while each[min(stage[p], len(each) - 1)] > start:
                    stage[p] -= 1
                members.append((p, stage[p], slow[p][stage[p]]))
            piece = self._piece(start, stop, tuple(members))
            done = max(now[p][s] for p, s, _ in members) + piece.seconds
            for (p, s, _), (gathering, less) in zip(members, piece.after, strict=True):
                now[p][s] = done
                spent[p][s] += piece.seconds
                gathered[p][s] += gathering
                own[p][s] += less
        barrier = clips_gradients(self.tables.job)
        arrive = leave = whole = 0.0
        for p, reaches in enumerate(now):
            tied = self._tied(p, slow[p][0], slow[p][-1])
            for s, reached in enumerate(reaches):
                # As where waiting is told from reducing.
                waits = max(0.0, reached - began[p][s] - spent[p][s])
                arrives = began[p][s] + waits + spent[p][s]
                arrives += tied if s in (0, len(reaches) - 1) else 0.0
                leaves = gathered[p][s] + self._update(p, s, slow[p][s], own[p][s], held[p][s])
                arrive, leave = max(arrive, arrives), max(leave, leaves)
                whole = max(whole, arrives + leaves)
        loading = self.tables.job.data_loading_seconds
        if barrier:
            return arrive + self.norm(tuple(each[0] for each in slow)) + leave + loading
        return whole + loading

    @property
    def least_after(self) -> float:
        """What follows the last end, at least."""
        loading = self.tables.job.data_loading_seconds
        if not clips_gradients(self.tables.job):
            return loading
        firsts = product(*(range(len(each[0])) for each in self.placed))
        return loading + min(self.norm(first) for first in firsts)

    def least_reductions(self, p: int) -> Floats:
        """[P, parts, layers + 1, layers + 1]: seconds that a stage of these layers reduces, at
        least, with whatever stages of the other pipelines.

        Per parameter of the stage a piece takes no less than the best of all pieces.
        """
        total = len(self.tables.model.layers)
        count, width = len(self.placed[p]), max(map(len, self.placed[p]))
        found = np.zeros((count, width, total + 1, total + 1))
        others = [range(len(each)) for q, each in enumerate(self.placed) if q != p]
        for s in range(count):
            rates = []
            for met in product(*others):
                stages = [*met[:p], s, *met[p:]]
                rates.append(self._least_rate(stages, p))
            for part in range(len(self.placed[p][s])):
                found[s, part] = min(rates) * self._unit_weights(p, s, part)
        return found

    def _least_rate(self, stages: Sequence[int], p: int) -> float:
        """Seconds per parameter of pipeline p's stage, where these reduce together."""
        placed = tuple(self.placed[q][s] for q, s in enumerate(stages))
        members = [(q, s, 0) for q, s in enumerate(stages)]
        group = self._group(placed, members[0])
        units = [
            id(self._unit(q, s, part))
            for q, s in enumerate(stages)
            for part in range(len(self.placed[q][s]))
        ]
        key = (group.dense, self.tables.sharding, p, *units)
        found = self.known.rates.get(key)
        if found is None:
            own = self._weights_of_pieces(p, stages[p]).max(axis=0)
            most = np.max(
                [self._weights_of_pieces(q, s).min(axis=0) for q, s in enumerate(stages)], axis=0
            )
            pieces = {*zip(own.ravel().tolist(), most.ravel().tolist(), strict=True)}
            found = self.known.rates[key] = min(
                seconds_of_parts(group.reduction(sent)) / held for held, sent in pieces if held
            )
        return found

    def _weights_of_pieces(self, p: int, s: int) -> Floats:
        """[parts, starts, stops] parameters of every run of layers."""
        return np.stack([self._unit_weights(p, s, part) for part in range(len(self.placed[p][s]))])

    def _unit_weights(self, p: int, s: int, part: int) -> Floats:
        """[starts, stops]"""
        unit = self._unit(p, s, part)
        found = self.known.weights.get(id(unit))
        if found is None:
            total = len(self.tables.model.layers)
            found = np.zeros((total + 1, total + 1))
            for start in range(total):
                for stop in range(start + 1, total + 1):
                    found[start, stop] = unit.held(((start, stop),))[0]
            self.known.weights[id(unit)] = found
        return found

    def _unit(self, p: int, s: int, part: int) -> Unit:
        # Parameters and updates do not depend on what is recomputed.
        mesh = self.rows[p].slots[s]
        return self.tables.unit(mesh.islands[part], mesh.shapes[part], self.tables.recompute[0])

    def _parameters(self, p: int, s: int, part: int, start: int, stop: int) -> float:
        key = (p, s, part, start, stop)
        found = self._held.get(key)
        if found is None:
            found = self._held[key] = sum(self._unit(p, s, part).held(((start, stop),)))
        return found

    def _piece(self, start: int, stop: int, members: tuple[tuple[int, int, int], ...]) -> _Piece:
        key = (start, stop, members)
        found = self._pieces.get(key)
        if found is None:
            group = self._group(tuple(self.placed[p][s] for p, s, _ in members), members[0])
            counts = [self._unit(p, s, part).held(((start, stop),))[0] for p, s, part in members]
            found = self._pieces[key] = _Piece(
                group.seconds(max(counts)).reduction,
                tuple(
                    (group.seconds(count).gathering, group.own(count) - count) for count in counts
                ),
            )
        return found

    def _group(self, members: _Members, first: tuple[int, int, int]) -> EndOfStep:
        unit = self._unit(*first)
        key = (members, self.shards, self.tables.sharding, id(unit.island))
        found = self.known.groups.get(key)
        if found is None:
            settings = self.tables.costs.settings
            holders = [(expand(part.devices), part.tp) for each in members for part in each]
            copies = copies_of(settings.cluster, holders, self.shards)
            found = self.known.groups[key] = EndOfStep(
                known=self.tables.shared.settings.known,
                island=unit.island,
                job=settings.job,
                reduction_precision=settings.reduction_precision,
                dense=copies,
                experts=copies,
                sharding=settings.sharding,
                offload=0.0,
                predictor=settings.predictor,
            )
        return found

    def _update(self, p: int, s: int, part: int, own: float, held: float) -> float:
        key = (p, s, part, own, held)
        found = self._updates.get(key)
        if found is None:
            found = self._updates[key] = seconds_of_parts(
                self._unit(p, s, part).end.update_of(own, held)
            )
        return found

    def _tied(self, p: int, first: int, last: int) -> float:
        settings = self.tables.costs.settings
        if not settings.model.tied_embeddings or sum(self.rows[p].stages) == 1:
            return 0.0
        one = self._unit(p, 0, first)
        other = self._unit(p, len(self.placed[p]) - 1, last)
        key = (id(one), id(other))
        found = self.known.tied.get(key)
        if found is None:
            found = self.known.tied[key] = seconds_of_parts(tied_between(settings, one, other))
        return found

    def norm(self, first: tuple[int, ...]) -> float:
        """Sum of one number over all ranks; `first`: slow parts of the first stages."""
        found = self._norms.get(first)
        if found is None:
            leads = [self.placed[p][0][part].devices[0].start for p, part in enumerate(first)]
            links = {hop.path for each in self.hops for hop in each}
            settings = self.tables.costs.settings
            found = self._norms[first] = seconds_of_parts(
                norm_of(settings, self.placed, leads, links)
            )
        return found
