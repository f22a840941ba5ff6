"""Which texts may name something of a launch: interfaces, addresses, images, resources, accounts?

Each function gives what is wrong with a text and how to write it, or an empty text. Names that pass
are made of characters that no shell, YAML or hostfile reads as its own.
"""

from __future__ import annotations

import ipaddress
import re

from hetplan.files.quantities import NAME_PATTERN

MAX_INTERFACE_LENGTH = 15
"""IFNAMSIZ - 1 of Linux (include/uapi/linux/if.h)."""
_MAX_HOST_LENGTH, _MAX_LABEL_LENGTH = 253, 63  # RFC 1035, section 2.3.4, as text
_MAX_PATH_LENGTH = 200
"""Of an image behind its registry (a choice: a reference that people write is shorter)."""
_LAST_PORT = 65535
_FIRST_FREE_PORT = 1024
"""Ports below are root's on Linux (net.ipv4.ip_unprivileged_port_start)."""

_DOMAIN = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,38}[a-z0-9])?", re.ASCII)
_INTERFACE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*", re.ASCII)
_DEVICE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*(?::[0-9]{1,3})?", re.ASCII)
_HOST_LABEL = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_-]*[A-Za-z0-9])?", re.ASCII)
_LABEL = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?", re.ASCII)
_WORD = re.compile(NAME_PATTERN.strip("^$"), re.ASCII)
_USER = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*", re.ASCII)

# The grammar of distribution's reference package: [domain[:port]/]path[:tag][@digest].
_COMPONENT = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_REGISTRY = r"(?:[A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?|\[[0-9A-Fa-f:]+\])(?::[0-9]{1,5})?"
_IMAGE = re.compile(
    rf"(?:{_REGISTRY}/)?{_COMPONENT}(?:/{_COMPONENT})*"
    r"(?::[A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?(?:@[a-z0-9]+:[0-9a-f]{32,})?",
    re.ASCII,
)
_PYXIS = re.compile(
    rf"{_REGISTRY}#{_COMPONENT}(?:/{_COMPONENT})*(?::[A-Za-z0-9_][A-Za-z0-9_.-]{{0,127}})?",
    re.ASCII,
)
_PATH = re.compile(r"/[A-Za-z0-9._/+-]+\.(?:sqsh|sif)", re.ASCII)
_QUALIFIED = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?", re.ASCII)


def domain_fault(text: str) -> str:
    """Of a launch domain, whose name becomes part of file and object names."""
    if _DOMAIN.fullmatch(text):
        return ""
    return f"found {text[:60]!a}; write 1 to 40 of a-z, 0-9 and '-', such as north-slurm"


def interface_fault(text: str) -> str:
    """Of a network interface of Linux."""
    if _INTERFACE.fullmatch(text) and len(text) <= MAX_INTERFACE_LENGTH:
        return ""
    return (
        f"found {text[:60]!a}; write one interface as `ip link` shows it, at most "
        f"{MAX_INTERFACE_LENGTH} of letters, digits, '.', '_' and '-', such as eth0"
    )


def device_fault(text: str) -> str:
    """Of an RDMA device, with a port where it has several."""
    if _DEVICE.fullmatch(text) and len(text) <= _MAX_LABEL_LENGTH:
        return ""
    return f"found {text[:60]!a}; write a device as `ibv_devices` shows it: mlx5_0, or mlx5_0:1"


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


def image_fault(text: str) -> str:
    """Of a container image: a reference, enroot's registry#image form, or a .sqsh or .sif file."""
    right = _IMAGE.fullmatch(text) or _PYXIS.fullmatch(text) or _PATH.fullmatch(text)
    if right and len(text) <= _MAX_PATH_LENGTH + _MAX_HOST_LENGTH:
        return ""
    return (
        f"found {text[:60]!a}; write [registry/]name[:tag][@digest], such as "
        "registry.example.org/train:1.2, or the path of a .sqsh or .sif file"
    )


def reference_fault(text: str) -> str:
    """Of an image that a container runtime of Kubernetes can pull."""
    if _IMAGE.fullmatch(text) and len(text) <= _MAX_PATH_LENGTH + _MAX_HOST_LENGTH:
        return ""
    return f"found {text[:60]!a}; Kubernetes pulls [registry/]name[:tag][@digest]"


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


def slurm_type_fault(text: str) -> str:
    """Of a type of Slurm's generic resource gpu."""
    if _WORD.fullmatch(text) and len(text) <= _MAX_LABEL_LENGTH:
        return ""
    return f"found {text[:60]!a}; write the Type of gres.conf, such as a100"


def user_fault(text: str) -> str:
    """Of a login name."""
    if _USER.fullmatch(text) and len(text) <= _MAX_LABEL_LENGTH:
        return ""
    return f"found {text[:60]!a}; write a login name of letters, digits, '.', '_' and '-'"


def word_fault(text: str) -> str:
    """Of a partition or another plain name."""
    if _WORD.fullmatch(text) and len(text) <= _MAX_LABEL_LENGTH:
        return ""
    return f"found {text[:60]!a}; use letters, digits, '.', '_' and '-', beginning with one of them"


def label_fault(text: str) -> str:
    """Of a namespace of Kubernetes: a label of RFC 1123."""
    if _LABEL.fullmatch(text):
        return ""
    return f"found {text[:60]!a}; write 1 to 63 of a-z, 0-9 and '-', such as training"
