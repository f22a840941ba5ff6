#!/usr/bin/env python3
# ruff: noqa: UP006, UP035, UP045, I001
"""Are the hosts of this job ready, and is the network between them what the plan was made with?

    check.py [--host NAME] [--timeout SECONDS] [--seconds SECONDS] [--json]
    check.py --alone           this host only, without the others
    check.py serve             answer probes of other hosts until Ctrl-C
    check.py probe HOST        round trip and rate from here to a host that serves

Run it on every host at one time (start-all.sh --check does it). Each looks at itself; then the
first host, that of rank 0, hears all others on the barrier's port, asks them to measure the links
that the plan sends over, one after the other, and prints what it found and what to mend. Which
host this is: --host, HETPLAN_HOST, SLURMD_NODENAME or what the system calls it.

Exit status: 0 ready, 1 something must be mended, 2 called wrongly, 130 interrupted. What it needs
to know stands in check.json beside it. Python 3.6 and its standard library are enough.
"""

import argparse
import json
import os
import resource
import socket
import sys
import time
import uuid
from typing import Any, Dict, List, Optional
import contextlib

if __package__:
    from .check_devices import finding
    from .check_host import check_host
    from .check_network import RATE_SECONDS, Answers, Guest, Meeting, clock_offset, judged, opened
    from .check_network import probe, read_message, reason, round_trip, write_message
    from .check_report import combined, figures, part_of, report_text, some
else:
    from check_devices import finding  # type: ignore
    from check_host import check_host  # type: ignore
    from check_network import RATE_SECONDS, Answers, Guest, Meeting, clock_offset  # type: ignore
    from check_network import judged, opened, probe, read_message, reason  # type: ignore
    from check_network import round_trip, write_message  # type: ignore
    from check_report import combined, figures, part_of, report_text, some  # type: ignore

WAIT_SECONDS = 300.0
"""Until all hosts have come: the slowest imports torch meanwhile."""
ANSWER_SECONDS = 60.0
"""For an answer of a host that takes part, beside the seconds that it measures."""
SKEW_SECONDS = 1.0
"""Clocks that differ by more make logs of two hosts hard to put in order (a choice)."""
READY, MEND, CALLED_WRONGLY, INTERRUPTED = 0, 1, 2, 130


def main(arguments: List[str]) -> int:
    """Run the command; its exit status."""
    parser = argparse.ArgumentParser(
        prog="check.py", description="Checks the hosts of a job before it is started."
    )
    parser.add_argument("what", nargs="?", default="all", choices=["all", "serve", "probe"])
    parser.add_argument("to", nargs="?", help="with probe: the host that serves")
    parser.add_argument("--host", help="name of this host in check.json")
    parser.add_argument("--alone", action="store_true", help="this host only")
    parser.add_argument("--timeout", type=float, default=WAIT_SECONDS, help="to wait for hosts")
    parser.add_argument("--seconds", type=float, default=RATE_SECONDS, help="per measured rate")
    parser.add_argument("--json", action="store_true", help="the report as JSON")
    asked = parser.parse_args(arguments)
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "check.json")
    try:
        with open(path, encoding="utf-8") as stream:
            sheet = json.load(stream)
    except (OSError, ValueError) as error:
        say(f"{path}: {error}")
        return CALLED_WRONGLY
    if not isinstance(sheet, dict) or not sheet.get("hosts"):
        say(f"{path}: is not what hetplan emits: it names no hosts")
        return CALLED_WRONGLY
    host = this_host(sheet, asked.host)
    if host is None:
        names = ", ".join(each["name"] for each in sheet["hosts"][:20])
        say(f"which host is this? Name it with --host; there are {names}")
        return CALLED_WRONGLY
    if asked.what == "serve":
        return serve(sheet, host, asked.timeout)
    if asked.what == "probe":
        return probe_one(sheet, host, asked.to, asked.seconds)
    if asked.alone:
        report = combined(sheet, [check_host(sheet, host)], [], [])
    elif host is sheet["hosts"][0]:
        report = lead(sheet, host, asked.timeout, asked.seconds)
    else:
        report = follow(sheet, host, asked.timeout, asked.seconds)
    if asked.json:
        print(json.dumps(report, sort_keys=True))
    else:
        # The first host tells of all; each of the others of itself.
        own = host is sheet["hosts"][0] or host["name"] not in report["hosts"]
        print(report_text(report if own else part_of(report, host["name"])))
    return MEND if report["failed"] else READY


def say(text: str) -> None:
    """A word to the person who waits."""
    sys.stderr.write(f"check.py: {text}\n")


def this_host(sheet: Dict[str, Any], asked: Optional[str]) -> Optional[Dict[str, Any]]:
    """The host on which this runs."""
    own = [os.environ.get("HETPLAN_HOST"), os.environ.get("SLURMD_NODENAME")]
    names = [asked] if asked else [*own, socket.gethostname(), socket.getfqdn()]
    hosts: List[Dict[str, Any]] = sheet["hosts"]
    for name in names:
        for host in hosts:
            if name and name in (host["name"], host["address"]):
                return host
    if asked:
        return None
    for name in names:
        short = [
            each for each in hosts if name and each["name"].split(".")[0] == name.split(".")[0]
        ]
        if len(short) == 1:
            return short[0]
    return None


