"""Checked values of a Hugging Face config.json: shape, norms, MLPs, positions, routers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hetplan.errors import Fault, InputError
from hetplan.files.nodes import Path
from hetplan.files.quantities import MAX_COUNT
from hetplan.files.reading import Document, describe
from hetplan.model.layers import Experts, TransformerLayer
from hetplan.model.numerics import (
    MAX_CONSTANT,
    Activation,
    RotaryScaling,
    RotaryScalingKind,
    Router,
    ScoreFunction,
)
from hetplan.model.spec import MAX_LAYERS

_ABSENT = object()


class ConfigValues:
    """The mapping at one place of a file."""

    def __init__(self, document: Document, place: Path) -> None:
        self.document = document
        self.place = place
        self.faults: list[Fault] = []
        self._wrong: set[str] = set()

    def at(self, key: str) -> object:
        """The raw value; None where there is none."""
        return self.document.at(*self.place, key)

    def fault(self, key: str, message: str, *, beside: Sequence[str] = ()) -> None:
        """Note a fault of this key.

        `beside`: other keys that the fault speaks of. Where one of them, or the key itself, has a
        fault already, its value is not what the file says, and nothing is noted.
        """
        if beside and not self._wrong.isdisjoint((key, *beside)):
            return
        self._wrong.add(key)
        self.faults.append(self.document.fault((*self.place, key), message))

    def raise_faults(self) -> None:
        """Raise one InputError with every fault, in the order of the file's lines."""
        if self.faults:
            found = dict.fromkeys(self.faults)
            raise InputError(*sorted(found, key=lambda fault: (fault.line, fault.field)))

    def key_of(self, *names: str) -> str:
        """The first of these names that the file has, else the first of all.

        Two names of one value that say different things are a fault.
        """
        present = [name for name in names if self._raw(name) is not _ABSENT]
        for other in present[1:]:
            if self.at(other) != self.at(present[0]):
                self.fault(
                    other,
                    f"found {describe(self.at(other))}, but {present[0]} is "
                    f"{describe(self.at(present[0]))}; both mean the same, keep one",
                )
        return present[0] if present else names[0]

    def _raw(self, key: str) -> object:
        parent = self.document.at(*self.place) if self.place else self.document.root
        return parent.get(key, _ABSENT) if isinstance(parent, dict) else _ABSENT

    def count(self, *names: str, default: int | None, least: int = 1, most: int = MAX_COUNT) -> int:
        """A whole number; `default` where it is missing, a fault where that is None."""
        found = self.count_or_none(*names, default=default, least=least, most=most)
        if found is None:
            key = self.key_of(*names)
            if not any(fault.field.endswith(key) for fault in self.faults):
                self.fault(key, "found nothing; write a whole number")
            return max(least, 1)
        return found

    def count_or_none(
        self, *names: str, default: int | None, least: int = 1, most: int = MAX_COUNT
    ) -> int | None:
        """A whole number, or None where the file says null; `default` where it is missing."""
        key = self.key_of(*names)
        value = self._raw(key)
        if value is _ABSENT:
            return default
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool):
            self.fault(key, f"found {describe(value)}; write a whole number")
            return max(least, 1)
        if not least <= value <= most:
            wanted = f"at least {least}" if value < least else f"at most {most:,}"
            found = str(value) if abs(value) < 10**18 else "a number of more than 18 digits"
            self.fault(key, f"found {found}; it must be {wanted}")
            return max(least, 1)
        return value

    def number(self, *names: str, default: float | None, zero: bool = False) -> float | None:
        """A number above 0 (or 0); `default` where it is missing or null."""
        key = self.key_of(*names)
        value = self._raw(key)
        if value is _ABSENT or value is None:
            return default
        if not isinstance(value, int | float) or isinstance(value, bool):
            self.fault(key, f"found {describe(value)}; write a number")
            return default
        if not (0 <= value <= MAX_CONSTANT if zero else 0 < value <= MAX_CONSTANT):
            above = "0 or more" if zero else "above 0"
            found = f"{value:g}" if abs(value) < 10**18 else "a number of more than 18 digits"
            self.fault(key, f"found {found}; it must be {above} and at most {MAX_CONSTANT:g}")
            return default
        return float(value)

    def layers(self, *names: str, default: int) -> int:
        """The number of transformer layers."""
        return self.count(*names, default=default, most=MAX_LAYERS)

    def flag(self, key: str, *, default: bool) -> bool:
        """True or false; null is false."""
        value = self._raw(key)
        if value is _ABSENT:
            return default
        if value is None or isinstance(value, bool):
            return bool(value)
        self.fault(key, f"found {describe(value)}; write true or false")
        return default

    def indices(self, key: str, limit: int) -> frozenset[int]:
        """A list of layer numbers, each below `limit`; empty where it is missing or null."""
        value = self.at(key)
        if value is None:
            return frozenset()
        wrong = "write a list of whole numbers"
        if not isinstance(value, list):
            self.fault(key, f"found {describe(value)}; {wrong}")
            return frozenset()
        found = set()
        for entry in value:
            if not isinstance(entry, int) or isinstance(entry, bool):
                self.fault(key, f"found {describe(entry)} in the list; {wrong}")
            elif not 0 <= entry < limit:
                shown = entry if abs(entry) < 10**18 else "a number of more than 18 digits"
                message = f"found {shown}; layers are 0 to {limit - 1}"
                self.fault(key, message, beside=("num_hidden_layers",))
            else:
                found.add(entry)
        return frozenset(found)

    def words(self, key: str, limit: int, known: Sequence[str]) -> tuple[str, ...] | None:
        """A list of `limit` of the known words; None where it is missing or null."""
        value = self.at(key)
        if value is None:
            return None
        if not isinstance(value, list):
            self.fault(key, f"found {describe(value)}; write a list of {', '.join(known)}")
            return None
        for entry in value:
            if entry not in known:
                message = f"found {describe(entry)} in the list; known: {', '.join(known)}"
                self.fault(key, message)
                return None
        if len(value) != limit:
            message = f"has {len(value)} entries for {limit} layers; make them equal"
            self.fault(key, message, beside=("num_hidden_layers",))
            return None
        return tuple(value)

    def refuse(self, key: str, why: str) -> None:
        """A fault where the file says true to what hetplan cannot count."""
        if self.at(key) not in (None, False):
            self.fault(key, f"found {describe(self.at(key))}; {why}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What a family's keys say."""

    hidden_size: int
    vocab_size: int
    positions: int
    """max_position_embeddings."""
    layers: tuple[TransformerLayer, ...]
    tied: bool
    learned_positions: int = 0
    embedding_size: int | None = None
    final_norm: bool = True
    num_mtp_layers: int = 0
    numerics: Numerics


def even_heads(values: ConfigValues, hidden: int, heads: int) -> int:
    """Width of a head where the file states none."""
    if hidden % heads:
        values.fault(
            "num_attention_heads",
            f"{heads} does not divide hidden_size {hidden}, and the width of a head follows from "
            "both; change one of them",
            beside=("n_embd", "hidden_size", "n_head"),
        )
        return 1
    return hidden // heads


def experts_of(
    values: ConfigValues,
    *,
    num_experts: int,
    per_token: int,
    ffn: int,
    shared: int = 0,
    shared_gate: bool = False,
) -> Experts:
    """Routed and shared experts, none with biases; a fault where a token goes to too many."""
    key = "num_experts_per_tok"
    if per_token > num_experts:
        values.fault(
            key,
            f"found {per_token}, more than the {num_experts} experts there are",
            beside=("n_routed_experts", "num_experts", "num_local_experts"),
        )
        per_token = num_experts
    return Experts(
        num_experts=num_experts,
        experts_per_token=per_token,
        expert_ffn_hidden_size=ffn,
        shared_ffn_hidden_size=shared,
        shared_gate=shared_gate and shared > 0,
    )


_ACTIVATIONS = {
    "silu": Activation.SILU,
    "swish": Activation.SILU,
    "gelu": Activation.GELU,
    "gelu_python": Activation.GELU,
    "gelu_new": Activation.GELU_TANH,
    "gelu_fast": Activation.GELU_TANH,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "relu": Activation.RELU,
}
"""transformers/activations.py, ACT2FN."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Numerics:
    """What of it a family's keys say; fields as in `hetplan.model.spec.ModelSpec`."""

    norm_epsilon: float
    activation: Activation
    rotary_base: float | None = None
    rotary_fraction: float | None = None
    rotary_scaling: RotaryScaling | None = None
    router: Router | None = None


def activation_of(values: ConfigValues, key: str, default: str) -> Activation:
    """The function that this key names."""
    found = values.at(key)
    return _ACTIVATIONS.get(default if found is None else str(found), Activation.OTHER)


def epsilon_of(values: ConfigValues, key: str, default: float) -> float:
    """The epsilon of every norm under this key."""
    return values.number(key, default=default) or default


def rotary_numerics(
    values: ConfigValues,
    *,
    norm_epsilon: float,
    activation: Activation,
    base: float = 10000.0,
    base_keys: tuple[str, ...] = ("rope_theta",),
    fraction: float | None = None,
    fraction_key: str = "partial_rotary_factor",
) -> Numerics:
    """Of a family with one set of rotary positions for all layers; `base` and `fraction` are its
    defaults.
    """
    settings = _rotary_settings(values)
    stated = values.number(*base_keys, default=base)
    part = values.number(fraction_key, default=fraction)
    if settings is not None:
        stated = settings.number("rope_theta", default=stated)
        part = settings.number("partial_rotary_factor", default=part)
    if part is not None and part > 1:
        values.fault(fraction_key, f"found {part:g}; at most 1 is rotated")
        part = None
    scaling = None if settings is None else _scaling(values, settings)
    if settings is not None:
        values.faults += settings.faults
    return Numerics(
        norm_epsilon=norm_epsilon,
        activation=activation,
        rotary_base=stated,
        rotary_fraction=None if part == 1 else part,
        rotary_scaling=scaling,
    )


def _rotary_settings(values: ConfigValues) -> ConfigValues | None:
    """The mapping of rotary settings; transformers takes rope_scaling where there are both."""
    for key in ("rope_scaling", "rope_parameters"):
        found = values.at(key)
        if isinstance(found, dict) and found:
            return ConfigValues(values.document, (*values.place, key))
    return None


def _scaling(values: ConfigValues, settings: ConfigValues) -> RotaryScaling | None:
    word = settings.at("rope_type") or settings.at("type") or "default"
    if word == "default":
        return None
    known = {kind.value: kind for kind in RotaryScalingKind}
    kind = known.get(str(word), RotaryScalingKind.OTHER)
    original = settings.count_or_none("original_max_position_embeddings", default=None)
    if original is None and kind is not RotaryScalingKind.OTHER:
        # modeling_rope_utils.py, standardize_rope_params.
        original = values.count_or_none("max_position_embeddings", default=None)
    return RotaryScaling(
        kind=kind,
        factor=settings.number("factor", default=None),
        original_length=original,
        low_frequency_factor=settings.number("low_freq_factor", default=None),
        high_frequency_factor=settings.number("high_freq_factor", default=None),
        beta_fast=settings.number("beta_fast", default=None),
        beta_slow=settings.number("beta_slow", default=None),
        mscale=settings.number("mscale", default=None, zero=True),
        mscale_all_dim=settings.number("mscale_all_dim", default=None, zero=True),
    )


def deepseek_router(values: ConfigValues, *, third: bool) -> Router:
    """modeling_deepseek_v2.py and modeling_deepseek_v3.py; the loss is of DeepSeek's own files.

    Version 2 ranks groups by their best expert and normalises nothing; version 3 by their best two,
    and always corrects the choice by a bias.
    """
    grouped = third or values.at("topk_method") == "group_limited_greedy"
    groups = values.count_or_none("n_group", default=8 if third else None)
    chosen = values.count_or_none("topk_group", default=4 if third else None)
    if not grouped or groups is None or chosen is None or groups == chosen:
        groups = chosen = None
    elif chosen > groups:
        message = f"found {chosen}, more than the {groups} groups there are"
        values.fault("topk_group", message, beside=("n_group",))
        groups = chosen = None
    return Router(
        score_function=ScoreFunction.SIGMOID if third else ScoreFunction.SOFTMAX,
        normalized=third and values.flag("norm_topk_prob", default=True),
        scaling_factor=values.number("routed_scaling_factor", default=2.5 if third else 1.0),
        num_groups=groups,
        groups_per_token=chosen,
        group_experts=None if groups is None else 2 if third else 1,
        correction_bias=third,
        loss_coefficient=values.number("aux_loss_alpha", default=None, zero=True),
        loss_per_sequence=None if values.at("seq_aux") is None else bool(values.at("seq_aux")),
    )
