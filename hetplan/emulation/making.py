"""Bring an emulation up and take it down, so that nothing is ever left behind.

Everything that will be made is written down first, and every name in it follows from the
emulation's name; so `remove` finds what there is after an interruption at any moment, also after
a kill -9, and without the file too. A Ctrl-C while it comes up takes effect between two steps and
removes what was made.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from hetplan.cluster.spec import Cluster
from hetplan.emulation import namespaces, recipe, state
from hetplan.emulation.layout import lay_out
from hetplan.emulation.relay import COUNTERS_PER_LINE
from hetplan.emulation.tools import batch, program, require
from hetplan.emulation.values import NAMESPACE_PREFIX, Emulation, check_name, key_of
from hetplan.errors import HetplanError, InputError

RELAY_SECONDS = 20.0
"""For the relay to open its TAPs, on a busy machine."""
GRACE_SECONDS, LIMIT_SECONDS = 2.0, 10.0
"""For processes on emulated hosts: from SIGTERM to SIGKILL, and until all must be gone."""
STEPS = ("folder", "written", "namespaces", "fabric", "hosts", "queues", "relay", "taps", "up")
"""What `make` tells as it goes on, in this order; `hosts` once per host."""

OnStep = Callable[[str], None]


def make(
    cluster: Cluster, *, name: str, file: str = "", on_step: OnStep | None = None
) -> Emulation:
    """Bring the cluster up under this name.

    InputError where the machine or user cannot (`hetplan.emulation.tools.missing`), the cluster
    cannot be emulated, or the name is taken; what an interrupted attempt left is removed first.
    After any failure nothing is left. `on_step` is called between steps; it may raise.
    """
    # Its faults come before those of the machine.
    emulation = lay_out(cluster, name=name, file=file)
    require()
    tell = on_step or (lambda step: None)
    with (
        _interrupts_between_steps() as check,
        state.locked(key_of(name), create=True, while_waiting=check) as lock,
    ):
        if state.is_up(name):
            raise InputError(
                f"emulation {name} is up already; remove it (`hetplan emulate down --name {name}`) "
                "or give another --name"
            )

        def step(what: str) -> None:
            tell(what)
            check()

        try:
            step("folder")
            _remove_made(key_of(name), lock)  # of an interrupted attempt
            _build(emulation, lock, step)
        except BaseException:
            _remove_all(key_of(name), lock)
            raise
    return emulation


def _build(emulation: Emulation, lock: int, step: OnStep) -> None:
    folder = state.folder_of(emulation.name)
    _write(emulation, folder)
    step("written")
    batch("ip", recipe.namespace_lines(emulation), lock=lock)
    step("namespaces")
    namespaces.inside(emulation.fabric, lambda: _set(recipe.fabric_settings()))
    batch("ip", recipe.fabric_lines(emulation), lock=lock, namespace=emulation.fabric)
    step("fabric")
    values = recipe.settings(emulation)
    for host in emulation.hosts:
        namespaces.inside(host.namespace, lambda: _set(values))
        batch("ip", recipe.host_lines(emulation, host), lock=lock, namespace=host.namespace)
        batch("tc", recipe.host_queue_lines(host), lock=lock, namespace=host.namespace)
        step("hosts")
    batch("tc", recipe.fabric_queue_lines(emulation), lock=lock, namespace=emulation.fabric)
    step("queues")
    if emulation.pipes:
        _start_relay(emulation, folder, lock)
        step("relay")
        batch("ip", recipe.tap_lines(emulation), lock=lock, namespace=emulation.fabric)
    step("taps")
    state.mark_up(emulation)
    step("up")


def _write(emulation: Emulation, folder: Path) -> None:
    state.write(emulation)
    (folder / "sys").mkdir(exist_ok=True)
    (folder / "hosts").write_text(recipe.hosts_text(emulation), encoding="utf-8")
    (folder / "places.json").write_text(json.dumps(recipe.places(emulation)), encoding="utf-8")
    (folder / "relay.json").write_text(json.dumps(recipe.relay_config(emulation)))
    counters = max(1, 2 * len(emulation.pipes) * COUNTERS_PER_LINE)
    (folder / "relay.counters").write_bytes(bytes(8 * counters))


def _set(values: Sequence[tuple[str, str]]) -> None:
    """Write settings below /proc/sys/net of the namespace in which the calling thread is."""
    for file, text in values:
        # A kernel without IPv6 has none to switch off.
        if file.startswith("ipv6/") and not Path("/proc/sys/net/ipv6").is_dir():
            continue
        Path("/proc/sys/net", file).write_text(text)


def _start_relay(emulation: Emulation, folder: Path, lock: int) -> None:
    """Start the relay and wait until its TAPs are there."""
    log = folder / "relay.log"
    with log.open("wb") as errors:
        relay = subprocess.Popen(
            program(
                "relay",
                str(folder / "relay.json"),
                str(folder / "relay.counters"),
                str(namespaces.path_of(emulation.fabric)),
                str(lock),
            ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            pass_fds=(lock,),
            start_new_session=True,
        )
    stdout = relay.stdout
    assert stdout is not None
    with stdout:
        ready = select.select([stdout], (), (), RELAY_SECONDS)[0] and stdout.readline()
    if ready != b"ready\n":
        relay.kill()
        relay.wait()
        output = " ".join(log.read_text(errors="replace").split()[-40:])
        raise HetplanError(f"the relay of the links between regions did not start: {output}")
    # It outlives this process; Popen would complain of a child that nobody waited for.
    relay.returncode = 0


@contextmanager
def _interrupts_between_steps() -> Iterator[Callable[[], None]]:
    """Ctrl-C and SIGTERM wait for the end of a step: a function that raises what has come.

    In other threads than the main one, signals do not arrive.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    came: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        came.append(number)

    def check() -> None:
        if came:
            came.clear()
            raise KeyboardInterrupt

    before = [
        (number, signal.getsignal(number))
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    ]
    for number, handler in before:
        if handler not in (signal.SIG_IGN, None):
            signal.signal(number, note)
    try:
        yield check
    finally:
        for number, handler in before:
            if handler is not None:
                signal.signal(number, handler)
    if came:
        raise KeyboardInterrupt


