"""What does a device hold that belongs to no microbatch, and what lies between stages?

placeholders   one tensor per shape of a weight, in place of gradients that went elsewhere
               (Transformer Engine, pytorch/module/base.py, get_dummy_wgrad; Megatron-LM's
               output layer takes one too)
workspace      of the matrix library
gathering      whole copy of the head's input under sequence parallelism, allocated once
               (Megatron-LM, get_global_memory_buffer)
messages       receive buffers, and what was sent and is still kept
"""

from __future__ import annotations

from dataclasses import dataclass

from hetplan.cost.memory.activations import Cut
from hetplan.cost.memory.state import placeholder_elements
from hetplan.cost.memory.values import MemoryLayout, TrainerMemory
from hetplan.model.layers import Experts
from hetplan.model.spec import ModelSpec


def standing_bytes(
    model: ModelSpec,
    cut: Cut,
    habits: TrainerMemory,
    positions: tuple[int, ...],
    tokens: float,
) -> float:
    """Bytes that are there during all of a step, whatever is in flight."""
    last = model.num_layers + model.num_mtp_layers + 1
    total = habits.workspace_bytes
    if any(0 < at < last and isinstance(model.layer_at(at).mlp, Experts) for at in positions):
        total += habits.experts_workspace_bytes
    if habits.placeholder_gradients:
        total += cut.element_bytes * placeholder_elements(model, cut.tp, cut.etp, positions)
    if cut.gathers and habits.frees_as_it_goes and positions[-1] == last:
        total += tokens * model.hidden_size * cut.element_bytes
    return total


def boundary_bytes(model: ModelSpec, cut: Cut, tokens: float) -> float:
    """One microbatch's activations between two stages, on one rank."""
    return tokens * model.hidden_size * cut.element_bytes * cut.replicated


@dataclass(frozen=True, slots=True, kw_only=True)
class Messages:
    """Bytes for what crosses the stage's boundaries."""

    received: float
    """Buffers that are there all the time."""
    sent: float
    """Kept with every microbatch in flight, in every chunk but the model's last."""
    beside: float
    """While a pass runs."""


def messages(
    layout: MemoryLayout, habits: TrainerMemory, message: float, *, first: bool, last: bool
) -> Messages:
    """Messages of a stage: `first` has no stage before it, `last` none after.

    A received gradient is the working memory of the layer that it enters, a received input is
    kept by the layer that reads it; neither is counted here.
    """
    neighbours = (not first) + (not last)
    if habits.receive_buffers:
        # Receives that are posted when there is room need no buffers for later microbatches.
        posted = layout.in_flight if layout.early_sends else layout.num_microbatches
        return Messages(
            received=neighbours * posted * message,
            sent=message if habits.keeps_output else 0.0,
            beside=neighbours * message,
        )
    # With several chunks the next pass's inputs are received while this one runs, in both
    # directions (Megatron-LM's interleaved schedule); with one chunk sends and receives end first.
    ahead = 2.0 * message if len(layout.chunks) > 1 else 0.0
    return Messages(received=0.0, sent=message if habits.keeps_output else 0.0, beside=ahead)
