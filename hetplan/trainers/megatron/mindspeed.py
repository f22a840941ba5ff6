"""MindSpeed (Huawei Ascend): Megatron-LM's pretrain_gpt.py behind MindSpeed's adaptor.

`import mindspeed.megatron_adaptor` before Megatron-LM is what MindSpeed's README asks for; it is in
a file of the emitted folder, so that the checkout stays as it is. Read, not run: MindSpeed takes
Megatron-LM core_r0.12.1 and has --pipeline-model-parallel-layout with the same symbols and order
(gitcode.com/Ascend/MindSpeed, docs/zh/features/pipeline-model-parallel-layout.md and
mindspeed/features_manager/pipeline_parallel). What was found in neither is refused.
"""

from __future__ import annotations

from collections.abc import Iterator

from hetplan.cluster.libraries import library_of
from hetplan.errors import Fault
from hetplan.schedulers.launch import EmissionOptions, EmittedFile, TrainerLaunch
from hetplan.schedulers.rank_layout import RankLayout
from hetplan.search.result import SearchResult
from hetplan.trainers import Trainer
from hetplan.trainers.megatron.model import VOCAB_MULTIPLE, missing_flags, model_arguments
from hetplan.trainers.megatron.parallel import (
    batch_arguments,
    degrees_of,
    overlap_arguments,
    parallel_arguments,
    recompute_arguments,
)
from hetplan.trainers.megatron.write import (
    agent_environment,
    common_faults,
    data_arguments,
    extra_arguments,
    hccl_timeouts,
    kernel_arguments,
    launch_remarks,
    megatron_settings,
    optimizer_arguments,
    optimizer_instances,
    precision_arguments,
    run_arguments,
    timeout_arguments,
)

TITLE = "MindSpeed over Megatron-LM core_r0.12.1 (arguments read in its documentation, not run)"
PROGRAM = "pretrain_gpt_mindspeed.py"
_PROGRAM_TEXT = '''"""pretrain_gpt.py with MindSpeed's adaptor; started in Megatron-LM's folder."""

import os
import runpy
import sys

sys.path.insert(0, os.getcwd())

import mindspeed.megatron_adaptor  # noqa: E402, F401

if __name__ == "__main__":
    runpy.run_path(os.path.join(os.getcwd(), "pretrain_gpt.py"), run_name="__main__")
'''
_NOT_THERE = ("--padded-vocab-size", "--transformer-impl")
"""Flags that are left out: the first came after core_r0.12.1, the second is the adaptor's."""
_LATER = (
    *("--window-size", "--window-attn-skip-freq", "--rope-type", "--moe-shared-expert-gate"),
    "--rotary-seq-len-interpolation-factor",
)
"""Flags of models that core_v0.12.1 does not know (megatron/training/arguments.py), and one that
it passes over (pretrain_gpt.py); none of them was found in MindSpeed."""


def mindspeed_faults(
    result: SearchResult, ranks: RankLayout, options: EmissionOptions
) -> tuple[Fault, ...]:
    """Everything that MindSpeed cannot be told, or that its code and documentation do not show."""
    faults = (
        *_device_faults(ranks),
        *common_faults(result),
        *_unread_faults(result),
    )
    if faults:
        return faults
    inputs = result.inputs
    return tuple(missing_flags(inputs.model, inputs.job, _LATER, "Megatron-LM core_r0.12.1"))


def _device_faults(ranks: RankLayout) -> Iterator[Fault]:
    others = dict.fromkeys(
        host.device_kind
        for host in ranks.hosts
        if library_of(host.vendor, host.device_kind) != "hccl"
    )
    if others:
        yield Fault(
            field="plan.pipelines[0].stages",
            message=f"devices of kind {', '.join(others)}; MindSpeed runs on Huawei's Ascend "
            "alone: forbid the other islands, or emit for target megatron",
        )


