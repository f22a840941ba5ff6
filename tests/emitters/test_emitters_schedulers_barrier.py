"""The emitted barrier, with processes on loopback: who is missing is named, others do no harm."""

from __future__ import annotations

import ast
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time

import pytest
from scheduler_sheets import emitted, free_port, loopback

from hetplan.emitters.schedulers.barrier_program import SILENCE_SECONDS, Hall

TOKEN = "0123456789abcdef"
SOON = 30.0
"""Seconds after which a test gives up; none of them needs as many."""


@contextlib.contextmanager
def room_of(tmp_path, hosts):
    """A way to start hosts of a folder with the tables of so many, and its port."""
    port = free_port()
    folder = emitted(tmp_path / "launch", loopback(port, *[1] * hosts))
    started: list[subprocess.Popen[str]] = []

    def start(name: str, *, timeout: float = SOON, token: str = TOKEN, python=sys.executable):
        words = [python, str(folder / "barrier.py"), "--timeout", str(timeout)]
        words += [str(folder / "agents.tsv"), str(port), token, name]
        started.append(subprocess.Popen(words, stderr=subprocess.PIPE, text=True))
        return started[-1]

    yield start, port
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def room(tmp_path):
    with room_of(tmp_path, 3) as found:
        yield found


def ended(*processes: subprocess.Popen[str]) -> list[tuple[int, str]]:
    """(exit status, what it said) of each."""
    return [
        (process.returncode, said)
        for process in processes
        for said in [process.communicate(timeout=SOON)[1]]
    ]


def connected(port: int) -> socket.socket:
    """A connection to the barrier, as soon as it listens."""
    end = time.monotonic() + SOON
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), timeout=SOON)
        except OSError:
            assert time.monotonic() < end
            time.sleep(0.02)


def hello(port: int, text: bytes) -> tuple[socket.socket, bytes]:
    """A connection that says this, and the first that it hears; nothing: it was closed."""
    connection = connected(port)
    connection.sendall(text)
    with contextlib.suppress(ConnectionResetError):
        return connection, connection.recv(4096)
    return connection, b""


def hear_until(connection: socket.socket, end: bytes) -> None:
    heard = b""
    while not heard.endswith(end):
        heard = connection.recv(4096)
        assert heard, "closed"
        assert heard.endswith(end) or b"go" not in heard


def test_all_pass_when_all_have_come_in_any_order(room):
    start, _ = room
    early = start("gamma")
    first = start("alpha")
    late = start("beta")
    for status, said in ended(early, late, first):
        assert status == 0, said
    assert first.returncode == 0


def test_a_host_that_does_not_come_is_named_on_every_host(room):
    start, port = room
    first = start("alpha", timeout=4)
    connected(port).close()
    waiting = start("gamma", timeout=SOON)
    for status, said in ended(first, waiting):
        assert status == 3
        assert "beta" in said
        assert "gamma" not in said.replace("not come: beta", "")


def test_no_first_host_is_said_as_such(room):
    start, port = room
    ((status, said),) = ended(start("beta", timeout=1.5))
    assert status == 3
    assert f"127.0.0.1 port {port}" in said


def test_garbage_scanners_and_slow_talkers_do_no_harm(room):
    start, port = room
    first = start("alpha")
    silent = [connected(port) for _ in range(40)]
    for text in (b"GET / HTTP/1.1\r\n\r\n", b"\0\xff\n", b"\n\n\n", os.urandom(4000) + b"\n"):
        connection, heard = hello(port, text)
        assert heard == b""
        connection.close()
    half = connected(port)
    half.sendall(f"hetplan-barrier {TOKEN} beta".encode())  # no end of line: nobody yet
    assert all(status == 0 for status, _ in ended(start("beta"), start("gamma"), first))
    for each in (*silent, half):
        each.close()


def test_another_job_a_stranger_and_a_second_of_a_host_are_refused(room):
    start, port = room
    first = start("alpha")
    other, heard = hello(port, b"hetplan-barrier ffffffffffffffff beta\n")
    assert heard.startswith(b"no this is another job")
    stranger, heard = hello(port, f"hetplan-barrier {TOKEN} delta\n".encode())
    assert heard.startswith(b"no no such host")
    waiting, heard = hello(port, f"hetplan-barrier {TOKEN} beta\n".encode())
    assert heard == b"wait gamma\n"
    ((status, said),) = ended(start("beta"))
    assert status == 4
    assert "already come" in said
    ((status, said),) = ended(start("gamma", token="ffffffffffffffff"))
    assert status == 4
    assert "another job" in said
    last = start("gamma")
    hear_until(waiting, b"go\n")
    waiting.close()
    assert [status for status, _ in ended(last, first)] == [0, 0]
    for each in (other, stranger):
        each.close()


