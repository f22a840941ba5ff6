"""MindSpeed and Megatron-Bridge take Megatron-LM's layout and values."""

from __future__ import annotations

import ast
import itertools
import warnings
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from megatron_models import device
from megatron_plans import outermost_results, random_results
from megatron_reader import read_run

from hetplan.emitters.megatron.arguments import megatron_arguments
from hetplan.emitters.megatron.bridge import SECTIONS
from hetplan.emitters.megatron.bridge import TRAINER as BRIDGE
from hetplan.emitters.megatron.mindspeed import PROGRAM
from hetplan.emitters.megatron.mindspeed import TRAINER as MINDSPEED
from hetplan.emitters.megatron.parallel import degrees_of
from hetplan.emitters.megatron.trainer import TRAINER as MEGATRON
from hetplan.emitters.placement import sheet_of
from hetplan.emitters.sheet import LaunchSheet
from hetplan.emitters.trainer_launch import EmitOptions, Trainer, TrainerLaunch
from hetplan.job.spec import Precision, ProductFormat, TrainerOptions
from hetplan.plans.plan import OverlapSettings
from hetplan.search.result import SearchResult

NO_OPTIONS = EmitOptions()
_PROVIDER_FIELDS = {
    "position_embedding_type",
    "rope_scaling",
    "rope_scaling_factor",
    "rotary_base",
    "seq_length",
    "share_embeddings_and_output_weights",
    "should_pad_vocab",
    "vocab_size",
}
"""What GPTModelProvider (megatron-bridge 0.3.1) has beside TransformerConfig."""


def sheet(result: SearchResult) -> LaunchSheet:
    return sheet_of(result.plan, result.inputs.cluster, data_outermost=True)


def launched(
    trainer: Trainer, result: SearchResult, options: EmitOptions = NO_OPTIONS
) -> TrainerLaunch:
    assert trainer.faults(result, sheet(result), options) == ()
    return trainer.launch(result, sheet(result), options)


def messages(
    trainer: Trainer, result: SearchResult, options: EmitOptions = NO_OPTIONS
) -> list[str]:
    return [fault.message for fault in trainer.faults(result, sheet(result), options)]


def on_ascend(result: SearchResult) -> SearchResult:
    """The same plan on a cluster whose islands all have Ascend devices."""
    cluster = result.inputs.cluster
    islands = tuple(
        replace(island, device=device("huawei-ascend-910b2-64gb")) for island in cluster.islands
    )
    changed = replace(cluster, islands=islands)
    return replace(result, inputs=replace(result.inputs, cluster=changed))


# ---- MindSpeed


def test_mindspeed_takes_megatrons_arguments() -> None:
    count = 0
    for result in itertools.islice(random_results(seed=31, count=10_000), 160):
        ascend = on_ascend(result)
        if MINDSPEED.faults(ascend, sheet(ascend), NO_OPTIONS):
            asked = {entry[0] for entry in megatron_arguments(ascend, sheet(ascend), NO_OPTIONS)}
            later = {"--window-size", "--rope-type", "--moe-shared-expert-gate"} & asked
            assert degrees_of(result.plan).cp > 1 or result.plan.optimizer_shards > 1 or later
            continue
        count += 1
        mine = launched(MINDSPEED, ascend).arguments
        megatrons = megatron_arguments(ascend, sheet(ascend), NO_OPTIONS)
        own = ("--transformer-impl", "--vocab-size", "--nccl-communicator-config-path")
        theirs = [entry for entry in megatrons if entry[0] not in own]
        assert [each for each in mine if each[0] not in (*own, "--distributed-backend")] == theirs
        run = read_run(mine, sheet(ascend).world_size, added_tokens=1)
        assert run.padded_vocab_size == result.plan.padded_vocab_size
    assert count > 50


def test_mindspeeds_program_and_environment() -> None:
    result = next(outermost_results())
    slow = replace(result, estimate=replace(result.estimate, step_seconds=900.0))
    launch = launched(MINDSPEED, slow)
    assert launch.program == (f"{{folder}}/{PROGRAM}",)
    (file,) = launch.files
    compile(file.text, file.path, "exec")
    assert file.text.index("import mindspeed.megatron_adaptor") < file.text.index("runpy.run_path")
    assert dict(launch.environment) == {
        "HCCL_CONNECT_TIMEOUT": "3360",
        "HCCL_EXEC_TIMEOUT": "3360",
    }
    assert ("--distributed-backend", "nccl") in launch.arguments
    assert ("--distributed-timeout-minutes", "56") in launch.arguments


def test_mindspeed_refuses_what_its_code_does_not_show() -> None:
    nvidia = next(random_results(seed=31, count=1))
    assert any("Ascend alone" in message for message in messages(MINDSPEED, nvidia))
    result = next(outermost_results())
    assert messages(MEGATRON, result) != []

    def with_plan(**changes: Any) -> SearchResult:
        return replace(result, plan=replace(result.plan, **changes))

    eight_bit = replace(
        result.inputs.job, trainer=TrainerOptions(product_format=ProductFormat.FLOAT8)
    )
    wrong = (
        replace(result, inputs=replace(result.inputs, job=eight_bit)),
        with_plan(overlap=OverlapSettings(tensor_parallel=True)),
    )
    for each in wrong:
        assert any(
            "found in neither MindSpeed's code" in message for message in messages(MINDSPEED, each)
        )


