"""Published measurements as hetplan's samples, with their known traps stepped around.

`unit/layer_times.csv`, fp16 operator profiles: a layer is the sum of its 13 operators at tp = 1
(at tp > 1 some contain communication). Backward times of the four matrix products are the input
gradient alone; the weight gradient costs another product of the forward's size. 1e7 us marks
failures. `unit/collectives.csv`: 1e12 us marks failures.
"""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Iterator
from functools import lru_cache

import pytest
from predict_samples import REFERENCE, layer_sample, link_sample

from hetplan.job.spec import Precision
from hetplan.model.spec import Architecture, ModelSpec, plain_model
from hetplan.profiling.samples import LayerSample, LinkSample

needs_reference = pytest.mark.skipif(
    not (REFERENCE / "unit").is_dir(), reason="published measurements are not here"
)

PRODUCTS = ("enc-attention-qkv", "enc-attention-dense", "enc-MLP-GEMM-1", "enc-MLP-GEMM-2")
_NOT_OF_A_LAYER = ("encoder-embedding", "final-layernorm", "gpt-post-process")
_HIDDEN_AND_HEADS = {"OPT-350": (1024, 16), "GPT-Neo-2.7": (2560, 32), "OPT-30": (7168, 56)}
_FAILED_US = 1e6
SEQUENCE = 2048


def spec(name: str) -> ModelSpec:
    hidden, heads = _HIDDEN_AND_HEADS[name]
    return plain_model(
        name=name,
        architecture=Architecture.GPT,
        num_layers=1,
        hidden_size=hidden,
        ffn_hidden_size=4 * hidden,
        num_attention_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        vocab_size=51200,
        max_sequence_length=SEQUENCE,
    )


Key = tuple[str, str, int]
"""GPU, model, microbatch size."""


@lru_cache(maxsize=1)
def operator_times() -> dict[Key, dict[str, tuple[float, float]]]:
    """Seconds (forward, backward) of every operator of a layer on one device."""
    found: dict[Key, dict[str, tuple[float, float]]] = defaultdict(dict)
    with (REFERENCE / "unit" / "layer_times.csv").open() as stream:
        for row in csv.DictReader(stream):
            mine = "Aceso" in row["source"] and row["dtype"] == "fp16" and row["algo"] == "0"
            if not mine or row["tp"] != "1" or row["op"] in _NOT_OF_A_LAYER:
                continue
            times = (float(row["fwd_us"]), float(row["bwd_us"]))
            if max(times) < _FAILED_US:
                key = (row["gpu"], row["model"], int(float(row["mbs"])))
                found[key][row["op"]] = (times[0] * 1e-6, times[1] * 1e-6)
    return {key: operators for key, operators in found.items() if len(operators) == 13}


def layer_samples(gpu: str) -> list[LayerSample]:
    """Forward and backward samples of whole layers."""
    samples = []
    for (device, name, microbatch), operators in operator_times().items():
        if device != gpu:
            continue
        forward = sum(times[0] for times in operators.values())
        weight_gradients = sum(operators[product][0] for product in PRODUCTS)
        backward = sum(times[1] for times in operators.values()) + weight_gradients
        for phase, seconds in (("forward", forward), ("backward", backward)):
            samples.append(
                layer_sample(
                    spec(name),
                    seconds,
                    phase=phase,
                    microbatch=microbatch,
                    precision=Precision.FLOAT16,
                    device=gpu,
                )
            )
    return samples


def all_reduce_samples(gpu: str) -> Iterator[LinkSample]:
    """NCCL all_reduce inside one node of 8 devices, every power of two from 1 MiB to 1 GiB."""
    sizes = {(1 << 20) << k for k in range(11)}
    with (REFERENCE / "unit" / "collectives.csv").open() as stream:
        for row in csv.DictReader(stream):
            if not row["source"].startswith("vTrain") or row["gpu"] != gpu:
                continue
            size, seconds = int(float(row["size_bytes"])), float(row["time_us"]) * 1e-6
            if size in sizes and seconds < 1.0:
                yield link_sample(seconds, size, ranks=int(row["ranks"]))
