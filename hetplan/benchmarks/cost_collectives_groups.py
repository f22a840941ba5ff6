"""How far off is a collective that is carried from the only group size that was measured?

Of every published table of a link inside a node, each group size in turn is all that is known, with
the link's sends, and predicts half and twice as many ranks. The 90 % ranks of the errors per class
of links (`predict.links_joint`), every link weighing the same, are the half-widths used where a
link has one group size. Pairs of cards that a bridge joins (RTX 3090) are no bus and left out.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from hetplan.benchmarks.accuracy.unit_collectives import node_link, read_collectives
from hetplan.benchmarks.accuracy.unit_judged import fabric_bytes_per_second
from hetplan.benchmarks.accuracy.unit_notes import Notes
from hetplan.predict.link.carried import JointClass, joint_of
from hetplan.predict.link.laws import collective_law, fit_link_laws
from hetplan.predict.regression import conformal_halfwidth, log_ratio
from hetplan.profiling.samples import LinkOperation, LinkSample

_Value = TypeVar("_Value")
_BRIDGED = (node_link("nvidia-rtx-3090-24gb"), 2)
_ROWS = 64
"""Of each link in the pool."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CarriedErrors:
    """Of one class of links."""

    joint: JointClass
    links: tuple[str, ...]
    log_halfwidth: float | None


def carried_errors(reference: Path) -> tuple[CarriedErrors, ...]:
    """Of every class that the reference data have links of."""
    by_link: dict[str, list[LinkSample]] = defaultdict(list)
    for population in read_collectives(reference, Notes()):
        for sample in population.links:
            if sample.nodes == 1:
                by_link[sample.link].append(sample)
    pools: dict[JointClass, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for link, samples in by_link.items():
        for joint, error in _errors(link, samples):
            pools[joint][link].append(error)
    return tuple(
        CarriedErrors(
            joint=joint,
            links=tuple(sorted(pools[joint])),
            log_halfwidth=conformal_halfwidth(
                [error for errors in pools[joint].values() for error in _thin(errors)]
            ),
        )
        for joint in JointClass
        if joint in pools
    )


def _errors(link: str, samples: Sequence[LinkSample]) -> Iterator[tuple[JointClass, float]]:
    fabric = fabric_bytes_per_second(link)
    sends = [each for each in samples if each.operation == LinkOperation.SEND_RECV]
    groups: dict[tuple[str, int], list[LinkSample]] = defaultdict(list)
    for each in samples:
        if each.operation != LinkOperation.SEND_RECV and (link, each.group_size) != _BRIDGED:
            groups[each.operation, each.group_size].append(each)
    for (operation, known), seen in groups.items():
        (law,) = fit_link_laws([*seen, *sends])
        joint = joint_of(law.tables, fabric)
        for asked in (known // 2, 2 * known):
            for each in _thin(sorted(groups.get((operation, asked), ()), key=_size)):
                found = collective_law(
                    law, operation, asked, each.message_bytes, fabric_bytes_per_second=fabric
                )
                if found is not None and joint is not None:
                    error = log_ratio(each.median_seconds, found.seconds)
                    yield joint.kind(max(known, asked)), error


def _size(sample: LinkSample) -> int:
    return sample.message_bytes


def _thin(values: Sequence[_Value]) -> list[_Value]:
    """So many of them, evenly; repeated where there are fewer, so that every link weighs alike."""
    count = len(values)
    return [values[math.floor(at * count / _ROWS)] for at in range(_ROWS)] if count else []
