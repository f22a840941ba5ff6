"""Memory by hand, and how many layers fit against counting up."""

from __future__ import annotations

import numpy as np
import pytest
from cost_fakes import job, model
from memory_cases import FULL, stage_layout

from hetplan.cost.estimate_values import MemoryUse
from hetplan.cost.memory.device import device_memory
from hetplan.cost.memory.lines import most_units, stage_bytes
from hetplan.cost.memory.values import NO_RECOMPUTE
from hetplan.job.spec import Job
from hetplan.model.layer_units import layer_units
from hetplan.model.spec import ModelSpec
from hetplan.plans.plan import Sharding


def use(
    shape: ModelSpec, asked: Job, layers: int, *, memory: float = 64 * 2**30, **changes: object
) -> MemoryUse:
    """Of a stage with so many transformer layers (`memory_cases.stage_layout`)."""
    return device_memory(shape, asked, stage_layout(shape, asked, layers, **changes), memory)


@pytest.mark.parametrize("target", ["native", "megatron"])
@pytest.mark.parametrize("dp", [1, 4])
@pytest.mark.parametrize("full_recompute", [False, True])
def test_most_layers_is_counting_up(target: str, dp: int, full_recompute: bool) -> None:
    """What the search takes for the most layers that fit is what device by device fits."""
    shape = model(num_layers=40)
    units = layer_units(shape, 128)
    assert units is not None
    place = {"dp": dp, "recompute": FULL if full_recompute else NO_RECOMPUTE}
    depths = np.array([1, 3, 8])
    seen = set()
    for asked in (job(target=target), job(target=target, sequence_length=4)):
        for role, (embedding, head) in enumerate(((False, False), (True, False), (False, True))):
            # One layer less than the model has: with all of them a stage holds both ends.
            ends = {"embedding": embedding, "head": head}
            totals = [
                [
                    use(shape, asked, count, in_flight=depth, **ends, **place).total_bytes
                    for count in range(1, 40)
                ]
                for depth in depths.tolist()
            ]
            one = stage_layout(shape, asked, 1, **ends, **place)
            lines = stage_bytes(shape, asked, one, units, role).lines(
                Sharding.NONE, 1, 1, one.num_microbatches
            )
            for mebibytes in (1, 5, 20, 60, 150, 250, 400, 600, 2000):
                room = mebibytes * 2**20
                found = most_units(np.array(lines.row()), np.array(float(room)), 39, depths)
                counted = [sum(each <= room for each in row) for row in totals]
                assert found.tolist() == counted
                seen |= set(counted)
    assert {0, 39} < seen
    assert len(seen) > 5
