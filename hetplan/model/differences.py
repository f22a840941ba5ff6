"""What a model has that hetplan cannot plan or train yet, in words."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING

from hetplan.model.layer_units import layer_units
from hetplan.model.layers import Norm, TransformerLayer
from hetplan.model.numerics import OWN_NORM_EPSILON, OWN_ROTARY_BASE, Activation

if TYPE_CHECKING:
    from hetplan.model.spec import ModelSpec

_MAX_NAMED = 4
"""Differences that one message names."""


def planning_faults(model: ModelSpec, sequence_length: int) -> tuple[str, ...]:
    """Why no plan for this model can be searched at this length; empty where one can.

    Layers may differ where they can be cut at units (`hetplan.model.layer_units`).
    """
    if layer_units(model, sequence_length) is None:
        return (unlike_layers(model, sequence_length),)
    return ()


def unlike_layers(model: ModelSpec, sequence_length: int | None) -> str:
    """Which transformer layers differ at this length, and in what."""
    distinct = model.distinct_layers(sequence_length)
    first, second = distinct[0], distinct[1]
    at = 0
    for run in model.layer_runs:
        if run.layer.at(sequence_length) == second:
            break
        at += run.count
    named = _differences(first, second)
    more = f" and {len(named) - _MAX_NAMED} more" if len(named) > _MAX_NAMED else ""
    length = "" if sequence_length is None else f" at sequence length {sequence_length}"
    return (
        f"{model.name} has transformer layers of {len(distinct)} shapes{length}: layers 1 and "
        f"{at + 1} differ in {', '.join(named[:_MAX_NAMED])}{more}; plans are searched for rows "
        "of equal layers, or of a repeating pattern, with at most one run of other layers before "
        "and one behind; hetplan estimate prices a layout"
    )


def _differences(first: object, second: object, path: str = "") -> list[str]:
    if type(first) is not type(second):
        return [f"{path} ({_word(first)} and {_word(second)})"]
    if not is_dataclass(first):
        return [] if first == second else [f"{path} ({_word(first)} and {_word(second)})"]
    return [
        found
        for field in fields(first)
        for found in _differences(
            getattr(first, field.name),
            getattr(second, field.name),
            f"{path}.{field.name}" if path else field.name,
        )
    ]


def _word(value: object) -> str:
    names = {"Attention": "plain attention", "LatentAttention": "latent attention"}
    names.update({"Mlp": "a dense MLP", "Experts": "experts"})
    word = names.get(type(value).__name__)
    return word or ("none" if value is None else str(value))


def own_layer_fault(model: ModelSpec) -> str:
    """Why hetplan's own layers cannot build the model; empty where they can."""
    found: list[str] = []
    if len(dict.fromkeys(run.layer for run in model.layer_runs)) > 1:
        found.append("transformer layers that are not all equal")
    layer: TransformerLayer = model.layer_runs[0].layer
    for run in model.layer_runs:
        found += [word for word in run.layer.features() if word not in found]
    if model.num_mtp_layers:
        found.append("multi-token prediction")
    gpt = layer.norm is Norm.LAYER_NORM
    if model.learned_positions != (model.max_sequence_length if gpt else 0):
        found.append(f"{model.learned_positions} learned positions")
    if model.embedding_size is not None:
        found.append("a projection beside the embedding")
    if model.final_norm is not layer.norm:
        found.append(f"{'no' if model.final_norm is None else model.final_norm} final norm")
    if model.head_bias:
        found.append("a bias in the head")
    if not found:
        return ""
    return (
        f"{model.name} has {', '.join(found[:6])}; hetplan's own trainer and profiler have plain "
        "gpt and llama layers only; target megatron can be planned from datasheet figures, or from "
        f"measurements of plain layers (`hetplan profile layers --architecture "
        f"{'gpt' if gpt else 'llama'} --hidden {model.hidden_size}`)"
    )


def own_numerics_differences(model: ModelSpec) -> tuple[str, ...]:
    """What the model says that hetplan's own layers compute otherwise, in words.

    Their cost is the same; what they train is not the model. Of models without `own_layer_fault`.
    """
    gpt = model.layer_runs[0].layer.norm is Norm.LAYER_NORM
    found = []
    if model.norm_epsilon not in (None, OWN_NORM_EPSILON):
        found.append(f"norm_epsilon {OWN_NORM_EPSILON:g} instead of {model.norm_epsilon:g}")
    if model.rotary_base not in (None, OWN_ROTARY_BASE):
        found.append(f"rotary_base {OWN_ROTARY_BASE:.0f} instead of {model.rotary_base:.17g}")
    if model.rotary_fraction not in (None, 1):
        found.append(f"whole heads rotated instead of {model.rotary_fraction:g} of each")
    if model.rotary_scaling is not None:
        kind = model.rotary_scaling.kind
        found.append(f"rotary positions that are not stretched instead of {kind} stretching")
    own = Activation.GELU if gpt else Activation.SILU
    if model.activation not in (None, own):
        found.append(f"activation {own} instead of {model.activation}")
    return tuple(found)


def own_numerics_remark(model: ModelSpec) -> str:
    """One sentence about `own_numerics_differences`; empty where there are none."""
    found = own_numerics_differences(model)
    if not found:
        return ""
    return (
        f"hetplan's own layers have {'; '.join(found)} of {model.name}: steps cost the same, but "
        "the weights that are trained are of another model"
    )
