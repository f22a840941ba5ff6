"""A sum of messages among ranks that lie level by level (`communicator.levels`).

In chunks: while one crosses between the units the next one is summed inside them. Receives are
posted as early as the caller says (`expect`), before the ranks compute, because a send of gloo
waits until it has heard that the other side takes it: a posted one saves a long link's way back.
What is to be added arrives in memory of its own, as large as all that this rank adds; what
replaces its own arrives in place, which nothing that is still sent can be (who sends it had to
have all of this rank's part before).

An accelerator's message is summed in the host's memory: chunks are copied there while earlier ones
are on the wire, and back as they are done.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from hetplan.cost.collectives.direct_levels import num_chunks
from hetplan.errors import LaunchError
from hetplan.runtime.communicator.levels import Levels, Move, chunks, phases
from hetplan.runtime.communicator.staging import Background, Work

FIRST_TAG = 1 << 24
"""Beyond those of messages between stages (a few per microbatch), which may share the group."""
_TAGS = 1 << 30
"""Numbers that are used again after so many: far more than are under way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mine:
    """A move that this rank has a part in."""

    move: Move
    peer: int
    """Rank, not position."""
    tag: int


_Cell = list[_Mine]
"""Of one phase and one chunk."""


class _Sent:
    """A send under way; a work of gloo can be waited for once."""

    def __init__(self, work: Work, mine: _Mine) -> None:
        self._work: Work | None = work
        self._mine = mine

    def overlaps(self, other: _Mine) -> bool:
        """Whether both are of the same elements."""
        one, two = self._mine.move, other.move
        return one.start < two.stop and two.start < one.stop

    def wait(self) -> None:
        """Until it has left."""
        if self._work is not None:
            _wait(self._work, self._mine)
            self._work = None


class LevelSum:
    """One message that is summed again and again, seen from one rank."""

    def __init__(
        self,
        message: Tensor,
        *,
        group: dist.ProcessGroup,
        ranks: Sequence[int],
        rank: int,
        levels: Levels,
        first_tag: int,
        staged: bool,
    ) -> None:
        """`message` is contiguous, and equally long on all ranks; so is the order in which the
        ranks make the sums of a group, and each sum takes `tags` numbers from `first_tag` on.
        """
        self._message = message.view(-1)
        self._group = group
        pinned = staged and message.device.type == "cuda"
        self._host = (
            torch.empty(self._message.shape, dtype=message.dtype, pin_memory=pinned)
            if staged
            else self._message
        )
        self._staged = staged
        self._chunks = chunks(self._message.numel(), num_chunks(message.nbytes))
        self._me = ranks.index(rank)
        self._cells, self.tags = self._plan(ranks, levels, first_tag)
        mine = [each for row in self._cells for cell in row for each in cell]
        self._incoming = self._host.new_empty(
            sum(_length(each) for each in mine if each.move.adds and each.move.target == self._me)
        )
        self._expected: dict[int, tuple[Work, Tensor]] | None = None

    def _plan(
        self, ranks: Sequence[int], levels: Levels, first_tag: int
    ) -> tuple[list[list[_Cell]], int]:
        """This rank's moves by phase and chunk, and how many all ranks have."""
        tag, me = 0, self._me
        table: list[list[_Cell]] = []
        for chunk, (start, stop) in enumerate(self._chunks):
            # As many phases for every chunk: none is empty where there is an element.
            for number, phase in enumerate(phases(levels, len(ranks), stop - start)):
                if number == len(table):
                    table.append([[] for _ in self._chunks])
                cell = table[number][chunk]
                for move in phase:
                    shifted = replace(move, start=move.start + start, stop=move.stop + start)
                    tag += 1
                    if me in (move.source, move.target):
                        peer = ranks[move.target if move.source == me else move.source]
                        number_of = (first_tag + tag) % _TAGS + FIRST_TAG
                        cell.append(_Mine(move=shifted, peer=peer, tag=number_of))
        return table, tag

    def sent_bytes(self) -> dict[int, float]:
        """What this rank sends in each sum, by the rank that it goes to."""
        sizes: dict[int, float] = defaultdict(float)
        for row in self._cells:
            for cell in row:
                for mine in cell:
                    if mine.move.source == self._me:
                        sizes[mine.peer] += _length(mine) * self._message.element_size()
        return sizes

    def expect(self) -> None:
        """Post all receives of the next sum; `start` does it where this was not called."""
        if self._expected is not None:
            return
        expected: dict[int, tuple[Work, Tensor]] = {}
        at = 0
        for row in self._cells:
            for cell in row:
                for mine in cell:
                    if mine.move.target != self._me:
                        continue
                    place = self._part(mine)
                    if mine.move.adds:
                        place = self._incoming[at : at + _length(mine)]
                        at += _length(mine)
                    expected[mine.tag] = self._post(dist.irecv, place, mine), place
        self._expected = expected

    def start(self) -> Work:
        """Begin the sum of what the message holds now; it replaces it when the work is done."""
        self.expect()
        return Background(self._run)

    def _run(self) -> None:
        expected, self._expected = self._expected or {}, None
        sends: dict[tuple[int, int], list[_Sent]] = defaultdict(list)
        for phase, row in enumerate(self._cells):
            for chunk, cell in enumerate(row):
                if phase == 0:
                    self._copy(chunk, self._host, self._message)
                else:
                    self._take(self._cells[phase - 1][chunk], expected, sends[phase - 1, chunk])
                for mine in cell:
                    if mine.move.source == self._me:
                        work = self._post(dist.isend, self._part(mine), mine)
                        sends[phase, chunk].append(_Sent(work, mine))
        last = len(self._cells) - 1
        for chunk in range(len(self._chunks)):
            if self._cells:
                self._take(self._cells[last][chunk], expected, sends[last, chunk])
            self._copy(chunk, self._message, self._host)
        for cell_sends in sends.values():
            for sent in cell_sends:
                sent.wait()

    def _take(
        self, cell: _Cell, expected: dict[int, tuple[Work, Tensor]], sends: Sequence[_Sent]
    ) -> None:
        """Wait for what this rank gets, and add what is to be added, in the order of the ranks."""
        for mine in cell:
            if mine.move.target != self._me:
                continue
            work, place = expected[mine.tag]
            _wait(work, mine)
            if mine.move.adds:
                # In an exchange of two this rank sends what it adds to.
                for sent in sends:
                    if sent.overlaps(mine):
                        sent.wait()
                self._part(mine).add_(place)

    def _copy(self, chunk: int, to: Tensor, source: Tensor) -> None:
        if self._staged:
            start, stop = self._chunks[chunk]
            to[start:stop].copy_(source[start:stop])

    def _part(self, mine: _Mine) -> Tensor:
        return self._host[mine.move.start : mine.move.stop]

    def _post(self, start: Callable[..., Work | None], tensor: Tensor, mine: _Mine) -> Work:
        work = start(tensor, mine.peer, group=self._group, tag=mine.tag)
        if work is None:
            raise LaunchError(f"rank {mine.peer} is not in the group that it is to sum with")
        return work


def _length(mine: _Mine) -> int:
    return mine.move.stop - mine.move.start


def _wait(work: Work, mine: _Mine) -> None:
    try:
        work.wait()
    except RuntimeError as error:
        raise LaunchError(f"a sum with rank {mine.peer} was not finished: {error}") from error
