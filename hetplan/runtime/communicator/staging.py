"""The host-staged transport: device memory over a network that reaches the host's memory only.

In chunks through two buffers on the host: while one chunk is on the wire the next one is copied.
Each message between two ranks has a thread of its own, so that posting it holds nobody; sums run
where they are started, because all ranks start them in the same order. A CPU's tensors are host
memory already and are never staged. Run with buffers between CPU tensors (tests/runtime); with an
accelerator's memory it has **not been run yet**.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor


class Work(Protocol):
    """A transfer under way."""

    def wait(self) -> object:
        """Until it is done (on an accelerator: until the stream's next work may rely on it)."""
        ...


CHUNK_BYTES = 4 * 2**20
"""Half a millisecond at 8 GB/s: long beside the cost of a call, short beside a message."""

Start = Callable[[Tensor], Work]
"""Begin to send, receive or sum a tensor of the host."""


class Background:
    """Something that runs in a thread of its own."""

    def __init__(self, run: Callable[[], None]) -> None:
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._guarded, args=(run,), daemon=True)
        self._thread.start()

    def _guarded(self, run: Callable[[], None]) -> None:
        try:
            run()
        except BaseException as error:
            self._error = error

    def wait(self) -> None:
        """Until it is done; raises what it raised."""
        self._thread.join()
        if self._error is not None:
            raise self._error


class Done:
    """Work that is over."""

    def wait(self) -> None:
        """At once."""


def send(tensor: Tensor, start: Start) -> None:
    """Send a contiguous tensor chunk by chunk; returns when all of it has left."""
    pieces, buffers = _pieces(tensor)
    works: list[Work] = []
    for at, piece in enumerate(pieces):
        if at >= 2:
            works[at - 2].wait()
        buffer = buffers[at % 2][: piece.numel()]
        buffer.copy_(piece)
        works.append(start(buffer))
    for work in works[-2:]:
        work.wait()


def receive(tensor: Tensor, start: Start) -> None:
    """Fill a contiguous tensor with what `send` sends; the chunks are the same on both sides."""
    _filled(tensor, start, lambda buffer, piece: None)


def reduce(tensor: Tensor, start: Start) -> None:
    """Replace a contiguous tensor by its sum over the ranks that all call this."""
    _filled(tensor, start, lambda buffer, piece: buffer.copy_(piece))


def _filled(tensor: Tensor, start: Start, fill: Callable[[Tensor, Tensor], object]) -> None:
    pieces, buffers = _pieces(tensor)
    works: list[Work] = []
    for at in range(len(pieces) + 1):
        if at < len(pieces):
            buffer = buffers[at % 2][: pieces[at].numel()]
            fill(buffer, pieces[at])
            works.append(start(buffer))
        if at > 0:
            # The other buffer's, while this one is under way.
            works[at - 1].wait()
            done = pieces[at - 1]
            done.copy_(buffers[(at - 1) % 2][: done.numel()])


def _pieces(tensor: Tensor) -> tuple[Sequence[Tensor], tuple[Tensor, Tensor]]:
    flat = tensor.view(-1)
    size = max(1, min(flat.numel(), CHUNK_BYTES // flat.element_size()))
    pinned = tensor.device.type == "cuda"
    one, two = (torch.empty(size, dtype=tensor.dtype, pin_memory=pinned) for _ in range(2))
    return torch.split(flat, size), (one, two)