# ---- the first host, and the others


def lead(sheet: Dict[str, Any], host: Dict[str, Any], timeout: float, seconds: float) -> Any:
    """What the first host finds with all others."""
    others = [each["name"] for each in sheet["hosts"][1:]]
    allow_files(2 * len(others) + 128)
    meeting = Meeting(others)
    # Before the longer checks, so that the others find it.
    taken, answers = open_ports(sheet, host, [sheet["port"], sheet["barrier_port"]], meeting)
    own = check_host(sheet, host)
    own["findings"] += taken
    allow_connections()
    missing = meeting.wait(timeout)
    if missing:
        say(f"{len(missing)} of {len(others)} hosts did not come")
    for guest in meeting.guests.values():
        ask_clock(guest)
    shared = check_shared(sheet, own, meeting)
    measured = measure(sheet, host, meeting, seconds)
    reports = [own] + [guest.report for guest in meeting.guests.values()]
    report = combined(sheet, reports, measured, missing, shared)
    meeting.end(report)
    for each in answers:
        each.close()
    return report


def allow_files(count: int) -> None:
    """Raise the limit on open files, one of which each connection is: often 1,024 at first."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def allow_connections() -> None:
    """As many open files as this process may have: every other host has a connection."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def open_ports(
    sheet: Dict[str, Any], host: Dict[str, Any], ports: List[int], meeting: Optional[Meeting]
) -> Any:
    """(findings about ports that are taken, what answers on the others)."""
    found, answers = [], []
    for port in ports:
        try:
            join = meeting.join if meeting is not None else None
            answers.append(Answers(port, sheet["token"], join))
        except OSError as error:
            text = f"port {port} cannot be listened on: {error.strerror or error}"
            mend = "end what uses it, or give the domain other ports in the cluster file"
            found.append(finding("ports", "fail", text, mend))
    if not found:
        text = "{} can be listened on".format(", ".join(map(str, ports)))
        found.append(finding("ports", "ok", text))
    return found, answers


def follow(sheet: Dict[str, Any], host: Dict[str, Any], timeout: float, seconds: float) -> Any:
    """What the first host tells another one; without it, what that finds alone."""
    found, answers = open_ports(sheet, host, [host["first_port"]], None)
    own = check_host(sheet, host)
    own["findings"] += found
    try:
        connection = meet(sheet, host, timeout)
        with connection, connection.makefile("rwb") as stream:
            own["findings"].append(check_rendezvous(sheet))
            connection.settimeout(min(timeout, ANSWER_SECONDS))
            write_message(stream, own)
            # Another program on the port would say nothing, for ever.
            check_welcome(host, read_message(stream))
            # The first host waits for the slowest of all hosts before it asks.
            connection.settimeout(None)
            return obey(sheet, host, stream)
    except (OSError, ValueError) as error:
        first = sheet["hosts"][0]
        where = "{}, {} port {}".format(first["name"], first["address"], sheet["barrier_port"])
        text = f"{where}: {reason(error)}"
        mend = "run check.py there at the same time, and let the port through"
        own["findings"].append(finding("first host", "fail", text, mend))
        return combined(sheet, [own], [], [])
    finally:
        for each in answers:
            each.close()


def meet(sheet: Dict[str, Any], host: Dict[str, Any], timeout: float) -> socket.socket:
    """A connection to the first host, which may begin later; the last error where there is none."""
    limit = time.monotonic() + timeout
    while True:
        try:
            where = (sheet["hosts"][0]["address"], sheet["barrier_port"])
            return opened(where[0], where[1], sheet["token"], "join {}".format(host["name"]))
        except (OSError, UnicodeError):
            if time.monotonic() > limit:
                raise
            time.sleep(min(1.0, timeout / 10))


def check_rendezvous(sheet: Dict[str, Any]) -> Dict[str, str]:
    """Whether the port of the rendezvous is reached from here."""
    first, port = sheet["hosts"][0], sheet["port"]
    text = "rendezvous {} port {}".format(first["address"], port)
    try:
        trip = round_trip(first["address"], port, sheet["token"])
    except (OSError, UnicodeError) as error:
        mend = "let the port through"
        return finding("rendezvous", "fail", f"{text}: {reason(error)}", mend)
    return finding("rendezvous", "ok", f"{text}, {1e3 * trip:.3g} ms")


def check_welcome(host: Dict[str, Any], message: Any) -> None:
    """ValueError where the first host does not take this one, or another program answers."""
    asked = message.get("do") if isinstance(message, dict) else None
    if asked == "refused":
        raise ValueError("another process has already come as {}".format(host["name"]))
    if asked != "welcome":
        raise ValueError("another program answers there")


