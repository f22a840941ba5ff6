"""Slots in pipeline order with their meshes decided, as arrays: what is left are layers.

Symbols and times are those of `search.space.stage_table`. The recomputation of a slot is fixed or
free: a variant that a slot may not take holds no layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hetplan.cost.arrays import Floats, Ints
from hetplan.search.space.stage_table import FIRST, LAST, Links, StageTable


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Chain:
    """P slots; stage arrays are [P], or [V, P] where the recomputation matters."""

    meshes: tuple[int, ...]
    """Mesh of every slot, first to last."""
    num_layers: int
    """L: layer units."""
    num_microbatches: int
    in_flight: Ints
    """W_s: the schedule's own microbatches in flight and the extra depth, at most m."""
    forward: Floats
    """[V, P] seconds of one layer unit."""
    backward: Floats
    forward_dependency: Floats
    """[V, P] constant part: embedding or head, and the transfer in."""
    backward_dependency: Floats
    forward_serial: Floats
    backward_serial: Floats
    most_layers: Ints
    """[V, P] units that fit; 0 where this variant is not allowed."""
    after: Floats
    """[P, L + 1] seconds after the last backward pass; of first and last slot with a tied matrix,
    of all with the sum of the norms."""
    leaving: Floats
    """[P, L + 1] what of `after` begins when all slots have reduced."""
    extra_forward: Floats
    """[V, P]"""
    extra_backward: Floats
    links: Links
    """[P - 1]"""


def chain_of(
    space: StageTable,
    slots: Sequence[int],
    variants: Sequence[int] | None = None,
    extra: Sequence[int] | None = None,
) -> Chain:
    """The slots of a pipeline over these meshes, first to last.

    variants: recomputation of every slot, -1 where it is free; all are free where left out.
    extra: microbatches in flight beyond the schedule's own, of every slot; none where left out.
    """
    last = len(slots) - 1
    at = np.array(slots, dtype=np.int64)
    roles = np.zeros(last + 1, dtype=np.int64)
    roles[0] += FIRST
    roles[-1] += LAST
    extra_forward = _by_slot(space.extra_forward, roles, at)
    extra_backward = _by_slot(space.extra_backward, roles, at)
    links = boundaries(space, at)
    zero = np.zeros(1)
    held = float(space.rendezvous)
    wires_in = np.concatenate((zero, links.forward_wire))
    wires_back = np.concatenate((links.backward_wire, zero))
    posts_in = held * (wires_in + np.concatenate((zero, links.rendezvous_extra)))
    posts_back = held * (wires_back + np.concatenate((links.rendezvous_extra, zero)))
    after = space.after[roles, at] + norm_seconds(space, at)
    if last > 0:
        after[[0, last]] += space.tied[at[0], at[-1]]
    depth = np.arange(last + 1, 0, -1) + np.array(extra or [0] * (last + 1), dtype=np.int64)
    in_flight = np.minimum(depth, space.num_microbatches)
    held_most = np.minimum(in_flight, space.most_layers.shape[3] - 1)
    most = space.most_layers[:, roles, at, held_most]
    if variants is not None:
        free = np.array(variants)
        allowed = (free < 0) | (free == np.arange(len(most))[:, None])
        most = np.where(allowed, most, 0)
    return Chain(
        meshes=tuple(int(i) for i in slots),
        num_layers=space.num_layers,
        num_microbatches=space.num_microbatches,
        in_flight=in_flight,
        forward=np.ascontiguousarray(space.forward[:, at]),
        backward=np.ascontiguousarray(space.backward[:, at]),
        forward_dependency=extra_forward + wires_in,
        backward_dependency=extra_backward + wires_back,
        forward_serial=extra_forward + posts_in,
        backward_serial=extra_backward + posts_back,
        most_layers=np.ascontiguousarray(most),
        after=after,
        leaving=space.leaving[roles, at],
        extra_forward=extra_forward,
        extra_backward=extra_backward,
        links=links,
    )


def _by_slot(values: Floats, roles: Ints, at: Ints) -> Floats:
    """[V, P] of [4, V, M]."""
    return np.ascontiguousarray(values[roles, :, at].T)


def norm_seconds(space: StageTable, at: Ints) -> float:
    """The sum of the norms beyond the least that `StageTable.after` has of it."""
    norm = space.norm
    if norm is None:
        return 0.0
    seconds = float(norm.inside[at].max()) - float(norm.inside.min())
    if len(at) > 1:
        hops = np.where(
            leaves_node(space, at), norm.node_links[at[:-1]], norm.links[at[:-1], at[1:]]
        )
        seconds += (len(at) - 1).bit_length() * float(hops.max())
    return seconds


def leaves_node(space: StageTable, at: Ints) -> npt.NDArray[np.bool_]:
    """Which neighbouring slots of one mesh lie in two nodes; stages fill nodes one by one."""
    placed = np.zeros(len(at), dtype=np.int64)
    for s in range(1, len(at)):
        placed[s] = placed[s - 1] + 1 if at[s] == at[s - 1] else 0
    node = placed // space.stages_per_node[at]
    left_node: npt.NDArray[np.bool_] = (at[:-1] == at[1:]) & (node[:-1] != node[1:])
    return left_node


def boundaries(space: StageTable, at: Ints) -> Links:
    """Transfers between neighbouring slots."""
    left, right = at[:-1], at[1:]
    leaves = leaves_node(space, at)

    def chosen(name: str) -> Floats:
        between: Floats = getattr(space.node_links, name)[left]
        within: Floats = getattr(space.links, name)[left, right]
        return np.where(leaves, between, within)

    return Links(
        send_forward=chosen("send_forward"),
        send_backward=chosen("send_backward"),
        wire_latency=chosen("wire_latency"),
        rendezvous_extra=chosen("rendezvous_extra"),
    )