# ---- Megatron-Bridge


def bridge_results() -> Iterator[SearchResult]:
    """Plans that Megatron-Bridge can be told."""
    for result in random_results(seed=41, count=10_000):
        if not BRIDGE.faults(result, sheet(result), NO_OPTIONS):
            yield result


def literals(launch: TrainerLaunch) -> dict[str, Any]:
    """The settings of the emitted program."""
    text = next(file.text for file in launch.files if file.path.endswith(".py"))
    found = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            if name.lower() in SECTIONS or name == "TRANSPORT_FILE":
                found[name] = ast.literal_eval(node.value)
    return found


def _config(model: dict[str, Any]) -> Any:
    """Megatron-core's configuration of the emitted model."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core.transformer.transformer_config import (
            MLATransformerConfig,
            TransformerConfig,
        )

        kind = MLATransformerConfig if model.get("multi_latent_attention") else TransformerConfig
        names = {field.name for field in fields(kind)}
        assert set(model) - names <= _PROVIDER_FIELDS
        # Fused kernels and their libraries are looked for on the spot.
        plain = {name: value for name, value in model.items() if name in names}
        return kind(**{**plain, "apply_rope_fusion": False}, pipeline_dtype=torch.bfloat16)


def test_bridge_gets_the_values_of_megatrons_arguments() -> None:
    for result in itertools.islice(bridge_results(), 60):
        launch = launched(BRIDGE, result)
        settings = literals(launch)
        assert {name.lower() for name in settings} == {*SECTIONS, "transport_file"}
        model, train = settings["MODEL"], settings["TRAIN"]
        config = _config(model)
        theirs = read_run(
            megatron_arguments(result, sheet(result), NO_OPTIONS), sheet(result).world_size
        )
        arguments = theirs.arguments
        layout = config.pipeline_model_parallel_layout
        if degrees_of(result.plan).pp > 1:
            counted = [
                [sum(kind.name == "decoder" for kind in chunk) for chunk in stage]
                for stage in layout.layout
            ]
            by_stage = {rank.stage: rank.layers for rank in theirs.ranks}
            assert counted == [[len(c) for c in by_stage[s]] for s in range(len(counted))]
        assert model["vocab_size"] == theirs.padded_vocab_size
        assert not model["should_pad_vocab"]
        assert (config.virtual_pipeline_model_parallel_size or 1) == theirs.virtual_stages
        assert train["global_batch_size"] == arguments.global_batch_size
        assert config.sequence_parallel == arguments.sequence_parallel
        assert config.add_bias_linear != arguments.disable_bias_linear
        assert config.recompute_granularity == arguments.recompute_granularity
        assert settings["PRECISION"] == {"grad_reduce_in_fp32": True, "bf16": True}
        sharded = arguments.use_distributed_optimizer
        assert settings["OPTIMIZER"]["use_distributed_optimizer"] == sharded
        assert settings["DIST"].get("use_tp_pp_dp_mapping", False) == sheet(result).data_outermost
        named = [file.path for file in launch.files if file.path.endswith(".yaml")]
        assert settings["TRANSPORT_FILE"] == (named[0] if named else "")


def test_bridge_patterns_are_lists_as_megatron_core_wants_them() -> None:
    """A tuple would be taken for neither a number nor a pattern."""
    for result in bridge_results():
        model = literals(launched(BRIDGE, result))["MODEL"]
        if "moe_layer_freq" in model:
            break
    assert isinstance(model["moe_layer_freq"], list)
    assert len(model["moe_layer_freq"]) == model["num_layers"]


def test_bridge_program_with_data() -> None:
    options = EmitOptions(
        data=("0.5", "/data/it's", "0.5", "/data/b"),
        tokenizer="/tok",
        learning_rate=1e-4,
        save="/save",
    )
    result = next(bridge_results())
    launch = launched(BRIDGE, result, options)
    settings = literals(launch)
    assert settings["DATASET"]["blend"] == ["0.5", "/data/it's", "0.5", "/data/b"]
    assert settings["TOKENIZER"] == {
        "tokenizer_type": "HuggingFaceTokenizer",
        "tokenizer_model": "/tok",
    }
    assert settings["CHECKPOINT"]["save"] == "/save"
    assert settings["OPTIMIZER"]["lr"] == 1e-4
    text = next(file.text for file in launch.files if file.path.endswith(".py"))
    compile(text, "pretrain_bridge.py", "exec")
    assert "PARAMETERS = torch.bfloat16" in text


def test_bridge_formats() -> None:
    result = next(bridge_results())
    half = replace(result.inputs.job, precision=Precision.FLOAT16)
    found = literals(launched(BRIDGE, replace(result, inputs=replace(result.inputs, job=half))))
    assert found["PRECISION"] == {"grad_reduce_in_fp32": True, "fp16": True}
    assert (found["OPTIMIZER"]["fp16"], found["OPTIMIZER"]["bf16"]) == (True, False)


@pytest.mark.parametrize("name", ["learned", "extra"])
def test_bridge_refuses(name: str) -> None:
    result = next(bridge_results())
    options = NO_OPTIONS
    if name == "learned":
        gpt = (r for r in random_results(seed=41, count=10_000) if r.inputs.model.name == "gpt")
        result = next(gpt)
    else:
        options = EmitOptions(extra_arguments=("--a",))
    assert messages(BRIDGE, result, options) != []
