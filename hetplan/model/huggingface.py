"""From a Hugging Face config.json to a ModelSpec: reading, families, faults.

The file is data: nothing in it is executed, and the `transformers` package is not needed. A key
that is missing means what it means to the configuration class of its family in transformers 5.23
(`transformers/models/<model_type>/configuration_<model_type>.py`); the modules `config_*` hold
these defaults. Keys that change no shape are passed over.
"""

from __future__ import annotations

import re
from difflib import get_close_matches
from pathlib import Path as FilePath

from hetplan.errors import InputError
from hetplan.files.nodes import Path
from hetplan.files.reading import Document
from hetplan.model.config_deepseek import DEEPSEEK_FAMILIES
from hetplan.model.config_gpt import GPT_FAMILIES
from hetplan.model.config_llama import LLAMA_FAMILIES
from hetplan.model.config_shape import Shape
from hetplan.model.config_values import ConfigValues
from hetplan.model.layers import Experts, runs_of
from hetplan.model.spec import ModelSpec

FAMILIES = GPT_FAMILIES | LLAMA_FAMILIES | DEEPSEEK_FAMILIES
"""How each `model_type` is read."""

_CLASSES = {
    "DeepseekV2ForCausalLM": "deepseek_v2",
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "GPT2LMHeadModel": "gpt2",
    "GPTNeoXForCausalLM": "gpt_neox",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3_text",
    "GemmaForCausalLM": "gemma",
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "MixtralForCausalLM": "mixtral",
    "OPTForCausalLM": "opt",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen2MoeForCausalLM": "qwen2_moe",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
}
"""Model types by the class in `architectures`, for files without `model_type`."""


def is_huggingface(document: Document) -> bool:
    """Whether the file is a model's config.json and not one of hetplan's own files."""
    root = document.root
    return (
        isinstance(root, dict)
        and "schema" not in root
        and ("model_type" in root or "architectures" in root)
    )


def model_of_config(document: Document) -> ModelSpec:
    """The model that a config.json describes; one InputError with every fault otherwise."""
    place = _text_part(document)
    model_type = _model_type(document, place)
    values = ConfigValues(document, place)
    try:
        shape = FAMILIES[model_type](values)
        values.raise_faults()
        return _spec(_name(document), values, shape)
    except InputError as error:
        # A value refused its own fields: the reader's faults say where, if it has any.
        values.raise_faults()
        if any(fault.file for fault in error.faults):
            raise
        raise InputError(document.fault(place, str(error))) from error


def _spec(name: str, values: ConfigValues, shape: Shape) -> ModelSpec:
    runs = runs_of(iter(shape.layers))
    return ModelSpec(
        name=name,
        hidden_size=shape.hidden_size,
        vocab_size=shape.vocab_size,
        max_sequence_length=_sequence_length(values, shape.positions),
        layer_runs=runs,
        final_norm=shape.layers[0].norm if shape.final_norm else None,
        learned_positions=shape.learned_positions,
        embedding_size=None if shape.embedding_size == shape.hidden_size else shape.embedding_size,
        tied_embeddings=shape.tied,
        num_mtp_layers=shape.num_mtp_layers,
        # DeepSeek's prediction layers have the index after the last layer, so they are like it.
        mtp_layer=shape.layers[-1] if shape.num_mtp_layers else None,
        norm_epsilon=shape.numerics.norm_epsilon,
        activation=shape.numerics.activation,
        rotary_base=shape.numerics.rotary_base,
        rotary_fraction=shape.numerics.rotary_fraction,
        rotary_scaling=shape.numerics.rotary_scaling,
        # A file may name experts that none of its layers has.
        router=shape.numerics.router if _has_experts(shape) else None,
    )


def _has_experts(shape: Shape) -> bool:
    return any(isinstance(layer.mlp, Experts) for layer in dict.fromkeys(shape.layers))


def _text_part(document: Document) -> Path:
    """Where the language model is described: in `text_config` of a model that also sees."""
    if not isinstance(document.at("text_config"), dict):
        return ()
    return ("text_config",)


def _model_type(document: Document, place: Path) -> str:
    path = (*place, "model_type")
    found = document.at(*path)
    if found is None and place:  # the part may leave it to the whole, as in gemma3
        path = ("model_type",)
        found = document.at(*path)
    if found is None or (isinstance(found, str) and found not in (*FAMILIES, "gemma3")):
        # A model type of its own may stand over a known class: Kimi K2 is a DeepseekV3ForCausalLM.
        classes = document.at("architectures")
        known = [
            _CLASSES[name]
            for name in (classes if isinstance(classes, list) else ())
            if isinstance(name, str) and name in _CLASSES
        ]
        if known:
            return known[0]
        if found is None:
            path = ("architectures",)
            found = classes[0] if isinstance(classes, list) and classes else classes
    if found == "gemma3":
        if not place:
            message = "a gemma3 file describes its language model in text_config, which is missing"
            raise InputError(document.fault(path, message))
        return "gemma3_text"
    if isinstance(found, str) and found in FAMILIES:
        return found
    word = str(found)[:60]
    near = get_close_matches(word.lower(), list(FAMILIES), n=3, cutoff=0.5)
    raise InputError(
        document.fault(
            path,
            f"found {word!a}, a model that hetplan does not know"
            + (f"; nearest: {', '.join(near)}" if near else "")
            + f"; known: {', '.join(FAMILIES)}; describe another one in hetplan's own form "
            "(configs/models)",
        )
    )


def _sequence_length(values: ConfigValues, positions: int) -> int:
    """`max_position_embeddings`, or the length that YaRN and its like stretch the original to.

    Files differ in whether max_position_embeddings is the stretched length already (DeepSeek) or
    the original one (Qwen2.5): the longer of the two is meant. Llama 3's is always stretched, and
    its factor is not the one of the lengths: Llama 3.2 has 32 over 8,192 and ends at 131,072.
    """
    for key in ("rope_scaling", "rope_parameters"):
        scaling = values.at(key)
        if not isinstance(scaling, dict) or "llama3" in (
            scaling.get("rope_type"),
            scaling.get("type"),
        ):
            continue
        original = _number(scaling.get("original_max_position_embeddings"))
        positions = max(positions, int(original * _number(scaling.get("factor"))))
    return min(positions, 10**9)


def _number(value: object) -> float:
    """The value where it is a sensible number, else 0."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < 10**9:
        return 0.0
    return float(value)


def _name(document: Document) -> str:
    """A name from the file's own, or from its folder's where the file is just config.json."""
    file = FilePath(document.file)
    stated = document.at("_name_or_path")
    stem = file.stem if file.stem.lower() != "config" else file.resolve().parent.name
    word = (stated.rstrip("/").rpartition("/")[2] if isinstance(stated, str) else "") or stem
    clean = re.sub(r"[^A-Za-z0-9._-]+", "-", word).strip("-._")[:100]
    return clean or str(document.at("model_type") or "model")[:100]
