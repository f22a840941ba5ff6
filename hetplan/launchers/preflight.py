"""Are all hosts of a plan ready? check.py, run on every one of them at one time.

Hosts of plain domains are reached by ssh, this machine without; a host of Slurm or Kubernetes is
not entered from outside: its part is said to be missing, with the command that does it there. The
program and its sheet travel over standard input and leave nothing behind.
"""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hetplan.cluster.launch_domains import SSH_PORT, Scheduler
from hetplan.emitters.placement import sheet_of
from hetplan.emitters.preflight import (
    CHECK_FILE,
    SCHEMA,
    SHEET_FILE,
    CheckedHost,
    CheckSheet,
    check_sheet,
    program_files,
)
from hetplan.emitters.trainer_launch import EmitOptions
from hetplan.errors import InputError
from hetplan.files.encoding import encode
from hetplan.files.reading import decode, read_document
from hetplan.search.result import SearchResult

DEFAULT_WAIT_SECONDS = 300.0
_PACKING_UP_SECONDS = 60.0
"""After the hosts have come: what measuring a pair may take beyond its own time."""
_PASSED_ON = ("TRAINER_FOLDER", "HETPLAN_PYTHON")
"""Variables that say where the trainer is, as start-all.sh passes them on."""
_SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=20")
_BOOTSTRAP = """
import os, runpy, shutil, sys, tempfile
folder = tempfile.mkdtemp(prefix="hetplan-check-")
try:
    for name, text in FILES.items():
        with open(os.path.join(folder, name), "w", encoding="utf-8") as stream:
            stream.write(text)
    sys.path.insert(0, folder)
    sys.argv[0] = os.path.join(folder, "check.py")
    runpy.run_path(sys.argv[0], run_name="__main__")
finally:
    shutil.rmtree(folder, ignore_errors=True)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFinding:
    """One thing that was looked at."""

    host: str
    """Or two hosts, as in `a to b`; empty: of all."""
    check: str
    status: str
    """`ok`; `note`: the plan may run, but somebody should look; `fail`: to be mended."""
    found: str
    mend: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PreflightReport:
    """What all hosts found."""

    hosts: tuple[str, ...]
    """That answered."""
    missing: tuple[str, ...]
    findings: tuple[HostFinding, ...]
    text: str
    """For people: tables, and what to mend."""
    json: str
    """The report of check.py, schema `hetplan.checked/1`."""

    @property
    def failed(self) -> bool:
        """Whether something must be mended before the plan is started."""
        return any(each.status == "fail" for each in self.findings)

    @property
    def unchecked(self) -> str:
        """How many hosts were checked, and what checks the others; empty: all were."""
        if not self.missing:
            return ""
        total = len(self.hosts) + len(self.missing)
        names = ", ".join(self.missing[:5]) + (", ..." if len(self.missing) > 5 else "")
        return (
            f"{len(self.hosts)} of {total} hosts checked, not {names}: nothing is known of those. "
            "Emit the plan and run, where its jobs are submitted: bash FOLDER/start-all.sh --check"
        )


def sheet_of_plan(result: SearchResult) -> CheckSheet:
    """What hetplan's own trainer needs of the plan's hosts; an InputError where they have no
    names.
    """
    return check_sheet(
        result, sheet_of(result.plan, result.inputs.cluster), EmitOptions(python="python3")
    )


def sheet_of_folder(folder: Path) -> CheckSheet:
    """The sheet of an emitted folder; an InputError where it has none."""
    path = folder / SHEET_FILE
    if not path.is_file():
        raise InputError(f"{folder} has no {SHEET_FILE}; name a plan file or an emitted folder")
    return decode(read_document(path), CheckSheet, schema=SCHEMA)


def preflight(
    sheet: CheckSheet, *, wait_seconds: float = DEFAULT_WAIT_SECONDS, rate_seconds: float = 3.0
) -> PreflightReport:
    """Check every host that can be entered from here.

    `wait_seconds` is how long hosts wait for each other, `rate_seconds` how long each rate is
    measured. Hosts that do not answer are in `missing`, with the reason among the findings.
    """
    entered = tuple(host for host in sheet.hosts if _can_enter(host))
    together = bool(entered) and entered[0] == sheet.hosts[0]
    names = {host.name for host in entered}
    pairs = tuple(each for each in sheet.pairs if {each.sender, each.receiver} <= names)
    asked = replace(sheet, hosts=entered, pairs=pairs)
    limit = wait_seconds + _PACKING_UP_SECONDS * (len(pairs) + 2) + 2 * rate_seconds * len(pairs)
    options: tuple[str, ...] = (
        "--json",
        "--timeout",
        f"{wait_seconds:g}",
        "--seconds",
        f"{rate_seconds:g}",
    )
    if not together:
        # Nobody to meet at: each looks at itself.
        options = (*options, "--alone")
    program = _program(asked)
    with ThreadPoolExecutor(max_workers=max(1, len(entered))) as pool:
        answers = tuple(
            pool.map(lambda host: _ask(host, sheet.python, options, program, limit), entered)
        )
    return _put_together(sheet, entered, answers, together=together)


def _can_enter(host: CheckedHost) -> bool:
    return host.scheduler == Scheduler.HOSTS or is_here(host)


def is_here(host: CheckedHost) -> bool:
    """Whether the host is this machine: one of its names, or an address that it can listen on."""
    if host.name in (socket.gethostname(), socket.getfqdn()):
        return True
    try:
        infos = socket.getaddrinfo(host.address, 0, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return False
    for family, kind, protocol, _, where in infos:
        with socket.socket(family, kind, protocol) as listening:
            try:
                listening.bind(where)
            except OSError:
                continue
            return True
    return False


def _program(sheet: CheckSheet) -> str:
    """One text for an interpreter's standard input."""
    files = {each.path: each.text for each in program_files()}
    files[SHEET_FILE] = encode(sheet, schema=SCHEMA)
    return f"FILES = {files!r}\n{_BOOTSTRAP}"


