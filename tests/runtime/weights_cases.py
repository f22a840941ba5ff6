"""Small Hugging Face models with random weights, for the tests of weights."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from hetplan.model.spec import ModelSpec
from hetplan.plans.plan import LayerRange
from hetplan.profiling.layers import Embedding, Head, build_layer
from hetplan.runtime.weights.stage import StagePart, load_stage, stage_tensors

VOCABULARY, LENGTH = 61, 16
FAMILIES = ("llama", "llama-tied", "gpt2")
LLAMA = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": LENGTH,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.1,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT2 = {
    "vocab_size": VOCABULARY,
    "n_embd": 32,
    "n_layer": 4,
    "n_head": 4,
    "n_inner": 64,
    "n_positions": LENGTH,
    "activation_function": "gelu",
    "initializer_range": 0.1,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def huggingface_model(family: str, **changes: object) -> nn.Module:
    torch.manual_seed(5)
    if family == "gpt2":
        model: nn.Module = GPT2LMHeadModel(GPT2Config(**(GPT2 | changes)))
    else:
        tied = {"tie_word_embeddings": family == "llama-tied"}
        model = LlamaForCausalLM(LlamaConfig(**(LLAMA | tied | changes)))
    with torch.no_grad():
        # Every vector starts as zeros or ones, which would hide a swap.
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return model.eval()


def saved(family: str, folder: Path, **changes: object) -> Path:
    huggingface_model(family, **changes).save_pretrained(folder)  # type: ignore[operator]
    return folder


def tokens() -> Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.randint(0, VOCABULARY, (3, LENGTH), generator=generator)


def huggingface_logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(tokens()).logits
    return logits


def single_process(model: ModelSpec, seed: int = 0) -> nn.ModuleList:
    """The reference trainer's layers in one process."""
    layers = nn.ModuleList(
        build_layer(
            model,
            position,
            tp=1,
            tp_rank=0,
            group=None,
            seed=seed,
            dtype=torch.float32,
            device="cpu",
        )
        for position in range(len(model.layers))
    )
    first, last = layers[0], layers[-1]
    if model.tied_embeddings and isinstance(first, Embedding) and isinstance(last, Head):
        last.weight = first.weight
    return layers


def whole(model: ModelSpec) -> StagePart:
    layers = LayerRange(start=0, stop=len(model.layers))
    return StagePart(layers=layers, tp=1, tp_index=0, dp_index=0)


def native_logits(folder: Path, model: ModelSpec) -> Tensor:
    layers = single_process(model)
    part = whole(model)
    load_stage(folder, model, part, {"weights": stage_tensors(layers, part.layers)})
    x = tokens()
    with torch.no_grad():
        for layer in layers:
            x = layer(x)
    return x
