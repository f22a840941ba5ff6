"""How long transfers and collectives take on a link, by message size and group size.

Every rank of a torch.distributed job runs `LinkProfiler.run`; rank 0 gets the samples. Groups of
one size are measured one after the other, never two at a time: one group per size, its ranks
spread evenly over the job (0 and world / 2 for pairs), so that a job of two nodes measures what
lies between them. Who wants a certain pair starts a job of two ranks.

A repeat begins with a barrier in a group of its own (gloo), so that control messages and payload
never share a connection, and no control message is sent while a repeat is timed. Times are taken
on every rank and put together afterwards: from the last rank's start to the last rank's end.
Ranks of one machine share its monotonic clock; for others the clock's offset is estimated from
the fastest of several round trips, to half of that round trip's asymmetry.

Part of the stand-alone measure.py: Python 3.8 and torch 2.1 only.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hetplan.errors import InputError
from hetplan.profiling.backends import Backend
from hetplan.profiling.timing import Timing, summarise

MIN_MESSAGE_BYTES = 4096
# Protocols switch between sizes; a factor of 4 puts two or more points on each side.
SIZE_FACTOR = 4
ELEMENT_BYTES = 4  # float32

SEND_RECV, SEND_RECV_LATE = "send_recv", "send_recv_late"
LINK_OPERATIONS = (
    SEND_RECV, SEND_RECV_LATE, "all_reduce", "reduce_scatter", "all_gather", "all_to_all",
    "broadcast",
)  # fmt: skip
"""Values of `hetplan.profiling.samples.LinkOperation`."""

_LOGGER = logging.getLogger(__name__)
_POINT_TO_POINT = (SEND_RECV, SEND_RECV_LATE)
# Between the barrier and the start: the barrier's own last messages have left by then.
_SETTLE_SECONDS = 2e-4
# The receiver is waiting for certain when the sender starts: 2 ms is several time slices.
_LATE_MIN_SECONDS = 2e-3


@dataclass(frozen=True)
class LinkLimits:
    """How often a case is repeated."""

    warmup: int = 2
    min_repeats: int = 5
    max_repeats: int = 40
    seconds: float = 0.1
    """A case aims to end within this time, once it has its fewest repeats."""


@dataclass(frozen=True)
class LinkCase:
    """One thing to measure."""

    operation: str
    group_size: int
    message_bytes: int


def message_sizes(largest_bytes: int) -> tuple[int, ...]:
    """Sizes from 4 KiB by factors of 4, and the largest itself."""
    if largest_bytes < MIN_MESSAGE_BYTES:
        raise InputError(
            f"the largest message is {largest_bytes} bytes; give {MIN_MESSAGE_BYTES} or more"
        )
    sizes, size = [], MIN_MESSAGE_BYTES
    while size < largest_bytes:
        sizes.append(size)
        size *= SIZE_FACTOR
    return (*sizes, largest_bytes)


def group_sizes(world: int) -> tuple[int, ...]:
    """Divisors of the world from 2, powers of two below it, and the world itself."""
    return tuple(
        size for size in range(2, world + 1) if world % size == 0 or size & (size - 1) == 0
    )


def link_cases(
    world: int,
    sizes: Sequence[int],
    *,
    groups: Sequence[int] = (),
) -> tuple[LinkCase, ...]:
    """Every case, small messages first; message sizes are rounded up so that groups divide them."""
    if world < 2:
        raise InputError("a link needs two ranks or more; start with torchrun --nproc-per-node 2")
    cases = []
    for size in sizes:
        for group in groups or group_sizes(world):
            if not 2 <= group <= world:
                raise InputError(f"group size is {group}; with {world} ranks it is 2 to {world}")
            unit = ELEMENT_BYTES * group
            for operation in LINK_OPERATIONS:
                if operation in _POINT_TO_POINT and group != 2:
                    continue
                whole = ELEMENT_BYTES if operation in _POINT_TO_POINT else unit
                cases.append(LinkCase(operation, group, -(-size // whole) * whole))
    return tuple(cases)


def group_members(world: int, group_size: int) -> tuple[int, ...]:
    """Ranks of the group of this size: spread evenly, rank 0 first."""
    return tuple(index * world // group_size for index in range(group_size))


@contextmanager
def process_group(backend: Backend) -> Iterator[int]:
    """The default process group of this torchrun job, for as long as it is used; gives the rank."""
    dist.init_process_group(backend.collectives)
    try:
        yield dist.get_rank()
    finally:
        dist.destroy_process_group()


class LinkProfiler:
    """One rank's part in measuring a link; needs an initialised default process group."""

    def __init__(self, backend: Backend, limits: LinkLimits | None = None) -> None:
        self.backend, self.limits = backend, limits or LinkLimits()
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self._control = dist.new_group(backend="gloo")
        self._clock_offset = self._measure_clock_offset()
        self._groups: dict[int, tuple[Any, Any]] = {}
        self.absent: dict[str, str] = {}
        """Operations that the backend turned out not to have, and what it said."""

    def run(
        self,
        cases: Sequence[LinkCase],
        *,
        measured: Collection[LinkCase] = (),
        on_sample: Callable[[LinkCase, Timing, int, int], None],
    ) -> None:
        """Measure the cases that are not in rank 0's `measured`.

        On rank 0 `on_sample(case, timing, finished, total)` is called after each; other ranks
        never call it. Operations that the backend does not have are left out with a warning, as
        are transfers too short for clocks of different machines.
        """
        agreed: list[Any] = [set(measured)]
        dist.broadcast_object_list(agreed, src=0, group=self._control)
        missing = [case for case in cases if case not in agreed[0]]
        for size in sorted({case.group_size for case in missing}):
            members = list(group_members(self.world, size))
            # Every rank takes part in making every group, in the same order.
            self._groups.setdefault(
                size,
                (
                    dist.new_group(members, backend=self.backend.collectives),
                    dist.new_group(members, backend="gloo"),
                ),
            )
        absent = self._absent_operations(missing)
        missing = [case for case in missing if case.operation not in absent]
        for index, case in enumerate(missing):
            if self.rank not in group_members(self.world, case.group_size):
                continue
            timing = self._measure(case)
            if self.rank == 0 and timing is not None:
                on_sample(case, timing, index + 1, len(missing))

    def _absent_operations(self, cases: Sequence[LinkCase]) -> set[str]:
        """Operations that some rank's backend refuses, found by one small try each."""
        refused: dict[str, str] = {}
        for operation in dict.fromkeys(case.operation for case in cases):
            size = min(case.group_size for case in cases if case.operation == operation)
            if self.rank not in group_members(self.world, size):
                continue
            case = LinkCase(operation, size, ELEMENT_BYTES * size)
            try:
                self._operation(case)()
                self.backend.synchronise()
            except (RuntimeError, NotImplementedError) as error:
                refused[operation] = str(error).splitlines()[0]
        everywhere: list[Any] = [None] * self.world
        dist.all_gather_object(everywhere, refused, group=self._control)
        absent = {operation: text for each in everywhere for operation, text in each.items()}
        self.absent.update(absent)
        if self.rank == 0:
            for operation, text in absent.items():
                name = self.backend.collectives
                _LOGGER.warning("%s is not measured: %s refuses it (%s)", operation, name, text)
        return set(absent)

    def _measure(self, case: LinkCase) -> Timing | None:
        """The timing; None where the clocks of the ranks cannot tell so short a time."""
        control = self._groups[case.group_size][1]
        run = self._operation(case)
        if case.operation == SEND_RECV_LATE:
            together = max(self._gathered(self._repeat(run, control, 0.0, 2), control))
            delay = max(_LATE_MIN_SECONDS, 2 * together) if self.rank == 0 else 0.0
        else:
            delay = 0.0
        began = time.perf_counter()
        self._repeat(run, control, delay, self.limits.warmup)
        typical = (time.perf_counter() - began) / self.limits.warmup
        # One rank's clock decides, so that all members repeat equally often.
        agreed = torch.tensor([typical], dtype=torch.float64)
        dist.broadcast(agreed, src=0, group=control)
        wanted = int(self.limits.seconds / float(agreed[0]))
        repeats = min(self.limits.max_repeats, max(self.limits.min_repeats, wanted))
        seconds = self._gathered(self._repeat(run, control, delay, repeats), control)
        if min(seconds) <= 0:
            # Between machines the clocks agree to within their offset's error only.
            if self.rank == 0:
                _LOGGER.warning(
                    "%s of %d bytes among %d ranks is not measured: it ended before it began by "
                    "the clocks of its machines; their offset is known less well than it is long",
                    case.operation,
                    case.message_bytes,
                    case.group_size,
                )
            return None
        return summarise(seconds)

    def _repeat(
        self, run: Callable[[], None], control: Any, delay_seconds: float, repeats: int
    ) -> list[tuple[float, float]]:
        """Start and end of every repeat on this rank, on rank 0's clock."""
        times = []
        for _ in range(repeats):
            dist.barrier(group=control)
            time.sleep(_SETTLE_SECONDS + delay_seconds)
            started = time.perf_counter()
            run()
            self.backend.synchronise()
            ended = time.perf_counter()
            times.append((started + self._clock_offset, ended + self._clock_offset))
        return times

    def _gathered(self, times: list[tuple[float, float]], control: Any) -> list[float]:
        """Per repeat: the last rank's end less the last rank's start, as the clocks tell them."""
        mine = torch.tensor(times, dtype=torch.float64)
        every = [torch.empty_like(mine) for _ in range(dist.get_world_size(control))]
        dist.all_gather(every, mine, group=control)
        latest = torch.stack(every).amax(dim=0)
        return [float(end - start) for start, end in latest]

    def _operation(self, case: LinkCase) -> Callable[[], None]:
        """What this rank does in one repeat; buffers are allocated here."""
        group, device = self._groups[case.group_size][0], self.backend.device()
        elements = case.message_bytes // ELEMENT_BYTES
        whole = torch.ones(elements, device=device)
        part = torch.ones(max(1, elements // case.group_size), device=device)
        members = group_members(self.world, case.group_size)
        if case.operation in _POINT_TO_POINT:
            if self.rank == members[0]:
                return lambda: dist.send(whole, members[1], group=group)
            return lambda: _nothing(dist.recv(whole, members[0], group=group))
        if case.operation == "all_reduce":
            return lambda: _nothing(dist.all_reduce(whole, group=group))
        if case.operation == "broadcast":
            return lambda: _nothing(dist.broadcast(whole, members[0], group=group))
        if case.operation == "reduce_scatter":
            scatter = _single("reduce_scatter_single", "reduce_scatter_tensor")
            return lambda: scatter(part, whole, group=group)
        if case.operation == "all_gather":
            gather = _single("all_gather_single", "all_gather_into_tensor")
            return lambda: gather(whole, part, group=group)
        received = torch.empty_like(whole)
        return lambda: _nothing(dist.all_to_all_single(received, whole, group=group))

    def _measure_clock_offset(self) -> float:
        """Seconds to add to this rank's clock to get rank 0's."""
        boot = Path("/proc/sys/kernel/random/boot_id")
        machines: list[Any] = [None] * self.world
        mine = boot.read_text() if boot.exists() else f"rank {self.rank}"
        dist.all_gather_object(machines, mine, group=self._control)
        offset = 0.0
        for rank in range(1, self.world):
            if machines[rank] == machines[0]:
                continue
            if self.rank == 0:
                self._answer_pings(rank)
            elif self.rank == rank:
                offset = self._ping()
        return offset

    def _answer_pings(self, rank: int) -> None:
        reading = torch.zeros(1, dtype=torch.float64)
        for _ in range(_PINGS):
            dist.recv(reading, rank, group=self._control)
            reading[0] = time.perf_counter()
            dist.send(reading, rank, group=self._control)

    def _ping(self) -> float:
        reading = torch.zeros(1, dtype=torch.float64)
        best = (float("inf"), 0.0)
        for _ in range(_PINGS):
            started = time.perf_counter()
            dist.send(reading, 0, group=self._control)
            dist.recv(reading, 0, group=self._control)
            ended = time.perf_counter()
            best = min(best, (ended - started, float(reading[0]) - (started + ended) / 2))
        return best[1]


# The fastest of this many round trips has met no queue, most likely.
_PINGS = 16


def _single(name: str, before: str) -> Callable[..., Any]:
    """torch.distributed's function of this name, which torch before 2.13 has under another."""
    function: Callable[..., Any] = getattr(dist, name, None) or getattr(dist, before)
    return function


def _nothing(_: Tensor | int | Any) -> None:
    return None
