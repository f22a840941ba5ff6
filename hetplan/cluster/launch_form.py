"""How launch domains are written in a cluster file, and what must hold for them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Annotated, TypeAlias

from pydantic import Field, TypeAdapter, ValidationError

from hetplan.cluster.devices import DeviceKind
from hetplan.cluster.launch_domains import (
    FIRST_PORT,
    LAST_PORT,
    MAX_ADDRESSES,
    SSH_PORT,
    KindLaunch,
    LaunchDomain,
    LaunchedIsland,
    Scheduler,
    launch_faults,
)
from hetplan.cluster.node import count_names
from hetplan.cluster.places import field_steps, island_paths, kind_figures
from hetplan.errors import Fault, InputError
from hetplan.files.nodes import Path
from hetplan.files.quantities import FileForm, Name, Seconds, value_of
from hetplan.files.reading import Document

Word: TypeAlias = Annotated[str, Field(min_length=1, max_length=500)]
"""A text whose form `launch_names` knows: faults are found by `check_launch`."""
Port: TypeAlias = Annotated[int, Field(ge=1, le=65535)]


@dataclass(frozen=True, slots=True, kw_only=True)
class KindLaunchForm(FileForm):
    """What one device kind of a launch domain needs."""

    device: Name
    """Device kind of an island of this domain."""
    resource: Word | None = None
    """Kubernetes' name of the devices, as amd.com/gpu. Known for NVIDIA and AMD. Slurm: their Type,
    for `--gpus-per-node=TYPE:8`; left out: no type."""
    image: Word | None = None
    """Container image for hosts of this kind. Left out: the domain's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchDomainForm(FileForm):
    """Islands whose hosts are started in one way."""

    name: Word
    """Name of the domain: a-z, 0-9 and '-'; it becomes part of file names."""
    islands: Annotated[list[Name], Field(min_length=1)]
    """Islands of the domain; an island is in at most one."""
    scheduler: Scheduler = Scheduler.HOSTS
    """hosts: plain machines, over ssh."""
    interface: Word | None = None
    """Over which all domains reach each other, as eth0. Left out:
    the libraries choose."""
    fabric_devices: list[Word] = field(default_factory=list)
    """RDMA devices of the islands' own network. Left out: the
    libraries choose."""
    first_port: Port = FIRST_PORT
    """First TCP port that other domains can reach."""
    last_port: Port = LAST_PORT
    """Last such port."""
    addresses: dict[str, Word] = field(default_factory=dict)
    """By node name, its address for all domains; ranges of equally many on
    both sides: "node[01-16]": "10.0.1.[1-16]". Nodes that are not listed are reached by name."""
    image: Word | None = None
    """Container image; required for kubernetes."""
    kinds: list[KindLaunchForm] = field(default_factory=list)
    """What single device kinds need."""
    ssh_user: Word | None = None
    """Of plain hosts. Left out: the user who starts."""
    ssh_port: Port = SSH_PORT
    """Of plain hosts."""
    partition: Word | None = None
    """Of Slurm. Left out: the user's default."""
    account: Word | None = None
    """Of Slurm. Left out: the user's default."""
    time_limit: Seconds | None = None
    """Of Slurm, such as 12 h. Left out: the partition's own."""
    namespace: Word | None = None
    """Of Kubernetes. Left out: that of the user's context."""


def launch_domain(form: LaunchDomainForm) -> LaunchDomain:
    """The value of a form in which `check_launch` found no fault."""
    return value_of(
        LaunchDomain,
        form,
        addresses=tuple(form.addresses.items()),
        kinds=tuple(value_of(KindLaunch, kind) for kind in form.kinds),
        time_limit_seconds=form.time_limit,
    )


def check_launch(document: Document, *, catalogue: Mapping[str, DeviceKind]) -> Iterator[Fault]:
    """Every setting of a domain can be; domains, islands, kinds and nodes go together."""
    right: list[LaunchDomain] = []
    places: list[Path] = []
    for at in document.entries(("launch",)):
        path: Path = ("launch", at)
        try:
            form = _ADAPTER.validate_json(json.dumps(document.at(*path)), strict=True)
            right.append(launch_domain(form))
        except (ValidationError, UnicodeEncodeError):
            continue  # found by the form itself
        except InputError as error:
            yield from (_placed(document, path, fault) for fault in error.faults)
            continue
        places.append(path)
    if right:
        for position, fault in launch_faults(right, list(_islands(document, catalogue))):
            yield _placed(document, places[position], fault)


_ADAPTER: TypeAdapter[LaunchDomainForm] = TypeAdapter(LaunchDomainForm)


def _placed(document: Document, path: Path, fault: Fault) -> Fault:
    """The fault of a domain's value, at its place in the file."""
    steps = field_steps(fault.field)
    if steps[0] == "time_limit_seconds":
        steps = ["time_limit"]
    if steps[0] == "addresses":
        listed = document.at(*path, "addresses")
        if isinstance(listed, dict) and isinstance(steps[1], int):
            steps[1] = str(list(listed)[steps[1]])
    return document.fault((*path, *steps), fault.message)


def _islands(document: Document, catalogue: Mapping[str, DeviceKind]) -> Iterator[LaunchedIsland]:
    kinds = kind_figures(document, catalogue)
    for _, path in island_paths(document):
        name, device = document.word((*path, "name")), document.word((*path, "device"))
        listed = document.at(*path, "node_names")
        if name is not None and device is not None:
            yield LaunchedIsland(
                name=name,
                device=device,
                vendor=kinds[device].vendor if device in kinds else "",
                node_names=tuple(_right_names(listed)),
            )


def _right_names(listed: object) -> Iterator[str]:
    """Names that `check_nodes` finds nothing wrong with."""
    for entry in listed if isinstance(listed, list) else ():
        with suppress(InputError):
            if isinstance(entry, str) and count_names(entry) <= MAX_ADDRESSES:
                yield entry
