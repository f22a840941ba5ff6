"""How a rank sums its gradients with the copies of other ranks.

What a rank puts into one exchange is a list of views of its gradients. Where they lie next to each
other, in a stretch of the gradient vector that no other exchange touches, that stretch is the
message; otherwise they are copied into one and back. All messages are filled before any is summed:
a gradient that takes part in several sums goes into each of them as it was.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hetplan.cost.network.segments import TrafficClass
from hetplan.errors import InputError
from hetplan.plans.plan import LayerRange
from hetplan.profiling.layers import Embedding, GptLayer, Head, LlamaLayer
from hetplan.runtime.communicator.channels import Channel
from hetplan.runtime.exchanges import ParameterPart

Named = Mapping[tuple[int, str], nn.Parameter]
"""Parameters by the position of their layer and their name; a tied one under both of its names."""


def named_parameters(modules: Sequence[nn.Module], chunks: Sequence[LayerRange]) -> Named:
    """The parameters of a stage's modules, one module per layer range."""
    found: dict[tuple[int, str], nn.Parameter] = {}
    for module, chunk in zip(modules, chunks, strict=True):
        layers = [
            each
            for each in module.modules()
            if isinstance(each, Embedding | GptLayer | LlamaLayer | Head)
        ]
        for position, layer in zip(range(chunk.start, chunk.stop), layers, strict=True):
            for name, parameter in layer.named_parameters(recurse=False):
                found[position, name] = parameter
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one rank puts into one exchange."""

    channel: Channel
    views: tuple[Tensor, ...]
    """Of its gradients."""


def parts_of(named: Named, parts: Iterable[ParameterPart]) -> tuple[Tensor, ...]:
    """Views of the gradients of these parts; of a tied matrix once."""
    found: dict[tuple[int, tuple[int, ...]], Tensor] = {}
    for part in parts:
        gradient = named[part.position, part.name].grad
        if gradient is None:
            raise InputError(f"{part.name} of layer {part.position} has no gradient")
        view = gradient.narrow(part.dim, part.start, part.length)
        found.setdefault((view.data_ptr(), tuple(view.shape)), view)
    return tuple(found.values())


class Sums:
    """Exchanges that are made at the same time."""

    def __init__(self, parts: Sequence[Part], traffic: TrafficClass) -> None:
        spans = [[_span(view) for view in part.views] for part in parts]
        self._messages = [
            _Message(part.views, in_place=_alone(at, spans)) for at, part in enumerate(parts)
        ]
        self._sums = [
            part.channel.sum_of(message.buffer, traffic)
            for part, message in zip(parts, self._messages, strict=True)
        ]

    def expect(self) -> None:
        """Let what other ranks send come in from now on: the earlier, the sooner it is there."""
        for each in self._sums:
            each.expect()

    def run(self) -> None:
        """Sum; returns when every gradient has its sum (on an accelerator: when it will have)."""
        for message in self._messages:
            message.fill()
        works = [each.start() for each in self._sums]
        for work, message in zip(works, self._messages, strict=True):
            work.wait()
            message.spread()


def _span(view: Tensor) -> tuple[int, int]:
    """Addresses from the first to behind the last element; of a strided view those between too."""
    length = 1 + sum(
        (size - 1) * stride for size, stride in zip(view.shape, view.stride(), strict=True)
    )
    return view.data_ptr(), view.data_ptr() + length * view.element_size()


def _alone(at: int, spans: Sequence[Sequence[tuple[int, int]]]) -> bool:
    """Whether no other exchange has anything between the first and the last address of this."""
    low, high = min(start for start, _ in spans[at]), max(stop for _, stop in spans[at])
    others = (span for other, found in enumerate(spans) if other != at for span in found)
    return all(stop <= low or start >= high for start, stop in others)


class _Message:
    def __init__(self, views: Sequence[Tensor], *, in_place: bool) -> None:
        self._views = views
        first, total = views[0], sum(view.numel() for view in views)
        self._in_place = in_place and _follow(views)
        self.buffer = first.as_strided((total,), (1,)) if self._in_place else first.new_empty(total)

    def fill(self) -> None:
        """Give the message the gradients as they are now."""
        if not self._in_place:
            torch.cat([view.reshape(-1) for view in self._views], out=self.buffer)

    def spread(self) -> None:
        """Give the gradients what the message has now."""
        if self._in_place:
            return
        at = 0
        for view in self._views:
            stop = at + view.numel()
            view.copy_(self.buffer[at:stop].view(view.shape))
            at = stop


def _follow(views: Sequence[Tensor]) -> bool:
    at = views[0].data_ptr()
    for view in views:
        if view.data_ptr() != at or not view.is_contiguous():
            return False
        at += view.numel() * view.element_size()
    return True
