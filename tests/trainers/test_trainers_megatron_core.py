"""What the rules call wrong megatron-core refuses, and it takes what they are silent about."""

from __future__ import annotations

import random
import warnings

import pytest
from rule_launches import MEGATRON, Flags, judged, launch

from hetplan.errors import InputError
from hetplan.trainers.megatron.read import segments_of

pytest.importorskip("megatron.core", reason="megatron-core is not installed")
with warnings.catch_warnings():
    # Importing warns about missing accelerator libraries.
    warnings.simplefilter("ignore")
    from megatron.core.num_microbatches_calculator import ConstantNumMicroBatchesCalculator
    from megatron.core.transformer.pipeline_parallel_layer_layout import (
        PipelineParallelLayerLayout,
    )
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_config import TransformerConfig

import torch

REFUSALS = (AssertionError, ValueError, ZeroDivisionError)
DRAWS = 400


def rules(flags: Flags) -> set[str]:
    """Rules that a launch with as many ranks as its degrees need breaks."""
    tp, pp = (flags.get(f"{name}-model-parallel-size", 1) for name in ("tensor", "pipeline"))
    ranks = {"torchrun.nnodes": pp, "torchrun.nproc-per-node": tp, "micro-batch-size": 1}
    return {each.rule for each in judged(launch({**ranks, **flags}))}


def layout(rng: random.Random) -> str:
    """A layout string that is often right."""
    stages, each = rng.choice([1, 2, 3, 4, 6]), rng.choice([1, 2, 4])
    parts = [f"t*{each}" if rng.random() < 0.5 else "t" * each for _ in range(stages)]
    text = "E" + "|".join(parts) + "L"
    if rng.random() < 0.2:
        text = f"E(t*{each}|)*{stages - 1}t*{each}L" if stages > 1 else text
    if rng.random() < 0.25:
        at = rng.randrange(len(text))
        text = text[:at] + rng.choice(["", "t", "|", "E", "L", " ", "m", "x", "(", ","]) + text[at:]
    if rng.random() < 0.1:
        at = rng.randrange(len(text))
        text = text[:at] + text[at + 1 :]
    return text


def test_layout_strings_are_judged_as_megatron_core_does() -> None:
    rng = random.Random(0)
    outcomes = []
    for _ in range(DRAWS):
        text, pp = layout(rng), rng.choice([1, 1, 2, 3])
        try:
            counted = "".join(segments_of(text)).count("t")
        except InputError:
            counted = 8
        layers = max(1, counted) if rng.random() < 0.7 else rng.choice([4, 6, 8, 12])
        try:
            parsed = PipelineParallelLayerLayout.from_str(text, pp)
            parsed.validate_layer_layout(num_layers=layers, mtp_num_layers=None)
            taken = True
        except (*REFUSALS, IndexError):
            taken = False
        flags = {"num-layers": layers, "pipeline-model-parallel-size": pp}
        found = rules({**flags, "pipeline-model-parallel-layout": text})
        assert ("launch-layout-string" not in found) == taken, (text, pp, layers, found)
        outcomes.append(taken)
    assert 50 < sum(outcomes) < DRAWS - 50


def drawn(rng: random.Random) -> dict[str, int | str | bool | None]:
    flags: dict[str, int | str | bool | None] = {
        "num-layers": rng.choice([12, 16, 24, 30, 32]),
        "hidden-size": 4096,
        "num-attention-heads": rng.choice([16, 32, 24, 64]),
        "group-query-attention": True,
        "num-query-groups": rng.choice([2, 4, 8, 6, 16]),
        "tensor-model-parallel-size": rng.choice([1, 2, 4, 8, 16]),
        "pipeline-model-parallel-size": rng.choice([1, 2, 3, 4]),
        "seq-length": 4096,
        "bf16": True,
    }
    if 4096 % int(flags["num-attention-heads"] or 1):
        flags["kv-channels"] = 128
    for end in ("first", "last"):
        if rng.random() < 0.3:
            flags[f"decoder-{end}-pipeline-num-layers"] = rng.choice([2, 4, 6, 8, 12])
    if rng.random() < 0.5:
        flags["recompute-granularity"] = rng.choice(["full", "selective"])
    if rng.random() < 0.4:
        flags["recompute-method"] = rng.choice(["uniform", "block"])
    if rng.random() < 0.4:
        flags["recompute-num-layers"] = 1
    return flags


def taken_by_core(flags: dict[str, int | str | bool | None]) -> bool:
    """Whether a configuration of these sizes is made and its stages have all its layers."""
    pp = int(flags["pipeline-model-parallel-size"] or 1)
    granularity, method = flags.get("recompute-granularity"), flags.get("recompute-method")
    if granularity == "selective" and method is not None:
        return False  # training/arguments.py, which the wheel does not have
    try:
        config = TransformerConfig(
            num_layers=flags["num-layers"],
            hidden_size=4096,
            num_attention_heads=flags["num-attention-heads"],
            num_query_groups=flags["num-query-groups"],
            kv_channels=flags.get("kv-channels"),
            tensor_model_parallel_size=flags["tensor-model-parallel-size"],
            pipeline_model_parallel_size=pp,
            pipeline_dtype=torch.bfloat16,
            num_layers_in_first_pipeline_stage=flags.get("decoder-first-pipeline-num-layers"),
            num_layers_in_last_pipeline_stage=flags.get("decoder-last-pipeline-num-layers"),
            recompute_granularity=granularity,
            recompute_method=method,
            recompute_num_layers=flags.get("recompute-num-layers"),
            bf16=True,
        )
        counts = [get_num_layers_to_build(config, pp_rank=stage) for stage in range(pp)]
    except REFUSALS:
        return False
    # Core 0.16.1 takes ends that have more layers than the model, and a stage of minus eight.
    return sum(counts) == flags["num-layers"] and min(counts) >= 0


# It warns of what it does not like about configurations that it takes.
@pytest.mark.filterwarnings("ignore::UserWarning:megatron.core")
def test_sizes_are_judged_as_megatron_core_does() -> None:
    rng = random.Random(1)
    wrong = {
        "launch-is-refused",
        "launch-loses-layers",
        "launch-sizes-do-not-divide",
        "launch-flags-contradict",
    }
    outcomes = []
    for _ in range(DRAWS):
        flags = drawn(rng)
        if flags.get("recompute-granularity") is None:
            # Nothing is recomputed: taken, and not what was asked.
            flags.pop("recompute-method", None)
            flags.pop("recompute-num-layers", None)
        found = rules(flags) & wrong
        assert (not found) == taken_by_core(flags), repr((flags, found))
        outcomes.append(not found)
    assert 20 < sum(outcomes) < DRAWS - 50


@pytest.mark.parametrize("batch", range(1, 40))
def test_batches_are_judged_as_megatron_core_does(batch: int) -> None:
    for size in (1, 2, 3):
        try:
            ConstantNumMicroBatchesCalculator(batch, size, 2, False, 0)
            taken = True
        except AssertionError:
            taken = False
        found = rules({**MEGATRON, "global-batch-size": batch, "micro-batch-size": size})
        assert ("launch-batch-does-not-divide" not in found) == taken
