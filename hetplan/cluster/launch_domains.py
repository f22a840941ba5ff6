"""Launch domains: the scheduler that starts the hosts of islands, and the names that reach them.

A cluster may lie in several launch domains: Slurm in one region, Kubernetes in another, plain hosts
in a third. Islands that no domain names are plain hosts, reached by ssh under their node names.

Texts of a domain reach shells, YAML and hostfiles. `Named` lists the texts that may: they are made
of characters that none of these reads as its own.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from enum import Enum, StrEnum
from functools import lru_cache

from hetplan.cluster.devices import CPU_KIND
from hetplan.cluster.node import count_names, expand_names
from hetplan.cluster.places import unknown
from hetplan.errors import Fault, InputError
from hetplan.units import NAME_PATTERN

_MAX_HOST_LENGTH, _MAX_LABEL_LENGTH = 253, 63  # RFC 1035, section 2.3.4, as text
_LAST_PORT = 65535
_FIRST_FREE_PORT = 1024
"""Ports below are root's on Linux (net.ipv4.ip_unprivileged_port_start)."""

_HOST_LABEL = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_-]*[A-Za-z0-9])?", re.ASCII)
_LABEL = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?", re.ASCII)

# The grammar of distribution's reference package: [domain[:port]/]path[:tag][@digest].
_COMPONENT = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_REGISTRY = r"(?:[A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?|\[[0-9A-Fa-f:]+\])(?::[0-9]{1,5})?"
_TAG = r"(?::[A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?"
_IMAGE = rf"(?:{_REGISTRY}/)?{_COMPONENT}(?:/{_COMPONENT})*{_TAG}(?:@[a-z0-9]+:[0-9a-f]{{32,}})?"
_QUALIFIED = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?", re.ASCII)

_MAX_IMAGE_LENGTH = 453
"""A registry's name and 200 characters behind it (a choice: people write shorter ones)."""


class Named(Enum):
    """What a text of a launch may name: its pattern, its length, and how to write it."""

    DOMAIN = (r"[a-z0-9](?:[a-z0-9-]*[a-z0-9])?", 40, "1 to 40 of a-z, 0-9 and '-', as north-slurm")
    """Becomes part of file and object names."""
    INTERFACE = (
        r"[A-Za-z0-9][A-Za-z0-9._-]*",
        15,  # IFNAMSIZ - 1 of Linux (include/uapi/linux/if.h)
        "one interface as `ip link` shows it, at most 15 of letters, digits, '.', '_' and '-', "
        "such as eth0",
    )
    DEVICE = (
        r"[A-Za-z0-9][A-Za-z0-9_.-]*(?::[0-9]{1,3})?",
        _MAX_LABEL_LENGTH,
        "a device as `ibv_devices` shows it: mlx5_0, or mlx5_0:1",
    )
    """RDMA device, with a port where it has several."""
    SLURM_TYPE = (NAME_PATTERN.strip("^$"), _MAX_LABEL_LENGTH, "the Type of gres.conf, as a100")
    USER = (
        r"[A-Za-z_][A-Za-z0-9_.-]*",
        _MAX_LABEL_LENGTH,
        "a login name of letters, digits, '.', '_' and '-'",
    )
    WORD = (
        NAME_PATTERN.strip("^$"),
        _MAX_LABEL_LENGTH,
        "letters, digits, '.', '_' and '-', beginning with a letter or digit",
    )
    """Partition or another plain name."""
    LABEL = (_LABEL.pattern, _MAX_LABEL_LENGTH, "1 to 63 of a-z, 0-9 and '-', such as training")
    """Label of RFC 1123: a namespace of Kubernetes, a part of a host's name."""
    REFERENCE = (_IMAGE, _MAX_IMAGE_LENGTH, "[registry/]name[:tag][@digest], as Kubernetes pulls")
    """Image that a container runtime of Kubernetes can pull."""
    IMAGE = (
        rf"{_IMAGE}|{_REGISTRY}#{_COMPONENT}(?:/{_COMPONENT})*{_TAG}"
        r"|/[A-Za-z0-9._/+-]+\.(?:sqsh|sif)",
        _MAX_IMAGE_LENGTH,
        "[registry/]name[:tag][@digest], such as registry.example.org/train:1.2, or the path of a "
        ".sqsh or .sif file",
    )
    """A reference, enroot's registry#image form, or a .sqsh or .sif file."""

    def fault(self, text: str) -> str:
        """What is wrong with the text and how to write it; empty: nothing."""
        pattern, longest, hint = self.value
        if len(text) <= longest and re.fullmatch(pattern, text, re.ASCII):
            return ""
        return f"found {text[:60]!a}; write {hint}"


