"""What does one microbatch need in a range of layers, and which moment of a step is the worst?

Candidates are all backward passes of a stage's order, and in each of them all layers, from the last
one back. When the backward pass of a layer runs, what the later layers kept is free already, so it
is taken off; not for a trainer that frees nothing before the pass of the whole stage is over.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from hetplan.cost.memory.activations import (
    Cut,
    LayerBytes,
    embedding_bytes,
    head_bytes,
    matrix_bytes,
    transformer_bytes,
)
from hetplan.cost.memory.values import NO_RECOMPUTE, TrainerMemory
from hetplan.cost.schedules import Pass
from hetplan.model.spec import ModelSpec
from hetplan.plans.plan import LayerRange


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Bytes of one microbatch in one layer range."""

    kept: float
    """From the start of its forward pass to the end of its backward pass."""
    for_weights: float
    """Still kept from then until the gradients of the weights are made, where that is a pass of its
    own."""
    working: float
    """Most that its backward pass needs beside all that the chunk keeps."""


@lru_cache(maxsize=4096)
def chunk_bytes(
    model: ModelSpec, layers: LayerRange, cut: Cut, habits: TrainerMemory, tokens: float
) -> Chunk:
    """One microbatch of `tokens` tokens of a rank in these layers."""
    kept = for_weights = released = working = 0.0
    first = layers.start + (layers.start == 0)
    again = layers.stop if cut.recompute.layers is None else first + cut.recompute.layers
    keeps = replace(cut, recompute=NO_RECOMPUTE)
    for at in reversed(range(layers.start, layers.stop)):
        one, matrix = layer_bytes(model, at, cut if at < again else keeps, habits)
        one = one.times(tokens)
        working = max(working, one.loss - released, one.working + matrix - released)
        kept += one.kept
        for_weights += one.for_weights
        if habits.frees_as_it_goes:
            released += one.kept
    return Chunk(kept=kept, for_weights=for_weights, working=working)


def layer_bytes(
    model: ModelSpec, at: int, cut: Cut, habits: TrainerMemory
) -> tuple[LayerBytes, float]:
    """What a layer needs per token, and for the gradient of its largest matrix."""
    vocabulary = float(cut.element_bytes * model.vocabulary_matrix(cut.tp))
    if at == 0:
        return embedding_bytes(model, cut, habits), vocabulary
    head = head_bytes(model, cut, habits)
    head_matrix = 0.0 if habits.fused_weight_gradients else vocabulary
    if at > model.num_layers + model.num_mtp_layers:
        return head, head_matrix
    layer, h = model.layer_at(at), model.hidden_size
    inside = transformer_bytes(layer, h, cut, habits)
    matrix = matrix_bytes(layer, h, cut, habits)
    if at <= model.num_layers:
        return inside, matrix
    # Multi-token prediction: both normed halves and their inputs; the layer; the head's own pass.
    halves = 4.0 * h * cut.element_bytes * cut.replicated
    whole = LayerBytes(
        kept=halves + inside.kept + head.kept,
        working=max(head.working, inside.working - head.kept * habits.frees_as_it_goes),
        for_weights=halves + inside.for_weights + head.for_weights,
        loss=head.loss,
    )
    return whole, max(matrix, head_matrix)


def worst_moment(order: tuple[Pass, ...], chunks: tuple[Chunk, ...]) -> tuple[float, float]:
    """(bytes kept, bytes that the pass needs besides) when their sum is largest in this order."""
    splits = any(one.kind == "W" for one in order)
    now, worst = 0.0, (0.0, 0.0)
    for one in order:
        chunk = chunks[one.chunk]
        if one.kind == "F":
            now += chunk.kept
            worst = max(worst, (now, 0.0), key=sum)
        elif one.kind == "B":
            worst = max(worst, (now, chunk.working), key=sum)
            now -= chunk.kept - (chunk.for_weights if splits else 0.0)
            worst = max(worst, (now, 0.0), key=sum)
        else:
            now -= chunk.for_weights
    return worst
