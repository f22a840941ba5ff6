"""What a campaign script does when it is started in a vendor's image.

    python measure_KIND.py layers                       on one device
    torchrun ... measure_KIND.py links --link NAME      one process on each end of the link

Measures what is missing in its results file and adds to it, so the same command goes on after a
kill. Rows of other circumstances (another driver, other clocks) do not count as there. Nothing is
sent anywhere; the file names devices, drivers and versions, and no machine.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import os
import re
import socket
import sys
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist

from hetplan.errors import HetplanError, InputError
from hetplan.profiling.backends import Backend, CpuBackend, CudaBackend, open_backend, use_threads
from hetplan.profiling.campaign_rows import SCHEMA, TOOL, RecordFile, read_own_records
from hetplan.profiling.circumstances import circumstances
from hetplan.profiling.measure_layers import LayerProfiler, Unit
from hetplan.profiling.measure_links import LinkCase, LinkProfiler, process_group
from hetplan.profiling.plugin_backend import PLUGINS
from hetplan.profiling.samples import LayerSample, LinkSample, Provenance
from hetplan.profiling.timing import ACCELERATOR_LIMITS, CPU_LIMITS

_MAX_REASON = 200
_TRIES = 2
"""Times that a unit may kill the process (as a kernel short of memory does) before it is left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkTask:
    """One link that the script can measure."""

    name: str
    host_staged: bool
    """Over host memory with gloo, whatever the device."""
    cases: tuple[LinkCase, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Everything that one script can measure."""

    campaign: str
    """Hash of the whole campaign; results of others are not mixed."""
    kind: str
    """Device kind of the samples."""
    units: tuple[Unit, ...]
    links: tuple[LinkTask, ...]


def run(task: Task, arguments: Sequence[str]) -> int:
    """Do what the arguments say; the exit code."""
    options = _parser(task).parse_args(list(arguments))
    try:
        if options.what == "layers":
            return _layers(task, options)
        return _links(task, options)
    except HetplanError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("stopped; the same command goes on from there", file=sys.stderr)
        return 130


def _parser(task: Task) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=f"Measure device kind {task.kind} for hetplan campaign {task.campaign}. Needs "
        "Python 3.8 or later and torch 2.1 or later with this device, nothing else. Writes one "
        "results-*.jsonl in the current folder, to be sent back, and sends nothing anywhere."
    )
    whats = parser.add_subparsers(dest="what", required=True)
    layers = whats.add_parser("layers", help="layers of the model, on one device")
    links = whats.add_parser("links", help="a link, under torchrun with a process on each end")
    links.add_argument("--link", required=True, choices=[link.name for link in task.links])
    links.add_argument("--largest", type=int, help="leave out messages of more bytes than this")
    layers.add_argument("--budget", type=_seconds, help="seconds to spend, cheapest shapes first")
    layers.add_argument("--retry", action="store_true", help="try again what failed before")
    layers.add_argument("--index", type=_whole, default=0, help="number of the device, from 0")
    for each in (layers, links):
        types = ["cpu", "cuda", *(plugin.name for plugin in PLUGINS)]
        each.add_argument("--device", choices=types, help="default: an accelerator, if any")
        each.add_argument("--collectives", help="torch.distributed backend of the device's memory")
        each.add_argument("--threads", type=_threads, default=1, help="threads of a CPU")
        each.add_argument("--again", action="store_true", help="measure all again, and keep both")
        each.add_argument("--out", help="results file; default results-KIND-....jsonl here")
    return parser


def _seconds(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError("write seconds above 0")
    return value


def _whole(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError("write a number from 0")
    return value


def _threads(text: str) -> int:
    most = os.cpu_count() or 1
    value = int(text)
    if not 1 <= value <= most:
        raise argparse.ArgumentTypeError(f"write 1 to {most}, as many as there are processors")
    return value


def _open(name: str | None, index: int) -> Backend:
    """The device of this name, or the first accelerator that torch sees, or the CPU."""
    if name is not None:
        return open_backend(name, index=index)
    if torch.cuda.is_available():
        return CudaBackend(index)
    for plugin in PLUGINS:
        try:
            return open_backend(plugin.name, index=index)
        except InputError:
            continue
    return CpuBackend()


class _Results:
    """The results file of one start of the script."""

    def __init__(self, task: Task, path: str, provenance: Provenance, link: str) -> None:
        self.path, self.id = path, uuid.uuid4().hex[:12]
        self._records = read_own_records(path)
        if any(each["campaign"] != task.campaign for each in self._of("run")):
            raise InputError(f"{path} has results of another campaign; name a new file with --out")
        self._provenance, self._number = provenance, 0
        alike = (
            each for each in self._of("run") if _circumstances(each["provenance"]) == self._own()
        )
        self._alike = {each["run"] for each in alike if each["link"] == link}
        self._file = RecordFile(path)
        self._file.add(
            {
                "record": "run",
                "schema": SCHEMA,
                "campaign": task.campaign,
                "run": self.id,
                "kind": task.kind,
                "link": link,
                "provenance": _plain(provenance),
            }
        )

    def _own(self) -> tuple[Any, ...]:
        return _circumstances(_plain(self._provenance))

    def _of(self, kind: str) -> list[dict[str, Any]]:
        return [each for each in self._records if each["record"] == kind]

    def held(self, kind: str) -> list[dict[str, Any]]:
        """Samples of this kind that were measured under the same circumstances."""
        return [each["sample"] for each in self._of(kind) if each["run"] in self._alike]

    def failed(self) -> set[int]:
        """Units that failed, or that the process died in, often enough."""
        failed = {each["unit"] for each in self._of("failure") if each["run"] in self._alike}
        died: dict[int, int] = {}
        for each in self._records:
            if each["run"] in self._alike and "unit" in each:
                step = {"begin": 1, "stop": -1, "done": -1}.get(each["record"], 0)
                died[each["unit"]] = died.get(each["unit"], 0) + step
        return failed | {unit for unit, count in died.items() if count >= _TRIES}

    def add(self, kind: str, **values: Any) -> None:
        """Add a record."""
        self._file.add({"record": kind, "run": self.id, **values})

    def add_sample(self, kind: str, sample: LayerSample | LinkSample) -> None:
        """Add a sample with its number and date."""
        values = {**_plain(sample), "measured_on": _today().isoformat()}
        self._number += 1
        self.add(kind, number=self._number, sample=values)


def _layers(task: Task, options: argparse.Namespace) -> int:
    backend = _open(options.device, options.index)
    use_threads(options.threads)
    path = options.out or f"results-{task.kind}-layers.jsonl"
    results = _Results(task, path, _provenance(task, backend, options), "")
    limits = ACCELERATOR_LIMITS if backend.is_accelerator else CPU_LIMITS
    profiler = LayerProfiler(backend, device=task.kind, limits=limits)
    held = set() if options.again else {LayerSample(**each).shape for each in results.held("layer")}
    left_out = set() if options.again or options.retry else results.failed()
    numbers = {unit: number for number, unit in enumerate(task.units)}
    work = [unit for unit in task.units if numbers[unit] not in left_out]
    say(f"measuring {task.kind} on {backend.name} ({backend.device_name()}) into {path}")
    if left_out:
        say(f"{len(left_out)} units that failed before are left out; --retry tries them again")
    missing = sum(1 for unit in work if profiler.shapes(unit) - held)
    begun, current = 0, -1

    def on_begin(unit: Unit) -> None:
        nonlocal begun, current
        begun, current = begun + 1, numbers[unit]
        results.add("begin", unit=current)

    def on_failure(unit: Unit, error: Exception) -> None:
        reason = _reason(error)
        results.add("failure", unit=numbers[unit], reason=reason)
        results.add("done", unit=numbers[unit])
        say(f"not measured: {describe(unit)}: {reason}")
        _free(backend)

    try:
        for progress in profiler.run(
            work,
            measured=held,
            budget_seconds=options.budget or float("inf"),
            on_begin=on_begin,
            on_failure=on_failure,
        ):
            for sample in progress.samples:
                if sample.shape not in held:
                    results.add_sample("layer", sample)
            results.add("done", unit=numbers[progress.unit])
            left = f"{progress.left_seconds:.0f} s left"
            say(f"{progress.finished}/{progress.total}, {left}, {describe(progress.unit)}")
    except KeyboardInterrupt:
        results.add("stop", unit=current)
        raise
    results.add("end", clocks=backend.clocks())
    if begun < missing:
        say(f"the budget is spent, {missing - begun} units are left; the same command goes on")
    say(f"done: {begun} units of {missing} that were missing; send back {path}")
    return 0


def _links(task: Task, options: argparse.Namespace) -> int:
    given = [os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR")]
    if not all(given) or not given[1].isdecimal() or int(given[1]) < 2:
        raise InputError("a link has two ends: start with torchrun, see COMMANDS.md")
    link = next(each for each in task.links if each.name == options.link)
    index = int(os.environ.get("LOCAL_RANK", "0"))
    backend = CpuBackend() if link.host_staged else _open(options.device, index)
    if options.collectives and not link.host_staged:
        backend.collectives = options.collectives  # type: ignore[misc]
    use_threads(options.threads)
    with process_group(backend) as rank:
        world = dist.get_world_size()
        largest = options.largest or float("inf")
        cases = [
            case
            for case in link.cases
            if case.group_size <= world and case.message_bytes <= largest
        ]
        if rank == 0:
            _lead(task, link, backend, cases, options)
        else:
            LinkProfiler(backend, link=link.name).run(cases, on_sample=lambda *_: None)
    return 0


def _lead(
    task: Task,
    link: LinkTask,
    backend: Backend,
    cases: Sequence[LinkCase],
    options: argparse.Namespace,
) -> None:
    """Rank 0's part: it keeps the samples."""
    path = options.out or f"results-{task.kind}-link-{link.name}.jsonl"
    results = _Results(task, path, _provenance(task, backend, options), link.name)
    held = set() if options.again else {_link_key(each) for each in results.held("link")}
    say(f"measuring link {link.name} with {backend.collectives} into {path}")
    started = time.monotonic()

    def keep(sample: LinkSample, finished: int, total: int) -> None:
        results.add_sample("link", sample)
        left = (time.monotonic() - started) / finished * (total - finished)
        say(f"{finished}/{total}, {left:.0f} s left, {sample.operation} {sample.message_bytes} B")

    profiler = LinkProfiler(backend, link=link.name)
    profiler.run(cases, measured=held, on_sample=keep)
    for operation, text in profiler.absent.items():
        reason = _reason(RuntimeError(text))
        results.add("failure", link=link.name, operation=operation.value, reason=reason)
        say(f"not measured: {operation}: {reason}")
    results.add("end", clocks=backend.clocks())
    say(f"done; send back {path}")


def describe(unit: Unit) -> str:
    """A unit in a few words."""
    point = unit.point
    return (
        f"{unit.kind} hidden {point.model.hidden_size} sequence {point.sequence_length} "
        f"microbatch {point.microbatch_size} tp {point.tp} {point.precision}"
    )


def say(text: str) -> None:
    """One line for the person who waits."""
    print(text, flush=True)


def _provenance(task: Task, backend: Backend, options: argparse.Namespace) -> Provenance:
    words = [options.what] + (["--link", options.link] if options.what == "links" else [])
    return circumstances(
        backend,
        device=task.kind,
        threads=options.threads,
        command=f"measure_{task.kind}.py {' '.join(words)} (campaign {task.campaign})",
        date=_today(),
        tool=TOOL,
    )


def _today() -> datetime.date:
    return datetime.date.today()


def _plain(value: LayerSample | LinkSample | Provenance) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in fields(value)}


def _circumstances(provenance: dict[str, Any]) -> tuple[Any, ...]:
    return Provenance(**provenance).circumstances


def _link_key(sample: dict[str, Any]) -> tuple[str, int, int]:
    return (sample["operation"], sample["group_size"], sample["message_bytes"])


def _reason(error: Exception) -> str:
    """Why a unit failed, in a line that names no machine and no folder."""
    text = str(error).strip()
    lines = text.splitlines()
    lowered = text.lower()
    words = ("out of memory", "can't allocate memory", "not enough memory", "alloc_failed")
    if isinstance(error, MemoryError) or any(word in lowered for word in words):
        return "out of memory"
    first = re.sub(r"(/[^\s/:]+){2,}", "...", lines[0] if lines else type(error).__name__)
    first = first.replace(socket.gethostname(), "...")
    return f"{type(error).__name__}: {first}"[:_MAX_REASON]


def _free(backend: Backend) -> None:
    """Give back what a failed unit held."""
    gc.collect()
    empty = getattr(getattr(torch, backend.name, None), "empty_cache", None)
    if empty is not None:
        empty()
