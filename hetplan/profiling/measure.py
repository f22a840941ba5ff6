"""Measures layers, operators and links with nothing but Python 3.8 and torch 2.1.

    python measure.py layers --out layers.csv
    python measure.py operators --out operators.csv
    torchrun --nproc-per-node 2 measure.py links --link NAME --out links.csv

`hetplan profile script` writes this program as one file, with what is to be measured in `TASK`, for
a machine with a vendor's image. The output is a CSV file of samples; its first line is the
provenance as JSON. `hetplan profile merge FILE` adds it to a store. A command that was killed goes
on where it ended. Nothing is sent anywhere, and the file names no machine.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import gc
import io
import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from hetplan.errors import InputError
from hetplan.files.locks import Lock
from hetplan.profiling.backends import Backend, open_backend, use_threads
from hetplan.profiling.bodies import TIMES, timing_columns
from hetplan.profiling.measure_links import LinkCase, LinkProfiler, process_group
from hetplan.profiling.timing import ACCELERATOR_LIMITS, CPU_LIMITS, Timing, TimingLimits
from hetplan.profiling.work import SIZES, Work, layer_work, measure_all, operator_work

TASK: dict[str, Any] = {}
"""`version` of hetplan; `models`: sizes; per device kind `layers` (rows that name a model by its
number) and `operators`; per link its `cases` (operation, group size, message bytes)."""
PROVENANCE_SCHEMA = "hetplan.provenance/2"
TOOL = "hetplan measure.py"
_MAX_DEATHS = 2
"""Times that a unit may kill the process (as a kernel short of memory does) before it is left."""

# The columns of `hetplan.profiling.samples`, in their order.
COLUMNS = {
    "layers": (
        "device", "architecture", "layer", "phase", "precision", *SIZES, "copies", *TIMES,
        "steady", "activation_bytes", "peak_memory_bytes", "clock_hertz", "measured_on",
    ),
    "operators": (
        "device", "operator", "phase", "precision", "output_precision", "batch", "m", "n", "k",
        *TIMES, "measured_on",
    ),
    "links": (
        "link", "operation", "backend", "group_size", "message_bytes", *TIMES, "measured_on",
        "nodes", "groups",
    ),
}  # fmt: skip
_NO_CIRCUMSTANCES = ("schema", "measured_on", "hetplan_version", "command", "notes")


class SampleFile:
    """The output: provenance, header, one row per sample, and comments on what went wrong.

    Each line is on disk before the next is measured. The half line of a killed run is cut off.
    """

    def __init__(self, path: str, columns: Sequence[str], provenance: dict[str, Any]) -> None:
        self._path, self._columns = Path(path), columns
        self.rows: list[dict[str, str]] = []
        """The rows that are there."""
        self.left_out: dict[str, str] = {}
        """Units that failed, or in which the process died, and why."""
        if self._path.exists() and not self._path.is_file():
            raise InputError(f"{path} is no plain file; name another with --out")
        # Two that measure at once would measure wrong times.
        self._lock = Lock(self._path).take()
        try:
            if self._path.exists() and self._path.stat().st_size:
                self._read(provenance)
            else:
                first = "# " + json.dumps(provenance, sort_keys=True)
                self._path.write_text(f"{first}\n{','.join(columns)}\n", encoding="utf-8")
        except OSError as error:
            raise InputError(f"{path}: cannot be written ({error.strerror or error})") from error

    def close(self) -> None:
        """Let another start have the file; the end of the process does so too."""
        self._lock.release()

    def _read(self, provenance: dict[str, Any]) -> None:
        data = self._path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        lines = whole.decode("utf-8", "replace").split("\n")
        try:
            held = json.loads(lines[0][1:])
        except (ValueError, RecursionError):
            held = None
        if not isinstance(held, dict) or lines[1:2] != [",".join(self._columns)]:
            raise InputError(f"{self._path} is no file of these samples; name another with --out")
        changed = [name for name in provenance if held.get(name) != provenance[name]]
        changed = [name for name in changed if name not in _NO_CIRCUMSTANCES]
        if changed:
            raise InputError(
                f"{self._path} was measured with another {', '.join(changed)}; name another --out"
            )
        if len(whole) < len(data):
            os.truncate(str(self._path), len(whole))
        deaths: dict[str, int] = {}
        for line in lines[2:]:
            word, _, rest = line.partition(" ")[2].partition(" ")
            if line.startswith("# failed "):
                name, _, reason = rest.partition(": ")
                self.left_out[name] = reason
            elif line.startswith(("# begin ", "# end ")):
                deaths[rest] = deaths.get(rest, 0) + (1 if word == "begin" else -1)
            elif line:
                row = next(csv.reader([line]))
                self.rows.append(dict(zip(self._columns, row)))  # noqa: B905
        for name, count in deaths.items():
            if count >= _MAX_DEATHS:
                self.left_out.setdefault(name, "the process died")

    def add(self, row: dict[str, Any]) -> None:
        """Write one sample and wait until it is on disk."""
        row = {**row, "measured_on": datetime.date.today().isoformat()}
        cells = [row[name] for name in self._columns]
        text = io.StringIO()
        words = (str(each).lower() if isinstance(each, bool) else each for each in cells)
        csv.writer(text, lineterminator="").writerow(words)
        self._append(text.getvalue())
        self.rows.append({name: str(row[name]) for name in self._columns})

    def comment(self, text: str) -> None:
        """Write a line that is no sample."""
        self._append("# " + text)

    def has(self, keys: dict[str, Any]) -> bool:
        """Whether a sample with these values is there."""
        return any(all(row[name] == str(keys[name]) for name in keys) for row in self.rows)

    def _append(self, line: str) -> None:
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(line + "\n")
            file.flush()
            os.fsync(file.fileno())


def measure_units(file: SampleFile, work: Sequence[Work], budget_seconds: float) -> None:
    """Measure what the file lacks of this work; comments in it say what was begun and failed."""

    def commented(each: Work) -> Iterator[dict[str, Any]]:
        file.comment(f"begin {each.name}")
        try:
            yield from each.rows()
        finally:
            file.comment(f"end {each.name}")

    def failed(each: Work, error: Exception) -> None:
        reason = _reason(error)
        file.comment(f"failed {each.name}: {reason}")
        print(f"not measured: {each.name}: {reason}", file=sys.stderr)
        gc.collect()

    def progress(finished: int, total: int, left: float, name: str) -> None:
        print(f"{finished}/{total}, at least {left:.0f} s left, {name}", flush=True)

    measure_all(
        [Work(each.name, each.keys, partial(commented, each)) for each in work],
        file.has,
        file.add,
        budget_seconds=budget_seconds,
        on_progress=progress,
        on_failure=failed,
    )
    if not all(file.has(keys) for each in work for keys in each.keys):
        print("not everything was measured; the same command goes on from there")


def task_work(what: str, kind: str, backend: Backend, limits: TimingLimits) -> Iterator[Work]:
    """Every layer or operator of the task for this kind, cheapest first as the task has them."""
    for entry in TASK["kinds"][kind][what]:
        if what == "layers":
            row = {**TASK["models"][entry["model"]], **entry, "device": kind}
            yield layer_work(row, backend, limits)
        else:
            op = SimpleNamespace(**entry)
            yield operator_work(op, op.precision, op.architecture, kind, backend, limits)


def measure_link(options: argparse.Namespace) -> None:
    """This rank's part in measuring a link; rank 0 keeps the samples."""
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        raise InputError("a link has two ends: start with torchrun --nproc-per-node 2")
    link = TASK["links"][options.link]
    device = "cpu" if link["host_staged"] else options.device
    backend = open_backend(device, index=int(os.environ.get("LOCAL_RANK", "0")))
    use_threads(options.threads)
    with process_group(backend) as rank:
        world = dist.get_world_size()
        cases = [LinkCase(*case) for case in link["cases"] if case[1] <= world]
        if rank:
            LinkProfiler(backend).run(cases, on_sample=lambda *_: None)
            return
        file = SampleFile(options.out, COLUMNS["links"], _provenance(options, backend))
        common = {"link": options.link, "backend": backend.collectives, "nodes": 1, "groups": 1}
        measured = [case for case in cases if file.has({**vars(case), "link": options.link})]

        def keep(case: LinkCase, timing: Timing, finished: int, total: int) -> None:
            file.add({**common, **vars(case), **timing_columns(timing)})
            print(f"{finished}/{total}, {case.operation} {case.message_bytes} B", flush=True)

        try:
            LinkProfiler(backend).run(cases, measured=measured, on_sample=keep)
        finally:
            file.close()


