"""What a job on a cluster needs measured, what of it is held, and how long the rest takes.

Layers are needed per device kind (the grid of the job), links per place of the cluster where
devices talk: inside a node, between nodes of an island, between islands. Durations come from the
samples there are, or from datasheet figures; they are for planning an afternoon, not a training
run.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from hetplan.cluster.devices import CPU_KIND, DeviceKind
from hetplan.cluster.spec import Cluster, Link, Transport
from hetplan.errors import InputError
from hetplan.job.spec import Job
from hetplan.model.spec import ModelSpec
from hetplan.profiling.backends import open_backend
from hetplan.profiling.grid import TP_DEGREES, ShapeOptions
from hetplan.profiling.measure_layers import Unit, unit_shapes, units
from hetplan.profiling.measure_links import LinkCase, LinkLimits, link_cases, message_sizes
from hetplan.profiling.provenance import kind_here
from hetplan.profiling.samples import LayerSample, LinkSample, Phase
from hetplan.profiling.timing import ACCELERATOR_LIMITS, CPU_LIMITS, expected_seconds

# Of the peak rate: about what layers of middling size reach; right to a factor of two or three,
# which is enough for a duration of which most is warm-up.
_REACHED = 0.3
# One repeat's barrier and pause (measure_links waits 0.2 ms), over Ethernet.
_REPEAT_SECONDS = 1e-3
# Without a model: beyond these a link's rate no longer changes with the size.
MAX_CPU_MESSAGE_BYTES = 4 << 20
MAX_ACCELERATOR_MESSAGE_BYTES = 256 << 20
# With a model: its gradients, up to what trainers put into one bucket at most.
MAX_BUCKET_BYTES = 1 << 30
MAX_PROCESSES_PER_NODE = 8  # devices that share the fast fabric of nodes that are sold


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerNeed:
    """What one device kind needs measured."""

    kind: str
    units: tuple[Unit, ...]
    """Every unit, cheapest first."""
    missing: tuple[Unit, ...]
    """Those of which at least one sample is not there."""
    missing_samples: int
    seconds: float | None
    """Expected for those missing; None where nothing is known of the kind."""
    basis: str
    """What the expectation comes from: `samples` or `datasheet`; empty without one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkPlace:
    """A place of the cluster where devices talk, and how it is measured."""

    name: str
    """Name of its samples."""
    is_named: bool
    """Whether the cluster file refers to that name; else it still has to."""
    words: str
    """Where it is, for a person."""
    kinds: tuple[str, str]
    """Device kinds at its ends."""
    link: Link
    nodes: int
    processes_per_node: int

    @property
    def is_host_staged(self) -> bool:
        """Whether it goes through host memory with gloo."""
        return self.link.transport is Transport.HOST_STAGED


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkNeed:
    """What one link needs measured."""

    place: LinkPlace
    cases: tuple[LinkCase, ...]
    missing: tuple[LinkCase, ...]
    seconds: float
    """Expected for those missing, from the cluster file's figures."""


def layer_need(
    kind: str,
    device: DeviceKind | None,
    units: Sequence[Unit],
    held: Sequence[LayerSample],
) -> LayerNeed:
    """What is missing of these units where these samples are held.

    Durations come from those samples. `device` gives datasheet figures where there are no samples
    of a layer; None: not known.
    """
    own = [sample for sample in held if sample.device == kind]
    have = {sample.shape for sample in own}
    pairs = [(unit, set(unit_shapes(unit)) - have) for unit in units]
    missing = tuple(unit for unit, lacking in pairs if lacking)
    seconds: list[float | None] = []
    bases = set()
    for unit, lacking in pairs:
        if lacking:
            one, basis = _unit_seconds(kind, device, unit, len(lacking), own)
            seconds.append(one)
            bases.add(basis)
    known = [each for each in seconds if each is not None]
    return LayerNeed(
        kind=kind,
        units=tuple(units),
        missing=missing,
        missing_samples=sum(len(lacking) for _, lacking in pairs),
        seconds=sum(known) if len(known) == len(seconds) else None,
        basis=" and ".join(sorted(bases - {""})),
    )


