# ruff: noqa: UP006, UP035, UP045
"""How do hosts reach each other: ports, round trips, rates? Over plain sockets.

A part of check.py. A host that is checked answers on a port of its own (`Answers`); connections
begin with one line, `hetplan-check TOKEN VERB WORDS`, and one with another token is closed:

    echo                what comes is sent back
    sink WARM SECONDS   what comes is counted for so long, of which the first WARM seconds are left
                        out; the answer is a line with the rate
    join NAME           the host takes part in a check (check.py, on the first host)
"""

import contextlib
import errno
import json
import select
import socket
import statistics
import threading
import time
from typing import Any, Callable, Dict, List, Optional, Tuple

if __package__:
    from .check_report import is_report
else:
    from check_report import is_report  # type: ignore

MAGIC = "hetplan-check"
MAX_LINE_LENGTH = 512
HELLO_SECONDS = 10.0
"""A connection that has not said what it wants by then is closed."""
PAUSE_SECONDS = 0.2
REPORT_SECONDS = 60.0
"""From a host's name to its report."""
ECHO_BYTES = 64
ECHOES, WARM_ECHOES = 21, 3
CHUNK = bytes(256 * 1024)
RATE_SECONDS = 3.0
WARM_SHARE = 1.0 / 3.0
"""Connections begin slowly: so much of the time is not counted (a choice; TCP doubles its window
every round trip, so a second is enough up to 100 ms)."""
TOLERANCE = 0.2
"""Measured figures within this part of the cluster file's are as expected."""
SOCKET_SECONDS = 200e-6
"""What two operating systems add to a round trip; below it nothing is said about latency."""


class Meter:
    """Rate of what comes once the beginning is over, over no less time than was asked for."""

    def __init__(self, warm: float, seconds: float) -> None:
        self.warm, self.seconds = warm, seconds
        self.begun = self.counted_from = self.last = -1.0
        self.count = 0

    def add(self, count: int, now: float) -> bool:
        """Count what has come; whether that is enough."""
        if self.begun < 0:
            self.begun = now
        if self.counted_from < 0:
            if now - self.begun >= self.warm:
                # What comes from now on is counted: this piece came before.
                self.counted_from = self.last = now
            return False
        self.count += count
        self.last = now
        # What waited while a reader was held up would make the short rest of the time a fast path.
        return now - self.counted_from >= self.seconds - self.warm

    def rate(self) -> float:
        """Bytes per second; 0 where too little came."""
        passed = self.last - self.counted_from
        return self.count / passed if self.counted_from >= 0 and passed > 0 else 0.0


