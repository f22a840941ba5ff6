"""Units of transformer layers between which a pipeline may be cut, and what cannot be planned yet.

A model whose transformer layers are all alike is cut at every layer. Where they differ, the row

    front layers, unit, unit, ..., unit, back layers

is cut between units only. A unit is one period of a repeating pattern: one layer, where all layers
between front and back are alike. The front layers are one run of equal ones, such as DeepSeek's
dense layers (arXiv 2412.19437, section 4.2), and belong to the first stage; the back layers are one
run too and belong to the last stage. Multi-token prediction goes with the head. So the costs of
every stage are linear in its number of units.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from hetplan.model.layers import Norm, TransformerLayer
from hetplan.model.numerics import OWN_NORM_EPSILON, OWN_ROTARY_BASE, Activation

if TYPE_CHECKING:
    from hetplan.model.spec import ModelSpec


MAX_PERIOD = 64
"""Layers of the longest pattern that is looked for: ten times the longest of models that were
published (five layers with a window and one without, arXiv 2503.19786, section 2)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerUnits:
    """How the transformer layers of a model are dealt into units."""

    count: int
    """Units."""
    layers_per_unit: int
    front_layers: int
    """Transformer layers before the first unit."""
    back_layers: int
    """The same behind the last one."""

    def layers(self, units: int, *, first: bool, last: bool) -> int:
        """Transformer layers of a stage, or of a chunk, with so many units.

        `first`: it holds the first unit and with it the front layers; `last` likewise.
        """
        return units * self.layers_per_unit + first * self.front_layers + last * self.back_layers

    @property
    def unit_positions(self) -> range:
        """Positions in `ModelSpec.layers` of the first unit."""
        start = 1 + self.front_layers
        return range(start, start + self.layers_per_unit)

    @property
    def front_positions(self) -> range:
        """Positions of the front layers."""
        return range(1, 1 + self.front_layers)

    @property
    def back_positions(self) -> range:
        """Positions of the back layers."""
        start = 1 + self.front_layers + self.count * self.layers_per_unit
        return range(start, start + self.back_layers)


def layer_units(model: ModelSpec, sequence_length: int) -> LayerUnits | None:
    """The units of this model at this length; None where its layers have no such form.

    Of several ways to deal the layers that with most units, then that with fewest layers outside.
    """
    return _units(tuple((run.layer.at(sequence_length), run.count) for run in model.layer_runs))


@lru_cache(maxsize=256)
def _units(runs: tuple[tuple[Hashable, int], ...]) -> LayerUnits | None:
    row: list[int] = []
    known: dict[Hashable, int] = {}
    for layer, count in runs:
        row += [known.setdefault(layer, len(known))] * count
    if len(known) == 1:
        return LayerUnits(count=len(row), layers_per_unit=1, front_layers=0, back_layers=0)
    longest, most_back = _run(row), _run(row[::-1])
    # A pattern that begins inside the first run has less than a period of it.
    fronts = dict.fromkeys((0, *range(max(0, longest - MAX_PERIOD), longest + 1)))
    found = [units for front in fronts for units in _from(row, front, most_back)]
    return max(
        found,
        key=lambda each: (
            each.count,
            -each.front_layers - each.back_layers,
            -each.front_layers,
        ),
        default=None,
    )


def _run(row: Sequence[int]) -> int:
    """How many of the first layers are alike."""
    return next((at for at, kind in enumerate(row) if kind != row[0]), len(row))


def _from(row: Sequence[int], front: int, most_back: int) -> list[LayerUnits]:
    """Units of every period behind so many front layers, two at least, as far as they reach."""
    rest = row[front:]
    found = []
    for period in range(1, min(MAX_PERIOD, len(rest) // 2) + 1):
        alike = period
        while alike < len(rest) and rest[alike] == rest[alike - period]:
            alike += 1
        count = alike // period
        back = len(rest) - count * period
        if count >= 2 and back <= most_back:
            found.append(
                LayerUnits(
                    count=count, layers_per_unit=period, front_layers=front, back_layers=back
                )
            )
    return found


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


def own_layer_fault(model: ModelSpec, *, trained: bool = False) -> str:
    """Why hetplan's profiler cannot time the model's layers, or, if `trained`, why its trainer
    cannot build them; empty where it can. The trainer's layers may differ in their MLPs.
    """
    found: list[str] = []
    layer: TransformerLayer = model.layer_runs[0].layer
    same = [replace(run.layer, mlp=layer.mlp) if trained else run.layer for run in model.layer_runs]
    if len(dict.fromkeys(same)) > 1:
        found.append("transformer layers that are not all equal")
    for run in model.layer_runs:
        found += [word for word in run.layer.features(trained=trained) if word not in found]
    if model.num_mtp_layers:
        advice = " (leave it out of the model file to train without)" if trained else ""
        found.append(f"multi-token prediction{advice}")
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
        f"{model.name} has {', '.join(found[:6])}; hetplan's own "
        f"{'trainer has' if trained else 'profiler has plain'} gpt and llama layers only"
        f"{', with plain experts or without' if trained else ''}; target megatron can be planned "
        "from datasheet figures, or from measurements of the layers of a plain model file "
        "(`hetplan profile layers --model`)"
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
    router = model.router
    if router is not None:
        other = {
            "groups of experts": router.num_groups,
            "a correction bias": router.correction_bias,
            "a balancing loss": router.loss_coefficient,
        }
        words = [word for word, value in other.items() if value]
        found += [f"a router without {' and '.join(words)}"] if words else []
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
