"""`hetplan convert`: weights from one trainer's folder to another's."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hetplan.cli.options import AsJson, emit, say

if TYPE_CHECKING:
    from hetplan.runtime.weights.convert import Converted

WHAT = ("weights",)
FORMATS = ("huggingface", "native", "megatron")
CONVERTED_SCHEMA = "hetplan.converted/1"


def convert(
    what: Annotated[str, typer.Argument(metavar="weights", help="What is converted.")],
    source: Annotated[
        Path,
        typer.Argument(
            metavar="FROM",
            help="Folder to read: Hugging Face (safetensors), reference trainer, or Megatron-LM "
            "(torch_dist). Which one it is, is found out.",
        ),
    ],
    out: Annotated[Path, typer.Argument(metavar="TO", help="Folder to write.")],
    to: Annotated[str, typer.Option("--to", help=f"What to write: {', '.join(FORMATS)}.")],
    plan: Annotated[
        Path | None,
        typer.Option(
            "--plan",
            help="Plan file that the weights are for: its padded vocabulary and tensor-parallel "
            "slices are those of a Megatron checkpoint.",
        ),
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(
            "--model", help="config.json or model file, for Megatron checkpoints from elsewhere."
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            "--dtype", help="float32, bfloat16 or float16. Default: as each tensor is kept."
        ),
    ] = None,
    iteration: Annotated[
        int | None,
        typer.Option(
            "--iteration",
            min=0,
            help="Write a Megatron checkpoint of this iteration. Default: a release, which asks "
            "for no optimizer state.",
        ),
    ] = None,
    inexact: Annotated[
        bool,
        typer.Option(
            "--inexact",
            help="Convert although the reader computes something otherwise, and say what.",
        ),
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Replace TO where it is a folder of weights.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Convert weights between Hugging Face, the reference trainer and Megatron-LM.

    Every tensor is accounted for: missing, unknown or mis-shaped ones are an error that names
    them. Optimizer state is not converted.
    """
    from hetplan.errors import Fault, InputError
    from hetplan.files.encoding import encode
    from hetplan.runtime.weights.convert import Conversion
    from hetplan.runtime.weights.convert import convert as run
    from hetplan.runtime.weights.folders import Format
    from hetplan.search.files import load_legal_plan

    if what not in WHAT:
        raise InputError(f"{what!a}: what can be converted is {', '.join(WHAT)}")
    if to not in FORMATS:
        raise InputError(f"--to {to!a} is not known; known: {', '.join(FORMATS)}")
    if iteration is not None and to != "megatron":
        raise InputError("--iteration is for Megatron checkpoints; give it with --to megatron")
    planned = None if plan is None else load_legal_plan(plan)
    asked = Conversion(
        source=source,
        out=out,
        to=Format(to),
        model_file=model,
        plan=None if planned is None else planned.plan,
        planned_model=None if planned is None else planned.inputs.model,
        dtype=dtype,
        iteration=iteration,
        inexact=inexact,
        force=force,
    )
    try:
        done = run(asked)
    except InputError as error:
        # A fault of the plan names a field of its file.
        raise InputError(
            *(
                Fault(
                    file=str(plan) if each.field.startswith("plan.") else each.file,
                    line=each.line,
                    field=each.field,
                    message=each.message,
                )
                for each in error.faults
            )
        ) from None
    if as_json:
        emit(encode(done, schema=CONVERTED_SCHEMA))
    else:
        emit(_text(done))
    say(f"wrote {out}")


def _text(done: Converted) -> str:
    lines = [
        f"{done.model}: {done.num_weights:,} weights, {done.parameter_count:,} parameters",
        f"  from {done.source} ({done.source_format})",
        f"  to   {done.out} ({done.out_format}), {', '.join(done.dtypes)}",
    ]
    if done.padded_vocab_size is not None:
        lines.append(f"  vocabulary padded to {done.padded_vocab_size:,}")
    if done.megatron_arguments:
        lines.append("  Megatron-LM computes what the model computes with")
        lines += [f"    {argument}" for argument in done.megatron_arguments]
    if done.differences:
        lines.append("  not alike, so logits differ:")
        lines += [f"    {difference}" for difference in done.differences]
    if done.not_finite:
        lines.append(
            "  values that are NaN or infinite, kept as they are; no training begins well:"
        )
        lines += [f"    {name}" for name in done.not_finite[:20]]
        if len(done.not_finite) > 20:
            lines.append(f"    and {len(done.not_finite) - 20} more")
    lines.append("  optimizer state is not converted: training begins with a fresh optimizer")
    return "\n".join(lines)
