"""In which number formats do the kinds of a plan exchange, and do all of them have these?

A plan names the format of every stage boundary and of every sum of gradients. A kind has a format
where a rate is known for it, where nothing is known of the kind, or where it has just computed the
layers in it; every kind has float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from hetplan.cluster.devices import DeviceKind
from hetplan.job.spec import Precision
from hetplan.launchers.numerics_values import Numerics
from hetplan.plans.pieces import Devices, Places, device_array, stage_array
from hetplan.search.result import SearchResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchanged:
    """Something that kinds exchange in one format."""

    what: str
    """As in `reduction of layers 0 to 4`; a range includes its last layer."""
    precision: str
    kinds: tuple[DeviceKind, ...]
    """Of the devices that take part, each once."""


def exchanged(result: SearchResult) -> Iterator[Exchanged]:
    """Every boundary, every reduction group, and the sum of a tied matrix."""
    plan, places = result.plan, Places(cluster=result.inputs.cluster)

    def of(what: str, precision: str, devices: Devices) -> Exchanged:
        islands = dict.fromkeys(places.islands(devices).tolist())
        kinds = dict.fromkeys(places.cluster.islands[at].device for at in islands)
        return Exchanged(what=what, precision=precision, kinds=tuple(kinds))

    for p, pipeline in enumerate(plan.pipelines):
        where = f" of pipeline {p}" if len(plan.pipelines) > 1 else ""
        for boundary, (left, right) in zip(
            pipeline.boundaries, pairwise(pipeline.stages), strict=True
        ):
            devices = np.concatenate([stage_array(left), stage_array(right)])
            number = boundary.index
            what = f"boundary between stages {number} and {number + 1}{where}"
            yield of(what, boundary.precision, devices)
    for group in plan.reduction_groups:
        experts = "experts of " if group.expert else ""
        layers = f"{experts}layers {group.layers.start} to {group.layers.stop - 1}"
        if group.layers.stop - group.layers.start == 1:
            layers = f"{experts}layer {group.layers.start}"
        yield of(f"reduction of {layers}", group.precision, device_array(group.members))
    if plan.tied_embedding_precision is not None:
        devices = device_array(plan.tied_embedding_devices)
        yield of("sum of the tied matrix", plan.tied_embedding_precision, devices)


def format_lines(result: SearchResult) -> tuple[str, ...]:
    """Every exchange with its format and the kinds that take part."""
    return tuple(
        f"{each.what}: {each.precision}, {' and '.join(kind.kind for kind in each.kinds)}"
        for each in exchanged(result)
    )


def format_faults(result: SearchResult, numerics: Numerics) -> tuple[str, ...]:
    """Kinds that lack the format of an exchange they take part in, one line each."""
    computed = {each.kind for each in numerics.kinds if each.results}
    lines: dict[tuple[str, str], str] = {}
    for each in exchanged(result):
        for kind in each.kinds:
            layers = kind.kind in computed and each.precision == numerics.setup.precision.value
            lacks = bool(kind.dtypes) and each.precision not in kind.dtypes
            if each.precision == Precision.FLOAT32.value or layers or not lacks:
                continue
            lines.setdefault(
                (kind.kind, each.precision),
                f"{kind.kind}: has no {each.precision} (it has {', '.join(kind.dtypes)}), in which "
                f"the plan has the {each.what}",
            )
    return tuple(lines.values())
