#!/usr/bin/env python3
# ruff: noqa: UP006, UP035, UP041, UP045
"""Have all hosts of a job come? Every host waits here until they have, before torchrun starts.

    barrier.py [--timeout SECONDS] AGENTS PORT TOKEN HOST

AGENTS is the table agents.tsv. The host of its first line listens on PORT; all others connect to
its address. A host that goes away while it waits is missing again; connections that say something
else, or another TOKEN (another job), change nothing. Exit status: 0 all have come, 3 some have not
(they are named), 4 refused by the listening host, 2 called wrongly.

Python 3.6 and its standard library are enough. Each line is a message of at most 512 bytes:

    host:   hetplan-barrier TOKEN NAME     then `here` every few seconds
    first:  wait NAMES | go | no REASON | late NAMES
"""

import argparse
import contextlib
import errno
import resource
import selectors
import socket
import sys
import time
from typing import Dict, List, Optional, Tuple

MAGIC = b"hetplan-barrier"
MAX_LINE_LENGTH = 512
# Times are choices: long beside a round trip around the earth (0.3 s), short beside a queue.
HELLO_SECONDS = 5.0
"""A connection that has not said who it is by then is closed."""
HEARTBEAT_SECONDS = 2.0
SILENCE_SECONDS = 15.0
"""A host that is silent so long is gone: its machine or network stopped without closing."""
NEWS_SECONDS = 30.0
"""Between two lines in the log that say who is missing."""
MAX_NAMED = 20
"""Hosts that one line names."""
PASSED, CALLED_WRONGLY, MISSING, REFUSED = 0, 2, 3, 4


class Guest:
    """One connection to the listening host."""

    def __init__(self, connection: socket.socket, now: float) -> None:
        self.connection = connection
        self.heard = now
        self.text = b""
        self.name = ""


def listed(names: List[str]) -> str:
    """The first names, and how many more there are."""
    more = len(names) - MAX_NAMED
    return ", ".join(names[:MAX_NAMED]) + (f" and {more} more" if more > 0 else "")


def news_line(word: str, names: List[str]) -> bytes:
    """A message to all hosts that have come, short enough for one line."""
    return f"{word} {listed(names)[: MAX_LINE_LENGTH - 100]}\n".encode()


def say(text: str) -> None:
    """A line for whoever reads the host's log."""
    sys.stderr.write(f"hetplan: barrier: {text}\n")
    sys.stderr.flush()


def read_hosts(path: str) -> Tuple[List[str], str]:
    """Names of all hosts, each once, and the address of the first."""
    names: List[str] = []
    address = ""
    with open(path, encoding="utf-8") as table:
        lines = table.read().splitlines()
    for line in lines[1:]:
        row = line.split("\t")
        address = address or row[2]
        names.append(row[1])
    return list(dict.fromkeys(names)), address


