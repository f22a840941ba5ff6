"""Megatron-LM's pretrain_gpt.py as a target of `hetplan emit`."""

from __future__ import annotations

from hetplan.emitters.megatron.arguments import megatron_arguments
from hetplan.emitters.megatron.environment import agent_environment
from hetplan.emitters.megatron.faults import megatron_faults
from hetplan.emitters.megatron.numerics import numerics_remarks
from hetplan.emitters.megatron.parallel import degrees_of
from hetplan.emitters.megatron.timeouts import timeout_minutes
from hetplan.emitters.megatron.transport import (
    TRANSPORT_FILE,
    transport_remarks,
    transport_text,
)
from hetplan.emitters.sheet import LaunchSheet
from hetplan.emitters.trainer_launch import EmitOptions, EmittedFile, Trainer, TrainerLaunch
from hetplan.search.result import SearchResult

TITLE = "Megatron-LM (pretrain_gpt.py, made for commit d98e8a64 of 22 Aug 2026)"


def megatron_launch(
    result: SearchResult, sheet: LaunchSheet, options: EmitOptions
) -> TrainerLaunch:
    """Program, arguments, environment and files of a plan without `megatron_faults`."""
    degrees = degrees_of(result.plan)
    return TrainerLaunch(
        target="megatron",
        title=TITLE,
        program=("pretrain_gpt.py",),
        arguments=megatron_arguments(result, sheet, options),
        environment=(),
        agent_environment=tuple(agent_environment(agent, degrees) for agent in sheet.agents),
        files=transport_files(result, sheet),
        remarks=launch_remarks(result, sheet, options),
    )


def transport_files(result: SearchResult, sheet: LaunchSheet) -> tuple[EmittedFile, ...]:
    """The file of the groups' networks, where they need one."""
    text = transport_text(result.plan, result.inputs.cluster, sheet)
    return (EmittedFile(path=TRANSPORT_FILE, text=text),) if text else ()


def launch_remarks(
    result: SearchResult, sheet: LaunchSheet, options: EmitOptions, *, transport: bool = True
) -> tuple[str, ...]:
    """What a reader should know of this launch; `transport`: it has a file of groups' networks."""
    plan, inputs = result.plan, result.inputs
    remarks = list(numerics_remarks(inputs.model))
    minutes = timeout_minutes(result, sheet)
    if minutes is not None:
        remarks.append(
            f"--distributed-timeout-minutes {minutes}: Megatron-LM's own 10, the start of the "
            "largest communicator over the longest link, and three steps."
        )
    if transport:
        remarks += transport_remarks(plan, inputs.cluster)
    if options.data:
        remarks.append(
            f"The plan was priced with {inputs.model.vocab_size} entries of the vocabulary, padded "
            f"to {plan.padded_vocab_size}; the tokenizer must not have more."
        )
    if not options.save:
        remarks.append("No checkpoints are saved: say --save FOLDER.")
    return tuple(remarks)


TRAINER = Trainer(
    name="megatron",
    plan_target="megatron",
    faults=megatron_faults,
    launch=megatron_launch,
    data_outermost=True,
)