def test_a_waiting_host_that_is_killed_is_missing_again_and_may_come_back(tmp_path):
    with room_of(tmp_path, 4) as (start, port):
        first, killed = start("alpha"), start("beta")
        delta = connected(port)
        delta.sendall(f"hetplan-barrier {TOKEN} delta\n".encode())
        hear_until(delta, b"wait gamma\n")
        os.kill(killed.pid, signal.SIGKILL)
        hear_until(delta, b"wait beta, gamma\n")
        rest = [start("gamma"), start("beta")]
        hear_until(delta, b"go\n")
        delta.close()
        assert [status for status, _ in ended(first, *rest)] == [0, 0, 0]


def test_a_host_that_falls_silent_is_missing_again():
    hall = Hall(["alpha", "beta"], "alpha", free_port(), TOKEN, SOON)
    port = hall.door.getsockname()[1]
    guest, stranger = connected(port), connected(port)
    guest.sendall(f"hetplan-barrier {TOKEN} beta\n".encode())
    while hall.missing():
        for key, _ in hall.selector.select(SOON):
            if key.fileobj is hall.door:
                hall.let_in()
            else:
                hall.listen(hall.guests[key.fd])
    now = time.monotonic()
    hall.drop_silent(now)
    assert hall.missing() == []
    hall.drop_silent(now + SILENCE_SECONDS + 1)
    assert hall.missing() == ["beta"]
    assert not hall.guests
    hall.close()
    guest.close()
    stranger.close()


def test_a_second_first_host_finds_the_port_taken(room):
    start, port = room
    first = start("alpha")
    connected(port).close()
    ((status, said),) = ended(start("alpha"))
    assert status == 4
    assert f"port {port}" in said
    first.terminate()


def test_a_name_that_is_no_host_is_called_wrongly(room):
    start, _ = room
    ((status, said),) = ended(start("delta"))
    assert status == 2
    assert "delta" in said


def test_it_runs_with_the_oldest_python_that_hosts_have(room):
    found = [shutil.which("python3.6"), "/usr/bin/python3.6"]
    found += [os.path.expanduser("~/.pyenv/versions/3.6.15/bin/python")]
    usable = [
        each
        for each in found
        if each and os.path.exists(each) and not subprocess.run([each, "-c", ""]).returncode
    ]
    if not usable:
        pytest.skip("no Python 3.6 here; its grammar is checked in another test")
    start, _ = room
    processes = [start(name, python=usable[0]) for name in ("alpha", "beta", "gamma")]
    assert [status for status, _ in ended(*processes)] == [0, 0, 0]


def test_its_grammar_and_modules_are_those_of_python_3_6(tmp_path):
    text = (emitted(tmp_path, loopback(29500, 1)) / "barrier.py").read_text()
    tree = ast.parse(text, feature_version=(3, 6))
    modules = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    assert modules <= {
        "argparse",
        "contextlib",
        "errno",
        "resource",
        "selectors",
        "socket",
        "sys",
        "time",
    }


def test_more_hosts_come_than_files_may_be_open_at_first(tmp_path):
    port = free_port()
    folder = emitted(tmp_path / "launch", loopback(port, 1))
    names = [f"n{number}" for number in range(60)]
    rows = (f"{at}\t{name}\t127.0.0.1\tlab\t{at}\t1\t0\n" for at, name in enumerate(names))
    (folder / "agents.tsv").write_text("node_rank\thost\taddress\n" + "".join(rows))
    words = [sys.executable, str(folder / "barrier.py"), "--timeout", str(SOON)]
    words += [str(folder / "agents.tsv"), str(port), TOKEN, names[0]]
    first = subprocess.Popen(
        ["bash", "-c", 'ulimit -Sn 40; exec "$@"', "bash", *words],
        stderr=subprocess.PIPE,
        text=True,
    )
    guests = []
    try:
        for name in names[1:]:
            guest = connected(port)
            guest.sendall(f"hetplan-barrier {TOKEN} {name}\n".encode())
            guests.append(guest)
        assert ended(first)[0][0] == 0
    finally:
        first.kill()
        first.communicate()
        for guest in guests:
            guest.close()
