"""How a rank's weights are averaged with those of other sites (`hetplan.plans.local_steps`).

A rank keeps the weights of the last averaging and their momentum, in float32 and in the host's
memory, as one vector each over its parameters. For every exchange between sites it puts the
differences of the fragment's weights into a message. Within a site all copies are equal, so the
first one counts for all; the float32 weights of a sharded optimizer are gathered before. What comes
back is the mean that the outer optimizer steps by: every rank makes the same step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from hetplan.cost.network.segments import TrafficClass
from hetplan.plans.local_steps import common_layers, fragments
from hetplan.plans.plan import LayerRange, OuterSynchronisation
from hetplan.profiling.weights import FlatParameters
from hetplan.runtime.communicator.channels import Channel, Groups, Sum
from hetplan.runtime.communicator.staging import Work
from hetplan.runtime.gradient_groups import exchanged_parts, exchanges
from hetplan.runtime.gradients import Named, Shard, parts_of
from hetplan.runtime.placement import RankPlace, site_batches
from hetplan.runtime.training import Training


class _Part(NamedTuple):
    """Views of a part of a parameter."""

    local: Tensor
    weights: Tensor
    """Of the last averaging; the next two as these."""
    momentum: Tensor
    mean: Tensor
    message: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class _Message:
    """A rank's part of one exchange of one fragment."""

    parts: tuple[_Part, ...]
    weight: float
    """Of this rank's differences: its site's part of the batch, 0 for all but the first copy."""
    sum: Sum


class Averaging:
    """The outer optimizer of one rank."""

    def __init__(
        self,
        training: Training,
        outer: OuterSynchronisation,
        places: Sequence[RankPlace],
        place: RankPlace,
        groups: Groups,
        named: Named,
        held: tuple[FlatParameters, Sequence[Shard]],
    ) -> None:
        """`groups` was opened for the exchanges between the sites (`Reduction.outer`)."""
        self.settings, (parameters, self._shards) = outer.settings, held
        self._parameters = parameters
        self._local = parameters.updated.detach()
        self._weights = self._local.to("cpu", copy=True)
        self._momentum = torch.zeros_like(self._weights)
        self._mean = torch.zeros_like(self._weights)
        self._works: list[Work] = []
        self._done, self._under_way = 0, False
        batches, model = site_batches(training.plan), training.model
        self.num_sites = len(batches)
        share = batches[place.site] / sum(batches)

        def rows(layers: LayerRange) -> Iterator[tuple[Channel, float, tuple[Tensor, ...]]]:
            """(channel, weight, views of the gradients) of every exchange of these layers."""
            for exchange in exchanges(outer.reduction_groups, places):
                channel = groups.channel(exchange.ranks)
                both = [common_layers(each, layers) for each in exchange.layers]
                held = tuple(each for each in both if each is not None)
                if channel is not None and held:
                    first = next(r for r in exchange.ranks if places[r].site == place.site)
                    parts = exchanged_parts(model, replace(exchange, layers=held), place)
                    weight = share if place.rank == first else 0.0
                    yield channel, weight, parts_of(named, parts)

        found = [[*rows(each)] for each in fragments(model, outer.settings.num_fragments)]
        sizes = [sum(view.numel() for *_, views in row for view in views) for row in found]
        # Fragments take turns: one buffer does for all.
        self._buffer = torch.empty(max(sizes), dtype=getattr(torch, outer.settings.precision))
        self._fragments = tuple(tuple(self._messages(row)) for row in found)

    def _messages(
        self, rows: Sequence[tuple[Channel, float, tuple[Tensor, ...]]]
    ) -> Iterator[_Message]:
        gradients, at = self._parameters.gradients, 0
        vectors = (self._local, self._weights, self._momentum, self._mean)
        for channel, weight, views in rows:
            begin, parts = at, list[_Part]()
            for view in views:
                start = (view.data_ptr() - gradients.data_ptr()) // gradients.element_size()
                message = self._buffer[at : at + view.numel()].view(view.shape)
                own = (each.as_strided(view.shape, view.stride(), start) for each in vectors)
                parts.append(_Part._make((*own, message)))
                at += view.numel()
            message_sum = channel.sum_of(self._buffer[begin:at], TrafficClass.DATA_PARALLEL)
            yield _Message(parts=tuple(parts), weight=weight, sum=message_sum)

    @property
    def _period(self) -> int:
        """Steps of a fragment's turn."""
        return self.settings.sync_steps // self.settings.num_fragments

    @property
    def _now(self) -> tuple[_Message, ...]:
        """Of the fragment whose turn the last step was in."""
        return self._fragments[(self._done - 1) // self._period % len(self._fragments)]

    def after_step(self) -> None:
        """What is due after a step: a mean begins, or arrives `fragment_sync_delay` steps later."""
        self._done += 1
        place = self._done % self._period
        begins = place == -self.settings.fragment_sync_delay % self._period
        for shard in self._shards if begins or place == 0 else ():
            shard.gather_exact()
        if begins:
            for message in self._now:
                for part in message.parts:
                    difference = part.weights - part.local.cpu()
                    part.message.copy_(difference.mul_(message.weight))
            self._works = [message.sum.start() for message in self._now]
            self._under_way = True
        if place == 0 and self._under_way:
            self.arrive()
            self._step()

    def arrive(self) -> None:
        """Wait for a mean that is under way."""
        for work in self._works:
            work.wait()
        self._works = []

    def _step(self) -> None:
        """SGD with Nesterov momentum, as torch.optim.SGD, on the fragment's weights."""
        settings, seen = self.settings, set[tuple[int, torch.Size]]()
        for local, weights, momentum, _, message in self._parts():
            key = local.data_ptr(), local.shape
            if key in seen:
                continue  # what is alike on all tensor-parallel ranks is in several messages
            seen.add(key)
            mean = message.to(torch.float32)
            momentum.mul_(settings.outer_momentum).add_(mean)
            weights.sub_(mean + settings.outer_momentum * momentum, alpha=settings.outer_lr)
            kept = settings.fragment_update_alpha
            local.copy_(torch.lerp(weights.to(local.device), local, kept))
        self._under_way = False
        self._parameters.round()

    def _parts(self) -> Iterator[_Part]:
        for message in self._now:
            yield from message.parts

    def state(self) -> dict[str, Tensor]:
        """What is kept, by its name in a checkpoint; what is written there counts after `resume`.

        Of a mean under way it is the mean.
        """
        self.arrive()
        for part in self._parts() if self._under_way else ():
            part.mean.copy_(part.message)
        return {
            "outer_weights": self._weights,
            "outer_momentum": self._momentum,
            "outer_mean": self._mean,
        }

    def begin_anew(self) -> None:
        """From the weights as they are, without momentum."""
        self._weights.copy_(self._local)
        self._momentum.zero_()

    def resume(self, done: int, *, under_way: bool) -> None:
        """Go on as after so many steps with what `state` has now; a mean may be under way."""
        self._done = done
        due = 0 < -done % self._period <= self.settings.fragment_sync_delay
        self._under_way = under_way and due
        for part in self._parts() if self._under_way else ():
            part.message.copy_(part.mean)