def address_fault(text: str) -> str:
    """Of an address: a host name, IPv4 or IPv6."""
    try:
        number = ipaddress.ip_address(text)
    except ValueError:
        pass
    else:
        if (
            number.is_unspecified
            or number.is_multicast
            or (text.count("%") and number.version == 6)
        ):
            return f"found {text[:60]!a}; write an address that other hosts can reach"
        return ""
    labels = text.split(".")
    right = len(text) <= _MAX_HOST_LENGTH and all(
        len(label) <= _MAX_LABEL_LENGTH and _HOST_LABEL.fullmatch(label) for label in labels
    )
    # Names whose last label is a number are read as IPv4 addresses (RFC 1123, section 2.1).
    if right and not (len(labels) > 1 and labels[-1].isdigit()):
        return ""
    return (
        f"found {text[:60]!a}; write a host name or an IP address, such as 10.0.3.17 or "
        "node17.example.org"
    )


def port_fault(port: int, least: int = _FIRST_FREE_PORT) -> str:
    """Of a TCP port that needs no rights."""
    if least <= port <= _LAST_PORT:
        return ""
    return f"found {port}; write a port from {least} to {_LAST_PORT}"


def kubernetes_resource_fault(text: str) -> str:
    """Of a resource that a device plugin advertises: domain/name."""
    domain, slash, name = text.partition("/")
    labels = domain.split(".")
    right = (
        slash
        and len(domain) <= _MAX_HOST_LENGTH
        and all(_LABEL.fullmatch(label) for label in labels)
        and _QUALIFIED.fullmatch(name)
    )
    if right:
        return ""
    return f"found {text[:60]!a}; write what the device plugin advertises, such as amd.com/gpu"


FIRST_PORT, LAST_PORT = 29500, 29999
"""Ports of a domain that names none: from the default of torchrun's --master-port on."""
SSH_PORT = 22
MINUTE = 60.0  # Slurm's resolution of --time
MAX_TIME_SECONDS = 365 * 86400.0  # a year (a choice)
MAX_ADDRESSES = 1 << 21
"""As many as a cluster can have devices."""
DEFAULT_DOMAIN = "hosts"
"""Name of the domain of islands that no domain names."""


class Scheduler(StrEnum):
    """What starts processes on the hosts of a domain."""

    HOSTS = "hosts"
    """Nothing: they are plain machines, reached by ssh."""
    SLURM = "slurm"
    KUBERNETES = "kubernetes"


@dataclass(frozen=True, slots=True, kw_only=True)
class KindLaunch:
    """What one device kind needs beside its domain's own settings."""

    device: str
    """Device kind."""
    resource: str = ""
    """Name under which Kubernetes counts its devices, as in `amd.com/gpu`; or Slurm's type in
    `--gpus-per-node TYPE:8`."""
    image: str = ""
    """Container image for hosts of this kind; empty: the domain's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchDomain:
    """Islands whose hosts are started in one way."""

    name: str
    islands: tuple[str, ...]
    scheduler: Scheduler = Scheduler.HOSTS
    interface: str = ""
    """Network interface over which hosts of all domains reach each other (socket traffic and
    rendezvous); empty: left to the libraries."""
    fabric_devices: tuple[str, ...] = ()
    """RDMA devices for the islands' own network, as in `mlx5_0`; empty: left to the libraries."""
    first_port: int = FIRST_PORT
    last_port: int = LAST_PORT
    """Ports that other domains can reach, both ends included."""
    addresses: tuple[tuple[str, str], ...] = ()
    """(node name, address by which hosts of every domain reach it), both as they were written:
    single ones, or ranges of equally many; ask `address_of`. Nodes that are not listed are reached
    under their names."""
    image: str = ""
    """Container image; empty: none."""
    kinds: tuple[KindLaunch, ...] = ()
    ssh_user: str = ""
    """Empty: the user who starts."""
    ssh_port: int = SSH_PORT
    partition: str = ""
    account: str = ""
    time_limit_seconds: float | None = None
    """Of Slurm; None: the partition's own."""
    namespace: str = ""
    """Of Kubernetes; empty: that of the user's context."""

    def of_kind(self, device: str) -> KindLaunch:
        """What the domain says of a device kind; empty texts where it says nothing."""
        found = next((each for each in self.kinds if each.device == device), None)
        return found or KindLaunch(device=device)

    def image_of(self, device: str) -> str:
        """The container image for hosts of a device kind; empty: none."""
        return self.of_kind(device).image or self.image

    def address_of(self, node: str) -> str:
        """By which hosts of every domain reach the node of this name."""
        return _by_node(self.addresses).get(node, node)

    def __post_init__(self) -> None:
        faults = tuple(domain_faults(self))
        if faults:
            raise InputError(*faults)


