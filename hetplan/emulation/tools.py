"""Running `ip` and `tc`, and whether this machine can emulate a cluster at all.

Lines that these programs read are made of numbers and of names that hetplan derives; nothing from
a user's file is in them, and no shell reads them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from hetplan.errors import HetplanError, InputError

TOOL_SECONDS = 60.0
_CAP_NET_ADMIN, _CAP_SYS_ADMIN = 12, 21  # linux/capability.h
TUN = Path("/dev/net/tun")
_BOOT = (
    "import sys; sys.path.insert(0, sys.argv.pop(1)); from importlib import import_module; "
    "import_module(sys.argv.pop(1)).main(sys.argv[1:])"
)
_SBIN = ("/usr/local/sbin", "/usr/sbin", "/sbin")


def tool(name: str) -> str:
    """Path of a program of iproute2, also where the user's PATH leaves out the sbin folders."""
    return shutil.which(name, path=os.pathsep.join((os.environ.get("PATH", ""), *_SBIN))) or name


def missing() -> tuple[str, ...]:
    """What this machine or user lacks, each with what to do; empty: an emulation can be made."""
    if sys.platform != "linux":
        return (f"network namespaces are Linux's; this is {sys.platform}: use a Linux machine",)
    lines = []
    if os.geteuid() != 0:
        lines.append("root is needed to make network namespaces: run the command with sudo")
    elif not _has_capabilities():
        lines.append(
            "this root may not administer networks (a container?): give it the capabilities "
            "NET_ADMIN and SYS_ADMIN, or run on the machine itself"
        )
    lacking = [name for name in ("ip", "tc") if not Path(tool(name)).is_absolute()]
    if lacking:
        lines.append(
            f"{' and '.join(lacking)} not found: install iproute2 (Debian, Ubuntu: apt install "
            "iproute2)"
        )
    if not TUN.exists():
        lines.append(
            "/dev/net/tun is not there, which links between regions need: modprobe tun; in a "
            "container, start it with --device /dev/net/tun"
        )
    elif os.geteuid() == 0 and not os.access(TUN, os.R_OK | os.W_OK):
        lines.append("/dev/net/tun cannot be opened: give this container the device")
    return tuple(lines)


def _has_capabilities() -> bool:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            held = int(line.split()[1], 16)
            return bool(held >> _CAP_NET_ADMIN & 1 and held >> _CAP_SYS_ADMIN & 1)
    return False


def require() -> None:
    """An InputError with everything that is missing."""
    lacking = missing()
    if lacking:
        raise InputError(*(f"cannot emulate a cluster here: {line}" for line in lacking))


def program(module: str, *arguments: str) -> tuple[str, ...]:
    """The command line of a program of this room, such as `relay`.

    hetplan is found where this process has it, and nothing in the folder in which the user stands
    (-P); the environment stays as it is, for a command that the program becomes.
    """
    package = str(Path(__file__).resolve().parents[2])
    return (sys.executable, "-P", "-c", _BOOT, package, f"hetplan.emulation.{module}", *arguments)


def batch(tool_name: str, lines: Sequence[str], *, lock: int, namespace: str = "") -> None:
    """Have `ip` or `tc` do these lines, in a namespace. A HetplanError shows what it says.

    The program holds the lock as well, and is in a session of its own: a Ctrl-C lets it finish.
    """
    if not lines:
        return
    where = ("-n", namespace) if namespace else ()
    try:
        done = subprocess.run(
            (tool(tool_name), *where, "-batch", "-"),
            input="\n".join(lines) + "\n",
            text=True,
            capture_output=True,
            check=False,
            pass_fds=(lock,),
            start_new_session=True,
            timeout=TOOL_SECONDS,
        )
    except subprocess.TimeoutExpired:
        raise HetplanError(f"{tool_name} was not done after {TOOL_SECONDS:g} s") from None
    if done.returncode:
        raise HetplanError(_explained(tool_name, lines, done.stderr))


def _explained(tool_name: str, lines: Sequence[str], stderr: str) -> str:
    output = " ".join(stderr.split()) or "no reason given"
    text = f"{tool_name} failed: {output}"
    number = stderr.rsplit(":", 1)[-1].strip()
    if "Command failed -:" in stderr and number.isdigit() and 0 < int(number) <= len(lines):
        text += f" ({lines[int(number) - 1]})"
    if "qdisc kind is unknown" in stderr:
        text += "; this kernel has no tbf queue (CONFIG_NET_SCH_TBF): modprobe sch_tbf"
    if "Operation not permitted" in stderr:
        text += "; this user may not make network namespaces here"
    return text