def obey(sheet: Dict[str, Any], host: Dict[str, Any], stream: Any) -> Any:
    """Do what the first host asks for, until it tells the report."""
    by_name = {each["name"]: each for each in sheet["hosts"]}
    while True:
        asked = read_message(stream)
        if asked["do"] == "end":
            return asked["report"]
        if asked["do"] == "clock":
            answer: Any = time.time()
        elif asked["do"] == "look":
            answer = os.path.exists(asked["path"])
        else:
            pair = sheet["pairs"][asked["pair"]]
            answer = probe(pair, by_name[pair["receiver"]], sheet["token"], asked["seconds"])
        write_message(stream, answer)


def ask_clock(guest: Guest) -> None:
    """Add what the host's clock says to its report."""
    try:
        ahead = clock_offset(guest)
    except (OSError, ValueError):
        guest.report["findings"].append(finding("clock", "fail", "went away", "look there"))
        return
    status = "note" if abs(ahead) > SKEW_SECONDS else "ok"
    mend = "start chrony or ntpd there" if status == "note" else ""
    text = f"{ahead:+.3g} s beside the first host"
    guest.report["findings"].append(finding("clock", status, text, mend))


def check_shared(sheet: Dict[str, Any], own: Any, meeting: Meeting) -> List[Dict[str, str]]:
    """Whether all hosts see one checkpoint folder."""
    folder = sheet["save"]
    if not folder or not os.path.isdir(folder) or not meeting.guests:
        return []
    path = os.path.join(folder, f".hetplan-check-{uuid.uuid4().hex}")
    try:
        with open(path, "x"):
            pass
    except OSError as error:
        text = f"{folder}: {error.strerror or error}"
        return [finding("checkpoint folder", "fail", text, "change its rights")]
    try:
        blind = []
        for name, guest in sorted(meeting.guests.items()):
            try:
                if not guest.ask({"do": "look", "path": path}, ANSWER_SECONDS):
                    blind.append(name)
            except (OSError, ValueError):
                blind.append(name)
    finally:
        os.remove(path)
    if not blind:
        return [finding("checkpoint folder", "ok", f"{folder} is one folder on all hosts")]
    text = "{} is another folder on {}".format(folder, ", ".join(blind[:20]))
    mend = "mount one file system there: a checkpoint is read back from all parts"
    return [finding("checkpoint folder", "note", text, mend)]


def measure(
    sheet: Dict[str, Any], host: Dict[str, Any], meeting: Meeting, seconds: float
) -> List[Dict[str, Any]]:
    """Every pair of the sheet whose hosts have come, one after the other."""
    by_name = {each["name"]: each for each in sheet["hosts"]}
    here = set(meeting.guests) | {host["name"]}
    found = []
    for number, pair in enumerate(sheet["pairs"]):
        if pair["sender"] not in here or pair["receiver"] not in here:
            continue
        if pair["sender"] == host["name"]:
            measured = probe(pair, by_name[pair["receiver"]], sheet["token"], seconds)
        else:
            question = {"do": "probe", "pair": number, "seconds": seconds}
            try:
                guest = meeting.guests[pair["sender"]]
                measured = guest.ask(question, ANSWER_SECONDS + 2 * seconds)
            except (OSError, ValueError) as error:
                measured = {"problem": "{}: {}".format(pair["sender"], reason(error))}
        status, words = judged(pair, measured)
        found.append(dict(pair, measured=measured, status=status, found=words))
    return found


# ---- single questions


def serve(sheet: Dict[str, Any], host: Dict[str, Any], timeout: float) -> int:
    """Answer probes for a while."""
    found, answers = open_ports(sheet, host, [host["first_port"]], None)
    say("{}: {}; for {:.0f} s, or until Ctrl-C".format(host["name"], found[0]["found"], timeout))
    if not answers:
        return MEND
    with contextlib.suppress(KeyboardInterrupt):
        time.sleep(timeout)
    answers[0].close()
    return READY


def probe_one(
    sheet: Dict[str, Any], host: Dict[str, Any], to: Optional[str], seconds: float
) -> int:
    """Round trip and rate to one host, beside the plan's where it sends there."""
    receiver = next((each for each in sheet["hosts"] if each["name"] == to), None)
    if receiver is None:
        say("probe HOST: one of {}".format(some([each["name"] for each in sheet["hosts"]])))
        return CALLED_WRONGLY
    ends = {host["name"], receiver["name"]}
    known = [pair for pair in sheet["pairs"] if {pair["sender"], pair["receiver"]} == ends]
    blank = {"sender": host["name"], "receiver": receiver["name"], "streams": 4}
    measured = probe(known[0] if known else blank, receiver, sheet["token"], seconds)
    if "problem" in measured:
        print(measured["problem"])
        return MEND
    status, words = judged(known[0], measured) if known else ("ok", "the plan sends nothing there")
    print(f"{figures(measured)}: {words}")
    return MEND if status == "fail" else READY


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        say("interrupted")
        sys.exit(INTERRUPTED)
