"""Which files are launches of a trainer, and what is known of where and what they train?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hetplan.cluster.spec import Cluster
from hetplan.errors import InputError
from hetplan.importers.launches.emitted import MANIFEST
from hetplan.importers.launches.facts import TRAINERS, facts_of, title_of
from hetplan.importers.launches.open import launch_of, unread_target
from hetplan.lint.launch_rules_view import Launch, leaf
from hetplan.lint.rows import Inputs, LaunchRow, Planned
from hetplan.model.spec import ModelSpec

EMITTED = MANIFEST
"""File that makes a folder a launch of hetplan's."""
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


def launch_part(path: Path, given: tuple[tuple[str, str], ...]) -> LaunchRow | str | None:
    """The launch in a file or folder; why it is passed over; None where it is none.

    An InputError where a configuration that is a launch cannot be read. A script that only looks
    like one, as scripts that convert checkpoints do, is passed over.
    """
    if path.is_file() and path.suffix.lower() not in _SUFFIXES:
        return None
    target = unread_target(path)
    if target:
        known = ", ".join(TRAINERS)
        return (
            f"was emitted for {target}, and launches of {known} are read; its plan.json is checked"
        )
    try:
        text = launch_of(path, given)
    except InputError as error:
        if path.is_dir() or path.suffix.lower() in (".yaml", ".yml", ".toml") or given:
            raise
        fault = error.faults[0]
        where = f", line {fault.line}" if fault.line else ""
        return f"looks like a launch{where}: {fault.message}"
    except UnicodeDecodeError:
        return None
    if text is None:
        return None
    if any(each.name.startswith("experiment.auto_tuner.") for each in text.settings):
        return "is an experiment whose tuner sets degrees and batches by itself"
    return LaunchRow(file=str(path), text=text)


def unknown_sizes(row: LaunchRow) -> str:
    """Which sizes of the launch nobody but its hosts knows, in words; empty: none."""
    unknown = {leaf(each.name): each for each in row.text.unread if leaf(each.name) in _SIZES}
    if not unknown:
        return ""
    names = sorted(unknown)
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    word = next((value for value in unknown[names[0]].values[::-1]), "")
    return (
        f"{row.file}: {', '.join(names[:_MAX_NAMES])}{more} not known here ({word:.40}), and "
        "rules that need them say nothing; give them with --set NAME=VALUE"
    )


def understood(row: LaunchRow) -> str:
    """What is known of the launch, in one line."""
    if row.facts is not None:
        return f"{row.file}: {title_of(row.facts)}"
    launch = Launch(row=row)
    if launch.is_hetero:
        return f"{row.file}: {row.text.trainer}, with meshes of its own"
    sizes = {
        "layers": launch.num_layers,
        "ranks": launch.world_size,
        "tp": launch.tp,
        "pp": launch.pp,
        "cp": launch.cp,
        "dp": launch.dp,
    }
    if launch.is_megatron_like:
        sizes["microbatches of"] = launch.number("micro-batch-size")
        sizes["batch"] = launch.number("global-batch-size")
    known = ", ".join(f"{name} {size}" for name, size in sizes.items() if size is not None)
    unknown = ", ".join(name for name, size in sizes.items() if size is None)
    return f"{row.file}: {row.text.trainer}: {known}" + (
        f"; not known: {unknown}" if unknown else ""
    )


def known_places(
    rows: Sequence[LaunchRow],
    inputs: Inputs,
    planned: Sequence[tuple[Path, Planned]],
    *,
    model: ModelSpec | None,
    cluster: Cluster | None,
) -> tuple[LaunchRow, ...]:
    """The launches with cluster and model: what the user names, else what lies beside them.

    Files that another launch includes are parts of it and no launches of their own.
    """
    included = {
        setting.file for row in rows for setting in row.text.settings if setting.file != row.file
    }
    plans = {str(path.parent): plan for path, plan in planned}
    models = [each for _, each in inputs.models]
    clusters = [each for _, each in inputs.clusters]
    found = []
    for row in rows:
        if row.file in included:
            continue
        plan = plans.get(row.file)
        own_model = model or (plan.model if plan else models[0] if len(models) == 1 else None)
        own_cluster = cluster or (
            plan.cluster if plan else clusters[0] if len(clusters) == 1 else None
        )
        found.append(_with_facts(replace(row, model=own_model, cluster=own_cluster)))
    return tuple(found)


def _with_facts(row: LaunchRow) -> LaunchRow:
    try:
        facts = facts_of(row.text, None if row.model is None else row.model.num_layers)
    except InputError:
        return row  # what is wrong in it is for the rules to say
    return replace(row, facts=facts)
