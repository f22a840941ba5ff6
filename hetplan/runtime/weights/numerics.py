"""What does a forward pass compute with the weights, beyond their shapes?

Two models of one shape differ in the epsilon of their norms, the base and the stretching of their
rotary positions and the form of their GELU; weights of one give other logits in the other. A
config.json says all of it, hetplan's own layers have one value of each
(`hetplan.profiling.layers`), Megatron-LM takes them as arguments. So a conversion compares them
and refuses, or says, what would differ.

Sources: transformers 5.23, models/llama/configuration_llama.py, models/mistral/
configuration_mistral.py, models/gpt2/configuration_gpt2.py, modeling_rope_utils.py;
megatron-core 0.16.1, transformer/mlp.py, fusions/fused_bias_gelu.py, models/common/embeddings/
rotary_pos_embedding.py; Megatron-LM, megatron/training/arguments.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from hetplan.errors import Fault, InputError
from hetplan.files.reading import Document
from hetplan.model.numerics import OWN_NORM_EPSILON, OWN_ROTARY_BASE, Activation, RotaryScalingKind
from hetplan.model.spec import Architecture, ModelSpec

FAMILIES = ("llama", "mistral", "gpt2")
"""`model_type`s whose layers are hetplan's own where their shapes are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3Scaling:
    """Llama 3's stretching of rotary positions (transformers, `rope_type` llama3)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_length: int


_MEGATRON_LLAMA3 = (8.0, 1.0, 4.0, 8192)
"""(factor, low, high, original length) of pretrain_gpt.py: megatron-core has no others but for the
factor (rotary_pos_embedding.py, RotaryEmbedding._apply_scaling), and Megatron-LM d98e8a64 passes
over --rope-scaling-factor (argument_utils.py, gpt_config_from_args)."""
_MEGATRON_FACTOR = 8.0
"""GPTModelConfig's own (megatron/training/argument_utils.py, gpt_config_from_args, d98e8a64)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Numerics:
    """Constants of a model's forward pass."""

    norm_epsilon: float
    rotary_base: float | None
    """Base of the rotary frequencies; None where positions are learned."""
    activation: Activation
    rotary_scaling: Llama3Scaling | None = None


def own_numerics(model: ModelSpec) -> Numerics:
    """What hetplan's own layers compute."""
    gpt = model.architecture is Architecture.GPT
    return Numerics(
        norm_epsilon=OWN_NORM_EPSILON,
        rotary_base=None if gpt else OWN_ROTARY_BASE,
        activation=Activation.GELU if gpt else Activation.SILU,
    )


def numerics_of_model(model: ModelSpec) -> Numerics:
    """What a model file says, and hetplan's own constants where it says nothing.

    An InputError where it says something that no format here can.
    """
    own, scaling = own_numerics(model), model.rotary_scaling
    if model.rotary_fraction not in (None, 1):
        message = f"{model.rotary_fraction:g} of each head is rotated; every part of it is here"
        raise InputError(Fault(field="rotary_fraction", message=message))
    if scaling is not None and scaling.kind is not RotaryScalingKind.LLAMA3:
        message = f"{scaling.kind}; weights are converted without a stretching, or with llama3"
        raise InputError(Fault(field="rotary_scaling", message=message))
    return Numerics(
        norm_epsilon=_said(model.norm_epsilon, own.norm_epsilon),
        rotary_base=None if own.rotary_base is None else _said(model.rotary_base, own.rotary_base),
        activation=own.activation if model.activation is None else model.activation,
        # Left out they are those of Llama 3.1, as in a config.json.
        rotary_scaling=None
        if scaling is None
        else Llama3Scaling(
            factor=_said(scaling.factor, 8.0),
            low_freq_factor=_said(scaling.low_frequency_factor, 1.0),
            high_freq_factor=_said(scaling.high_frequency_factor, 4.0),
            original_length=int(_said(scaling.original_length, 8192)),
        ),
    )


def _said(value: float | None, otherwise: float) -> float:
    return otherwise if value is None else value


