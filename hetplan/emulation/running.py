"""Commands on emulated hosts, on one or on all at once; whom a host reaches; and an emulation for
as long as it is used.

`emulated` brings a cluster up and takes it down when its block ends, however that is: a guard in a
process of its own (this module as the program `running NAME`) does so when this process is killed.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from hetplan.cluster.spec import Cluster
from hetplan.emulation import making, state
from hetplan.emulation.tools import program
from hetplan.emulation.values import Emulation
from hetplan.errors import HetplanError

GRACE_SECONDS = 5.0
"""For commands: from SIGTERM to SIGKILL."""
INTERRUPTED_SECONDS = 1.0
"""For a command that got the same Ctrl-C to end by itself."""

OnLine = Callable[[str, bool, str], None]
"""Host, whether it is of stderr, line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostStatus:
    """How a command ended on a host."""

    host: str
    status: int
    """Exit status; 128 + the signal's number where one ended it."""


def start(
    emulation: Emulation,
    host: str,
    command: Sequence[str],
    *,
    environment: Mapping[str, str] | None = None,
    stdin: int | None = subprocess.DEVNULL,
    stdout: int | None = None,
    stderr: int | None = None,
    own_session: bool = True,
) -> subprocess.Popen[bytes]:
    """The command, started on a host (`HERE`: on the machine itself), in a session of its own.

    It ends with this process (or, as Linux has it, with the thread that called this). The caller
    waits for it; `hetplan.emulation.making.remove` ends it too.
    """
    return subprocess.Popen(
        program("enter", emulation.name, host, str(os.getpid()), *command),
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        env=environment,
        start_new_session=own_session,
    )


def run_on_all(
    name: str, command: Sequence[str], *, on_line: OnLine, end_others: bool = False
) -> tuple[HostStatus, ...]:
    """Run the command on every host at once; how it ended on each, in the hosts' order.

    `on_line` gets each line of its output. `end_others`: the first failure ends it everywhere.
    """
    emulation = state.read_up(name)
    started: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for host in emulation.hosts:
            started[host.name] = start(
                emulation,
                host.name,
                command,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
        _pass_lines(started, on_line, end_others)
        return tuple(
            HostStatus(host=host, status=exit_status(process.wait()))
            for host, process in started.items()
        )
    finally:
        end(tuple(started.values()))
        for process in started.values():
            for stream in (process.stdout, process.stderr):
                if stream is not None:
                    stream.close()


def run_on_one(emulation: Emulation, host: str, command: Sequence[str]) -> int:
    """Run the command on a host, or `HERE`, with this process's streams; its exit status.

    A Ctrl-C at the terminal reaches the command too; one that does not end is ended.
    """
    process = start(emulation, host, command, stdin=None, own_session=False)
    try:
        return exit_status(process.wait())
    except BaseException:
        with suppress(subprocess.TimeoutExpired):
            process.wait(INTERRUPTED_SECONDS)
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_SECONDS)
        process.kill()
        process.wait()
        raise


def reached_from(
    emulation: Emulation,
    host: str,
    addresses: Sequence[str],
    *,
    seconds: float,
    limit_seconds: float,
) -> tuple[str, ...]:
    """The addresses that answer the host in these seconds; a HetplanError where it cannot ask them.

    `limit_seconds`: of the whole, with the start of the program on the host.
    """
    command = program("reach", str(seconds), *addresses)
    process = start(emulation, host, command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        output, errors = process.communicate(timeout=limit_seconds)
    except subprocess.TimeoutExpired:
        raise HetplanError(f"host {host} did not answer in {limit_seconds:g} s") from None
    finally:
        end((process,))
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()
    if process.returncode:
        last = errors.decode(errors="replace").strip().rpartition("\n")[2]
        raise HetplanError(f"host {host} could not ask whom it reaches: {last}")
    return tuple(json.loads(output))


def exit_status(returncode: int) -> int:
    """As shells have it: 128 + the signal's number where one ended the process."""
    return 128 - returncode if returncode < 0 else returncode


def end(
    processes: Sequence[subprocess.Popen[bytes]], *, grace_seconds: float = GRACE_SECONDS
) -> None:
    """End these processes and their sessions, unless all ended well: ask first, then force.

    A process that has ended may have left children: its group is there until the last is gone.
    """
    if all([process.poll() == 0 for process in processes]):
        return
    for number in (signal.SIGTERM, signal.SIGKILL):
        for process in processes:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, number)
        limit = time.monotonic() + grace_seconds
        for process in processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, limit - time.monotonic()))


def _pass_lines(
    started: Mapping[str, subprocess.Popen[bytes]], on_line: OnLine, end_others: bool
) -> None:
    """Pass lines on until all commands have ended and their streams too."""
    selector = selectors.DefaultSelector()
    rest: dict[int, bytes] = {}
    for host, process in started.items():
        for stream, is_error in ((process.stdout, False), (process.stderr, True)):
            assert stream is not None
            os.set_blocking(stream.fileno(), False)
            selector.register(stream, selectors.EVENT_READ, (host, is_error))
            rest[stream.fileno()] = b""
    ended = False
    while selector.get_map():
        for key, _ in selector.select(timeout=0.1):
            host, is_error = key.data
            data = os.read(key.fd, 65536)
            *lines, left = (rest[key.fd] + data).split(b"\n")
            if not data:
                selector.unregister(key.fileobj)
                lines, left = ([left] if left else []), b""
            rest[key.fd] = left
            for line in lines:
                on_line(host, is_error, line.decode(errors="replace"))
        # A process that a command left behind may keep its streams open; it is not waited for.
        over = all([process.poll() is not None for process in started.values()])
        if over and not selector.select(timeout=0):
            break
        if end_others and not ended and any(process.poll() for process in started.values()):
            ended = True
            end(tuple(started.values()))
    selector.close()


_OWNED, _REMOVED = b"o", b"r"
"""What a process tells its guard: that it made the emulation; that it has removed it."""


def main(arguments: list[str]) -> None:
    """Guard the emulation NAME of the process that has the other end of stdin.

    When that process ends without a word that it has removed it, remove it.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    message = b""
    while data := os.read(0, 16):
        message += data
    if _OWNED in message and _REMOVED not in message:
        making.remove(arguments[0])


@contextmanager
def emulated(cluster: Cluster, *, name: str, file: str = "") -> Iterator[Emulation]:
    """The cluster, up for as long as the block runs; errors as `hetplan.emulation.making.make`.

    Removed when the block ends, when it raises, and when this process is killed at any moment.
    """
    guard = subprocess.Popen(
        program("running", name),
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        bufsize=0,
    )
    to_guard = guard.stdin
    assert to_guard is not None
    owned = False

    def tell(step: str) -> None:
        nonlocal owned
        if not owned:
            # The name is free, or was left half made: from here on the guard may remove it.
            owned = True
            to_guard.write(_OWNED)

    try:
        yield making.make(cluster, name=name, file=file, on_step=tell)
    finally:
        try:
            if owned:
                making.remove(name)
            with suppress(BrokenPipeError):
                to_guard.write(_REMOVED)
        finally:
            # Where it could not be removed here, an interruption or an error, the guard tries.
            to_guard.close()
            guard.wait()