def command_of(host: CheckedHost, python: str, options: tuple[str, ...]) -> tuple[str, ...]:
    """What runs the program on the host."""
    words = ("-", "--host", host.name, *options)
    if is_here(host):
        return (sys.executable, *words)
    given = [f"{name}={os.environ[name]}" for name in _PASSED_ON if os.environ.get(name)]
    variables = ("env", *given) if given else ()
    port = () if host.ssh_port == SSH_PORT else ("-p", str(host.ssh_port))
    user = ("-l", host.ssh_user) if host.ssh_user else ()
    remote = shlex.join((*variables, python, *words))
    return (*_SSH, *port, *user, "--", host.address, remote)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    """What one host's check printed."""

    report: dict[str, Any] | None
    problem: str = ""


def _ask(
    host: CheckedHost, python: str, options: tuple[str, ...], program: str, limit: float
) -> _Answer:
    try:
        done = subprocess.run(
            command_of(host, python, options),
            input=program,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=limit,
        )
    except subprocess.TimeoutExpired:
        return _Answer(report=None, problem=f"gave no answer in {limit:.0f} s")
    except OSError as error:
        return _Answer(report=None, problem=f"{error.filename}: {error.strerror}")
    for line in reversed(done.stdout.splitlines()):
        try:
            report = json.loads(line)
        except ValueError:
            continue
        if isinstance(report, dict) and "findings" in report:
            return _Answer(report=report)
    words = [line for line in done.stderr.splitlines() if line.strip()]
    said = words[-1].strip() if words else "no message"
    return _Answer(report=None, problem=f"ended with {done.returncode}: {said}")


def _put_together(
    sheet: CheckSheet,
    entered: tuple[CheckedHost, ...],
    answers: tuple[_Answer, ...],
    *,
    together: bool,
) -> PreflightReport:
    """The first host's report, or those of all; and why hosts are not in it."""
    from hetplan.emitters.preflight_program.check_report import report_text

    found = [answer.report for answer in answers if answer.report is not None]
    if together and answers[0].report is not None:
        found = [answers[0].report]
    report: dict[str, Any] = {
        "schema": "hetplan.checked/1",
        "hosts": [name for each in found for name in each["hosts"]],
        "findings": [line for each in found for line in each["findings"]],
        "facts": {name: facts for each in found for name, facts in each["facts"].items()},
        "pairs": [pair for each in found for pair in each["pairs"]],
        "all_pairs": sheet.all_pairs,
    }
    report["missing"] = [host.name for host in sheet.hosts if host.name not in report["hosts"]]
    lost = {
        host.name: _lost(answer.problem)
        for host, answer in zip(entered, answers, strict=True)
        if answer.report is None
    }
    for host in sheet.hosts:
        if host.name not in {each.name for each in entered}:
            lost[host.name] = _not_entered(host)
    # A host that ssh could not enter did not come: the reason says more than that.
    report["findings"] = [
        line
        for line in report["findings"]
        if not (line["check"] == "host" and line["host"] in lost)
    ]
    report["findings"] += [{"host": name, "check": "host", **words} for name, words in lost.items()]
    report["failed"] = any(line["status"] == "fail" for line in report["findings"])
    count = f"{len(report['hosts'])} of {len(sheet.hosts)} hosts"
    return PreflightReport(
        hosts=tuple(report["hosts"]),
        missing=tuple(report["missing"]),
        findings=tuple(HostFinding(**line) for line in report["findings"]),
        text=report_text(report, checked="" if not report["missing"] else count),
        json=json.dumps(report, sort_keys=True),
    )


def _lost(problem: str) -> dict[str, str]:
    mend = "look whether ssh enters it without a password and Python is there"
    return {"status": "fail", "found": problem, "mend": mend}


def _not_entered(host: CheckedHost) -> dict[str, str]:
    how = f"srun -w {shlex.quote(host.name)}" if host.scheduler == Scheduler.SLURM else "in its pod"
    return {
        "status": "note",
        "found": f"not checked: {host.scheduler} starts it",
        "mend": f"emit the plan and run {CHECK_FILE} on all hosts at one time, there {how}",
    }
