"""From a plan to the folder that starts it under a trainer, or the reasons why there is none.

    plan -> ranks (hosts, agents, rank order)   hetplan.schedulers.rank_layout
         -> launch (program, arguments, files)  the trainer's `write` module
         -> launch script, check, README        hetplan.schedulers, folder, readme

A plan is taken whatever target it was searched for: it must be legal for the trainer's target in
`hetplan.plans.targets`, and the trainer's module must find nothing that it cannot be told.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from hetplan.cluster.load import load_cluster
from hetplan.cluster.spec import Cluster, Island
from hetplan.errors import Fault, InputError
from hetplan.files.settings import given_path
from hetplan.plans.check import check_plan
from hetplan.plans.formats import job_summing_as
from hetplan.plans.targets import target as plan_target
from hetplan.schedulers import SCHEDULERS
from hetplan.schedulers.launch import EmissionOptions, EmittedFile, TrainerLaunch
from hetplan.schedulers.quoting import FOLDER
from hetplan.schedulers.rank_layout import (
    RankLayout,
    held_library_faults,
    held_library_remarks,
    libraries,
    rank_layout,
)
from hetplan.search.files import load_legal_plan, placed_faults, result_text
from hetplan.search.result import SearchResult
from hetplan.trainers import Trainer, trainer_named
from hetplan.trainers.folder import (
    CHECK_FILE,
    check_place,
    check_text,
    host_checks,
    write_folder,
)
from hetplan.trainers.readme import placement_remarks, readme_text
from hetplan.units import number_runs

PLAN_FILE, README_FILE = "plan.json", "README.md"

_STAGE = re.compile(r"\.stages\[(\d+)\]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Emission:
    """Everything that an emitted folder holds, and what it was made from."""

    files: tuple[EmittedFile, ...]
    ranks: RankLayout
    launch: TrainerLaunch


def emit_plan(result: SearchResult, target: str, options: EmissionOptions) -> Emission:
    """The folder for the trainer of this name.

    An InputError lists everything that keeps the plan from it, with places in the plan file.
    """
    return emission_for(result, trainer_named(target), options)


def emission_for(result: SearchResult, trainer: Trainer, options: EmissionOptions) -> Emission:
    """The same for a trainer that is at hand."""
    faults = refusals(result, trainer, options)
    if faults:
        raise InputError(*faults)
    retargeted = _for_target(result, trainer)
    ranks = rank_layout(
        retargeted.plan, retargeted.inputs.cluster, data_outermost=trainer.data_outermost
    )
    needs = [*held_library_remarks(retargeted.inputs.job.trainer.collective_algorithm)]
    several = libraries(ranks.agents)
    if len(several) > 1 and retargeted.inputs.job.trainer.mixed_libraries:
        needs.append(
            f"The devices go through {' and '.join(several)}, which stock {trainer.name} cannot "
            "start: the job's trainer.mixed_libraries says that yours can."
        )
    ranks = replace(ranks, remarks=(*placement_remarks(retargeted), *ranks.remarks, *needs))
    launch = trainer.launch(retargeted, ranks, options)
    if options.extra_arguments:
        plain = trainer.launch(retargeted, ranks, replace(options, extra_arguments=()))
        remarks = repeated_flags(plain, options)
        launch = replace(launch, remarks=(*launch.remarks, *remarks))
    files = (
        *launch.files,
        *SCHEDULERS[options.scheduler].files(ranks, launch, options),
        EmittedFile(path=PLAN_FILE, text=result_text(result)),
        EmittedFile(path=README_FILE, text=readme_text(result, ranks, launch, options)),
    )
    check = check_text(host_checks(result, ranks, launch, options), files)
    return Emission(
        files=(*files, EmittedFile(path=CHECK_FILE, text=check, executable=True)),
        ranks=ranks,
        launch=launch,
    )


def refusals(result: SearchResult, trainer: Trainer, options: EmissionOptions) -> tuple[Fault, ...]:
    """Why the trainer cannot run this plan, each reason once; empty: it can.

    First what its target's limits say; of a plan within those, what its module says.
    """
    retargeted = _for_target(result, trainer)
    inputs = retargeted.inputs
    limits = check_plan(retargeted.plan, inputs.model, inputs.cluster, inputs.job)
    if limits:
        return merged_faults(replace(fault, field=f"plan.{fault.field}") for fault in limits)
    ranks = rank_layout(retargeted.plan, inputs.cluster, data_outermost=trainer.data_outermost)
    faults = (
        *trainer.faults(retargeted, ranks, options),
        *held_library_faults(ranks, inputs.job.trainer.collective_algorithm),
        *option_faults(options),
    )
    return merged_faults(faults)


def _for_target(result: SearchResult, trainer: Trainer) -> SearchResult:
    """The result as one of the trainer's target in `hetplan.plans.targets`."""
    name = plan_target(trainer.plan_target).name
    inputs = result.inputs
    # A plan of another target says in which format gradients are summed, where this one can choose.
    job = job_summing_as(result.plan, replace(inputs.job, target=name))
    return replace(result, plan=replace(result.plan, target=name), inputs=replace(inputs, job=job))


def read_plan(file: Path, cluster_file: Path | None = None) -> SearchResult:
    """A legal plan of a plan file, with node names and launch domains of the cluster file."""
    result = load_legal_plan(file)
    if cluster_file is not None:
        result = with_hosts_of(result, load_cluster(cluster_file), str(cluster_file))
    return result


def sorted_refusals(
    result: SearchResult, target: str, options: EmissionOptions, file: Path
) -> tuple[Fault, ...]:
    """`refusals` with lines of the plan's file; empty: the target can run the plan.

    An InputError where options or the cluster are wrong and another plan would not help.
    """
    try:
        faults = refusals(result, trainer_named(target), options)
    except InputError as error:
        raise InputError(*_placed(error.faults, file)) from None
    if faults and not plan_faults(faults):
        raise InputError(*faults)
    return _placed(faults, file)


