"""All arguments of pretrain_gpt.py that realise a plan, one entry per flag.

Flags that are left out have Megatron-LM's defaults, which the plan was priced with. Every flag was
taken by the parser and validators of Megatron-LM d98e8a64.
"""

from __future__ import annotations

from collections.abc import Iterator

from hetplan.emitters.megatron.model import VOCAB_MULTIPLE, model_arguments
from hetplan.emitters.megatron.optimizer import optimizer_arguments, precision_arguments
from hetplan.emitters.megatron.parallel import (
    batch_arguments,
    overlap_arguments,
    parallel_arguments,
    recompute_arguments,
)
from hetplan.emitters.megatron.timeouts import timeout_arguments
from hetplan.emitters.megatron.transport import TRANSPORT_FILE, transport_text
from hetplan.emitters.sheet import LaunchSheet
from hetplan.emitters.trainer_launch import EmitOptions
from hetplan.job.trainer import TrainerSettings, trainer_settings_of
from hetplan.search.result import SearchResult

DROPOUT = "0.1"
"""Megatron-LM's own, where the job asks for dropout."""


def megatron_settings(result: SearchResult) -> TrainerSettings:
    """The trainer's settings under the job's options."""
    job = result.inputs.job
    return trainer_settings_of("megatron", job.precision, job.trainer)


def plan_arguments(result: SearchResult, sheet: LaunchSheet) -> Iterator[tuple[str, ...]]:
    """What the plan and its model say: shape, degrees, recomputation, formats, overlap."""
    job = result.inputs.job
    settings = megatron_settings(result)
    yield from model_arguments(result.inputs.model, job)
    yield from parallel_arguments(result, sheet, context_exchange=settings.context_exchange)
    yield from batch_arguments(result)
    yield from recompute_arguments(result.plan)
    yield from overlap_arguments(result.plan)
    yield from precision_arguments(job, settings)
    yield from kernel_arguments(settings)


def kernel_arguments(settings: TrainerSettings) -> Iterator[tuple[str, ...]]:
    """Dropout and the kernels of attention, loss and weights' gradients."""
    yield "--attention-dropout", DROPOUT if settings.attention_dropout else "0.0"
    yield "--hidden-dropout", DROPOUT if settings.hidden_dropout else "0.0"
    yield "--transformer-impl", "transformer_engine"
    if not settings.fused_attention:
        yield "--attention-backend", "unfused"
    if settings.fused_loss:
        yield ("--cross-entropy-loss-fusion",)
        # Transformer Engine's is refused (arguments.py: "disabled due to stability issues").
        yield "--cross-entropy-fusion-impl", "native"
    if not settings.fused_accumulation:
        yield ("--no-gradient-accumulation-fusion",)


def transport_arguments(result: SearchResult, sheet: LaunchSheet) -> Iterator[tuple[str, ...]]:
    """Timeouts of long links and the file of the groups' networks."""
    yield from timeout_arguments(result, sheet)
    if transport_text(result.plan, result.inputs.cluster, sheet):
        yield "--nccl-communicator-config-path", f"{{folder}}/{TRANSPORT_FILE}"


def data_arguments(result: SearchResult, options: EmitOptions) -> Iterator[tuple[str, ...]]:
    """Vocabulary and data, padded as the plan has it."""
    yield "--vocab-size", str(result.inputs.model.vocab_size)
    yield "--make-vocab-size-divisible-by", str(VOCAB_MULTIPLE)
    if not options.data:
        # Its vocabulary is --vocab-size (core/tokenizers/text/libraries/null_tokenizer.py).
        yield "--tokenizer-type", "NullTokenizer"
        yield ("--mock-data",)
        return
    # Otherwise the tokenizer's own vocabulary is padded (core/tokenizers/utils/build_tokenizer.py).
    yield "--padded-vocab-size", str(result.plan.padded_vocab_size)
    sentencepiece = options.tokenizer.endswith(".model")
    yield "--tokenizer-type", "SentencePieceTokenizer" if sentencepiece else "HuggingFaceTokenizer"
    yield "--tokenizer-model", options.tokenizer
    yield "--data-path", *options.data
    # Nothing is evaluated.
    yield "--split", "100,0,0"


def run_arguments(result: SearchResult, options: EmitOptions) -> Iterator[tuple[str, ...]]:
    """Length of the run, checkpoints and log."""
    job = result.inputs.job
    yield "--train-iters", str(options.steps)
    yield "--eval-iters", "0"
    yield "--eval-interval", str(options.steps)
    # Every step, so that `hetplan compare` sees how they differ; level 1 are the parts of a step.
    yield "--log-interval", "1"
    yield "--timing-log-level", "1"
    yield ("--no-barrier-with-level-1-timing",)
    if job.seed > 0:
        # initialize.py takes positive ones; its own is 1234.
        yield "--seed", str(job.seed)
    if options.save:
        yield "--save", options.save
        yield "--save-interval", str(job.checkpoint_interval_steps or options.steps)
    if options.load:
        yield "--load", options.load
    if options.save or options.load:
        # Can be read again under other degrees and layouts.
        yield "--ckpt-format", "torch_dist"


def extra_arguments(options: EmitOptions) -> tuple[tuple[str, ...], ...]:
    """The user's own words, one entry per flag."""
    entries: list[list[str]] = []
    for word in options.extra_arguments:
        if word.startswith("--") or not entries:
            entries.append([])
        entries[-1].append(word)
    return tuple(tuple(entry) for entry in entries)


def megatron_arguments(
    result: SearchResult, sheet: LaunchSheet, options: EmitOptions
) -> tuple[tuple[str, ...], ...]:
    """Every argument of pretrain_gpt.py."""
    return (
        *plan_arguments(result, sheet),
        *optimizer_arguments(result, options),
        *transport_arguments(result, sheet),
        *data_arguments(result, options),
        *run_arguments(result, options),
        *extra_arguments(options),
    )
