"""Network namespaces: what is in them, and how a process gets into one.

Linux only; the system calls that Python 3.11 does not have go through the C library
(`setns`, `unshare`, `mount`, `prctl`: their manual pages, section 2).
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Thread

FOLDER = Path("/run/netns")
"""Where `ip netns` keeps the names of namespaces."""
CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWNET = 0x20000, 0x4000000, 0x40000000
MS_BIND, MS_MOVE, MS_REC, MS_SLAVE = 0x1000, 0x2000, 0x4000, 0x80000
PR_SET_PDEATHSIG = 1


def _call(function: str, *arguments: object) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    if getattr(library, function)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{function}: {os.strerror(number)}")


def path_of(namespace: str) -> Path:
    """The file of the namespace of this name."""
    return FOLDER / namespace


def names() -> tuple[str, ...]:
    """Every namespace that has a name."""
    try:
        return tuple(sorted(os.listdir(FOLDER)))
    except FileNotFoundError:
        return ()


def enter_network(path: str | Path) -> None:
    """Put the calling thread into the network namespace of this file."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _call("setns", ctypes.c_int(handle), ctypes.c_int(CLONE_NEWNET))
    finally:
        os.close(handle)


def unshare(flags: int) -> None:
    """Give the calling thread namespaces of its own."""
    _call("unshare", ctypes.c_int(flags))


def mount(source: str, target: str, kind: str = "", flags: int = 0) -> None:
    """Mount, bind or change a mount."""
    _call(
        "mount",
        ctypes.c_char_p(source.encode()),
        ctypes.c_char_p(target.encode()),
        ctypes.c_char_p(kind.encode()) if kind else None,
        ctypes.c_ulong(flags),
        None,
    )


def die_with_parent(parent: int, number: signal.Signals = signal.SIGTERM) -> None:
    """Have the calling process signalled when its parent ends, or now if it has ended."""
    _call("prctl", ctypes.c_int(PR_SET_PDEATHSIG), ctypes.c_ulong(number), 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


def inside(namespace: str, function: Callable[[], None]) -> None:
    """Call the function in the network namespace of this name; this thread stays where it is."""
    errors: list[BaseException] = []

    def run() -> None:
        with open("/proc/thread-self/ns/net") as own:
            try:
                enter_network(path_of(namespace))
                function()
            except BaseException as error:
                errors.append(error)
            finally:
                # The kernel may list the thread for a moment after it was joined: whoever ends the
                # processes of a namespace must not find this process there.
                _call("setns", ctypes.c_int(own.fileno()), ctypes.c_int(CLONE_NEWNET))

    thread = Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


def processes_in(inodes: Collection[int]) -> tuple[int, ...]:
    """Processes that have a thread in one of the network namespaces of these inode numbers."""
    processes = (int(entry) for entry in os.listdir("/proc") if entry.isdigit())
    return tuple(number for number in processes if is_in(number, inodes))


def is_in(process: int, inodes: Collection[int]) -> bool:
    """Whether a thread of the process is in one of these namespaces."""
    with suppress(OSError):  # it may end at any moment
        for task in os.listdir(f"/proc/{process}/task"):
            if os.stat(f"/proc/{process}/task/{task}/ns/net").st_ino in inodes:
                return True
    return False


def end_processes(
    inodes: Collection[int], *, grace_seconds: float, limit_seconds: float
) -> tuple[int, ...]:
    """Send SIGTERM, then SIGKILL, to every process in these namespaces; those that are left."""
    signalled: set[int] = set()
    began = time.monotonic()
    while left := processes_in(inodes):
        now = time.monotonic() - began
        if now > limit_seconds:
            return left
        handles = []
        for process in left:
            force = now > grace_seconds
            if force or process not in signalled:
                number = signal.SIGKILL if force else signal.SIGTERM
                _signal_if_inside(process, inodes, number)
                signalled.add(process)
            with suppress(OSError):
                handles.append(os.pidfd_open(process))
        _wait_for_one(handles, seconds=0.1)
    return ()


def _signal_if_inside(process: int, inodes: Collection[int], number: int) -> None:
    """Signal the process, unless it has left the namespaces or its number is another's by now."""
    with suppress(OSError):
        handle = os.pidfd_open(process)
        try:
            if is_in(process, inodes):
                signal.pidfd_send_signal(handle, number)
        finally:
            os.close(handle)


def _wait_for_one(handles: Sequence[int], *, seconds: float) -> None:
    poll = select.poll()
    for handle in handles:
        poll.register(handle, select.POLLIN)
    poll.poll(seconds * 1000)
    for handle in handles:
        os.close(handle)
