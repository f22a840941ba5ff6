"""A bound of a family that knows what it costs to cross from one island to another.

`hetplan.search.costs.rough` fills islands as if they were one; between regions a transfer can take
longer than a stage computes. Of all boundaries of a family the shortest between each two islands
counts, and T grows until islands that can be joined within T hold all units (`rough_crossings`).
That is some tenths of a millisecond, so it is asked of families alone that the rough bound leaves
open.

Families with several chunks: every stage is busy for m c, no island has more room than without
chunks, and m v messages cross every boundary; where the trainer batches its sends a stage also
waits for every exchange. Early sends: a stage does not wait for its transfers, only the wire does.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hetplan.cost.replay.times import Exchange
from hetplan.cost.step_model.work import exchange_of
from hetplan.plans.targets import target
from hetplan.search.costs.ends import Ends
from hetplan.search.costs.placed import ROLES
from hetplan.search.costs.rough import Roughs
from hetplan.search.costs.rough_crossings import Held, least_step
from hetplan.search.costs.rough_longest import caps
from hetplan.search.costs.transfers import Transfers
from hetplan.search.families.family import Family
from hetplan.search.families.space import MIDDLE, Floats, Ints, Links

_MANY = 48
"""Meshes above which boundaries are taken as free: pricing all pairs takes longer than a proof."""

_MORE = 1.01
"""A bound that is a little more than enough still is when the best plan gets a new price."""

_FOR_EVER = 1e30
"""Seconds."""


class _Wires(NamedTuple):
    """As `Held` takes them."""

    into: Floats
    back: Floats
    least: Floats
    wire: Floats
    batched: tuple[Floats, Floats, Floats]
    """The first three for exchanges of both directions together."""


@dataclass(frozen=True, slots=True)
class Sharper:
    """Sharper bounds of the families of a job; keeps what they share."""

    roughs: Roughs
    transfers: Transfers
    ends: Ends
    _wires: dict[tuple[object, ...], _Wires] = field(default_factory=dict, repr=False)

    def seconds(self, family: Family, enough: float = np.inf) -> float:
        """No plan of the family has a shorter step; not below the rough bound.

        What would make the bound more than `enough` is left out, a little aside.
        """
        known = self.roughs.of(family).bound_seconds
        base = self.roughs.base(family)
        if base.arrays is None or known == np.inf:
            return known
        cost, rows, room, first, most = base.arrays
        m, units = family.num_microbatches, self.roughs.placed.units.count
        single = family.virtual_stages == 1
        waits = target(self.roughs.placed.job.target).rendezvous_sends and not family.early_sends
        wires = self._of(family, first)
        into, back, least = wires.into, wires.back, wires.least
        batched = not single and waits and self._batched
        if batched:
            into, back, least = wires.batched
        elif not (single and waits):
            into, back, least = (np.zeros_like(each) for each in (into, back, least))
        loading = self.roughs.placed.job.data_loading_seconds
        held = Held(
            cost=cost,
            cap=caps(rows, room, units, m, base.positions),
            first=first,
            most=most,
            into=into,
            back=back,
            least=least,
            wire=wires.wire,
            after=np.zeros((len(family.meshes), units + 1)),
            units=units,
            microbatches=m,
            messages=m * family.virtual_stages,
            whole=base.whole if single else -1.0,
            shorter=base.least,
            extra=family.most_extra_depth,
            chunks=family.virtual_stages,
            exchanges=m * family.virtual_stages - 1 if batched else 0,
        )
        much = _MORE * (enough - loading)
        found = float(least_step(held, known - loading, much))
        if found < much and self._may_close(family, held, found, enough - loading):
            self._after(family, held)
            found = float(least_step(held, found, much))
        return max(known, loading + found)

    def _far(self, family: Family, held: Held) -> list[int]:
        """Meshes over several regions that fit."""
        islands = self.roughs.placed.cluster.islands
        return [
            k
            for k, mesh in enumerate(family.meshes)
            if len({islands[at].region for at in mesh.islands}) > 1 and held.cap[:, k, 0].max() > 0
        ]

    def _may_close(self, family: Family, held: Held, found: float, enough: float) -> bool:
        """Whether the bound would be enough if what those do after their passes took for ever:
        how long it does take is much more work to say.
        """
        far = self._far(family, held)
        if not far:
            return False
        held.after[far] = _FOR_EVER
        without = float(least_step(held, found, enough))
        held.after[far] = 0.0
        return without > found if enough == np.inf else without >= enough

    @property
    def _batched(self) -> bool:
        """Whether the trainer of the job batches the sends of interleaved pipelines."""
        return exchange_of(self.roughs.placed.job) is Exchange.MEGATRON

    def _after(self, family: Family, held: Held) -> None:
        """Fill in what meshes over several regions do after their passes."""
        for k in self._far(family, held):
            mesh, most = family.meshes[k], int(held.cap[:, k, 0].max())
            waited = np.ones((len(mesh.islands), ROLES, held.units + 1), dtype=np.bool_)
            times = self.ends.least(mesh, family.sharding, (most,) * ROLES, waited)
            # Growing, and a stage at an end of the pipeline has more to sum up.
            seconds = np.sum(times, axis=0)[MIDDLE]
            held.after[k] = np.minimum.accumulate(seconds[::-1])[::-1]
            held.after[k, most + 1 :] = held.after[k, most]

    def _of(self, family: Family, first: Ints) -> _Wires:
        """Shared by families whose boundaries carry the same messages."""
        meshes, islands = family.meshes, int(first.max()) + 1
        if len(meshes) > _MANY:
            none = np.zeros((len(meshes), islands))
            free = none, none, np.zeros((2, len(meshes)))
            return _Wires(*free, np.zeros((islands, islands)), free)
        sides = tuple([self._side(k, family) for k in range(len(meshes))])
        key = tuple([(mesh.islands, mesh.max_stages > 1) for mesh in meshes]), sides
        found = self._wires.get(key)
        if found is None:
            found = self._wires[key] = self._priced(family, first, islands)
        return found

    def _side(self, at: int, family: Family) -> tuple[object, ...]:
        """What the transfers of a mesh depend on, besides its islands."""
        return tuple([
            (shape.num_devices, shape.microbatch_size, shape.cp, shape.tp, shape.sequence_parallel)
            for shape in family.meshes[at].shapes
        ])  # fmt: skip

    def _priced(self, family: Family, first: Ints, islands: int) -> _Wires:
        links, nodes, _, _ = self.transfers.between(family.meshes)
        count = len(family.meshes)
        apart = np.array(
            [[not one.mask & two.mask for two in family.meshes] for one in family.meshes]
        )
        wire = np.full((islands, islands), np.inf)
        busy = np.maximum(links.send_forward, links.send_backward)
        for one in range(count):
            for two in range(count):
                if apart[one, two]:
                    i, j = first[one], first[two]
                    wire[i, j] = min(wire[i, j], busy[one, two])
        alone = _sides(
            first, islands, apart, (links.forward_wire, links.backward_wire),
            (nodes.forward_wire, nodes.backward_wire), family,
        )  # fmt: skip
        batched = _sides(first, islands, apart, _exchanged(links), _exchanged(nodes), family)
        return _Wires(*alone, wire, batched)


def _exchanged(links: Links) -> tuple[Floats, Floats]:
    """Seconds of an exchange for the stage below the boundary, and for the one above it."""
    posted = links.rendezvous_extra
    return (
        np.maximum(posted + links.forward_wire, links.send_backward),
        np.maximum(posted + links.backward_wire, links.send_forward),
    )


def _sides(
    first: Ints,
    islands: int,
    apart: npt.NDArray[np.bool_],
    links: tuple[Floats, Floats],
    nodes: tuple[Floats, Floats],
    family: Family,
) -> tuple[Floats, Floats, Floats]:
    """(into, back, least) of these seconds below and above every boundary."""
    count = len(family.meshes)
    into, back = np.full((2, count, islands), np.inf)
    for one in range(count):
        for two in range(count):
            if apart[one, two]:
                i, j = first[one], first[two]
                into[two, i] = min(into[two, i], links[0][one, two])
                back[one, j] = min(back[one, j], links[1][one, two])
    least = np.stack((into.min(axis=1), back.min(axis=1)))
    for k, mesh in enumerate(family.meshes):
        if mesh.max_stages > 1:
            for d in range(2):
                least[d, k] = min(least[d, k], links[d][k, k], nodes[d][k])
    return into, back, np.where(np.isfinite(least), least, 0.0)
