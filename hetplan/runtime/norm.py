"""How large are all gradients together, and how are they clipped?

The global norm counts every weight of the model once: of its copies those of the first pipeline's
first data-parallel rank; of what several tensor-parallel ranks hold alike the lowest one's; of a
tied matrix the embedding's. Gradients are scaled where the norm is above `MAX_NORM`, as
torch.nn.utils.clip_grad_norm_ does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from hetplan.model.spec import LayerKind, ModelSpec
from hetplan.profiling.weights import parameter_slices
from hetplan.runtime.communicator.channels import Channel
from hetplan.runtime.exchanges import ParameterPart
from hetplan.runtime.placement import RankPlace

MAX_NORM = 1.0
"""As Megatron-LM's default, --clip-grad (megatron/training/arguments.py)."""
EPSILON = 1e-6
"""Added to the norm before dividing, as torch.nn.utils.clip_grad_norm_ does."""


def counted_parts(model: ModelSpec, place: RankPlace) -> Iterator[ParameterPart]:
    """What this rank adds to the norm, the copies of its whole stage left out of account."""
    for chunk in place.chunks:
        for position in range(chunk.start, chunk.stop):
            kind = model.layers[position]
            tied_head = model.tied_embeddings and kind is LayerKind.HEAD
            lower = max(0, place.tp_index - 1)
            mine = parameter_slices(model, kind, tp=place.tp, tp_rank=place.tp_index)
            below = parameter_slices(model, kind, tp=place.tp, tp_rank=lower)
            for parameter, other in zip(mine, below, strict=True):
                if tied_head and parameter.name == "weight":
                    continue
                row = 0
                for piece, same in zip(parameter.parts, other.parts, strict=True):
                    # Slices of equal start follow each other: starts never fall with tp_index.
                    if place.tp_index == 0 or same.start != piece.start:
                        yield ParameterPart(
                            position=position,
                            name=parameter.name,
                            dim=0,
                            start=row,
                            length=piece.shape[0],
                        )
                    row += piece.shape[0]


def counts(place: RankPlace, parts: int = 1) -> bool:
    """Whether this rank's copy is the one that counts, or has one of the `parts` of it."""
    return place.pipeline == 0 and place.dp_index < parts


def clip(gradients: Tensor, counted: Sequence[Tensor], everyone: Channel | None) -> None:
    """Scale all gradients of this rank so that the norm of all ranks' is at most `MAX_NORM`.

    `counted` are the views of them that this rank adds to the norm.
    """
    total = torch.zeros((), dtype=torch.float32, device=gradients.device)
    for view in counted:
        total += torch.linalg.vector_norm(view, dtype=torch.float32).square()
    if everyone is not None:
        everyone.start_sum(total, None).wait()
    gradients.mul_(torch.clamp(MAX_NORM / (total.sqrt() + EPSILON), max=1.0))
