"""The numbers of one candidate as arrays: what the bounds and the integer model are made of.

A slot is a pipeline stage whose island is chosen and whose layers are not; n is its number of
transformer layers. A slot is in a role: 0 in the middle, 1 first (embedding), 2 last (head),
3 both. Slot times are affine in n.

Two times per pass of a slot appear in every bound:

    dependency  from the end of the same pass on the neighbour to the end of this one
    serial      from the end of the slot's previous operation to the end of this one

With eager sends only the dependency contains the transfer. With rendezvous sends a transfer cannot
begin before the receiver has posted, and it posts just before it computes, so both contain it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hetplan.plans.build import Degrees

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

MIDDLE, FIRST, LAST, BOTH = 0, 1, 2, 3


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Space:
    """Costs of one candidate over I islands, up to P slots and L transformer layers."""

    degrees: Degrees
    num_layers: int
    num_microbatches: int
    stages: int
    """Number of stages that is pinned; 0 where it is free."""
    islands: tuple[str, ...]
    max_stages: Ints
    """[I]"""
    forward: Floats
    """[I] seconds of one transformer layer, one microbatch."""
    backward: Floats
    """[I]"""
    extra_forward: Floats
    """[4, I] seconds of embedding and head by role."""
    extra_backward: Floats
    """[4, I]"""
    send_forward: Floats
    """[I, I] seconds on the wire of an activation from island (row) to island (column)."""
    send_backward: Floats
    """[I, I] the same of a gradient, from the island of the column to that of the row."""
    wire_latency: Floats
    """[I, I]"""
    rendezvous_extra: Floats
    """[I, I] seconds after the receiver has posted before data can flow (rendezvous sends)."""
    rendezvous: bool
    most_layers: Ints
    """[4, I, P + 1] layers that fit with this many microbatches in flight; 0: none fits."""
    after: Floats
    """[4, I, L + 1] seconds after a slot's last backward pass: reduction and optimizer."""
    may_be_first: npt.NDArray[np.bool_]
    """[I] whether the job's pins let the embedding be there."""
    may_be_last: npt.NDArray[np.bool_]
    """[I]"""

    @property
    def forward_wire(self) -> Floats:
        """[I, I] dependency part of a transfer downstream."""
        return self.send_forward + self.wire_latency

    @property
    def backward_wire(self) -> Floats:
        """[I, I] dependency part of a transfer upstream; rows are upstream islands."""
        return self.send_backward + self.wire_latency

    @property
    def forward_post(self) -> Floats:
        """[I, I] serial part of a transfer downstream: what its receiver waits at least."""
        return (self.forward_wire + self.rendezvous_extra) * float(self.rendezvous)

    @property
    def backward_post(self) -> Floats:
        """[I, I] serial part of a transfer upstream."""
        return (self.backward_wire + self.rendezvous_extra) * float(self.rendezvous)

    @property
    def most_slots(self) -> int:
        """Most stages that a pipeline can have."""
        room = int(self.max_stages.sum())
        return min(self.num_layers, room, self.stages or room)

    def in_flight(self, position_from_back: int) -> int:
        """Microbatches in flight at a slot, counted from 1 for the last one."""
        return min(position_from_back, self.num_microbatches)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Chain:
    """Slots in pipeline order with everything but their layers decided; arrays of length P."""

    islands: tuple[int, ...]
    """Index into `Space.islands` of every slot."""
    forward: Floats
    backward: Floats
    forward_dependency: Floats
    """Constant part: embedding or head, and the transfer in."""
    backward_dependency: Floats
    forward_serial: Floats
    backward_serial: Floats
    most_layers: Ints
    after: Floats
    """[P, L + 1]"""
    extra_forward: Floats
    extra_backward: Floats
    send_forward: Floats
    """[P - 1]"""
    send_backward: Floats
    wire_latency: Floats
    rendezvous_extra: Floats


def chain_of(space: Space, islands: Sequence[int]) -> Chain:
    """The slots of a pipeline over these islands, first to last."""
    last = len(islands) - 1
    roles = [FIRST * (s == 0) + LAST * (s == last) for s in range(len(islands))]
    at = np.array(islands, dtype=np.int64)
    extra_forward = space.extra_forward[roles, at]
    extra_backward = space.extra_backward[roles, at]
    wires_in, posts_in = np.zeros(last + 1), np.zeros(last + 1)
    wires_back, posts_back = np.zeros(last + 1), np.zeros(last + 1)
    wires_in[1:] = space.forward_wire[at[:-1], at[1:]]
    posts_in[1:] = space.forward_post[at[:-1], at[1:]]
    wires_back[:-1] = space.backward_wire[at[:-1], at[1:]]
    posts_back[:-1] = space.backward_post[at[:-1], at[1:]]
    flight = [space.in_flight(last + 1 - s) for s in range(last + 1)]
    return Chain(
        islands=tuple(islands),
        forward=space.forward[at],
        backward=space.backward[at],
        forward_dependency=extra_forward + wires_in,
        backward_dependency=extra_backward + wires_back,
        forward_serial=extra_forward + posts_in,
        backward_serial=extra_backward + posts_back,
        most_layers=space.most_layers[roles, at, flight],
        after=space.after[roles, at],
        extra_forward=extra_forward,
        extra_backward=extra_backward,
        send_forward=space.send_forward[at[:-1], at[1:]],
        send_backward=space.send_backward[at[:-1], at[1:]],
        wire_latency=space.wire_latency[at[:-1], at[1:]],
        rendezvous_extra=space.rendezvous_extra[at[:-1], at[1:]],
    )