class Hall:
    """The listening host: it waits for all others."""

    def __init__(self, hosts: List[str], own: str, port: int, token: str, timeout: float) -> None:
        self.hosts, self.token, self.timeout = hosts, token.encode("ascii"), timeout
        self.known = frozenset(hosts)
        self.selector = selectors.DefaultSelector()
        self.guests: Dict[int, Guest] = {}
        self.present: Dict[str, Optional[Guest]] = {own: None}
        # Port scanners must not use up the file descriptors that hosts need.
        self.most_guests = 2 * len(hosts) + 64
        allow_files(self.most_guests + 16)
        self.door = listening_socket(port)
        self.selector.register(self.door, selectors.EVENT_READ)

    def missing(self) -> List[str]:
        """Hosts that have not come or have gone."""
        return [name for name in self.hosts if name not in self.present]

    def run(self) -> int:
        """The exit status, after all have come or the time is over."""
        start = news = beat = time.monotonic()
        while True:
            now = time.monotonic()
            missing = self.missing()
            if not missing:
                self.send_all(b"go\n")
                self.close()
                say(f"all {len(self.hosts)} hosts have come after {now - start:.0f} s")
                return PASSED
            if now - start >= self.timeout:
                self.send_all(news_line("late", missing))
                self.close()
                return report_missing(missing, len(self.hosts), self.timeout)
            if now - news >= NEWS_SECONDS:
                news = now
                say(f"waiting for {len(missing)} of {len(self.hosts)} hosts: {listed(missing)}")
            if now - beat >= HEARTBEAT_SECONDS:
                beat = now
                self.drop_silent(now)
                self.send_all(news_line("wait", missing))
            rest = self.timeout - (now - start)
            for key, _ in self.selector.select(max(0.0, min(HEARTBEAT_SECONDS, rest))):
                if key.fileobj is self.door:
                    self.let_in()
                elif key.fd in self.guests:
                    self.listen(self.guests[key.fd])

    def let_in(self) -> None:
        """Take a new connection."""
        try:
            connection, _ = self.door.accept()
        except OSError:
            return  # it went away again, or descriptors are used up for now
        if len(self.guests) >= self.most_guests:
            strangers = [guest for guest in self.guests.values() if not guest.name]
            if strangers:
                self.drop(min(strangers, key=lambda guest: guest.heard))
            else:
                connection.close()
                return
        connection.setblocking(False)
        guest = Guest(connection, time.monotonic())
        self.guests[connection.fileno()] = guest
        self.selector.register(connection, selectors.EVENT_READ)

    def listen(self, guest: Guest) -> None:
        """What a connection says."""
        try:
            found = guest.connection.recv(4096)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            found = b""
        if not found:
            self.drop(guest)
            return
        guest.text += found
        while b"\n" in guest.text:
            line, guest.text = guest.text.split(b"\n", 1)
            if guest.name:
                guest.heard = time.monotonic()
            elif not self.welcome(guest, line):
                return
        if len(guest.text) > MAX_LINE_LENGTH:
            self.drop(guest)

    def welcome(self, guest: Guest, line: bytes) -> bool:
        """Whether the first line of a connection is that of a host of this job."""
        words = line.split()
        if len(words) != 3 or words[0] != MAGIC:
            self.drop(guest)
            return False
        name = words[2].decode("utf-8", "replace")
        reason = ""
        if words[1] != self.token:
            reason = "this is another job, or the folder there is of another emission"
        elif name not in self.known:
            reason = "no such host in this job's agents.tsv"
        elif name in self.present:
            reason = "this host has already come and still waits: is it started twice?"
        if reason:
            self.send(guest, f"no {reason}\n".encode())
            self.drop(guest)
            return False
        guest.name, guest.heard = name, time.monotonic()
        self.present[name] = guest
        return True

    def drop_silent(self, now: float) -> None:
        """Close what has said nothing for too long."""
        for guest in list(self.guests.values()):
            if now - guest.heard > (SILENCE_SECONDS if guest.name else HELLO_SECONDS):
                self.drop(guest)

    def drop(self, guest: Guest) -> None:
        """Close a connection; its host, if it was one, is missing again."""
        self.selector.unregister(guest.connection)
        self.guests.pop(guest.connection.fileno(), None)
        guest.connection.close()
        if guest.name and self.present.get(guest.name) is guest:
            del self.present[guest.name]

    def send(self, guest: Guest, line: bytes) -> None:
        """Send a line; what does not fit into the socket's buffer is a dead host's."""
        with contextlib.suppress(OSError):
            guest.connection.send(line)

    def send_all(self, line: bytes) -> None:
        """Send a line to every host that has come."""
        for guest in list(self.guests.values()):
            if guest.name:
                self.send(guest, line)

    def close(self) -> None:
        """Let the last line reach everybody, then close."""
        self.selector.close()
        self.door.close()
        end = time.monotonic() + 5.0
        for guest in self.guests.values():
            with contextlib.suppress(OSError):
                guest.connection.shutdown(socket.SHUT_WR)
        for guest in self.guests.values():
            with contextlib.suppress(OSError):
                # Closing with unread bytes would reset the connection, and the last line with it.
                guest.connection.settimeout(max(0.01, end - time.monotonic()))
                while guest.name and guest.connection.recv(4096):
                    pass
            guest.connection.close()


