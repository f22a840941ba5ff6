"""Names of hosts: what is one, and several entries of the same host put together."""

from __future__ import annotations

import ipaddress
import re

_NAME = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]{0,251}[A-Za-z0-9_])?", re.ASCII)
MAX_SLOTS = 10**6
"""Processes of one host; no machine has as many devices."""


def is_host_name(text: str) -> bool:
    """Whether it is a name or an address that can stand for a host."""
    return bool(_NAME.fullmatch(text)) or is_ipv6(text)


def is_ipv6(text: str) -> bool:
    """Whether it is an IPv6 address, with or without a zone."""
    if ":" not in text or len(text) > 60:
        return False
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return text.isascii()