def differences(found: Numerics, model: ModelSpec) -> tuple[str, ...]:
    """What the reference trainer would compute otherwise, in words; empty: equal logits."""
    own = own_numerics(model)
    words = []
    if found.norm_epsilon != own.norm_epsilon:
        words.append(f"the norms' epsilon is {found.norm_epsilon:g}, here {own.norm_epsilon:g}")
    if found.rotary_base is not None and found.rotary_base != own.rotary_base:
        words.append(f"the rotary base is {found.rotary_base:g}, here {own.rotary_base:g}")
    if found.rotary_scaling is not None:
        words.append("rotary positions are stretched as in Llama 3, here they are not")
    if found.activation is not own.activation:
        words.append(f"the MLP has {found.activation}, here {own.activation}")
    return tuple(words)


def megatron_arguments(found: Numerics) -> tuple[str, ...]:
    """Arguments of Megatron-LM under which it computes the same with these weights."""
    arguments = [f"--norm-epsilon {found.norm_epsilon:g}"]
    if found.rotary_base is not None:
        arguments += ["--position-embedding-type rope", f"--rotary-base {found.rotary_base:.0f}"]
    else:
        arguments.append("--position-embedding-type learned_absolute")
    scaling = found.rotary_scaling
    if scaling is not None:
        # Versions that do not pass over the factor want it said.
        arguments += ["--use-rope-scaling", f"--rope-scaling-factor {scaling.factor:g}"]
    if found.activation is Activation.SILU:
        arguments.append("--swiglu")
    elif found.activation is Activation.GELU:
        # transformer/mlp.py: with the fusion, which is on by default, GELU is the tanh form.
        arguments.append("--no-bias-gelu-fusion")
    return tuple(arguments)


def megatron_differences(found: Numerics) -> tuple[str, ...]:
    """What no argument of Megatron-LM makes it compute, in words."""
    words = []
    scaling = found.rotary_scaling
    if scaling is not None:
        kept = (
            scaling.factor,
            scaling.low_freq_factor,
            scaling.high_freq_factor,
            scaling.original_length,
        )
        if kept != _MEGATRON_LLAMA3:
            words.append(
                f"Llama 3's stretching has (factor, low, high, original length) {kept}, "
                f"pretrain_gpt.py {_MEGATRON_LLAMA3}"
            )
        if scaling.factor != _MEGATRON_FACTOR:
            words.append(
                f"Llama 3's stretching has factor {scaling.factor:g}; pretrain_gpt.py passes over "
                f"--rope-scaling-factor and takes {_MEGATRON_FACTOR:g}"
            )
    if found.rotary_base is not None and found.rotary_base != int(found.rotary_base):
        words.append(f"--rotary-base is a whole number, the model's is {found.rotary_base:g}")
    return tuple(words)


def numerics_of_config(document: Document) -> Numerics:
    """What a Hugging Face config.json computes; an InputError where no format here can say it."""
    family = document.at("model_type")
    if family not in FAMILIES:
        raise InputError(
            document.fault(
                ("model_type",),
                f"found {str(family)[:60]!a}; weights are converted of {', '.join(FAMILIES)}",
            )
        )
    return _gpt2(document) if family == "gpt2" else _llama(document)


def _llama(document: Document) -> Numerics:
    activation = document.at("hidden_act")
    if activation not in (None, "silu", "swish"):
        raise InputError(
            document.fault(
                ("hidden_act",), f"found {str(activation)[:60]!a}; Llama-like layers have silu here"
            )
        )
    base, scaling = _rotary(document)
    return Numerics(
        # LlamaConfig and MistralConfig: 1e-6 where the key is missing.
        norm_epsilon=_number(document, "rms_norm_eps", 1e-6),
        rotary_base=base,
        activation=Activation.SILU,
        rotary_scaling=scaling,
    )


