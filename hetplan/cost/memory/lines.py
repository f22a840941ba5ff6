"""A stage's memory as a function of its layer units, and how many units fit.

The formulas of `hetplan.cost.memory.device` for stages that hold n equal units of layers in one
chunk (`hetplan.model.layer_units`), beside what the first and the last stage hold. With w
microbatches in flight the worst moment is the largest of three lines in n:

    backward pass of the last unit, or behind it    S(n) + w K(n) + A
    backward pass of what stands before the units   S(n) + w K(n) + B - n R
    update of the weights                           S(n) + U(n)

S: parameters, gradients, optimizer state, buffers; K: kept by a microbatch; A, B: working memory;
R of a unit is free again before B (0 for trainers that free nothing); U: what the update takes.
All are linear in n. So for every w the most units are the least of three quotients: no search.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from hetplan.cost.arrays import Floats, Ints
from hetplan.cost.memory.activations import cut_of
from hetplan.cost.memory.device import (
    Moments,
    boundary_bytes,
    layer_bytes,
    messages,
    standing_bytes,
    state_bytes,
    weights_at,
)
from hetplan.cost.memory.values import MemoryLayout, job_memory
from hetplan.job.spec import Job, Optimizer
from hetplan.model.layer_units import LayerUnits
from hetplan.model.spec import ModelSpec
from hetplan.plans.chosen import Shape
from hetplan.plans.plan import Sharding

_FIRST, _LAST = 1, 2
_INSIDE = 1e-12
"""A sum in another order differs by less than this part of itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Amount:
    """Something that a stage of n units has `fixed + n * each` of."""

    fixed: float
    each: float

    def __add__(self, other: Amount) -> Amount:
        return Amount(fixed=self.fixed + other.fixed, each=self.each + other.each)

    def times(self, factor: float) -> Amount:
        """The amount `factor` times."""
        return Amount(fixed=self.fixed * factor, each=self.each * factor)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageBytes:
    """What of a stage's memory does not depend on who shares the optimizer state."""

    dense: Amount
    """Parameters on one rank, routed experts left out."""
    routed: Amount
    largest: float
    """Parameters on one rank of the layer that has most."""
    kept: Amount
    """Bytes that one microbatch in flight keeps."""
    front_kept: float
    """Of that, before the first unit."""
    back_kept: float
    """Behind the last one."""
    sent: float
    """For the next stage, or the next chunk's; the last chunk of all keeps none."""
    working: float
    """A, with what lies between stages."""
    working_alone: float
    """A without that."""
    before: float
    """B, with it."""
    released: float
    """R"""
    buffers: float
    received: float
    """Receive buffers per microbatch."""
    parameter_bytes: float
    gradient_bytes: float
    optimizer_bytes: float
    update_bytes: float
    """Per parameter whose state a rank keeps."""

    def lines(
        self,
        sharding: Sharding,
        shards: int,
        expert_shards: int,
        num_microbatches: int,
        *,
        early_sends: bool = False,
        offload: float = 0.0,
    ) -> Lines:
        """The three lines where so many ranks share the state, of whose optimizer the part
        `offload` is in host memory.

        Buffers are there for what is received of all microbatches of the step, with `early_sends`
        of those in flight.
        """
        level = tuple(Sharding).index(sharding) if shards > 1 else 0
        whole = own = self.dense + self.routed
        if level:
            own = self.dense.times(1.0 / shards) + self.routed.times(1.0 / expert_shards)
        state = (own if level >= 3 else whole).times(self.parameter_bytes)
        state += (own if level >= 2 else whole).times(self.gradient_bytes)
        state += own.times(self.optimizer_bytes * (1.0 - offload))
        # What is cut is whole while a layer runs (`hetplan.cost.memory.device.state`).
        gathered = self.largest * (
            self.gradient_bytes * (level >= 2) + 2 * self.parameter_bytes * (level >= 3)
        )
        base = Amount(fixed=state.fixed + self.buffers + gathered, each=state.each)
        update = base + own.times(self.update_bytes * (1.0 - offload))
        host = own.times(self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes)
        received = 0.0 if early_sends else self.received * num_microbatches
        kept = replace(self.kept, fixed=self.kept.fixed + self.received * early_sends)
        return Lines(
            last=Amount(fixed=base.fixed + received + self.working, each=base.each),
            before=Amount(
                fixed=base.fixed + received + self.before, each=base.each - self.released
            ),
            update=update,
            kept=kept,
            host=host.times(offload),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Lines:
    """Bytes of a stage of n units at the three moments, without what microbatches keep."""

    last: Amount
    before: Amount
    update: Amount
    """Nothing is kept then."""
    kept: Amount
    """By each microbatch in flight."""
    host: Amount
    """In host memory."""

    def host_units(self, available_bytes: float, most: int) -> int:
        """Units whose offloaded optimizer fits in the device's part of its host, at most `most`."""
        left = available_bytes * (1.0 + _INSIDE) - self.host.fixed
        if left < 0.0:
            return 0
        if left >= most * self.host.each:
            return most
        return math.floor(left / self.host.each)

    def total_bytes(self, units: int, in_flight: int) -> float:
        """At the worst moment."""
        kept = in_flight * (self.kept.fixed + units * self.kept.each)
        return max(
            self.last.fixed + units * self.last.each + kept,
            self.before.fixed + units * self.before.each + kept,
            self.update.fixed + units * self.update.each,
        )

    def interleaved(self, held: StageBytes, chunks: int, *, ends: bool) -> Lines:
        """The moment of the first backward pass, where what is in flight are chunks of a stage.

        Earlier chunks are neither smaller nor less often in flight than later ones, so that w
        chunks in flight keep at least w / chunks of what all of them keep; the last chunk is in
        flight once, and sends nothing where the model ends with it. Other moments of a step need as
        much or more: an upper bound of what fits.
        """
        part = 1.0 / chunks
        return Lines(
            last=Amount(
                fixed=self.last.fixed + held.back_kept - held.sent * ends, each=self.last.each
            ),
            before=Amount(fixed=-math.inf, each=0.0),
            update=self.update,
            kept=Amount(fixed=held.sent + part * held.front_kept, each=part * self.kept.each),
            host=self.host,
        )

    def row(self) -> tuple[float, ...]:
        """The eight numbers, as `most_units` takes them."""
        each = (self.last, self.before, self.update, self.kept)
        return tuple(value for amount in each for value in (amount.fixed, amount.each))


def most_units(rows: Floats, available_bytes: Floats, most: int, in_flight: Ints) -> Ints:
    """[..., W] units that fit with so many microbatches in flight; 0: not even one.

    `rows`: [..., 8] as of `Lines.row`; `available_bytes`: [...]; `in_flight`: [W].
    """
    room = available_bytes[..., None] * (1.0 + _INSIDE)
    w = in_flight.astype(np.float64)
    kept, kept_each = rows[..., 6, None] * w, rows[..., 7, None] * w
    found = np.full((*rows.shape[:-1], w.size), float(most))
    for fixed, each, extra, extra_each in (
        (rows[..., 0, None], rows[..., 1, None], kept, kept_each),
        # -inf where nothing stands before the units: no limit.
        (rows[..., 2, None], rows[..., 3, None], kept, kept_each),
        (rows[..., 4, None], rows[..., 5, None], 0.0, 0.0),
    ):
        left, slope = room - fixed - extra, each + extra_each
        with np.errstate(divide="ignore", invalid="ignore"):
            fits = np.where(slope > 0, left / slope, np.where(left >= 0, np.inf, 0.0))
        np.minimum(found, fits, out=found)
    whole: Ints = np.maximum(np.floor(found), 0.0).astype(np.int64)
    return whole


def stage_bytes(
    model: ModelSpec, job: Job, layout: MemoryLayout, units: LayerUnits, role: int
) -> StageBytes:
    """Of stages of this role (bit 1: the first, bit 2: the last) and so laid out.

    Of `layout` count shape, recomputation and chunks (one or several). `model` has the padded
    vocabulary.
    """
    habits = job_memory(job)
    each = state_bytes(job, habits)
    cut = cut_of(layout, job.sequence_length, each.parameter, job.expert_load_factor)
    tokens = layout.shape.microbatch_size * job.sequence_length / layout.shape.cp
    first, last = bool(role & _FIRST), bool(role & _LAST)
    message = boundary_bytes(model, cut, tokens)
    between = messages(layout, habits, message, first=first, last=last)
    front = (0, *units.front_positions) if first else ()
    inside = tuple(units.unit_positions)
    back = tuple(range(units.back_positions.start, len(model.layers))) if last else ()
    moments = Moments(tokens=tokens, frees=habits.frees_as_it_goes)
    behind = moments.add(layer_bytes(model, at, cut, habits) for at in reversed(back))
    unit = behind.add(layer_bytes(model, at, cut, habits) for at in reversed(inside))
    ahead = replace(unit, working=-math.inf).add(
        layer_bytes(model, at, cut, habits) for at in reversed(front)
    )
    kept, released = unit.kept - behind.kept, unit.released - behind.released
    shape = layout.shape
    outside, own = _weights(model, shape, (*front, *back)), _weights(model, shape, inside)
    if first and last and model.tied_embeddings:
        outside = (outside[0] - model.vocabulary_matrix(shape.tp), outside[1])
    return StageBytes(
        dense=Amount(fixed=outside[0], each=own[0]),
        routed=Amount(fixed=outside[1], each=own[1]),
        largest=max(sum(_weights(model, shape, (at,))) for at in (*front, *inside, *back)),
        kept=Amount(fixed=ahead.kept - kept + between.sent * (not last), each=kept),
        front_kept=ahead.kept - unit.kept,
        back_kept=behind.kept,
        sent=between.sent,
        working=unit.working + between.beside,
        working_alone=unit.working,
        before=ahead.working + released + between.beside,
        released=released,
        buffers=standing_bytes(model, cut, habits, (*front, *inside, *back), tokens),
        received=between.received / layout.num_microbatches,
        parameter_bytes=float(each.parameter),
        gradient_bytes=float(each.gradient),
        optimizer_bytes=float(each.optimizer),
        update_bytes=habits.update_bytes if job.optimizer is Optimizer.ADAMW else 0.0,
    )


def _weights(model: ModelSpec, shape: Shape, positions: Iterable[int]) -> tuple[float, float]:
    """(all but routed experts, those) on one rank."""
    found = [weights_at(model, at, shape.tp, shape.ep, shape.etp) for at in positions]
    return sum((one.dense for one in found), 0.0), sum((one.routed for one in found), 0.0)