def _unit_seconds(
    kind: str,
    device: DeviceKind | None,
    unit: Unit,
    samples: int,
    held: Sequence[LayerSample],
) -> tuple[float | None, str]:
    """Expected time of a unit with so many samples, and what it comes from."""
    work = unit.point.flops(unit.kind)
    rates = [_rate(sample, unit, work) for sample in held if _is_alike(sample, unit)]
    if rates:
        rate, basis = statistics.median(rates), "samples"
    else:
        peak = _peak(device, unit.point.precision.value)
        if not peak:
            return None, ""
        rate, basis = peak * _REACHED, "datasheet"
    limits = CPU_LIMITS if kind == CPU_KIND else ACCELERATOR_LIMITS
    # Forward and backward are one measurement; every update is one of its own, and short.
    updates = max(0, samples - 2) * expected_seconds(limits, 0.1 * limits.min_seconds)
    return expected_seconds(limits, work / rate) + updates, basis


def _is_alike(sample: LayerSample, unit: Unit) -> bool:
    return (
        sample.layer == unit.kind
        and sample.phase == Phase.FORWARD
        and sample.precision == unit.point.precision
    )


def _rate(sample: LayerSample, unit: Unit, work: float) -> float:
    """Operations a second of the unit's passes, from the nearest thing that was measured.

    Work grows with the tokens and about with the square of the hidden size; backward is twice
    forward.
    """
    point = unit.point
    tokens = point.microbatch_size * point.sequence_length
    measured = sample.microbatch_size * sample.sequence_length
    scale = tokens / measured * sample.tp / point.tp
    scale *= (point.model.hidden_size / sample.hidden_size) ** 2
    return work / (3.0 * sample.median_seconds * scale)


def _peak(device: DeviceKind | None, precision: str) -> float:
    if device is None:
        return 0.0
    try:
        return device.peak(precision)
    except InputError:
        return 0.0


def link_places(cluster: Cluster) -> tuple[LinkPlace, ...]:
    """Every place of the cluster where devices talk; one of several that share their samples."""
    places = []
    for island in cluster.islands:
        kinds = (island.device.kind, island.device.kind)
        if island.devices_per_node > 1:
            places.append(
                _place(
                    island.intra_node,
                    f"{island.name}-node",
                    f"inside a node of {island.name}",
                    kinds,
                    nodes=1,
                    processes=min(island.devices_per_node, MAX_PROCESSES_PER_NODE),
                )
            )
        if island.nodes > 1:
            words = f"between two nodes of {island.name}"
            places.append(_place(island.inter_node, f"{island.name}-nodes", words, kinds))
    for entry in cluster.links:
        left, right = (cluster.island(name) for name in entry.between)
        words = f"between {left.name} and {right.name}"
        kinds = (left.device.kind, right.device.kind)
        places.append(_place(entry.link, f"{left.name}-{right.name}", words, kinds))
    places += _regional_places(cluster)
    first: dict[str, LinkPlace] = {}
    for place in places:
        first.setdefault(place.name, place)
    return tuple(first.values())


def _regional_places(cluster: Cluster) -> Iterator[LinkPlace]:
    """One place of every link that several pairs of islands share: two islands that it joins."""
    listed = {frozenset(entry.between) for entry in cluster.links}
    joined = {frozenset(entry.between): entry.link for entry in cluster.region_links}
    wanted = {id(link) for link in joined.values()}
    wanted |= {id(link) for link in (cluster.within_region, cluster.across_regions) if link}
    for left, right in combinations(cluster.islands, 2):
        if not wanted:
            return
        if frozenset((left.name, right.name)) in listed:
            continue
        link, name = cluster.within_region, "within-region"
        if left.region != right.region:
            regional = joined.get(frozenset((left.region, right.region)))
            link, name = regional or cluster.across_regions, "across-regions"
            if regional is not None:
                name = f"{left.region}-{right.region}-regions"
        if link is not None and id(link) in wanted:
            wanted.remove(id(link))
            kinds = (left.device.kind, right.device.kind)
            yield _place(link, name, f"between {left.name} and {right.name}", kinds)


def _place(
    link: Link,
    name: str,
    words: str,
    kinds: tuple[str, str],
    *,
    nodes: int = 2,
    processes: int = 1,
) -> LinkPlace:
    return LinkPlace(
        name=link.samples or name,
        is_named=link.samples is not None,
        words=words,
        kinds=kinds,
        link=link,
        nodes=nodes,
        processes_per_node=processes,
    )


