"""What does a model compute with its weights, beyond their shapes?

Two models of one shape differ in the epsilon of their norms, the function of their MLP, the base
and the stretching of their rotary positions and the router of their experts. None of it changes
what a step costs; all of it changes what is trained. A model file may leave each of them out
(None): then nobody said, and the trainer's own stands.

Sources: norms, arXiv 1910.07467; rotary positions, arXiv 2104.09864, equation 15; their stretching,
arXiv 2309.00071 (YaRN) and transformers, modeling_rope_utils.py (the others); routers, arXiv
2101.03961 (balancing loss), 2412.19437, section 2.1.2 (sigmoid, groups, correction bias).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, TypeAlias

from pydantic import Field

from hetplan.errors import InputError
from hetplan.files.quantities import Count, FileForm, check_limits

OWN_NORM_EPSILON = 1e-5
"""Of hetplan's own layers: LayerNorm's default in torch and GPT-2, RMSNorm's in Llama 2."""
OWN_ROTARY_BASE = 10000.0
"""Of hetplan's own layers: arXiv 2104.09864, section 3.2.2."""
MAX_CONSTANT = 1e12
"""Largest value of a constant; the largest published rotary base is 1e9 or less."""
Constant: TypeAlias = Annotated[float, Field(gt=0, le=MAX_CONSTANT)]
Weight: TypeAlias = Annotated[float, Field(ge=0, le=MAX_CONSTANT)]
Part: TypeAlias = Annotated[float, Field(gt=0, le=1)]


class Activation(StrEnum):
    """Function between the projections of the MLP."""

    SILU = "silu"
    GELU = "gelu"
    """x times the normal distribution's integral, by erf."""
    GELU_TANH = "gelu_tanh"
    """The same by a tanh (arXiv 1606.08415, section 2): up to 5e-4 away from it."""
    RELU = "relu"
    OTHER = "other"
    """A function of another name."""


class RotaryScalingKind(StrEnum):
    """How rotary positions are stretched; the words of Hugging Face's `rope_type`."""

    LINEAR = "linear"
    DYNAMIC = "dynamic"
    YARN = "yarn"
    LONGROPE = "longrope"
    LLAMA3 = "llama3"
    OTHER = "other"
    """A kind of another name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RotaryScaling(FileForm):
    """Stretching of rotary positions."""

    kind: RotaryScalingKind
    """Hugging Face's rope_type."""
    factor: Constant | None = None
    """How far positions, or slow frequencies, are stretched."""
    original_length: Count | None = None
    """Sequence length before the stretching."""
    low_frequency_factor: Constant | None = None
    """Of llama3: frequencies of fewer turns are stretched. Turns over the original length."""
    high_frequency_factor: Constant | None = None
    """Of llama3: frequencies of more turns are left as they are."""
    beta_fast: Constant | None = None
    """Of yarn: as high_frequency_factor."""
    beta_slow: Constant | None = None
    """Of yarn: as low_frequency_factor."""
    mscale: Weight | None = None
    """Of yarn: weight of the logarithm of the factor in the rotation's length."""
    mscale_all_dim: Weight | None = None
    """Of yarn: the same in the scale of the attention scores."""

    def __post_init__(self) -> None:
        check_limits(self)


class ScoreFunction(StrEnum):
    """What makes a router's logits weights."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"


@dataclass(frozen=True, slots=True, kw_only=True)
class Router(FileForm):
    """How tokens are given to experts; a key left out is not said."""

    score_function: ScoreFunction | None = None
    """What makes the router's logits weights."""
    normalized: bool | None = None
    """Weights of a token's experts add up to 1, before scaling_factor."""
    scaling_factor: Constant | None = None
    """The weights are multiplied by it."""
    num_groups: Count | None = None
    """Groups of experts, of equal size; needs groups_per_token."""
    groups_per_token: Count | None = None
    """Groups of one token's experts."""
    group_experts: Count | None = None
    """Experts whose scores add up to their group's."""
    correction_bias: bool | None = None
    """A bias per expert follows its load (arXiv 2408.15664)."""
    loss_coefficient: Weight | None = None
    """Weight of the balancing loss."""
    loss_per_sequence: bool | None = None
    """Balancing loss of each sequence; otherwise of a microbatch."""

    def __post_init__(self) -> None:
        check_limits(self)
        if (self.num_groups is None) != (self.groups_per_token is None):
            raise InputError("num_groups and groups_per_token belong together; give both or none")
        if (self.groups_per_token or 0) > (self.num_groups or 0):
            raise InputError(
                f"groups_per_token is {self.groups_per_token}, num_groups {self.num_groups}; a "
                "token has no more groups than there are"
            )