@lru_cache(maxsize=64)
def _by_node(addresses: tuple[tuple[str, str], ...]) -> dict[str, str]:
    """Address of every listed node, ranges written out."""
    return {
        name: address
        for nodes, written in addresses
        for name, address in zip(expand_names((nodes,)), expand_addresses(written), strict=True)
    }


def expand_addresses(written: str) -> tuple[str, ...]:
    """Every address of an entry; an InputError where it is no address and no range of addresses."""
    if "[" not in written:
        message = address_fault(written)
        if message:
            raise InputError(message)
        return (written,)
    found = tuple(expand_names((written,)))
    for address in found:
        message = address_fault(address)
        if message:
            raise InputError(message)
    return found


def domain_faults(domain: LaunchDomain) -> Iterator[Fault]:
    """Every setting of a domain that cannot be."""
    named = [
        ("name", Named.DOMAIN, domain.name),
        *(
            (field, kind, getattr(domain, field))
            for field, kind in _NAMED_FIELDS
            if getattr(domain, field)
        ),
        *((f"fabric_devices[{at}]", Named.DEVICE, x) for at, x in enumerate(domain.fabric_devices)),
    ]
    single = [
        *((field, kind.fault(text)) for field, kind, text in named),
        ("first_port", port_fault(domain.first_port)),
        ("last_port", port_fault(domain.last_port)),
        ("ssh_port", port_fault(domain.ssh_port, least=1)),
    ]
    yield from (Fault(field=field, message=message) for field, message in single if message)
    if domain.last_port <= domain.first_port:
        message = (
            f"{domain.last_port} after first_port {domain.first_port}; name a range of two "
            "ports or more, of which the first is the rendezvous"
        )
        yield Fault(field="last_port", message=message)
    if not domain.islands:
        message = "is empty; name the islands whose hosts are started in this way"
        yield Fault(field="islands", message=message)
    limit = domain.time_limit_seconds
    if limit is not None and not MINUTE <= limit <= MAX_TIME_SECONDS:
        message = f"{limit:g} s; a limit is from a minute to a year"
        yield Fault(field="time_limit_seconds", message=message)
    for field, belongs in _OWN_FIELDS:
        if getattr(domain, field) != _DEFAULTS[field] and domain.scheduler is not belongs:
            message = f"is of {belongs} domains and this one is of {domain.scheduler}; leave it out"
            yield Fault(field=field, message=message)
    yield from _kind_faults(domain)
    yield from _address_faults(domain.addresses)


def _kind_faults(domain: LaunchDomain) -> Iterator[Fault]:
    known: set[str] = set()
    for at, kind in enumerate(domain.kinds):
        where = f"kinds[{at}]"
        if kind.device in known:
            message = f"{kind.device[:60]!a} is listed twice; keep one of the two"
            yield Fault(field=f"{where}.device", message=message)
        known.add(kind.device)
        if kind.image and (message := Named.IMAGE.fault(kind.image)):
            yield Fault(field=f"{where}.image", message=message)
        if not kind.resource:
            continue
        if domain.scheduler is Scheduler.KUBERNETES:
            message = kubernetes_resource_fault(kind.resource)
        elif domain.scheduler is Scheduler.SLURM:
            message = Named.SLURM_TYPE.fault(kind.resource)
        else:
            message = "no scheduler counts devices of plain hosts; leave it out"
        if message:
            yield Fault(field=f"{where}.resource", message=message)


def _address_faults(addresses: tuple[tuple[str, str], ...]) -> Iterator[Fault]:
    named: set[str] = set()
    reached: dict[str, str] = {}
    for at, (nodes, written) in enumerate(addresses):
        where = f"addresses[{at}]"
        try:
            count = count_names(nodes)
            if count > MAX_ADDRESSES or ("[" in written and count_names(written) > MAX_ADDRESSES):
                message = f"stands for more than {MAX_ADDRESSES:,} nodes; correct the range"
                yield Fault(field=where, message=message)
                continue
            each = expand_addresses(written)
        except InputError as error:
            yield Fault(field=where, message=str(error))
            continue
        if count != len(each):
            message = f"{count} nodes and {len(each)} addresses; give every node one"
            yield Fault(field=where, message=message)
            continue
        for name, address in zip(expand_names((nodes,)), each, strict=True):
            if name in named:
                message = f"node {name!a} has two addresses; keep one of them"
            elif address in reached:
                message = f"{address} is already the address of {reached[address]!a}"
            else:
                named.add(name)
                reached[address] = name
                continue
            yield Fault(field=where, message=message)
            break


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchedIsland:
    """What a launch domain must know of an island."""

    name: str
    device: str
    vendor: str
    node_names: tuple[str, ...]
    """Names or ranges, as written; empty: the nodes have none."""