def allow_files(count: int) -> None:
    """Raise the limit on open files, one of which each connection is: often 1,024 at first."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft == resource.RLIM_INFINITY or soft >= most:
        return
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def listening_socket(port: int) -> socket.socket:
    """A socket on this port of all addresses, of both IP versions where there are two."""
    kinds = [(socket.AF_INET6, "::"), (socket.AF_INET, "0.0.0.0")]
    for family, address in kinds:
        try:
            found = socket.socket(family, socket.SOCK_STREAM)
        except OSError:
            continue  # a kernel without this version
        try:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                found.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            found.bind((address, port))
            found.listen(1024)
            found.setblocking(False)
            return found
        except OSError as error:
            found.close()
            if error.errno == errno.EADDRINUSE or family == socket.AF_INET:
                raise
    raise OSError("no IP")


def report_missing(missing: List[str], hosts: int, timeout: float) -> int:
    """Say who has not come."""
    say(
        f"after {timeout:.0f} s {len(missing)} of {hosts} hosts have not come: {listed(missing)}. "
        "Look at their logs; is the folder there, are they started, do they reach this port?"
    )
    return MISSING


def attend(address: str, port: int, token: str, own: str, timeout: float) -> int:
    """Wait at the listening host for all others; the exit status."""
    end = time.monotonic() + timeout
    reason = "no connection"
    while time.monotonic() < end:
        try:
            connection = socket.create_connection((address, port), timeout=5.0)
        except OSError as error:
            reason = str(error)
            time.sleep(0.5)  # it may not listen yet
            continue
        with connection:
            status, reason = converse(connection, token, own, end)
        if status is not None:
            return status
        time.sleep(0.5)
    say(f"after {timeout:.0f} s: the job's first host, {address} port {port}: {reason}")
    return MISSING


def converse(
    connection: socket.socket, token: str, own: str, end: float
) -> Tuple[Optional[int], str]:
    """(exit status, None where to connect again; why the connection ended)."""
    connection.settimeout(HEARTBEAT_SECONDS)
    text, heard, reason = b"", time.monotonic(), "it says nothing"
    try:
        connection.sendall(b" ".join([MAGIC, token.encode("ascii"), own.encode("utf-8")]) + b"\n")
        # The listening host says when the time is over, and who is missing.
        while time.monotonic() < end + 2 * HEARTBEAT_SECONDS:
            try:
                found = connection.recv(4096)
            except socket.timeout:
                found = None
            if found == b"":
                return None, "it closed the connection"
            heard = time.monotonic() if found else heard
            if time.monotonic() - heard > SILENCE_SECONDS:
                return None, "it is silent"
            text += found or b""
            while b"\n" in text:
                line, text = text.split(b"\n", 1)
                word, _, rest = line.decode("utf-8", "replace").partition(" ")
                if word == "go":
                    return PASSED, ""
                if word == "late":
                    say(f"these hosts have not come in time: {rest}")
                    return MISSING, ""
                if word == "no":
                    say(f"refused by the job's first host: {rest}")
                    return REFUSED, ""
                reason = f"it still waits for {rest}" if word == "wait" else reason
            if len(text) > MAX_LINE_LENGTH:
                return None, "something else answers there"
            connection.sendall(b"here\n")
    except OSError as error:
        return None, str(error)
    return None, reason


def main(words: List[str]) -> int:
    """The exit status for these command-line words."""
    parser = argparse.ArgumentParser(description="Wait until all hosts of a job have come.")
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds")
    parser.add_argument("agents")
    parser.add_argument("port", type=int)
    parser.add_argument("token")
    parser.add_argument("host")
    asked = parser.parse_args(words)
    hosts, address = read_hosts(asked.agents)
    if asked.host not in hosts:
        say(f"{asked.host} is no host of {asked.agents}")
        return CALLED_WRONGLY
    if asked.host != hosts[0]:
        return attend(address, asked.port, asked.token, asked.host, asked.timeout)
    try:
        hall = Hall(hosts, asked.host, asked.port, asked.token, asked.timeout)
    except OSError as error:
        say(f"cannot listen on port {asked.port}: {error}; does a job still run here?")
        return REFUSED
    return hall.run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