def _rotary(document: Document) -> tuple[float, Llama3Scaling | None]:
    """Base and stretching; `rope_parameters` is where transformers 5 keeps both."""
    key = "rope_parameters" if isinstance(document.at("rope_parameters"), dict) else "rope_scaling"
    scaling = document.at(key)
    settings = scaling if isinstance(scaling, dict) else {}
    base = 10000.0
    if key == "rope_parameters" and "rope_theta" in settings:
        base = _number(document, key, base, "rope_theta")
    else:
        base = _number(document, "rope_theta", base)
    partial = document.at("partial_rotary_factor") or settings.get("partial_rotary_factor")
    if partial not in (None, 1, 1.0):
        message = f"found {partial!s:.20}; every part of a head is rotated here"
        raise InputError(document.fault(("partial_rotary_factor",), message))
    kind = settings.get("rope_type", settings.get("type", "default"))
    if kind == "default":
        return base, None
    if kind != "llama3":
        message = f"found {str(kind)[:60]!a}; default and llama3 are known"
        raise InputError(document.fault((key, "rope_type"), message))
    return base, Llama3Scaling(
        factor=_number(document, key, 8.0, "factor"),
        low_freq_factor=_number(document, key, 1.0, "low_freq_factor"),
        high_freq_factor=_number(document, key, 4.0, "high_freq_factor"),
        original_length=int(_number(document, key, 8192, "original_max_position_embeddings")),
    )


_GELUS = {
    "gelu": Activation.GELU,
    "gelu_new": Activation.GELU_TANH,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
}


def _gpt2(document: Document) -> Numerics:
    name = document.at("activation_function")
    activation = _GELUS.get(str(name)) if name is not None else Activation.GELU_TANH
    if activation is None:
        message = f"found {str(name)[:60]!a}; known: {', '.join(_GELUS)}"
        raise InputError(document.fault(("activation_function",), message))
    for key, usual in (("scale_attn_weights", True), ("scale_attn_by_inverse_layer_idx", False)):
        if document.at(key) not in (None, usual):
            message = f"found {document.at(key)!s:.20}; attention is scaled by the root of the "
            raise InputError(document.fault((key,), message + "head dimension here"))
    return Numerics(
        norm_epsilon=_number(document, "layer_norm_epsilon", 1e-5),
        rotary_base=None,
        activation=activation,
    )


def _number(document: Document, key: str, missing: float, inner: str = "") -> float:
    path = (key, inner) if inner else (key,)
    value = document.at(*path)
    if value is None:
        return missing
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e12:
        raise InputError(document.fault(path, f"found {str(value)[:60]!a}; expected a number > 0"))
    return float(value)


def config_of_model(model: ModelSpec, numerics: Numerics, dtype: str) -> dict[str, object]:
    """Content of a config.json that transformers reads as this model."""
    shared: dict[str, object] = {
        "vocab_size": model.vocab_size,
        "tie_word_embeddings": model.tied_embeddings,
        "torch_dtype": dtype,
    }
    if model.architecture is Architecture.GPT:
        gelus = {Activation.GELU: "gelu", Activation.GELU_TANH: "gelu_new"}
        return {
            "architectures": ["GPT2LMHeadModel"],
            "model_type": "gpt2",
            "n_embd": model.hidden_size,
            "n_layer": model.num_layers,
            "n_head": model.num_attention_heads,
            "n_inner": model.ffn_hidden_size,
            "n_positions": model.max_sequence_length,
            "layer_norm_epsilon": numerics.norm_epsilon,
            "activation_function": gelus[numerics.activation],
            **shared,
        }
    rope: dict[str, object] = {"rope_type": "default", "rope_theta": numerics.rotary_base}
    scaling = numerics.rotary_scaling
    if scaling is not None:
        rope.update(
            rope_type="llama3",
            factor=scaling.factor,
            low_freq_factor=scaling.low_freq_factor,
            high_freq_factor=scaling.high_freq_factor,
            original_max_position_embeddings=scaling.original_length,
        )
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "max_position_embeddings": model.max_sequence_length,
        "rms_norm_eps": numerics.norm_epsilon,
        "hidden_act": "silu",
        # Both spellings: transformers 5 reads rope_parameters, older ones the other two.
        "rope_theta": numerics.rotary_base,
        "rope_parameters": rope,
        **({"rope_scaling": rope} if scaling is not None else {}),
        **shared,
    }