def remove(name: str) -> tuple[str, ...]:
    """Remove all that there is of the emulation of this name, up or half made.

    The namespaces that were removed; none is no fault. Processes on its hosts are ended. A second
    Ctrl-C waits until it is done.
    """
    require()
    key = key_of(check_name(name))
    with (
        _interrupts_between_steps() as check,
        state.locked(key, create=True, while_waiting=check) as lock,
    ):
        return _remove_all(key, lock)


def remove_every() -> tuple[str, ...]:
    """As `remove`, for every emulation of this machine, also those whose file is gone."""
    require()
    removed: list[str] = []
    for name in [emulation.name for emulation in state.all_written()]:
        removed += remove(name)
    for key in sorted(set(state.written_keys()) | keys_of_namespaces()):
        with _interrupts_between_steps(), state.locked(key, create=True) as lock:
            removed += _remove_all(key, lock)
    return tuple(removed)


def keys_of_namespaces() -> set[str]:
    """Keys of the emulations that have a namespace."""
    return {
        name.removeprefix(NAMESPACE_PREFIX).partition("-")[0]
        for name in namespaces.names()
        if name.startswith(NAMESPACE_PREFIX)
    }


def _remove_all(key: str, lock: int) -> tuple[str, ...]:
    removed = _remove_made(key, lock)
    state.remove_folder(state.FOLDER / key)
    return removed


def _remove_made(key: str, lock: int) -> tuple[str, ...]:
    """End the processes in the emulation's namespaces, then remove those.

    A namespace lives, with its interfaces, as long as a process is in it, so processes go first,
    and are looked for again when nobody can enter any more. The open files keep the numbers of
    the namespaces from being given to others meanwhile.
    """
    names = [name for name in namespaces.names() if name.startswith(f"{NAMESPACE_PREFIX}{key}-")]
    handles = [os.open(namespaces.path_of(name), os.O_RDONLY | os.O_CLOEXEC) for name in names]
    try:
        # A name whose making was interrupted before its mount is an empty file of /run's own, on
        # another device.
        device = os.stat("/proc/self/ns/net").st_dev
        status = [os.fstat(handle) for handle in handles]
        inodes = frozenset(each.st_ino for each in status if each.st_dev == device)
        if namespaces.is_in(os.getpid(), inodes):
            raise InputError("this is a host of the emulation; remove it from outside")
        _end(inodes, GRACE_SECONDS)
        batch("ip", [f"netns delete {name}" for name in names], lock=lock)
        _end(inodes, 0.0)
    finally:
        for handle in handles:
            os.close(handle)
    return tuple(names)


def _end(inodes: frozenset[int], grace_seconds: float) -> None:
    if not inodes:
        return
    left = namespaces.end_processes(
        inodes, grace_seconds=grace_seconds, limit_seconds=LIMIT_SECONDS
    )
    if left:
        raise HetplanError(
            f"processes on emulated hosts do not end: {', '.join(map(str, left))}; the system "
            "waits for them, look at `ps -o pid,stat,wchan,cmd` of them and try again"
        )
