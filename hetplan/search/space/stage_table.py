"""The numbers of one family as arrays: what bounds, programs and local search are made of.

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

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hetplan.cost.arrays import Floats, Ints
from hetplan.search.space.family import Family

MIDDLE, FIRST, LAST, BOTH = 0, 1, 2, 3
"""Roles."""

MAX_FREE_ISLANDS = 8
"""With more islands the meshes of a region stand next to each other (part of the space)."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Links:
    """Transfers of one microbatch over a set of boundaries; four arrays of one shape."""

    send_forward: Floats
    """Seconds on the wire of an activation."""
    send_backward: Floats
    """The same of a gradient, against the direction of the pipeline."""
    wire_latency: Floats
    rendezvous_extra: Floats
    """Seconds after the receiver has posted before data can flow (rendezvous sends)."""

    @property
    def times(self) -> tuple[Floats, Floats, Floats, Floats]:
        """All four, in the order of the fields."""
        return self.send_forward, self.send_backward, self.wire_latency, self.rendezvous_extra

    @property
    def forward_wire(self) -> Floats:
        """From the sender's end to the arrival of an activation."""
        return self.send_forward + self.wire_latency

    @property
    def backward_wire(self) -> Floats:
        """The same of a gradient."""
        return self.send_backward + self.wire_latency


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NormSums:
    """The sum of all gradients' norms, which every stage waits for
    (`hetplan.cost.step_model.step`).

    Seconds, up and down the tree.
    """

    inside: Floats
    """[M] among the ranks of a stage."""
    links: Floats
    """[M, M] one level of the tree over the stages, where it crosses from mesh to mesh."""
    node_links: Floats
    """[M] the same between two nodes of one mesh."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageTable:
    """Costs of one family over M meshes, up to P slots and L layer units."""

    family: Family
    num_layers: int
    """L: layer units."""
    layers_per_unit: int
    front_layers: int
    """Transformer layers before the first unit; the first slot has them besides its units."""
    back_layers: int
    """The same behind the last unit."""
    num_microbatches: int
    stages: int
    """Number of stages that is pinned; 0 where it is free."""
    stage_limit: int
    """Most stages that the target can run with this many microbatches."""
    region: Ints
    """[M] region of the mesh; -1 where its islands lie in several."""
    island_mask: Ints
    """[M] islands of the mesh as bits."""
    max_stages: Ints
    """[M]"""
    forward: Floats
    """[V, M] seconds of one layer unit, one microbatch."""
    backward: Floats
    """[V, M] recomputation included."""
    extra_forward: Floats
    """[4, V, M] seconds of embedding, head, front and back layers by role."""
    extra_backward: Floats
    """[4, V, M]"""
    links: Links
    """[M, M] from mesh (row) to mesh (column); on the diagonal inside one node."""
    node_links: Links
    """[M] between two nodes of one mesh."""
    stages_per_node: Ints
    """[M] stages that share a node; 1 where a stage fills one or several."""
    tied: Floats
    """[M, M] seconds that first (row) and last stage (column) reduce a tied matrix."""
    rendezvous: bool
    most_layers: Ints
    """[V, 4, M, W + 1] units that fit with this many microbatches in flight; 0: none fits."""
    after: Floats
    """[4, M, L + 1] seconds after a slot's last backward pass: reduction, optimizer, gathering,
    and what every plan of the space waits for besides."""
    leaving: Floats
    """[4, M, L + 1] what of `after` begins when all slots have reduced; zeros: nothing waits."""
    norm: NormSums | None = None
    """None where gradients are not clipped."""
    may_be_first: npt.NDArray[np.bool_]
    """[M] whether the job's pins let the embedding be there."""
    may_be_last: npt.NDArray[np.bool_]
    """[M]"""