def link_need(place: LinkPlace, sizes: Sequence[int], held: Collection[LinkCase]) -> LinkNeed:
    """What is missing of this link at these message sizes; `held` are the cases of its samples."""
    cases = link_cases(place.nodes * place.processes_per_node, sizes)
    missing = tuple(case for case in cases if case not in held)
    return LinkNeed(
        place=place,
        cases=cases,
        missing=missing,
        seconds=sum(_case_seconds(place.link, case) for case in missing),
    )


def _case_seconds(link: Link, case: LinkCase) -> float:
    limits = LinkLimits()
    # Collectives move up to twice the tensor over each device's link (ring, Patarasuk 2009).
    moved = 2.0 * case.message_bytes / link.bandwidth_bytes_per_second
    one = _REPEAT_SECONDS + case.group_size * link.latency_seconds + moved
    repeats = min(limits.max_repeats, max(limits.min_repeats, limits.seconds / one))
    return (limits.warmup + repeats) * one


def link_case(sample: LinkSample) -> LinkCase:
    """The case that a sample measured."""
    return LinkCase(sample.operation, sample.group_size, sample.message_bytes)


def link_sizes(
    model: ModelSpec | None, job: Job | None, *, is_accelerator: bool
) -> tuple[int, ...]:
    """Message sizes up to the largest message that a plan of the job would send."""
    if model is None or job is None:
        most = MAX_ACCELERATOR_MESSAGE_BYTES if is_accelerator else MAX_CPU_MESSAGE_BYTES
        return message_sizes(most)
    return message_sizes(
        min(MAX_BUCKET_BYTES, model.parameter_count * job.precision.bytes_per_element)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Here:
    """The device that this machine would measure."""

    torch_device: str
    kind: str
    """The kind that its samples get."""

    def is_kind(self, kind: str) -> bool:
        """Whether it, or this machine's CPU, is of this kind."""
        return kind in (CPU_KIND, self.kind)


def device_here() -> Here:
    """The device that `hetplan profile` would measure unless told otherwise."""
    backend = open_backend()
    return Here(torch_device=backend.name, kind=kind_here(backend))


def cluster_kinds(cluster: Cluster) -> tuple[tuple[str, DeviceKind | None, int], ...]:
    """Every device kind of a cluster, its figures and its most devices in one node."""
    kinds: dict[str, tuple[DeviceKind, int]] = {}
    for island in cluster.islands:
        _, most = kinds.get(island.device.kind, (None, 1))
        kinds[island.device.kind] = (island.device, max(most, island.devices_per_node))
    return tuple((kind, device, most) for kind, (device, most) in kinds.items())


def layer_needs(
    shapes: ShapeOptions,
    kinds: Sequence[tuple[str, DeviceKind | None, int]],
    held: Sequence[LayerSample],
) -> tuple[LayerNeed, ...]:
    """Per (kind, its figures, most tp): what is missing, the kind that takes least time first."""
    needs = [
        layer_need(kind, device, kind_units(shapes, kind, most_tp), held)
        for kind, device, most_tp in kinds
    ]
    return tuple(
        sorted(needs, key=lambda need: float("inf") if need.seconds is None else need.seconds)
    )


def kind_units(shapes: ShapeOptions, kind: str, most_tp: int) -> tuple[Unit, ...]:
    """The layers of these shapes on a kind whose nodes have `most_tp` devices."""
    is_pinned = shapes.job is not None and shapes.job.pin.tp is not None
    if not shapes.tp_degrees and not is_pinned:
        degrees = tuple(degree for degree in TP_DEGREES if degree <= most_tp)
        shapes = replace(shapes, tp_degrees=degrees)
    return units(shapes.grid(is_accelerator=kind != CPU_KIND))


def link_needs(
    shapes: ShapeOptions, cluster: Cluster, held: Sequence[LinkSample]
) -> tuple[LinkNeed, ...]:
    """What is missing of every link of the cluster, the one that takes least time first."""
    needs = []
    for place in link_places(cluster):
        is_accelerator = not place.is_host_staged and place.kinds[0] != CPU_KIND
        cases = {
            link_case(sample)
            for sample in held
            if sample.link == place.name and (sample.backend == "gloo") == place.is_host_staged
        }
        sizes = link_sizes(shapes.model, shapes.job, is_accelerator=is_accelerator)
        needs.append(link_need(place, sizes, cases))
    return tuple(sorted(needs, key=lambda need: need.seconds))
