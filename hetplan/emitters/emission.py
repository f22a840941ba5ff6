"""What is the whole folder that starts a plan under a trainer, and why may there be none?

    plan -> sheet (hosts, agents, rank order)   hetplan.emitters.placement
         -> launch (program, arguments, files)  the trainer's module
         -> scripts, preflight, README          schedulers, preflight, readme

A plan is taken whatever target it was searched for: it must be legal for the trainer's target in
`hetplan.plans.targets`, and the trainer's module must find nothing that it cannot be told.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path

from hetplan.emitters.folder import check_place, write_folder
from hetplan.emitters.judgement import placement_remarks
from hetplan.emitters.options import option_faults, repeated_flags
from hetplan.emitters.placement import sheet_of
from hetplan.emitters.preflight import preflight_files
from hetplan.emitters.readme import readme_text
from hetplan.emitters.schedulers import scheduled_files
from hetplan.emitters.sheet import LaunchSheet
from hetplan.emitters.trainer_launch import EmitOptions, EmittedFile, Trainer, TrainerLaunch
from hetplan.errors import Fault, InputError
from hetplan.plans.check import check_plan
from hetplan.plans.formats import job_summing_as
from hetplan.plans.targets import target as plan_target
from hetplan.search.files import load_legal_plan, result_text
from hetplan.search.result import SearchResult

PLAN_FILE, README_FILE = "plan.json", "README.md"

_HOMES = (
    ("megatron", "hetplan.emitters.megatron.trainer"),
    ("megatron-bridge", "hetplan.emitters.megatron.bridge"),
    ("mindspeed", "hetplan.emitters.megatron.mindspeed"),
    ("flagscale", "hetplan.emitters.flagscale.trainer"),
    ("torchtitan", "hetplan.emitters.torchtitan.trainer"),
    ("deepspeed", "hetplan.emitters.deepspeed.trainer"),
)
"""Module of every trainer, which exports TRAINER; imported when it is asked for."""
_STAGE = re.compile(r"\.stages\[(\d+)\]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Emission:
    """Everything that an emitted folder holds, and what it was made from."""

    files: tuple[EmittedFile, ...]
    sheet: LaunchSheet
    launch: TrainerLaunch


def trainer_names() -> tuple[str, ...]:
    """Names of all trainers for which folders can be emitted."""
    return tuple(name for name, _ in _HOMES)


def trainer_named(name: str) -> Trainer:
    """The trainer of this name; an InputError that lists the known ones otherwise."""
    home = dict(_HOMES).get(name)
    if home is None:
        raise InputError(f"--target {name!a}: no such trainer; {', '.join(trainer_names())} are")
    found: Trainer = import_module(home).TRAINER
    return found


def emit_plan(result: SearchResult, target: str, options: EmitOptions) -> Emission:
    """The folder for the trainer of this name.

    An InputError lists everything that keeps the plan from it, with places in the plan file.
    """
    return emission_for(result, trainer_named(target), options)


def emission_for(result: SearchResult, trainer: Trainer, options: EmitOptions) -> Emission:
    """The same for a trainer that is at hand."""
    faults = refusals(result, trainer, options)
    if faults:
        raise InputError(*faults)
    asked = _for_target(result, trainer)
    sheet = sheet_of(asked.plan, asked.inputs.cluster, data_outermost=trainer.data_outermost)
    sheet = replace(sheet, remarks=(*placement_remarks(asked), *sheet.remarks))
    launch = trainer.launch(asked, sheet, options)
    if options.extra_arguments:
        plain = trainer.launch(asked, sheet, replace(options, extra_arguments=()))
        remarks = repeated_flags(plain, options)
        launch = replace(launch, remarks=(*launch.remarks, *remarks))
    checks = preflight_files(result, sheet, launch, options)
    return Emission(
        files=(
            *launch.files,
            *scheduled_files(sheet, launch, options, checks),
            *checks,
            EmittedFile(path=PLAN_FILE, text=result_text(result)),
            EmittedFile(path=README_FILE, text=readme_text(result, sheet, launch, options)),
        ),
        sheet=sheet,
        launch=launch,
    )


def refusals(result: SearchResult, trainer: Trainer, options: EmitOptions) -> tuple[Fault, ...]:
    """Why the trainer cannot run this plan, each reason once; empty: it can.

    First what its target's limits say; of a plan within those, what its module says.
    """
    asked = _for_target(result, trainer)
    inputs = asked.inputs
    limits = check_plan(asked.plan, inputs.model, inputs.cluster, inputs.job)
    if limits:
        return merged_faults(replace(fault, field=f"plan.{fault.field}") for fault in limits)
    sheet = sheet_of(asked.plan, inputs.cluster, data_outermost=trainer.data_outermost)
    return merged_faults((*trainer.faults(asked, sheet, options), *option_faults(options)))


def _for_target(result: SearchResult, trainer: Trainer) -> SearchResult:
    """The result as one of the trainer's target in `hetplan.plans.targets`."""
    name = plan_target(trainer.plan_target).name
    inputs = result.inputs
    # A plan of another target says in which format gradients are summed, where this one can choose.
    job = job_summing_as(result.plan, replace(inputs.job, target=name))
    return replace(result, plan=replace(result.plan, target=name), inputs=replace(inputs, job=job))


def plan_faults(faults: Iterable[Fault]) -> tuple[Fault, ...]:
    """Those that another plan may not have: the others are about options of the emission."""
    return tuple(fault for fault in faults if fault.field.startswith(("plan.", "inputs.")))


def merged_faults(faults: Iterable[Fault]) -> tuple[Fault, ...]:
    """Equal faults of several stages as one that says at which stages it is.

    The field of such a fault is that of the first stage.
    """
    found: dict[tuple[str, str], list[Fault]] = {}
    for fault in faults:
        found.setdefault((_STAGE.sub(".stages[]", fault.field), fault.message), []).append(fault)
    return tuple(_merged(each) for each in found.values())


def _merged(faults: list[Fault]) -> Fault:
    stages = sorted({int(number) for each in faults for number in _STAGE.findall(each.field)})
    if len(stages) < 2:
        return faults[0]
    said = ", ".join(_runs(stages))
    return replace(faults[0], message=f"stages {said}: {faults[0].message}")


def _runs(numbers: list[int]) -> Iterator[str]:
    """Ascending numbers as ranges: 0-11, 14."""
    first = last = numbers[0]
    for number in [*numbers[1:], -1]:
        if number == last + 1:
            last = number
            continue
        yield str(first) if first == last else f"{first}-{last}"
        first = last = number


def emit(
    plan: SearchResult | Path | str,
    target: str,
    folder: Path | str,
    options: EmitOptions | None = None,
    *,
    force: bool = False,
) -> Emission:
    """Write the folder that starts a plan under a trainer; what was written.

    `plan` may be a plan file. An InputError lists every reason why the target cannot run it, or
    why nothing can be written there; with `force` only files that hetplan wrote are replaced.
    """
    place = Path(folder)
    check_place(place, force=force)
    result = plan if isinstance(plan, SearchResult) else load_legal_plan(plan)
    emission = emit_plan(result, target, options or EmitOptions())
    write_folder(place, emission.files, target, force=force)
    return emission