def _placed(faults: tuple[Fault, ...], file: Path) -> tuple[Fault, ...]:
    of_plan = plan_faults(faults)
    others = (fault for fault in faults if fault not in of_plan)
    return (*placed_faults(file, of_plan), *others)


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
    return tuple(_merge_stages(each) for each in found.values())


def _merge_stages(faults: list[Fault]) -> Fault:
    stages = sorted({int(number) for each in faults for number in _STAGE.findall(each.field)})
    if len(stages) < 2:
        return faults[0]
    return replace(faults[0], message=f"stages {number_runs(stages)}: {faults[0].message}")


def emit(
    plan: SearchResult | Path | str,
    target: str,
    folder: Path | str,
    options: EmissionOptions | None = None,
    *,
    force: bool = False,
) -> Emission:
    """Write the folder that starts a plan under a trainer; what was written.

    `plan` may be a plan file. An InputError lists every reason why the target cannot run it, or
    why nothing can be written there; with `force` only files that hetplan wrote are replaced.
    """
    place = given_path(folder, "folder")
    check_place(place, force=force)
    if not isinstance(plan, SearchResult):
        plan = load_legal_plan(given_path(plan, "plan", ", or a result"))
    emission = emit_plan(plan, target, options or EmissionOptions())
    write_folder(place, emission.files, force=force)
    return emission


# ---- options of every trainer

# Arguments by which trainers are told a plan's degrees, layout and batch, in the spelling
# of Megatron-LM (FlagScale's own begin with hetero) and torchtitan, "_" written as "-".
_PLAN_FLAGS = re.compile(
    r"parallel-(size|degree)|parallel-layout|parallel-split|parallel-schedule|model-part$"
    r"|batch-size|^hetero|^enable-hetero|tp-pp-dp-mapping|^num-layers|pipeline-num-layers|layers-per|^seq-length"
    r"|seq-len$|accumulation-steps|rampup|^recompute|^yaml-cfg"
)


def option_faults(options: EmissionOptions) -> Iterator[Fault]:
    """Options that no trainer can be told, or that say what the plan says; fields are options."""
    if options.scheduler not in SCHEDULERS:
        message = f"{options.scheduler[:60]!a}; there are {', '.join(SCHEDULERS)}"
        yield Fault(field="--scheduler", message=message)
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
    if options.data and not options.tokenizer:
        message = "is missing; with --data it says which tokenizer made them, or is to read them"
        yield Fault(field="--tokenizer", message=message)
    if options.data and rate is None:
        message = "is missing; with --data the run learns, and no plan says how fast"
        yield Fault(field="--learning-rate", message=message)
    yield from _extra_faults(options)


def _extra_faults(options: EmissionOptions) -> Iterator[Fault]:
    for flag in dict.fromkeys(flags_of(options)):
        if _PLAN_FLAGS.search(_plain(flag)):
            message = (
                f"{flag[:60]} is what the plan says: pin it in the job and plan again, so that "
                "ranks, memory and times are those of the launch"
            )
            yield Fault(field="--extra", message=message)


def repeated_flags(launch: TrainerLaunch, options: EmissionOptions) -> Iterator[str]:
    """A remark on arguments of the user's own that a launch without them says already."""
    said = {argument[0].partition("=")[0] for argument in launch.arguments}
    again = [flag for flag in dict.fromkeys(flags_of(options)) if flag in said]
    if again:
        yield (
            f"--extra says {', '.join(again)} again: the trainer takes the last, so that what the "
            "plan was priced with may not hold."
        )


def flags_of(options: EmissionOptions) -> Iterator[str]:
    """Names of the user's own arguments, as written, without values."""
    for word in options.extra_arguments:
        if word.startswith("--"):
            yield word.partition("=")[0]


def _plain(flag: str) -> str:
    """Without leading dashes and section (`--training.global_batch_size`)."""
    return flag.lstrip("-").rpartition(".")[2].replace("_", "-").lower()


# ---- hosts that were named after the plan was made


def with_hosts_of(result: SearchResult, cluster: Cluster, file: str) -> SearchResult:
    """The result with node names and launch domains of this cluster, which came from `file`.

    An InputError where its islands are not those of the plan.
    """
    mine = result.inputs.cluster
    faults = tuple(_differences(mine, cluster))
    if faults:
        raise InputError(*(Fault(file=file, message=message) for message in faults))
    islands = tuple(
        replace(own, node_names=other.node_names)
        for own, other in zip(mine.islands, cluster.islands, strict=True)
    )
    named = replace(mine, islands=islands, launch_domains=cluster.launch_domains)
    return replace(result, inputs=replace(result.inputs, cluster=named))


def _differences(mine: Cluster, other: Cluster) -> Iterator[str]:
    """Where device numbers of the plan would mean other devices."""
    own, new = [each.name for each in mine.islands], [each.name for each in other.islands]
    if own != new:
        yield (
            f"has the islands {', '.join(new)}, the plan's cluster {', '.join(own)}: the plan was "
            "made for another cluster"
        )
        return
    for one, two in zip(mine.islands, other.islands, strict=True):
        for what, before, after in zip(_WHAT, _facts(one), _facts(two), strict=True):
            if before != after:
                yield (
                    f"island {one.name} has {what} {after}, the plan's cluster {before}: plan again"
                )


_WHAT = ("nodes", "devices_per_node", "device", "region", "nodes_out")


def _facts(island: Island) -> tuple[object, ...]:
    return (
        island.nodes,
        island.devices_per_node,
        island.device.kind,
        island.region,
        list(island.nodes_out),
    )
