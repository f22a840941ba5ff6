"""How a rank sums its gradients, shares the optimizer and clips by the global norm.

`Sums`: what a rank puts into one exchange is a list of views of its gradients. Where they lie next
to each other, in a stretch of the gradient vector that no other exchange touches, that stretch is
the message; otherwise they are copied into one and back. All messages are filled before any is
summed: a gradient that takes part in several sums goes into each of them as it was.

`Shard`: with ZeRO-1 (arXiv 1910.02054) each rank of a sharding group gets the sum of its part
alone and updates that part; then the updated weights are gathered. With several sharding groups
(arXiv 2205.00119) the parts are summed once more between the groups. All weights of a rank are one
vector, or two where its experts have other copies; its parts are equally long, the last one is
filled up with zeros.

`clip`: the global norm counts every weight of the model once: the copy of the first pipeline's
first data-parallel rank (of local steps, the site's first pipeline's); the lowest tensor-parallel
rank's where several hold the same; a tied matrix as the embedding's; of an expert its first copy.
Gradients are scaled where the norm is above `MAX_NORM`, as torch.nn.utils.clip_grad_norm_ does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hetplan.cost.network.segments import TrafficClass
from hetplan.errors import InputError
from hetplan.job.spec import Optimizer
from hetplan.model.spec import ModelSpec
from hetplan.plans.plan import LayerRange
from hetplan.profiling.layers import Layer
from hetplan.profiling.weights import FlatParameters, make_rule, rule_state, set_updates
from hetplan.runtime.communicator.channels import Channel
from hetplan.runtime.placement import RankPlace
from hetplan.runtime.weight_slices import ParameterPart, slices_of

Named = Mapping[tuple[int, str], nn.Parameter]
"""Parameters by the position of their layer and their name; a tied one under both of its names."""


def named_parameters(modules: Sequence[nn.Module], chunks: Sequence[LayerRange]) -> Named:
    """The parameters of a stage's modules, one module per layer range."""
    named: dict[tuple[int, str], nn.Parameter] = {}
    for module, chunk in zip(modules, chunks, strict=True):
        layers = [module_part for module_part in module.modules() if isinstance(module_part, Layer)]
        for position, layer in zip(range(chunk.start, chunk.stop), layers, strict=True):
            for name, parameter in layer.named_parameters(recurse=False):
                named[position, name] = parameter
    return named


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one rank puts into one exchange."""

    channel: Channel
    views: tuple[Tensor, ...]
    """Of its gradients."""


def parts_of(named: Named, parts: Iterable[ParameterPart]) -> tuple[Tensor, ...]:
    """Views of the gradients of these parts; of a tied matrix once."""
    views: dict[tuple[int, tuple[int, ...]], Tensor] = {}
    for part in parts:
        gradient = named[part.position, part.name].grad
        if gradient is None:
            raise InputError(f"{part.name} of layer {part.position} has no gradient")
        view = gradient.narrow(part.dim, part.start, part.length)
        views.setdefault((view.data_ptr(), tuple(view.shape)), view)
    return tuple(views.values())


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
        for one_sum in self._sums:
            one_sum.expect()

    def run(self) -> None:
        """Sum; returns when every gradient has its sum (on an accelerator: when it will have)."""
        for message in self._messages:
            message.fill()
        works = [one_sum.start() for one_sum in self._sums]
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
    others = (span for other, views in enumerate(spans) if other != at for span in views)
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


class Shard:
    """One rank's part of the weights of a stage, and the rule that updates it."""

    def __init__(
        self,
        parameters: FlatParameters,
        elements: slice,
        optimizer: Optimizer,
        *,
        inside: Channel | None,
        across: Channel | None,
    ) -> None:
        """Of these elements of the rank's parameters. `inside`: the ranks that split them, in the
        order of their parts; None: this rank has all. `across`: those with the same part.
        """
        weights = parameters.weights[elements]
        self._weights, self._gradients = weights, parameters.gradients[elements]
        gradients = self._gradients
        self._inside = inside
        total, self.parts = weights.numel(), 1 if inside is None else len(inside.ranks)
        parts = self.parts
        size = -(-total // parts)
        start = 0 if inside is None else min(total, inside.ranks.index(inside.rank) * size)
        stop = min(total, start + size)
        self.start = elements.start + start
        """Of this rank's part in all its parameters."""
        self._stop = elements.start + stop
        self._base = parameters.gradients.data_ptr()
        self._padded = weights.new_zeros(parts * size) if parts * size != total else None
        self.gradients = gradients.new_zeros(size)
        """Of this rank's part, after `reduce`."""
        self._across = (
            None if across is None else across.sum_of(self.gradients, TrafficClass.DATA_PARALLEL)
        )
        self._all = parameters.updated.detach()[elements]
        self._updated = nn.Parameter(self._all[start:stop])
        self._mine = weights[start:stop]
        self._rule = make_rule(optimizer, [self._updated])

    @property
    def updated(self) -> Tensor:
        """This part of the weights in float32, as the rule updates it."""
        return self._updated

    def state(self) -> dict[str, Tensor]:
        """The rule's state of `updated` (`hetplan.profiling.weights.rule_state`)."""
        return rule_state(self._rule, self._updated)

    def resume(self, updates: int) -> None:
        """Go on as after this many updates; the whole vector of weights is set already."""
        set_updates(self._rule, self._updated, updates)

    def counted(self, views: Iterable[Tensor]) -> Sequence[Tensor]:
        """What of these stretches of the gradient vector lies in this part, as views of it."""
        own = []
        for view in views:
            at = (view.data_ptr() - self._base) // view.element_size()
            start, stop = max(at, self.start), min(at + view.numel(), self._stop)
            if start < stop:
                own.append(self.gradients[start - self.start : stop - self.start])
        return tuple(own)

    def expect(self) -> None:
        """Let what other groups send come in from now on: the earlier, the sooner it is there."""
        if self._across is not None:
            self._across.expect()

    def reduce(self) -> None:
        """Sum the gradients over all copies."""
        message = self._gradients
        if self._inside is None:
            self.gradients.copy_(message)
            self._sum_across()
            return
        if self._padded is not None:
            self._padded[: message.numel()].copy_(message)
            message = self._padded
        self._inside.scatter_sum(message, self.gradients)
        self._sum_across()

    def _sum_across(self) -> None:
        if self._across is not None:
            self._across.start().wait()

    def update(self) -> None:
        """Apply the rule to this part and gather all parts."""
        size = self._mine.numel()
        self._updated.grad = self.gradients[:size].to(self._updated.dtype)
        self._rule.step()
        if self._updated.data_ptr() != self._mine.data_ptr():
            self._mine.copy_(self._updated.detach())
        self._gather(self._mine, self._weights, self._padded)

    def gather_exact(self) -> None:
        """Gather all parts of the float32 copy of the weights, where there is one."""
        if self._all.data_ptr() != self._weights.data_ptr():
            padded = None if self._padded is None else self._padded.float()
            self._gather(self._updated.detach(), self._all, padded)

    def _gather(self, mine: Tensor, into: Tensor, padded: Tensor | None) -> None:
        if self._inside is None:
            return
        if padded is None:
            self._inside.gather(mine, into)
            return
        filled = mine.new_zeros(self.gradients.numel())
        filled[: mine.numel()].copy_(mine)
        self._inside.gather(filled, padded)
        into.copy_(padded[: into.numel()])


MAX_NORM = 1.0
"""As Megatron-LM's default, --clip-grad (megatron/training/arguments.py)."""
EPSILON = 1e-6
"""Added to the norm before dividing, as torch.nn.utils.clip_grad_norm_ does."""


Parts = tuple[int, int]
"""Ranks that have one copy together: of experts, and of the other weights."""


def parts_of_copies(shards: Sequence[Shard]) -> Parts:
    """The same of ranks with these shards, of experts last."""
    return (shards[-1].parts, shards[0].parts) if shards else (1, 1)


def counted_parts(model: ModelSpec, place: RankPlace, parts: Parts) -> Iterator[ParameterPart]:
    """What this rank, or it and those with the other parts together, adds to the norm."""
    for chunk in place.chunks:
        for part in slices_of(model, chunk, place.cut):
            if part.first and counts(place, parts, expert=part.expert):
                yield ParameterPart(
                    position=part.position,
                    name=part.name,
                    dim=0,
                    start=part.row,
                    length=part.rows,
                )


def counts(place: RankPlace, parts: Parts, *, expert: bool) -> bool:
    """Whether this rank's copy, of its experts or of its other weights, is the one that counts, or
    one of its parts.
    """
    copy, of_experts = place.expert_copy if expert else place.dp_index, parts[0]
    return place.pipeline == place.first_pipeline and copy < (of_experts if expert else parts[1])


def clip(gradients: Sequence[Tensor], counted: Sequence[Tensor], everyone: Channel | None) -> None:
    """Scale all gradients of this rank so that the norm of all ranks' is at most `MAX_NORM`.

    `counted` are the views of them that this rank adds to the norm.
    """
    total = torch.zeros((), dtype=torch.float32, device=gradients[0].device)
    for view in counted:
        total += torch.linalg.vector_norm(view, dtype=torch.float32).square()
    if everyone is not None:
        everyone.start_sum(total, None).wait()
    for each in gradients:
        each.mul_(torch.clamp(MAX_NORM / (total.sqrt() + EPSILON), max=1.0))
