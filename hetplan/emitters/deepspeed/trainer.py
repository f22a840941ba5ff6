"""A plan as a launch of Megatron-DeepSpeed: arguments, and the file that DeepSpeed reads."""

from __future__ import annotations

import json
from collections.abc import Iterator

from hetplan.emitters.deepspeed.arguments import (
    CONFIG_FILE,
    deepspeed_arguments,
    deepspeed_config,
)
from hetplan.emitters.deepspeed.faults import deepspeed_faults
from hetplan.emitters.deepspeed.partition import transformer_layers
from hetplan.emitters.megatron.arguments import extra_arguments
from hetplan.emitters.megatron.environment import agent_environment
from hetplan.emitters.megatron.parallel import degrees_of
from hetplan.emitters.sheet import LaunchSheet
from hetplan.emitters.trainer_launch import EmitOptions, EmittedFile, Trainer, TrainerLaunch
from hetplan.job.spec import Precision
from hetplan.job.trainer import TrainerSettings, trainer_settings
from hetplan.model.layers import Attention
from hetplan.model.spec import ModelSpec
from hetplan.search.result import SearchResult

TITLE = "Megatron-DeepSpeed (commit f4157bea of 24 Dec 2024, with DeepSpeed 0.19.6)"


def deepspeed_launch(
    result: SearchResult, sheet: LaunchSheet, options: EmitOptions
) -> TrainerLaunch:
    """The launch of a result without faults."""
    settings = trainer_settings(result.inputs.job)
    degrees = degrees_of(result.plan)
    config = json.dumps(deepspeed_config(result, settings), indent=2)
    return TrainerLaunch(
        target="deepspeed",
        title=TITLE,
        program=("pretrain_gpt.py",),
        arguments=(
            *deepspeed_arguments(result, sheet, settings, options),
            *extra_arguments(options),
        ),
        environment=(),
        agent_environment=tuple(agent_environment(agent, degrees) for agent in sheet.agents),
        files=(EmittedFile(path=CONFIG_FILE, text=config + "\n"),),
        remarks=tuple(_remarks(result, sheet, settings)),
    )


def _remarks(result: SearchResult, sheet: LaunchSheet, settings: TrainerSettings) -> Iterator[str]:
    plan = result.plan
    if len(plan.pipelines[0].stages) > 1:
        yield (
            "The plan's layers per stage are those that DeepSpeed 0.19.6 cuts by itself; other "
            "versions may cut layers that do not divide evenly in another order."
        )
        if not settings.blocking_sends:
            yield (
                "DeepSpeed's stages send and receive one after the other; the plan was priced with "
                "Megatron-LM's, which do both at once: set trainer.blocking_sends to price it."
            )
    yield (
        f"The tokenizer must have at most {result.inputs.model.vocab_size:,} entries, and pad to "
        f"{plan.padded_vocab_size:,}."
    )
    yield from _numerics(result.inputs.model)
    counts = {agent.num_ranks for agent in sheet.agents}
    turned = [each.host.name for each in sheet.agents if each.first_rank % each.num_ranks]
    if len(counts) > 1 and turned:
        yield (
            "Megatron-DeepSpeed takes rank modulo devices for a rank's device (initialize.py): on "
            f"{', '.join(turned[:4])} ranks use the devices in a turned order."
        )


def own_cut(result: SearchResult) -> tuple[int, ...]:
    """Transformer layers of every stage as DeepSpeed cuts them."""
    return transformer_layers(
        result.inputs.model.num_layers,
        len(result.plan.pipelines[0].stages),
        mixed=result.inputs.job.precision is not Precision.FLOAT32,
    )


def _numerics(model: ModelSpec) -> Iterator[str]:
    """What the model does not say and Megatron-DeepSpeed's megatron/arguments.py takes."""
    attention = model.layer_runs[0].layer.attention
    rotary = isinstance(attention, Attention) and attention.rotary
    own = [
        *(["norm_epsilon (--layernorm-epsilon 1e-5)"] if model.norm_epsilon is None else ()),
        *(["rotary_base (10000)"] if rotary and model.rotary_base is None else ()),
        *(["activation (silu behind a gate, else gelu)"] if model.activation is None else ()),
    ]
    if own:
        yield (
            f"The model does not say {', '.join(own)}: Megatron-DeepSpeed's own, in brackets, "
            "stand. Say them in the model file."
        )


TRAINER = Trainer(
    name="deepspeed",
    plan_target="megatron",
    faults=deepspeed_faults,
    launch=deepspeed_launch,
    own_cut=own_cut,
)