def launch_faults(
    domains: Sequence[LaunchDomain], islands: Sequence[LaunchedIsland], *, whole: bool = True
) -> Iterator[tuple[int, Fault]]:
    """(position of the domain, what is wrong) where domains and islands do not go together.

    `whole`: these are all islands; a part of a cluster keeps domains that name others.
    """
    by_name = {island.name: island for island in islands}
    first: dict[str, int] = {}
    owner: dict[str, str] = {}
    for at, domain in enumerate(domains):
        if domain.name == DEFAULT_DOMAIN:
            message = f"{DEFAULT_DOMAIN!a} are the islands that no domain names; take another name"
            yield at, Fault(field="name", message=message)
        elif domain.name in first:
            message = f"{domain.name!a} is already the name of another domain; rename one"
            yield at, Fault(field="name", message=message)
        first.setdefault(domain.name, at)
        own = []
        for position, name in enumerate(domain.islands):
            where = f"islands[{position}]"
            if name not in by_name and not whole:
                continue
            if name not in by_name:
                message = unknown(name, by_name, "island")
                yield at, Fault(field=where, message=message)
            elif name in owner:
                message = f"{name!a} is already in {owner[name]!a}; an island is in one domain"
                yield at, Fault(field=where, message=message)
            else:
                owner[name] = domain.name
                own.append(by_name[name])
        if len(own) == len(domain.islands):
            yield from ((at, fault) for fault in _naming_faults(domain, own))
        yield from ((at, fault) for fault in _pod_faults(domain, own))


def _naming_faults(domain: LaunchDomain, own: Sequence[LaunchedIsland]) -> Iterator[Fault]:
    """Kinds and nodes that the domain names are its islands'."""
    devices = {island.device: island.vendor for island in own}
    for at, kind in enumerate(domain.kinds):
        if kind.device not in devices:
            message = f"{unknown(kind.device, devices, 'device kind')} (of this domain's islands)"
            yield Fault(field=f"kinds[{at}].device", message=message)
    if domain.addresses:
        nodes = {name for island in own for name in expand_names(island.node_names)}
        for at, (entry, _) in enumerate(domain.addresses):
            stranger = next((name for name in expand_names((entry,)) if name not in nodes), None)
            if stranger is not None:
                message = f"{unknown(stranger, nodes, 'node')} (node_names of the domain's islands)"
                yield Fault(field=f"addresses[{at}]", message=message)


def _pod_faults(domain: LaunchDomain, own: Sequence[LaunchedIsland]) -> Iterator[Fault]:
    """Kubernetes knows which image to run, and what to ask for."""
    if domain.scheduler is not Scheduler.KUBERNETES:
        return
    for device, vendor in {island.device: island.vendor for island in own}.items():
        image = domain.image_of(device)
        if not image:
            message = f"a pod needs a container image, there is none for {device}; add image"
            yield Fault(field="image", message=message)
        elif message := Named.REFERENCE.fault(image):
            yield Fault(field="image", message=message)
        if not resource_of(domain, device, vendor):
            message = (
                f"under which name does Kubernetes count devices of kind {device}? Add "
                f"{{device: {device}, resource: ...}} as `kubectl describe node` lists it"
            )
            yield Fault(field="kinds", message=message)


def resource_of(domain: LaunchDomain, device: str, vendor: str) -> str:
    """Under which name Kubernetes counts devices of a kind; empty: nobody says it."""
    if device == CPU_KIND:
        return "cpu"
    return domain.of_kind(device).resource or _PLUGIN_RESOURCES.get(vendor, "")


_PLUGIN_RESOURCES = {"nvidia": "nvidia.com/gpu", "amd": "amd.com/gpu"}
"""Of the vendors with one device plugin and one name (NVIDIA/k8s-device-plugin,
ROCm/k8s-device-plugin: README)."""
_NAMED_FIELDS = (
    ("interface", Named.INTERFACE),
    ("image", Named.IMAGE),
    ("ssh_user", Named.USER),
    ("partition", Named.WORD),
    ("account", Named.WORD),
    ("namespace", Named.LABEL),
)
"""Texts that a domain may leave empty."""
_OWN_FIELDS = (
    ("ssh_user", Scheduler.HOSTS),
    ("ssh_port", Scheduler.HOSTS),
    ("partition", Scheduler.SLURM),
    ("account", Scheduler.SLURM),
    ("time_limit_seconds", Scheduler.SLURM),
    ("namespace", Scheduler.KUBERNETES),
)
"""Settings that mean something to one scheduler only."""
_DEFAULTS = {each.name: each.default for each in fields(LaunchDomain)}
