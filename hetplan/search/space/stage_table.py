"""The stage table of a family: what bounds, programs and local search are made of.

A slot is a pipeline stage whose mesh is chosen and whose layers are not; n is its number of layer
units. A unit is what the pipeline is cut into: one transformer layer, or the layers of one period
where kinds of layers alternate. A slot is in a role: 0 in the middle, 1 first (embedding, and the
layers before the first unit), 2 last (head, and the layers behind the last unit), 3 both. Slot
times are affine in n. V counts the recomputations that a stage may choose, M the meshes.

Two times per pass of a slot appear in every bound:

    dependency  from the end of the same pass on the neighbour to the end of this one
    serial      from the end of the slot's previous operation to the end of this one

With eager sends only the dependency contains the transfer. With rendezvous sends a transfer cannot
begin before the receiver has posted, and it posts just before it computes, so both contain it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hetplan.cost.arrays import Floats, Ints

MIDDLE, FIRST, LAST, BOTH = 0, 1, 2, 3
"""Roles."""
ROLES = 4

SEND_FORWARD, SEND_BACKWARD, WIRE_LATENCY, RENDEZVOUS_EXTRA = range(4)
"""Rows of `StageTable.links`: seconds on the wire of an activation, and of a gradient, against the
direction of the pipeline; latency; after the receiver has posted before data can flow."""

MAX_FREE_ISLANDS = 8
"""With more islands the meshes of a region stand next to each other (part of the space)."""


class StageTable(NamedTuple):
    """Costs of one family over M meshes and up to L layer units; kernels take it as it is.

    All arrays are contiguous. Times are seconds of one microbatch.
    """

    num_layers: int
    """L: layer units."""
    layers_per_unit: int
    front_layers: int
    """Transformer layers before the first unit; the first slot has them besides its units."""
    back_layers: int
    """The same behind the last unit."""
    num_microbatches: int
    most_extra_depth: int
    """Most microbatches in flight beyond the schedule's own."""
    stages: int
    """Number of stages that is pinned; 0 where it is free."""
    stage_limit: int
    """Most stages that the target can run with this many microbatches."""
    regions_apart: bool
    """Whether meshes of one region stand next to each other."""
    rendezvous: bool
    clips_gradients: bool
    """Whether every stage waits for the sum of all gradients' norms; else its times are 0."""
    region: Ints
    """[M] region of the mesh; -1 where its islands lie in several."""
    island_mask: Ints
    """[M] islands of the mesh as bits."""
    max_stages: Ints
    """[M]"""
    may_be_first: npt.NDArray[np.bool_]
    """[M] whether the job's pins let the embedding be there."""
    may_be_last: npt.NDArray[np.bool_]
    """[M]"""
    stages_per_node: Ints
    """[M] stages that share a node; 1 where a stage fills one or several."""
    forward: Floats
    """[V, M] one layer unit."""
    backward: Floats
    """[V, M] recomputation included."""
    extra_forward: Floats
    """[4, V, M] embedding, head, front and back layers by role."""
    extra_backward: Floats
    """[4, V, M]"""
    links: Floats
    """[4, M, M] transfers from mesh (row) to mesh (column); on the diagonal inside one node."""
    node_links: Floats
    """[4, M] between two nodes of one mesh."""
    tied: Floats
    """[M, M] first (row) and last stage (column) reduce a tied matrix; infinite: not allowed."""
    most_layers: Ints
    """[V, 4, M, W + 1] units that fit with this many microbatches in flight; 0: none fits."""
    after: Floats
    """[4, M, L + 1] after a slot's last backward pass: reduction, optimizer, gathering, and what
    every plan of the space waits for besides."""
    leaving: Floats
    """[4, M, L + 1] what of `after` begins when all slots have reduced; zeros: nothing waits."""
    norm_inside: Floats
    """[M] sum of the norms among the ranks of a stage, beyond the least, which `after` has; up and
    down the tree (`hetplan.cost.step_model.step`)."""
    norm_links: Floats
    """[M, M] one level of the tree over the stages, where it crosses from mesh to mesh."""
    norm_node_links: Floats
    """[M] the same between two nodes of one mesh."""

    def contiguous(self) -> StageTable:
        """The table with arrays as kernels take them."""
        arrays: dict[str, Any] = {
            name: np.ascontiguousarray(getattr(self, name)) for name in MESH_AXES
        }
        return self._replace(**arrays)

    def of_meshes(self, meshes: Ints) -> StageTable:
        """The table of these meshes, in this order."""
        found: dict[str, Any] = {}
        for name, axes in MESH_AXES.items():
            values = getattr(self, name)
            for axis in axes:
                values = values.take(meshes, axis)
            found[name] = values
        return self._replace(**found)


MESH_AXES = {
    **dict.fromkeys(("region", "island_mask", "max_stages", "may_be_first", "may_be_last"), (0,)),
    **dict.fromkeys(("stages_per_node", "norm_inside", "norm_node_links"), (0,)),
    **dict.fromkeys(("forward", "backward", "node_links", "after", "leaving"), (1,)),
    **dict.fromkeys(("extra_forward", "extra_backward", "most_layers"), (2,)),
    **dict.fromkeys(("tied", "norm_links"), (0, 1)),
    "links": (1, 2),
}
"""Axes of the arrays that count meshes."""


def num_islands(masks: Ints) -> int:
    """Islands that meshes lie on; masks: [M] as bits."""
    return int(np.bitwise_or.reduce(masks)).bit_count()


def forward_wires(links: Floats) -> Floats:
    """From the sender's end to the arrival of an activation; links: [4, ...] as the table's."""
    seconds: Floats = links[SEND_FORWARD] + links[WIRE_LATENCY]
    return seconds


def backward_wires(links: Floats) -> Floats:
    """The same of a gradient."""
    seconds: Floats = links[SEND_BACKWARD] + links[WIRE_LATENCY]
    return seconds


def most_stages(table: StageTable) -> int:
    """Most stages that a pipeline of this table can have."""
    room = sum(
        int(table.max_stages[on].max())
        for island in range(int(table.island_mask.max()).bit_length())
        if (on := (table.island_mask >> island & 1).astype(bool)).any()
    )
    return min(table.num_layers, room, table.stage_limit, table.stages or room)