def _unread_faults(result: SearchResult) -> Iterator[Fault]:
    plan, job = result.plan, result.inputs.job
    degrees = degrees_of(plan)
    unread = "which was found in neither MindSpeed's code nor its documentation"
    if degrees.cp > 1:
        yield Fault(
            field="plan.pipelines[0]",
            message=f"cp {degrees.cp}; MindSpeed has algorithms of its own "
            "(--context-parallel-algo): pin cp: 1",
        )
    if job.trainer.product_format is not None:
        yield Fault(
            field="inputs.job.trainer.product_format",
            message=f"{job.trainer.product_format}, {unread}: leave it out",
        )
    if plan.overlap.tensor_parallel:
        message = f"true, {unread}: leave it out and plan again"
        yield Fault(field="inputs.job.trainer.tp_comm_overlap", message=message)
    if plan.optimizer_offload > 0:
        message = f"{plan.optimizer_offload}, {unread}: keep optimizer state on the device"
        yield Fault(field="plan.optimizer_offload", message=message)
    if optimizer_instances(plan, degrees) > 1:
        message = f"{plan.optimizer_shards} of {degrees.copies} copies, {unread}: shard over all"
        yield Fault(field="plan.optimizer_shards", message=message)


def mindspeed_arguments(
    result: SearchResult, ranks: RankLayout, options: EmissionOptions
) -> tuple[tuple[str, ...], ...]:
    """Every argument of pretrain_gpt.py at core_r0.12.1."""
    settings = megatron_settings(result)
    entries = (
        *model_arguments(result.inputs.model, result.inputs.job),
        *parallel_arguments(result, ranks, context_exchange=False),
        *batch_arguments(result),
        *recompute_arguments(result.plan),
        *overlap_arguments(result.plan),
        *precision_arguments(result.inputs.job, settings),
        *kernel_arguments(settings),
        *optimizer_arguments(result, options),
        *timeout_arguments(result, ranks),
        *_vocabulary(result, options),
        *run_arguments(result, options),
        # The adaptor turns it into hccl.
        ("--distributed-backend", "nccl"),
        *extra_arguments(options),
    )
    return tuple(entry for entry in entries if entry[0] not in _NOT_THERE)


def _vocabulary(result: SearchResult, options: EmissionOptions) -> Iterator[tuple[str, ...]]:
    """Data, with a --vocab-size that pads to the plan's.

    At core_r0.12.1 the mock tokenizer adds an end-of-document token to it (megatron/training/
    tokenizer/tokenizer.py, _NullTokenizer), which would pad a full vocabulary once more.
    """
    size = result.inputs.model.vocab_size
    for entry in data_arguments(result, options):
        if entry[0] == "--vocab-size" and not options.data:
            yield "--vocab-size", str(size - 1)
        else:
            yield entry


def mindspeed_launch(
    result: SearchResult, ranks: RankLayout, options: EmissionOptions
) -> TrainerLaunch:
    """Program, arguments, environment and files of a plan without `mindspeed_faults`."""
    degrees = degrees_of(result.plan)
    return TrainerLaunch(
        target="mindspeed",
        title=TITLE,
        program=(f"{{folder}}/{PROGRAM}",),
        arguments=mindspeed_arguments(result, ranks, options),
        environment=hccl_timeouts(result, ranks),
        agent_environment=tuple(
            agent_environment(agent, degrees, result.inputs.job) for agent in ranks.agents
        ),
        files=(EmittedFile(path=PROGRAM, text=_PROGRAM_TEXT),),
        remarks=_remarks(result, ranks, options),
    )


def _remarks(result: SearchResult, ranks: RankLayout, options: EmissionOptions) -> tuple[str, ...]:
    own = launch_remarks(result, ranks, options, transport=False)
    found = [
        "The trainer's folder is a checkout of Megatron-LM core_r0.12.1; MindSpeed is installed."
    ]
    if options.data:
        found.append(
            "core_r0.12.1 pads the tokenizer's own vocabulary to a multiple of "
            f"{VOCAB_MULTIPLE} x tp; the plan has {result.plan.padded_vocab_size}."
        )
    return (*found, *own)


TRAINER = Trainer(
    name="mindspeed",
    plan_target="megatron",
    faults=mindspeed_faults,
    launch=mindspeed_launch,
    data_outermost=True,
)