class Answers:
    """Answers connections on a port, each in a thread of its own, until it is closed."""

    def __init__(
        self,
        port: int,
        token: str,
        join: Optional[Callable[[str, socket.socket], None]] = None,
        address: str = "",
    ) -> None:
        self.token, self._join = token, join
        self._listening = _listen(address, port)
        self.port = self._listening.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Accept nothing more."""
        # Wakes the thread that waits in accept, which closing alone does not.
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listening.accept()
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ECONNABORTED):
                    return
                time.sleep(PAUSE_SECONDS)  # until another connection is closed
                continue
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        try:
            connection.settimeout(HELLO_SECONDS)
            words = read_line(connection).split(" ")
            if words[:2] != [MAGIC, self.token] or len(words) < 3:
                return
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if words[2] == "echo":
                _echo(connection)
            elif words[2] == "sink" and len(words) == 5:
                _sink(connection, float(words[3]), float(words[4]))
            elif words[2] == "join" and len(words) == 4 and self._join is not None:
                self._join(words[3], connection)
        except (OSError, ValueError):
            pass
        finally:
            connection.close()


def _listen(address: str, port: int) -> socket.socket:
    """A socket that listens on both kinds of addresses where the system has both."""
    kinds = [(socket.AF_INET, address)]
    if not address and socket.has_ipv6:
        kinds.insert(0, (socket.AF_INET6, "::"))
    problem = None
    for family, where in kinds:
        listening = socket.socket(family, socket.SOCK_STREAM)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            listening.bind((where, port))
            listening.listen(128)
            return listening
        except OSError as error:
            listening.close()
            problem = error
            if error.errno == errno.EADDRINUSE:
                break
    raise problem if problem is not None else OSError("no address")


def read_line(connection: socket.socket, longest: int = MAX_LINE_LENGTH) -> str:
    """The next line, without what follows it; ValueError where there is none."""
    text = b""
    while not text.endswith(b"\n"):
        piece = connection.recv(1)
        if not piece or len(text) >= longest:
            raise ValueError("no line")
        text += piece
    return text[:-1].decode("utf-8", "replace")


def _echo(connection: socket.socket) -> None:
    while True:
        piece = connection.recv(ECHO_BYTES)
        if not piece:
            return
        connection.sendall(piece)


def _sink(connection: socket.socket, warm: float, seconds: float) -> None:
    meter = Meter(warm, seconds)
    while True:
        piece = connection.recv(1 << 20)
        if not piece or meter.add(len(piece), time.monotonic()):
            break
    connection.sendall((f"{meter.rate()!r}\n").encode())
    # The sender's last pieces are on their way: a close now would cut off the answer.
    while piece:
        piece = connection.recv(1 << 20)


def opened(
    address: str, port: int, token: str, words: str, seconds: float = HELLO_SECONDS
) -> socket.socket:
    """A connection that has said what it wants."""
    connection = socket.create_connection((address, port), timeout=seconds)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.sendall((f"{MAGIC} {token} {words}\n").encode())
    return connection


def round_trip(
    address: str, port: int, token: str, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Seconds there and back: the median of several; OSError where there is no answer."""
    connection = opened(address, port, token, "echo")
    try:
        times = []
        for _ in range(WARM_ECHOES + ECHOES):
            begin = clock()
            connection.sendall(bytes(ECHO_BYTES))
            left = ECHO_BYTES
            while left:
                piece = connection.recv(left)
                if not piece:
                    raise OSError(errno.ECONNRESET, "closed: another program answers there")
                left -= len(piece)
            times.append(clock() - begin)
        return statistics.median(times[WARM_ECHOES:])
    finally:
        connection.close()


