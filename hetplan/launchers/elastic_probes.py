"""Which hosts of an emulation answer right now, and reach each other on both networks?

On each host that is asked a short program is started, which tries to reach the others over the
shaped network, where tensors go, and over the control network, where ranks meet. Its answer comes
back over its output. All hosts are asked at once, and none is waited for longer than
`LIMIT_SECONDS`.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress

from hetplan.emulation.running import end, start
from hetplan.emulation.tools import program
from hetplan.emulation.values import Emulation
from hetplan.launchers.elastic_hosts import joined

CONNECT_SECONDS = 2.0
"""For connections: the first one that is lost is repeated after a second (RFC 6298)."""
LIMIT_SECONDS = 4.0
"""For the whole of a probe; the rest is for the start of its program on a busy machine."""
_READ_SECONDS = 0.1
"""For an answer that is there already: hosts after one that used up the limit have answered too."""


def reachable(
    emulation: Emulation, hosts: Sequence[str], beside: Sequence[str] = ()
) -> tuple[str, ...]:
    """Those of `hosts` that answer, and reach each other and all of `beside`, on both networks."""
    others = (*hosts, *(name for name in beside if name not in hosts))
    if not others:
        return ()
    # A host alone reaches whom it can be asked about: itself.
    heard = _heard(emulation, hosts, others)
    fit = [name for name in hosts if name in heard and set(beside) <= heard[name] | {name}]
    return joined(fit, {name: heard[name] for name in fit})


def _heard(
    emulation: Emulation, hosts: Sequence[str], others: Sequence[str]
) -> dict[str, set[str]]:
    """Names that each of these hosts reached; hosts that did not answer are missing."""
    asked: dict[str, subprocess.Popen[bytes]] = {}
    limit = time.monotonic() + LIMIT_SECONDS
    try:
        for name in hosts:
            addresses = [
                address
                for other in others
                for address in (
                    emulation.host(other).data_address,
                    emulation.host(other).control_address,
                )
            ]
            asked[name] = start(
                emulation,
                name,
                program("reaching", str(CONNECT_SECONDS), *addresses),
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
        found = {}
        for name, process in asked.items():
            text = b""
            with suppress(subprocess.TimeoutExpired):
                left = max(_READ_SECONDS, limit - time.monotonic())
                text, _ = process.communicate(timeout=left)
            with suppress(ValueError):
                found[name] = _names(emulation, others, json.loads(text))
        return found
    finally:
        end(tuple(asked.values()))
        for process in asked.values():
            if process.stdout is not None:
                process.stdout.close()


def _names(emulation: Emulation, others: Sequence[str], addresses: Sequence[str]) -> set[str]:
    """Hosts of which both addresses answered."""
    return {
        name
        for name in others
        if emulation.host(name).data_address in addresses
        and emulation.host(name).control_address in addresses
    }
