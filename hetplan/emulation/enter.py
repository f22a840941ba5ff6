"""Put a process on an emulated host, then replace it by the command that runs there.

The program `enter EMULATION HOST PARENT COMMAND...` (`hetplan.emulation.tools.program`), or
`become` from Python. The process gets the host's network, its name (`hostname`), a /etc/hosts with
all hosts, and a /sys that shows its interfaces; files, users and processes are the machine's.
PARENT is 0, or the process whose end ends this one. HOST may be `HERE`: the machine itself, which
stays as it is.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from hetplan.emulation import namespaces, state
from hetplan.emulation.values import (
    CONTROL_HOST,
    CONTROL_INTERFACE,
    DATA_INTERFACE,
    HERE,
    key_of,
)
from hetplan.errors import InputError

NOT_EXECUTABLE, NOT_FOUND = 126, 127
"""Exit codes of a command that cannot be started, as shells have them."""
_INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
"""What gloo, nccl and tensorpipe send over, unless the user says otherwise."""


def become(name: str, host: str, command: Sequence[str]) -> NoReturn:
    """Replace this process by the command on a host of the emulation.

    InputError where there is no such emulation or host; SystemExit with 126 or 127 where the
    command cannot be started.
    """
    state.check_up(name)
    # Shared: while the emulation is being removed nobody enters.
    with state.locked(key_of(name), shared=True):
        state.check_up(name)
        folder = state.folder_of(name)
        places = json.loads((folder / "places.json").read_text(encoding="utf-8"))
        if host not in places:
            have = ", ".join(place for place in places if place != HERE)
            raise InputError(f"emulation {name} has no host {host}; it has {have}")
        if host != HERE:
            namespaces.enter_network(namespaces.path_of(places[host]["namespace"]))
            _surround(host, folder)
    _replace(command, {**_interfaces(host), **os.environ, **places[host]["variables"]}, host)


def _replace(command: Sequence[str], environment: Mapping[str, str], host: str) -> NoReturn:
    # Python ignores these; the command gets what a shell would give it (subprocess does the same).
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvpe(command[0], list(command), environment)
    except OSError as error:
        where = "" if host == HERE else f" (on host {host})"
        print(f"hetplan: {command[0]}: {error.strerror}{where}", file=sys.stderr)
        missing = isinstance(error, FileNotFoundError)
        raise SystemExit(NOT_FOUND if missing else NOT_EXECUTABLE) from None


def _interfaces(host: str) -> dict[str, str]:
    if host == HERE:
        return {}
    interface = CONTROL_INTERFACE if host == CONTROL_HOST else DATA_INTERFACE
    return dict.fromkeys(_INTERFACE_VARIABLES, interface)


def _surround(host: str, folder: Path) -> None:
    """Host name, /etc/hosts and /sys of this process alone."""
    namespaces.unshare(namespaces.CLONE_NEWNS | namespaces.CLONE_NEWUTS)
    # What is mounted from here on is nobody else's.
    namespaces.mount("none", "/", flags=namespaces.MS_REC | namespaces.MS_SLAVE)
    ctypes.CDLL(None).sethostname(host.encode(), len(host.encode()))
    if Path("/etc/hosts").exists():
        namespaces.mount(str(folder / "hosts"), "/etc/hosts", flags=namespaces.MS_BIND)
    # A new /sys shows this namespace's interfaces; control groups are hung back into it. Where a
    # container forbids it, programs that look into /sys/class/net see the machine's.
    keep, groups = str(folder / "sys"), "/sys/fs/cgroup"
    with suppress(OSError):
        namespaces.mount(groups, keep, flags=namespaces.MS_BIND | namespaces.MS_REC)
    with suppress(OSError):
        namespaces.mount("sysfs", "/sys", "sysfs")
    if os.path.ismount(keep):
        with suppress(OSError):
            namespaces.mount(keep, groups, flags=namespaces.MS_MOVE)


def main(arguments: list[str]) -> None:
    """As the module says."""
    name, host, parent, *command = arguments
    if int(parent):
        namespaces.die_with_parent(int(parent))
    try:
        become(name, host, command)
    except InputError as error:
        print(f"hetplan: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None
