"""What a model and a job need measured, from the options of `hetplan profile`."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hetplan.cli.profile_layers import kind_here
from hetplan.cli.profile_links import link_sizes
from hetplan.cli.profile_request import ProfileRequest
from hetplan.cluster.devices import CPU_KIND, DeviceKind
from hetplan.cluster.spec import Cluster
from hetplan.profiling.backends import default_backend, open_backend
from hetplan.profiling.grid import TP_DEGREES
from hetplan.profiling.measure_layers import Unit, units
from hetplan.profiling.measure_links import link_key
from hetplan.profiling.missing import (
    LayerNeed,
    LinkNeed,
    LinkPlace,
    layer_need,
    link_need,
    link_places,
)
from hetplan.profiling.samples import LayerSample, LinkSample

_HOST_BACKEND = "gloo"


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
    backend = open_backend(default_backend())
    return Here(torch_device=backend.name, kind=kind_here(backend))


def layer_needs(
    request: ProfileRequest,
    kinds: Sequence[tuple[str, DeviceKind | None, int]],
    held: Sequence[LayerSample],
    *,
    alike: Sequence[LayerSample] = (),
) -> tuple[LayerNeed, ...]:
    """Per (kind, its figures, most tp): what is missing, the kind that takes least time first.

    Samples `alike` only tell how long things take.
    """
    needs = [
        layer_need(kind, device, _units(request, kind, most_tp), held, alike=alike)
        for kind, device, most_tp in kinds
    ]
    return tuple(sorted(needs, key=lambda need: _order(need.seconds)))


def link_needs(
    request: ProfileRequest, cluster: Cluster, held: Sequence[LinkSample]
) -> tuple[LinkNeed, ...]:
    """What is missing of every link of the cluster, the one that takes least time first."""
    needs = []
    for place in link_places(cluster):
        accelerator = not place.is_host_staged and place.kinds[0] != CPU_KIND
        keys = {
            link_key(sample)
            for sample in held
            if sample.link == place.name
            and (sample.backend == _HOST_BACKEND) == place.is_host_staged
        }
        sizes = link_sizes(request, is_accelerator=accelerator)
        needs.append(link_need(place, sizes, keys))
    return tuple(sorted(needs, key=lambda need: need.seconds))


def cluster_kinds(cluster: Cluster) -> tuple[tuple[str, DeviceKind | None, int], ...]:
    """Every device kind of a cluster, its figures and its most devices in one node."""
    found: dict[str, tuple[DeviceKind, int]] = {}
    for island in cluster.islands:
        _, most = found.get(island.device.kind, (None, 1))
        found[island.device.kind] = (island.device, max(most, island.devices_per_node))
    return tuple((kind, device, most) for kind, (device, most) in found.items())


def _units(request: ProfileRequest, kind: str, most_tp: int) -> tuple[Unit, ...]:
    loaded = request.load()
    pinned = loaded is not None and loaded[1].pin.tp is not None
    if request.tp is None and not pinned:
        degrees = [degree for degree in TP_DEGREES if degree <= most_tp]
        request = replace(request, tp=",".join(map(str, degrees)))
    return units(request.grid(is_accelerator=kind != CPU_KIND))


def _order(seconds: float | None) -> float:
    return float("inf") if seconds is None else seconds


def inputs_text(request: ProfileRequest) -> str:
    """The options that say what is measured, as they are typed."""
    options: list[str] = []
    for name, value in (
        ("--model", request.model),
        ("--job", request.job),
        ("--hidden", request.hidden),
        ("--seq", request.seq),
        ("--microbatch", request.microbatch),
        ("--tp", request.tp),
    ):
        if value is not None:
            options += [name, str(value)]
    return shlex.join(options)


def layers_command(request: ProfileRequest, kind: str, here: Here) -> str:
    """The command that measures the layers of a kind on this machine."""
    words = ["hetplan profile", inputs_text(request), store_text(request)]
    if kind == CPU_KIND and here.torch_device != CPU_KIND:
        words.append("--device cpu")
    elif kind != here.kind and kind != CPU_KIND:
        words.append(f"--kind {shlex.quote(kind)}")
    return " ".join(filter(None, words))


def link_command(request: ProfileRequest, place: LinkPlace) -> str:
    """The command that measures a link inside this machine."""
    words = [
        f"torchrun --standalone --nproc-per-node {place.processes_per_node} -m hetplan profile",
        f"--link {shlex.quote(place.name)}",
        inputs_text(request),
        store_text(request),
        "--device cpu" if place.is_host_staged else "",
    ]
    return " ".join(filter(None, words))


def campaign_command(request: ProfileRequest, cluster: Path) -> str:
    """The command that writes scripts for what cannot be measured here."""
    words = ["hetplan profile --campaign", shlex.quote(str(cluster)), inputs_text(request)]
    return " ".join(filter(None, words))


def store_text(request: ProfileRequest) -> str:
    """The option that names the store, as in a command that is shown."""
    return "" if request.store is None else f"--store {shlex.quote(str(request.store))}"
