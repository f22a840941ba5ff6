"""From one folder of weights to another: what is read, checked, written and said.

Optimizer state is not converted: its layout is each trainer's own, and a run that begins from
converted weights begins with a fresh optimizer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from hetplan.errors import Fault, InputError
from hetplan.files.reading import read_document
from hetplan.model.huggingface import is_huggingface
from hetplan.model.load import load_model
from hetplan.model.spec import ModelSpec
from hetplan.plans.formats import MEGATRON_DIST, format_of_plan
from hetplan.plans.plan import Plan
from hetplan.plans.targets import target
from hetplan.runtime.weights.folders import Format, check_free, format_of, whole_folder
from hetplan.runtime.weights.huggingface import open_huggingface, write_huggingface
from hetplan.runtime.weights.megatron import open_megatron, read_note, write_megatron
from hetplan.runtime.weights.native import open_native, write_native
from hetplan.runtime.weights.numerics import (
    Numerics,
    differences,
    megatron_arguments,
    megatron_differences,
    numerics_of_config,
    numerics_of_model,
)
from hetplan.runtime.weights.tensors import DTYPES, WeightSource, unlike_parts, weights_of
from hetplan.runtime.weights.watched import watched


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """What is asked for."""

    source: Path
    out: Path
    to: Format
    model_file: Path | None = None
    """config.json or model file; needed where the source does not say what it is of."""
    plan: Plan | None = None
    """Whose padded vocabulary and tensor-parallel slices a Megatron checkpoint gets."""
    planned_model: ModelSpec | None = None
    """Of the plan's inputs."""
    dtype: str | None = None
    """One of `tensors.DTYPES`; None: each tensor as it is kept."""
    iteration: int | None = None
    """Of a Megatron checkpoint; None: a release."""
    inexact: bool = False
    """Convert although the reader computes something otherwise; it is said."""
    force: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Converted:
    """What was done."""

    source: str
    source_format: str
    out: str
    out_format: str
    model: str
    num_weights: int
    parameter_count: int
    dtypes: tuple[str, ...]
    """Number formats of what was written."""
    padded_vocab_size: int | None = None
    """Rows of the vocabulary that were written to a Megatron checkpoint."""
    megatron_arguments: tuple[str, ...] = ()
    """Under which Megatron-LM computes what the model computes."""
    differences: tuple[str, ...] = ()
    """What the reader of the result computes otherwise, where that was accepted."""
    not_finite: tuple[str, ...] = ()
    """Weights with values that are NaN or infinite; they are kept as they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Opened:
    source: WeightSource
    format: Format
    config: str | None
    """The config.json that the weights came with."""


def convert(asked: Conversion) -> Converted:
    """Do the conversion; an InputError, and nothing written, where it cannot be done whole."""
    if asked.dtype is not None and asked.dtype not in DTYPES:
        raise InputError(f"dtype {asked.dtype!a} is not known; known: {', '.join(DTYPES)}")
    if asked.out.resolve() == asked.source.resolve():
        raise InputError(Fault(file=str(asked.out), message="is what is read; name another folder"))
    check_free(asked.out, force=asked.force)
    _check_plan(asked)
    opened = _open(asked)
    dtype = DTYPES[asked.dtype] if asked.dtype else None
    source = watched(opened.source, str(asked.source), dtype)
    _check_model(asked, source.model)
    unlike = _differences(asked, source)
    padded = _padded(asked, source.model) if asked.to is Format.MEGATRON else None
    arguments = megatron_arguments(source.numerics) if asked.to is Format.MEGATRON else ()
    with whole_folder(asked.out, force=asked.force) as folder:
        if asked.to is Format.HUGGINGFACE:
            write_huggingface(folder, source, dtype=dtype, huggingface_config=opened.config)
        elif asked.to is Format.NATIVE:
            write_native(folder, source, dtype=dtype, huggingface_config=opened.config)
        else:
            write_megatron(
                folder,
                source,
                dtype=dtype,
                huggingface_config=opened.config,
                padded_vocab_size=padded or source.model.vocab_size,
                arguments=arguments,
                pieces=1 if asked.plan is None else _largest_tp(asked.plan),
                iteration=asked.iteration,
            )
    weights = weights_of(source.model)
    kept = {str(source.dtype(each)).removeprefix("torch.") for each in weights}
    return Converted(
        source=str(asked.source),
        source_format=opened.format.value,
        out=str(asked.out),
        out_format=asked.to.value,
        model=source.model.name,
        num_weights=len(weights),
        parameter_count=sum(math.prod(each.shape) for each in weights),
        dtypes=(asked.dtype,) if asked.dtype else tuple(sorted(kept)),
        padded_vocab_size=padded,
        megatron_arguments=arguments,
        differences=unlike,
        not_finite=tuple(source.odd),
    )


def _open(asked: Conversion) -> _Opened:
    found = format_of(asked.source)
    if found is Format.HUGGINGFACE:
        source = open_huggingface(asked.source)
        return _Opened(source=source, format=found, config=source.config)
    if found is Format.NATIVE:
        native = open_native(asked.source)
        return _Opened(source=native, format=found, config=native.manifest.huggingface_config)
    note = read_note(asked.source)
    if asked.model_file is not None:
        model, numerics, config = _named_model(asked.model_file)
    elif note is not None:
        model, numerics, config = note.model, note.numerics, note.huggingface_config
    else:
        message = (
            "Megatron-LM keeps the model's shape in a pickle, which is not read; say what the "
            "weights are of: --model with a config.json or a model file"
        )
        raise InputError(Fault(file=str(asked.source), message=message))
    megatron = open_megatron(asked.source, model, numerics)
    return _Opened(source=megatron, format=found, config=config)


def _named_model(file: Path) -> tuple[ModelSpec, Numerics, str | None]:
    """Model, what it computes, and the text where the file is a config.json."""
    model, document = load_model(file), read_document(file)
    if is_huggingface(document):
        return model, numerics_of_config(document), document.text
    return model, numerics_of_model(model), None


def _check_plan(asked: Conversion) -> None:
    plan = asked.plan
    if plan is None or asked.to is not Format.MEGATRON:
        return
    kept = format_of_plan(plan.target, plan)
    if kept is not MEGATRON_DIST:
        message = (
            f"the plan is for {plan.target}, which keeps checkpoints as {kept.name}: "
            f"{kept.reason}; a Megatron distributed checkpoint is for plans of target megatron"
        )
        raise InputError(Fault(field="plan.target", message=message))


def _check_model(asked: Conversion, model: ModelSpec) -> None:
    planned = asked.planned_model
    unlike = () if planned is None else unlike_parts(planned, model)
    if planned is not None and unlike:
        message = (
            f"the plan is for {planned.name}, whose {', '.join(unlike)} is not that of {model.name}"
        )
        raise InputError(Fault(file=str(asked.source), message=message))
    if asked.model_file is not None:
        unlike = unlike_parts(load_model(asked.model_file), model)
        if unlike:
            message = f"has another {', '.join(unlike)} than the weights of {asked.source}"
            raise InputError(Fault(file=str(asked.model_file), message=message))


def _differences(asked: Conversion, source: WeightSource) -> tuple[str, ...]:
    if asked.to is Format.HUGGINGFACE:
        return ()
    if asked.to is Format.NATIVE:
        found, who = differences(source.numerics, source.model), "the reference trainer"
    else:
        found, who = megatron_differences(source.numerics), "Megatron-LM"
    if found and not asked.inexact:
        raise InputError(
            *(
                Fault(
                    file=str(asked.source),
                    message=f"{each}: {who} would compute other logits; convert all the same with "
                    "--inexact, as a start for training",
                )
                for each in found
            )
        )
    return found


def _padded(asked: Conversion, model: ModelSpec) -> int:
    if asked.plan is not None:
        return asked.plan.padded_vocab_size
    return target("megatron").padded_vocab_size(model.vocab_size, 1)


def _largest_tp(plan: Plan) -> int:
    return max(replica.tp for replica in plan.replicas)
