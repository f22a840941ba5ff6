"""What a whole layer of the model computes on a device, forward, backward and in one update.

The layers are those that hetplan trains (`hetplan.profiling.layers`), as rank 0's tensor-parallel
slice without its group: what a group would add up stays a partial sum, on every device alike. They
start from the weights that the trainer starts from, rounded to the job's format; the embedding and
the loss see the trainer's own tokens.

The first update of AdamW is the sign of the gradient, whatever its moments' coefficients, and would
turn the rounding of a small gradient into a whole step. So every device updates with the gradients
of the reference, and goes on from the same moments, as after `_UPDATES` updates.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hetplan.job.spec import Optimizer
from hetplan.launchers.numerics_bodies import Outcome, SameDraws, exact_copy
from hetplan.model.spec import LayerKind, ModelSpec
from hetplan.profiling.layers import Head, HeadWithLoss, build_layer
from hetplan.profiling.operator_bodies import Place
from hetplan.profiling.updating import FlatParameters, make_rule, rule_state, set_updates
from hetplan.runtime.data import MarkovTokens, sample_numbers

_UPDATES = 10
"""Neither of the moments' corrections is 1 after so many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSlice:
    """One layer as a tensor-parallel slice, and what it is given."""

    model: ModelSpec
    kind: LayerKind
    tp: int
    microbatch_size: int
    sequence_length: int
    seed: int
    precision: torch.dtype

    @property
    def position(self) -> int:
        """The first layer of its kind."""
        return self.model.layers.index(self.kind)


def trained_tokens(part: LayerSlice) -> tuple[Tensor, Tensor]:
    """Inputs and targets of the first microbatch that the trainer would see."""
    batch = part.microbatch_size
    numbers = sample_numbers(0, global_batch_size=batch, microbatch_size=batch, dp=1, dp_index=0)
    data = MarkovTokens.of(part.model.vocab_size, part.seed)
    drawn = torch.from_numpy(data.samples(numbers, part.sequence_length + 1))
    return drawn[:, :-1], drawn[:, 1:]


def layer_outcomes(part: LayerSlice, place: Place) -> tuple[Outcome, ...]:
    """Result, gradient of the input, and gradients of all weights."""
    module = _module(part, place)
    batch, length, hidden = part.microbatch_size, part.sequence_length, part.model.hidden_size
    tokens, targets = (each.to(place.device) for each in trained_tokens(part))
    with SameDraws(part.seed, part.precision, exact=place.dtype == torch.float64):
        x = tokens
        if part.kind is not LayerKind.EMBEDDING:
            x = place.leaf(batch, length, hidden)
        result = module(x, targets) if part.kind is LayerKind.HEAD else module(x)
        gradient = place.values(*result.shape) if result.dim() else None
        torch.autograd.backward(result, gradient)
    return tuple(_found(module, x, result))


def layer_weights(part: LayerSlice, place: Place) -> Tensor:
    """All weights of the layer as one vector, as every device starts from them."""
    weights = [weight.detach().flatten() for weight in _module(part, place).parameters()]
    return torch.cat(weights)


def _module(part: LayerSlice, place: Place) -> nn.Module:
    layer: nn.Module = build_layer(
        part.model,
        part.position,
        tp=part.tp,
        tp_rank=0,
        group=None,
        seed=part.seed,
        dtype=part.precision,
        device="cpu" if place.dtype == torch.float64 else place.device,
    )
    layer = layer.to(place.dtype)
    return HeadWithLoss(layer) if isinstance(layer, Head) else layer


def _found(module: nn.Module, x: Tensor, result: Tensor) -> Iterator[Outcome]:
    yield Outcome(tensor="forward", value=exact_copy(result))
    if x.grad is not None:
        yield Outcome(tensor="gradient of input", value=exact_copy(x.grad))
    for name, parameter in module.named_parameters():
        if parameter.grad is not None:
            short = name.rpartition(".")[2]
            yield Outcome(tensor=f"gradient of {short}", value=exact_copy(parameter.grad))


def update_outcomes(
    part: LayerSlice, place: Place, gradients: tuple[Outcome, ...], optimizer: Optimizer
) -> tuple[Outcome, ...]:
    """Weights of the layer after one update of many, and their change before it is rounded.

    `gradients` are the reference's of `layer_outcomes`.
    """
    by_name = {each.tensor.removeprefix("gradient of "): each.value for each in gradients}
    module = _module(part, place)
    named = [(name.rpartition(".")[2], weight) for name, weight in module.named_parameters()]
    exactly = torch.cat([by_name[name].flatten() for name, _ in named])
    given = exactly.to(part.precision)
    before = torch.cat([weight.detach().flatten() for _, weight in named])
    flat = FlatParameters(module, optimizer)
    # `FlatParameters` works on float32 where the weights are narrower or wider than that.
    exact = place.dtype == torch.float64
    weights = before.clone() if exact else before.float().clone()
    alone = nn.Parameter(weights)
    alone.grad = given.to(device=place.device, dtype=weights.dtype)
    rule = make_rule(optimizer, [alone])
    _start(rule_state(rule, alone), exactly)
    set_updates(rule, alone, _UPDATES)
    rule.step()
    change = exact_copy(alone) - exact_copy(before)
    if exact:
        after = exact_copy(alone)
    else:
        _start(flat.state(), exactly)
        flat.resume(_UPDATES)
        flat.gradients.copy_(given)
        flat.update()
        after = exact_copy(flat.weights)
    return (
        Outcome(tensor="change of weights", value=change),
        Outcome(tensor="weights after a step", value=after),
    )


def _start(state: dict[str, Tensor], gradients: Tensor) -> None:
    """Fill the rule's moments as if two gradients had come in turn: these, and their neighbours.

    So the first moment never exceeds the root of the second. In float32 everywhere: the reference
    starts from what the devices can hold.
    """
    other = gradients.roll(1)
    moments = {
        "exp_avg": (gradients + other) / 2.0,
        "exp_avg_sq": (gradients.square() + other.square()) / 2.0,
    }
    for name, kept in state.items():
        kept.copy_(moments[name].float())
