"""Models, contexts and files for the importers of Sailor, Metis, Galvatron and SimuMax."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from hetplan.importers.records import ImportContext
from hetplan.job.spec import Precision
from hetplan.model.spec import Architecture, ModelSpec, plain_model

DEVICE = "x200-64gb"


def gpt(num_layers: int = 4, *, name: str = "tiny-gpt", vocab_size: int = 32000) -> ModelSpec:
    return plain_model(
        name=name,
        architecture=Architecture.GPT,
        num_layers=num_layers,
        hidden_size=512,
        ffn_hidden_size=2048,
        num_attention_heads=8,
        num_kv_heads=8,
        head_dim=64,
        vocab_size=vocab_size,
        max_sequence_length=2048,
    )


def llama(num_layers: int = 2) -> ModelSpec:
    return plain_model(
        name="tiny-llama",
        architecture=Architecture.LLAMA,
        num_layers=num_layers,
        hidden_size=1024,
        ffn_hidden_size=2816,
        num_attention_heads=16,
        num_kv_heads=4,
        head_dim=64,
        vocab_size=32000,
        max_sequence_length=4096,
    )


def context(
    file: str = "profile.json",
    *,
    model: ModelSpec | None = None,
    device: str | None = DEVICE,
    precision: Precision | None = None,
    sequence_length: int | None = None,
    link: str | None = None,
) -> ImportContext:
    return ImportContext(
        file=file,
        model=model,
        device=device,
        precision=precision,
        sequence_length=sequence_length,
        link=link,
    )


Run = Sequence[tuple[float, float, float]]
"""(forward, backward, update) of every layer."""


def sailor_text(runs: Mapping[tuple[int, int], Run], *, indent: int | None = 1) -> str:
    """A profile.json of runs by (microbatch, tp)."""
    data: dict[str, dict[str, dict[str, list[float]]]] = {}
    for (microbatch, tp), run in runs.items():
        layers = {str(at): list(times) for at, times in enumerate(run)}
        data.setdefault(str(microbatch), {})[str(tp)] = layers
    return json.dumps(data, indent=indent)


def alike(num_layers: int, *, scale: float = 1.0, update: float = 0.001) -> list[list[float]]:
    """Plausible times: embedding, equal transformer layers, head."""
    ends = [0.0002 * scale, 0.0004 * scale, update], [0.002 * scale, 0.004 * scale, update]
    layers = [[0.001 * scale, 0.0021 * scale, update] for _ in range(num_layers)]
    return [ends[0], *layers, ends[1]]


def metis_text(
    milliseconds: Sequence[object],
    *,
    optimizer: object = 5.0,
    total: object = 100.0,
) -> str:
    return json.dumps(
        {
            "model": {"model_name": "Tiny", "num_layers": len(milliseconds)},
            "execution_time": {
                "total_time_ms": total,
                "optimizer_time_ms": optimizer,
                "batch_generator_time_ms": 1.0,
                "layer_compute_total_ms": list(milliseconds),
            },
            "execution_memory": {"total_memory_mb": 100.0, "layer_memory_total_mb": []},
        },
        indent=1,
    )


def simumax_data() -> dict[str, object]:
    return {
        "sys_name": "X200 64G",
        "num_per_node": 8,
        "accelerator": {
            "backend": "cuda",
            "mem_gbs": 64,
            "op": {
                "default": {"tflops": 100, "efficient_factor": 0.7},
                "matmul": {
                    "tflops": 180,
                    "efficient_factor": 0.7,
                    "accurate_efficient_factor": {"m=1, k=2, out_dtype=bf16": 0.8},
                },
            },
            "bandwidth": {"default": {"efficient_factor": 0.9, "gbps": 1000, "latency_us": 30}},
            "mode": "roofline",
        },
        "networks": {
            "inter_node": {
                "processor_usage": 0,
                "bandwidth": {"efficient_factor": 0.8, "gbps": 50, "latency_us": 12},
                "op": {"p2p": {"scale": 1, "offset": 0, "efficient_factor": 0.5}},
            }
        },
    }
