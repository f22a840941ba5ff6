"""No plan of a question pays less than this for its devices, whatever a device costs per second.

A plan pays price x step for every device. Let w be the price per second of all devices of a stage,
b the sequences that pass it with one microbatch, and c its seconds in passes for one layer unit of
one microbatch. A stage of n units is in passes for n c B / b seconds of the step, with B sequences
in the batch, and no step is shorter. So the plan pays at least

    sum over stages w n c B / b  >=  B L min (w c / b),

the least over all meshes of the question, as its stages hold L units together. Plans of several
pipelines do the same with their shares of the batch (`multi_pipeline.bound.busy_bound`). Embedding,
head, memory, transfers, waits, and nodes that are paid whole only make plans dearer.

The same holds for energy, with the watts of a device in passes as its price: outside of passes it
draws something, too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from hetplan.search.bounds.order_free_bound import BottleneckLinks, UnitCosts
from hetplan.search.multi_pipeline.solver import MultiPipelineSolver
from hetplan.search.solvers import may_have_several
from hetplan.search.space.family import Mesh
from hetplan.search.table_maker import TableMaker

_ROUNDING = 1e-9
"""Sums in another order; far below what a gap is told to."""


def least_prices(maker: TableMaker, prices: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """By name of a list of prices, the bound per step; prices: per device and second, by island.

    An InputError for models without units, and where the predictor lacks something.
    """
    job, names = maker.job, maker.island_names
    every = {mesh for block in maker.families.blocks for mesh in block.meshes}
    costs = UnitCosts(maker.stage_pricer, BottleneckLinks(maker.stage_pricer))
    seconds = {mesh: _unit_seconds(maker, costs, mesh) for mesh in sorted(every)}
    found = {}
    for name, each in prices.items():
        of_island = [each[island] for island in names]
        least = min((w * _price(mesh, of_island) for mesh, w in seconds.items()), default=math.inf)
        bound = job.global_batch_size * maker.units().count * least
        if may_have_several(job):
            several = MultiPipelineSolver(len(maker.families), maker)
            bound = min(bound, several.least_price(of_island))
        found[name] = bound * (1.0 - _ROUNDING)
    return found


def _unit_seconds(maker: TableMaker, costs: UnitCosts, mesh: Mesh) -> float:
    """In passes, of one layer unit and one microbatch, on the slowest part of the mesh."""
    units = (
        costs.unit(island, shape, maker.recompute)
        for island, shape in zip(mesh.islands, mesh.shapes, strict=True)
    )
    return max(float((unit.forward + unit.backward).min()) for unit in units)


def _price(mesh: Mesh, of_island: list[float]) -> float:
    """Per second and sequence of a microbatch, of all its devices."""
    parts = zip(mesh.islands, mesh.shapes, strict=True)
    return sum(of_island[at] * shape.num_devices for at, shape in parts) / mesh.samples
