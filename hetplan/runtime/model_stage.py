"""The part of the model that one rank trains: the layers of its stage, or its slices of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hetplan.cost.network.segments import TrafficClass
from hetplan.errors import InputError
from hetplan.model.spec import LayerKind, ModelSpec
from hetplan.plans.plan import LayerRange
from hetplan.profiling.layers import (
    Communication,
    Embedding,
    Head,
    HeadWithLoss,
    Layer,
    build_layer,
)
from hetplan.profiling.pacing import Pacer
from hetplan.profiling.weights import ALL_EXPERTS, Cut, ExpertShare
from hetplan.runtime.activity import Activity
from hetplan.runtime.communicator.channels import Channel


@dataclass(frozen=True, slots=True, kw_only=True)
class StageShape:
    """Which layers a rank builds, and how."""

    layers: LayerRange
    cut: Cut
    microbatch_size: int
    full_recompute: bool
    seed: int
    dtype: torch.dtype
    device: torch.device
    expert_shares: tuple[ExpertShare, ...] = (ALL_EXPERTS,)
    """Of the ranks of its expert-parallel group."""


class _Counted(Communication):
    """A group whose bytes are counted and whose sums and exchanges `activity` records."""

    def __init__(self, channel: Channel, activity: Activity, peers: tuple[int, ...]) -> None:
        super().__init__(channel.group)
        self._channel, self._activity, self._peers = channel, activity, peers

    def all_reduce(self, tensor: Tensor, operation: Any = None) -> None:
        self._channel.count_sum(tensor.nbytes, TrafficClass.TENSOR_PARALLEL)
        with self._activity.within("sum over its tensor-parallel ranks", self._peers):
            super().all_reduce(tensor, operation)

    def exchange(self, into: Tensor, tensor: Tensor, received: list[int], sent: list[int]) -> None:
        with self._activity.within("exchange of its experts' tokens", self._peers):
            self._channel.exchange_rows(into, tensor, received, sent)


def _deal_out(
    layer: Layer, shares: Sequence[ExpertShare], group: Channel, activity: Activity
) -> None:
    """Let the layer exchange its experts' tokens with the ranks of this group."""
    others = tuple(rank for rank in group.ranks if rank != group.rank)
    layer.expert_communication = _Counted(group, activity, others)
    layer.expert_counts = [len(share.of(layer.num_experts)) for share in shares]


class StageModule(nn.Module):
    """The layers of one stage in a row.

    The first stage takes tokens [b, s], the others activations [b, s, h]; the last stage takes
    targets [b, s] as well and gives the mean loss of its microbatch, the others activations.
    A stage that holds both ends of a model with tied embeddings has one matrix for both.
    """

    def __init__(
        self,
        model: ModelSpec,
        shape: StageShape,
        *,
        group: dist.ProcessGroup | Channel | None,
        expert_group: Channel | None = None,
        pacer: Pacer | None,
        activity: Activity | None = None,
        peers: tuple[int, ...] = (),
    ) -> None:
        """`group`: of the tensor-parallel ranks; through a channel what they send is counted, and
        `activity` records each sum with these `peers`.
        """
        super().__init__()
        channel = group if isinstance(group, Channel) else None
        built = [
            build_layer(
                model,
                position,
                cut=shape.cut,
                group=group.group if isinstance(group, Channel) else group,
                seed=shape.seed,
                dtype=shape.dtype,
                device=shape.device,
            )
            for position in range(shape.layers.start, shape.layers.stop)
        ]
        activity = activity or Activity()
        for layer in built:
            if channel is not None:
                layer.communication = _Counted(channel, activity, peers)
            if expert_group is not None:
                _deal_out(layer, shape.expert_shares, expert_group, activity)
        first, last = built[0], built[-1]
        self.matrix: nn.Parameter | None = None
        """The vocabulary matrix that another stage holds too, where the model ties it."""
        if model.tied_embeddings:
            if isinstance(first, Embedding) and isinstance(last, Head):
                last.weight = first.weight
            elif isinstance(first, Embedding):
                self.matrix = first.get_parameter("weight")
            elif isinstance(last, Head):
                self.matrix = last.get_parameter("weight")
        self.holds_loss = isinstance(last, Head)
        self.holds_tokens = isinstance(first, Embedding)
        self._recompute = shape.full_recompute
        self._kinds = model.layers[shape.layers.start : shape.layers.stop]
        self._communications = [
            each for layer in built for each in (layer.communication, layer.expert_communication)
        ]
        modules: list[nn.Module] = [
            HeadWithLoss(layer) if isinstance(layer, Head) else layer for layer in built
        ]
        if pacer is not None:
            modules = [
                pacer.wrap(module, kind, shape.microbatch_size, shape.cut.tp)
                for module, kind in zip(modules, self._kinds, strict=True)
            ]
        self.layers = nn.ModuleList(modules)

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        """Activations [b, s, h] for the next stage, or the loss."""
        for layer, kind in zip(self.layers, self._kinds, strict=True):
            if kind is LayerKind.HEAD:
                if targets is None:
                    raise InputError("the stage that holds the head needs targets")
                x = layer(x, targets)
            elif kind is LayerKind.TRANSFORMER and self._recompute:
                # No layer draws random numbers, so there is no generator state to restore.
                x = checkpoint(layer, x, use_reentrant=False, preserve_rng_state=False)
            else:
                x = layer(x)
        return x

    def tensor_parallel_seconds(self) -> float:
        """Time spent in the tensor-parallel and expert-parallel groups so far."""
        return sum(communication.seconds for communication in self._communications)
