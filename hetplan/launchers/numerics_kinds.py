"""Which device kinds of a plan does this machine have, and which torch device computes for each?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress

import torch

from hetplan.cluster.devices import CPU_KIND
from hetplan.errors import InputError
from hetplan.launchers.machine import same_kind
from hetplan.launchers.numerics import KindBackend
from hetplan.plans.pieces import Places, stage_array
from hetplan.profiling.backends import PLUGINS, AcceleratorBackend, Backend, CpuBackend
from hetplan.search.result import SearchResult


def kinds_of_plan(result: SearchResult) -> tuple[str, ...]:
    """Device kinds that the plan uses, in the order of its stages."""
    cluster = result.inputs.cluster
    places = Places(cluster=cluster)
    found: dict[str, None] = {}
    for pipeline in result.plan.pipelines:
        for stage in pipeline.stages:
            for island in dict.fromkeys(places.islands(stage_array(stage)).tolist()):
                found[cluster.islands[island].device.kind] = None
    return tuple(found)


def kinds_here(kinds: Sequence[str], paced: Sequence[str] = ()) -> tuple[KindBackend, ...]:
    """Those of these kinds that this machine has, each with its first device.

    `paced` kinds are played by this machine's cores, which then compute for them.
    """
    accelerators = tuple(_accelerators())
    found = []
    for kind in kinds:
        backend: Backend | None = None
        if kind == CPU_KIND or kind in paced:
            backend = CpuBackend()
        else:
            backend = next((each for each in accelerators if same_kind(kind, each.kind())), None)
        if backend is not None:
            found.append(KindBackend(kind=kind, backend=backend))
    return tuple(found)


def _accelerators() -> Iterator[Backend]:
    """One device per kind that torch sees."""
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            yield AcceleratorBackend("cuda", index)
    for plugin in PLUGINS:
        with suppress(InputError):
            yield AcceleratorBackend(plugin.name)
