"""Launches for `hetplan check`: which files are launches, where they run, and their rules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from hetplan.cluster.spec import Cluster
from hetplan.errors import InputError
from hetplan.lint.evidence import Evidence, Inputs, Place, Planned
from hetplan.lint.findings import Check, Finding, finding
from hetplan.model.spec import ModelSpec
from hetplan.trainers import rules
from hetplan.trainers.flagscale import rules as flagscale
from hetplan.trainers.launch_command import LaunchNotFollowedError
from hetplan.trainers.megatron import rules as megatron
from hetplan.trainers.read import facts_of, read_launch, trainer_of
from hetplan.trainers.rules import Check as LaunchCheck
from hetplan.trainers.rules import Launch, Violation
from hetplan.trainers.torchtitan import rules as torchtitan

_CHECKS: dict[str, tuple[LaunchCheck, ...]] = {
    "megatron": (*rules.CHECKS, *megatron.CHECKS),
    "flagscale": (*rules.CHECKS, *flagscale.CHECKS),
    "torchtitan": (*rules.CHECKS, *torchtitan.CHECKS),
}
_SUFFIXES = (".sh", ".bash", ".slurm", ".sbatch", ".yaml", ".yml", ".toml", ".args", "")
_SIZES = (
    "tensor-model-parallel-size",
    "pipeline-model-parallel-size",
    "context-parallel-size",
    "expert-model-parallel-size",
    "num-layers",
    "micro-batch-size",
    "global-batch-size",
    "nnodes",
    "nproc-per-node",
    "tensor-parallel-degree",
    "pipeline-parallel-degree",
)
_MAX_NAMES = 4


def _check(rule: str) -> Callable[[Evidence], Iterator[Finding]]:
    def check(evidence: Evidence) -> Iterator[Finding]:
        # Launches that include one file share what is wrong in it.
        yield from dict.fromkeys(
            _finding(launch, violation)
            for launch in evidence.inputs.launches
            for own, find in _CHECKS[launch.text.trainer]
            if own == rule
            for violation in find(launch)
        )

    return check


def _finding(launch: Launch, violation: Violation) -> Finding:
    settings = [setting for setting in violation.settings if setting.file]
    file = settings[0].file if settings else launch.file
    places = [Place(file=file, line=setting.line) for setting in settings if setting.file == file]
    return finding(places or [Place(file=launch.file, line=0)], violation.found, count=1)


CHECKS: Mapping[str, Check] = {
    rule: _check(rule) for checks in _CHECKS.values() for rule, _ in checks
}


def launch_part(path: Path, given: tuple[tuple[str, str], ...]) -> Launch | str | None:
    """The launch in a file; why it is passed over; None where it is none.

    An InputError where it is a launch that is wrong. A script that hetplan does not follow, or that
    only looks like a launch, is passed over.
    """
    if not path.is_file() or path.suffix.lower() not in _SUFFIXES:
        return None
    try:
        trainer = trainer_of(path)
        if trainer is None:
            return None
        text = read_launch(path, trainer, given)
    except LaunchNotFollowedError as error:
        if given:
            raise
        fault = error.faults[0]
        where = f", line {fault.line}" if fault.line else ""
        return f"looks like a launch{where}: {fault.message}"
    except UnicodeDecodeError:
        return None
    if any(setting.name.startswith("experiment.auto_tuner.") for setting in text.settings):
        return "is an experiment whose tuner sets degrees and batches by itself"
    return Launch(file=str(path), text=text)


def unknown_sizes(launch: Launch) -> str:
    """Which sizes of the launch only its hosts know, in words; empty: none."""
    unknown = {each.flag: each for each in launch.text.unread if each.flag in _SIZES}
    if not unknown:
        return ""
    names = sorted(unknown)
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    word = next(iter(unknown[names[0]].values[::-1]), "")
    return (
        f"{launch.file}: {', '.join(names[:_MAX_NAMES])}{more} not known here ({word:.40}), and "
        "rules that need them report nothing; give them with --set NAME=VALUE"
    )


def understood(launch: Launch) -> str:
    """What is known of the launch, in one line."""
    if launch.facts is not None:
        return f"{launch.file}: {launch.facts.title()}"
    if launch.is_hetero:
        return f"{launch.file}: {launch.text.trainer}, with meshes of its own"
    sizes = {
        "layers": launch.num_layers,
        "ranks": launch.world_size,
        "tp": launch.tp,
        "pp": launch.pp,
        "cp": launch.cp,
        "dp": launch.dp,
    }
    known = ", ".join(f"{name} {size}" for name, size in sizes.items() if size is not None)
    unknown = ", ".join(name for name, size in sizes.items() if size is None)
    return f"{launch.file}: {launch.text.trainer}: {known}" + (
        f"; not known: {unknown}" if unknown else ""
    )


def known_places(
    launches: Sequence[Launch],
    inputs: Inputs,
    planned: Sequence[tuple[Path, Planned]],
    *,
    model: ModelSpec | None,
    cluster: Cluster | None,
) -> tuple[Launch, ...]:
    """The launches with cluster and model: what the user names, else what lies beside them.

    Files that another launch includes are parts of it and no launches of their own.
    """
    included = {
        setting.file
        for launch in launches
        for setting in launch.text.settings
        if setting.file != launch.file
    }
    plans = {str(path.parent): plan for path, plan in planned}
    models = [each for _, each in inputs.models]
    clusters = [each for _, each in inputs.clusters]
    found = []
    for launch in launches:
        if launch.file in included:
            continue
        plan = plans.get(str(Path(launch.file).parent))
        own_model = model or (plan.model if plan else models[0] if len(models) == 1 else None)
        own_cluster = cluster or (
            plan.cluster if plan else clusters[0] if len(clusters) == 1 else None
        )
        found.append(_with_facts(replace(launch, model=own_model, cluster=own_cluster)))
    return tuple(found)


def _with_facts(launch: Launch) -> Launch:
    try:
        layers = None if launch.model is None else launch.model.num_layers
        return replace(launch, facts=facts_of(launch.text, layers))
    except InputError:
        return launch  # the rules report what is wrong in it