def rate(
    address: str, port: int, token: str, streams: int = 1, seconds: float = RATE_SECONDS
) -> float:
    """Bytes per second over so many connections at one time; OSError where one breaks."""
    found: List[float] = []
    problems: List[OSError] = []

    def send() -> None:
        try:
            found.append(_sent(address, port, token, seconds))
        except OSError as error:
            problems.append(error)

    threads = [threading.Thread(target=send, daemon=True) for _ in range(max(1, streams))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if problems:
        raise problems[0]
    return sum(found)


def _sent(address: str, port: int, token: str, seconds: float) -> float:
    """Send until the other side has counted enough; its rate."""
    words = f"sink {seconds * WARM_SHARE!r} {seconds!r}"
    connection = opened(address, port, token, words)
    try:
        limit = time.monotonic() + seconds + HELLO_SECONDS
        while time.monotonic() < limit:
            answered, free, _ = select.select([connection], [connection], [], HELLO_SECONDS)
            if answered:
                return float(read_line(connection))
            if free:
                connection.send(CHUNK)
        raise OSError(errno.ETIMEDOUT, "no rate was told in %.0f s" % (seconds + HELLO_SECONDS))
    except ValueError as error:
        raise OSError(errno.ECONNRESET, "closed: another program answers there") from error
    finally:
        connection.close()


def probe(pair: Dict[str, Any], receiver: Dict[str, Any], token: str, seconds: float) -> Any:
    """Round trip and rate to a host that answers: the pair with what was measured, or why not."""
    where = (receiver["address"], receiver["first_port"], token)
    measured: Dict[str, Any] = {"sender": pair["sender"], "receiver": pair["receiver"]}
    try:
        measured["round_trip_seconds"] = round_trip(*where)
        measured["bandwidth_bytes_per_second"] = rate(*where, pair["streams"], seconds)
    except (OSError, UnicodeError) as error:
        measured["problem"] = f"{where[0]} port {where[1]}: {reason(error)}"
    return measured


def reason(error: Exception) -> str:
    """What a failed connection means."""
    number = getattr(error, "errno", None)
    if isinstance(error, socket.timeout) or number == errno.ETIMEDOUT:
        return "no answer in time: a firewall drops it, or no route"
    if number == errno.ECONNREFUSED:
        return "refused: nothing listens there, or a firewall refuses it"
    if isinstance(error, (socket.gaierror, UnicodeError)):
        return "the name has no address here"
    return str(error) or type(error).__name__


def judged(pair: Dict[str, Any], measured: Dict[str, Any]) -> Tuple[str, str]:
    """(status, words) of a measured pair beside what the plan was made with."""
    if "problem" in measured:
        return "fail", measured["problem"]
    trip, wanted_trip = measured["round_trip_seconds"], pair["round_trip_seconds"]
    speed, wanted = measured["bandwidth_bytes_per_second"], pair["bandwidth_bytes_per_second"]
    if not pair["comparable"]:
        return "ok", "over sockets, which the devices' own library does not use: not compared"
    status, words = "ok", []
    if speed < wanted * (1 - TOLERANCE):
        status = "fail"
        words.append("the rate is %.0f %% of the cluster file's" % (100 * speed / wanted))
    elif speed > wanted * (1 + TOLERANCE):
        status = "note"
        words.append("the rate is %.1f times the cluster file's" % (speed / wanted))
    if trip > wanted_trip * (1 + TOLERANCE) + SOCKET_SECONDS:
        status = "fail"
        words.append("the round trip is longer than the cluster file's")
    elif trip < wanted_trip * (1 - TOLERANCE) - SOCKET_SECONDS:
        status = "note" if status == "ok" else status
        words.append("the round trip is shorter than the cluster file's")
    return status, "; ".join(words) or "as in the cluster file"


# ---- one host that asks, and others that answer


class Guest:
    """A host that takes part, as the first host sees it."""

    def __init__(self, name: str, connection: socket.socket) -> None:
        self.name, self.connection = name, connection
        self.stream = connection.makefile("rwb")
        self.report = self.answer()
        if not is_report(self.report, name):
            raise ValueError("no report")
        self.over = threading.Event()

    def answer(self) -> Any:
        """Its next message; OSError where it is gone."""
        return read_message(self.stream)

    def ask(self, question: Any, seconds: float) -> Any:
        """What it answers within so many seconds; OSError where it is gone."""
        self.connection.settimeout(seconds)
        write_message(self.stream, question)
        return self.answer()


class Meeting:
    """The first host's view of all others."""

    def __init__(self, names: List[str]) -> None:
        self._awaited = set(names)
        self._changed = threading.Condition()
        self.guests: Dict[str, Guest] = {}

    def join(self, name: str, connection: socket.socket) -> None:
        """A host has come; returns when the check is over."""
        # It looks at the rendezvous first, which a firewall may let wait.
        connection.settimeout(REPORT_SECONDS)
        guest = Guest(name, connection)
        with self._changed:
            known = name in self._awaited and name not in self.guests
            if known:
                # It knows from now on that this is the first host, which may take long to ask.
                write_message(guest.stream, {"do": "welcome"})
                self.guests[name] = guest
                self._changed.notify_all()
        if known:
            guest.over.wait()
        else:
            write_message(guest.stream, {"do": "refused", "host": name})

    def wait(self, seconds: float) -> List[str]:
        """Names of those that have not come by then."""
        limit = time.monotonic() + seconds
        with self._changed:
            while self._awaited - set(self.guests):
                left = limit - time.monotonic()
                if left <= 0:
                    break
                self._changed.wait(left)
            return sorted(self._awaited - set(self.guests))

    def end(self, report: Any) -> None:
        """Tell everybody and let go."""
        for guest in self.guests.values():
            with contextlib.suppress(OSError):
                write_message(guest.stream, {"do": "end", "report": report})
            guest.over.set()


def clock_offset(guest: Guest, clock: Callable[[], float] = time.time) -> float:
    """Seconds by which the host's clock is ahead: that of the quickest of five questions."""
    best: Optional[Tuple[float, float]] = None
    for _ in range(5):
        begin = clock()
        there = float(guest.ask({"do": "clock"}, HELLO_SECONDS))
        end = clock()
        if best is None or end - begin < best[0]:
            best = (end - begin, there - (begin + end) / 2)
    return best[1] if best else 0.0


def write_message(stream: Any, value: Any) -> None:
    """One line of JSON."""
    stream.write(json.dumps(value).encode() + b"\n")
    stream.flush()


def read_message(stream: Any) -> Any:
    """The next line of JSON; OSError where there is none."""
    line = stream.readline(1 << 24)
    if not line.endswith(b"\n"):
        raise OSError(errno.ECONNRESET, "the other host went away")
    return json.loads(line.decode("utf-8"))
