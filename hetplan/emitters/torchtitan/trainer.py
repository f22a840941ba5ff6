"""A plan as a launch of torchtitan: arguments, and the Python module that has the model."""

from __future__ import annotations

from collections.abc import Iterator

from hetplan.cluster.links import Transport
from hetplan.emitters.sheet import LaunchSheet
from hetplan.emitters.torchtitan.arguments import (
    degrees_of,
    option_arguments,
    plan_arguments,
    recompute_word,
    timeout_arguments,
)
from hetplan.emitters.torchtitan.config import MODULE, NORM_EPSILON, ROTARY_BASE, config_text
from hetplan.emitters.torchtitan.faults import torchtitan_faults
from hetplan.emitters.trainer_launch import EmitOptions, EmittedFile, Trainer, TrainerLaunch
from hetplan.emitters.vendors import vendor_environment
from hetplan.job.spec import ProductFormat
from hetplan.job.trainer import trainer_settings
from hetplan.plans.plan import Boundary
from hetplan.search.result import SearchResult

TITLE = "torchtitan 0.3.0"


def torchtitan_launch(
    result: SearchResult, sheet: LaunchSheet, options: EmitOptions
) -> TrainerLaunch:
    """The launch of a result without faults."""
    inputs = result.inputs
    settings = trainer_settings(inputs.job)
    text = config_text(
        inputs.model, result.plan, inputs.job.sequence_length, settings.product_format
    )
    return TrainerLaunch(
        target="torchtitan",
        title=TITLE,
        program=("-m", "torchtitan.train"),
        arguments=(
            *plan_arguments(result),
            *timeout_arguments(result, sheet),
            *option_arguments(options),
            *((each,) for each in options.extra_arguments),
            # A subcommand: arguments of the whole stand before it.
            (recompute_word(result.plan),),
        ),
        environment=(
            # Where torchtitan finds the module with the model.
            ("PYTHONPATH", "{folder}"),
            # run_train.sh.
            ("PYTORCH_ALLOC_CONF", "expandable_segments:True"),
        ),
        agent_environment=tuple(vendor_environment(agent) for agent in sheet.agents),
        files=(EmittedFile(path=f"{MODULE}.py", text=text),),
        remarks=tuple(_remarks(result, options, settings.product_format)),
    )


def _remarks(
    result: SearchResult, options: EmitOptions, product_format: ProductFormat | None
) -> Iterator[str]:
    plan, model, job = result.plan, result.inputs.model, result.inputs.job
    yield (
        "The arguments are those of release 0.3.0; code after it counts tokens instead of "
        "sequences (training.num_tokens_per_train_step) and takes others."
    )
    if model.rotary_base is None:
        yield (
            f"The model does not say rotary_base: that of torchtitan's Llama 3 models, "
            f"{ROTARY_BASE:,}, stands. Say it in the model file."
        )
    if model.norm_epsilon is None:
        yield (
            f"The model does not say norm_epsilon: torchtitan's own, {NORM_EPSILON:g}, stands. Say "
            "it in the model file."
        )
    if not options.data:
        yield (
            "Without --data torchtitan reads the texts of its tests (tests/assets), which its "
            "checkout has and its package has not: start in a checkout."
        )
    if plan.padded_vocab_size != model.vocab_size:
        yield (
            f"The vocabulary of {model.vocab_size:,} is padded to {plan.padded_vocab_size:,}, so "
            "that tp divides it."
        )
    if job.gradient_clipping is False:
        yield (
            "Gradients are not clipped (training.max_norm inf); torchtitan computes their norm all "
            "the same."
        )
    if degrees_of(plan).pp == 1 and plan.pipelines[0].num_microbatches > 1:
        yield (
            "Without stages a microbatch is a step of gradient accumulation, each of which reduces "
            "its gradients; the plan is priced with one reduction per step."
        )
    yield from _boundary_remarks(plan.pipelines[0].boundaries)
    if product_format is ProductFormat.FLOAT8:
        yield "Products in float8 are scaled by rows (torchao), one scale per tensor was priced."
    if product_format is not None:
        yield (
            "Layers are compiled only with --compile.enable; torchao's products in "
            f"{product_format} are slow without it."
        )


def _boundary_remarks(boundaries: tuple[Boundary, ...]) -> Iterator[str]:
    staged = [str(each.index) for each in boundaries if each.transport == Transport.HOST_STAGED]
    if staged:
        yield (
            f"Boundaries after stages {', '.join(staged)} are host-staged in the plan; torchtitan "
            "sends over them with the devices' own library."
        )


TRAINER = Trainer(
    name="torchtitan",
    plan_target="torchtitan",
    faults=torchtitan_faults,
    launch=torchtitan_launch,
)