def _provenance(options: argparse.Namespace, backend: Backend) -> dict[str, Any]:
    """As `hetplan.profiling.samples.Provenance`."""
    return {
        "schema": PROVENANCE_SCHEMA,
        "device": options.kind,
        "device_name": backend.device_name(),
        "backend": backend.name,
        "measured_on": datetime.date.today().isoformat(),
        "hetplan_version": TASK["version"],
        "torch_version": torch.__version__,
        "driver": backend.driver(),
        "threads": options.threads,
        "paced": "",
        "together": 1,
        "tool": TOOL,
        "clocks": backend.clocks(),
        "command": f"measure.py {options.what} --kind {options.kind}",
        "notes": "",
    }


def _reason(error: BaseException) -> str:
    """Why a unit failed, in a line that names no folder."""
    text = str(error).strip() or type(error).__name__
    words = ("out of memory", "can't allocate memory", "not enough memory", "alloc_failed")
    if isinstance(error, MemoryError) or any(word in text.lower() for word in words):
        return "out of memory"
    return re.sub(r"(/[^\s/:]+){2,}", "...", text.splitlines()[0])[:200]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Measure this machine for hetplan; send back the CSV file."
    )
    kinds, links = sorted(TASK["kinds"]), sorted(TASK["links"])
    parser.add_argument("what", choices=tuple(COLUMNS))
    parser.add_argument("--out", help="CSV file (default: samples-KIND-WHAT.csv)")
    parser.add_argument("--kind", choices=kinds, default=kinds[0] if len(kinds) == 1 else None)
    parser.add_argument("--link", choices=links, default=links[0] if len(links) == 1 else None)
    parser.add_argument("--device", help="torch device type (default: an accelerator, else cpu)")
    parser.add_argument("--index", type=int, default=0, help="number of the device")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds to spend")
    parser.add_argument("--retry", action="store_true", help="try again what failed before")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what the arguments say; the exit code."""
    if not TASK:
        print("measure.py has no task; write it with hetplan profile script", file=sys.stderr)
        return 2
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.kind is None or (options.what == "links" and options.link is None):
        parser.error("name --kind, and for links --link")
    if options.threads < 1 or options.index < 0 or not options.budget > 0:
        parser.error("--threads is 1 or more, --index 0 or more, --budget above 0")
    name = options.link if options.what == "links" else options.kind
    options.out = options.out or f"samples-{name}-{options.what}.csv"
    try:
        if options.what == "links":
            measure_link(options)
            return 0
        backend = open_backend(options.device, index=options.index)
        use_threads(options.threads)
        file = SampleFile(options.out, COLUMNS[options.what], _provenance(options, backend))
        limits = ACCELERATOR_LIMITS if backend.is_accelerator else CPU_LIMITS
        work = list(task_work(options.what, options.kind, backend, limits))
        if not options.retry:
            work = [each for each in work if each.name not in file.left_out]
        try:
            measure_units(file, work, options.budget)
        finally:
            file.close()
        print(f"done; send back {options.out}")
        return 0
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped; the same command goes on from there", file=sys.stderr)
        return 130


if __name__ == "__main__":
    raise SystemExit(main())
