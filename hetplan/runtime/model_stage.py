"""The part of the model that one rank trains: the layers of its stage, or its slices of them."""

from __future__ import annotations

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
    build_layer,
)
from hetplan.profiling.pacing import Pacer
from hetplan.runtime.activity import Activity
from hetplan.runtime.communicator.channels import Channel


@dataclass(frozen=True, slots=True, kw_only=True)
class StageShape:
    """Which layers a rank builds, and how."""

    layers: LayerRange
    tp: int
    tp_index: int
    microbatch_size: int
    full_recompute: bool
    seed: int
    dtype: torch.dtype
    device: torch.device


class _Counted(Communication):
    """A tensor-parallel group whose bytes are counted and whose sums `activity` records."""

    def __init__(self, channel: Channel, activity: Activity, peers: tuple[int, ...]) -> None:
        super().__init__(channel.group)
        self._channel, self._activity, self._peers = channel, activity, peers

    def all_reduce(self, tensor: Tensor, operation: Any = None) -> None:
        self._channel.count_sum(tensor.nbytes, TrafficClass.TENSOR_PARALLEL)
        with self._activity.within("sum over its tensor-parallel ranks", self._peers):
            super().all_reduce(tensor, operation)


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
                tp=shape.tp,
                tp_rank=shape.tp_index,
                group=group.group if isinstance(group, Channel) else group,
                seed=shape.seed,
                dtype=shape.dtype,
                device=shape.device,
            )
            for position in range(shape.layers.start, shape.layers.stop)
        ]
        if channel is not None:
            for layer in built:
                counted = _Counted(channel, activity or Activity(), peers)
                setattr(layer, "communication", counted)  # noqa: B010
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
            layer.communication for layer in built if isinstance(layer.communication, Communication)
        ]
        modules: list[nn.Module] = [
            HeadWithLoss(layer) if isinstance(layer, Head) else layer for layer in built
        ]
        if pacer is not None:
            modules = [
                pacer.wrap(module, kind, shape.microbatch_size, shape.tp)
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
        """Time spent in the tensor-parallel group so far."""
        return sum(communication.seconds for communication in self._communications)
