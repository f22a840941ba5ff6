"""Can a trainer be told what a user says beside the plan, and is the launch then still the plan's?

These are options of every trainer; what one of them wants beside is asked by its own module.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from hetplan.emitters.quoting import FOLDER
from hetplan.emitters.trainer_launch import EmitOptions, TrainerLaunch
from hetplan.errors import Fault

# Names of arguments by which trainers are told a plan's degrees, layout and batch, in the spelling
# of Megatron-LM (FlagScale's own begin with hetero) and torchtitan, "_" written as "-".
_OF_PLANS = re.compile(
    r"parallel-(size|degree)|parallel-layout|parallel-split|parallel-schedule|model-part$"
    r"|batch-size|^hetero|^enable-hetero|tp-pp-dp-mapping|^num-layers|pipeline-num-layers|layers-per|^seq-length"
    r"|seq-len$|accumulation-steps|rampup|^recompute|^yaml-cfg"
)


def option_faults(options: EmitOptions) -> Iterator[Fault]:
    """Options that no trainer can be told, or that say what the plan says; fields are options."""
    if not options.python.strip():
        yield Fault(field="--python", message="is empty; say an interpreter, such as python3")
    folder = options.trainer_folder
    if folder and not folder.startswith(("/", FOLDER)):
        yield Fault(
            field="--trainer-folder",
            message=f"{folder[:60]!a} is relative, and hosts start in different folders: write its "
            f"whole path, or one that begins with {FOLDER}",
        )
    rate = options.learning_rate
    if rate is not None and not (math.isfinite(rate) and rate >= 0.0):
        yield Fault(
            field="--learning-rate",
            message=f"{rate}; a rate is a number of 0 or more, such as 1e-4",
        )
    named = (
        *((f"--{name}", getattr(options, name)) for name in ("tokenizer", "save", "load")),
        *(("--data", text) for text in options.data),
    )
    for field, text in named:
        if text.startswith("-"):
            message = f"{text[:60]!a} begins with '-', which trainers take for an option: write ./-"
            yield Fault(field=field, message=message)
    if any(not text for text in options.data):
        yield Fault(field="--data", message="is empty; say a prefix or a folder, or leave it out")
    yield from _extra_faults(options)


def _extra_faults(options: EmitOptions) -> Iterator[Fault]:
    for flag in dict.fromkeys(flags_of(options)):
        if _OF_PLANS.search(_plain(flag)):
            message = (
                f"{flag[:60]} is what the plan says: pin it in the job and plan again, so that "
                "ranks, memory and times are those of the launch"
            )
            yield Fault(field="--extra", message=message)


def repeated_flags(launch: TrainerLaunch, options: EmitOptions) -> Iterator[str]:
    """A remark on arguments of the user's own that a launch without them says already."""
    said = {argument[0].partition("=")[0] for argument in launch.arguments}
    again = [flag for flag in dict.fromkeys(flags_of(options)) if flag in said]
    if again:
        yield (
            f"--extra says {', '.join(again)} again: the trainer takes the last, so that what the "
            "plan was priced with may not hold."
        )


def flags_of(options: EmitOptions) -> Iterator[str]:
    """Names of the user's own arguments, as written, without values."""
    for word in options.extra_arguments:
        if word.startswith("--"):
            yield word.partition("=")[0]


def _plain(flag: str) -> str:
    """Without leading dashes and section (`--training.global_batch_size`)."""
    return flag.lstrip("-").rpartition(".")[2].replace("_", "-").lower()
