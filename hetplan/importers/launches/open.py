"""Which trainer's launch is a file or a folder, and what does it say?"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from hetplan.errors import Fault, InputError
from hetplan.files.reading import read_document, read_text
from hetplan.importers.launches.emitted import (
    AGENTS,
    EXPERIMENT,
    SCRIPT,
    agents_of,
    emitted_target,
    plan_part,
    variables_of,
)
from hetplan.importers.launches.facts import TRAINERS
from hetplan.importers.launches.flagscale import flagscale_launch
from hetplan.importers.launches.scripts import Given, script_launch
from hetplan.importers.launches.torchtitan import toml_launch
from hetplan.importers.launches.values import LaunchHost, LaunchText

_TITAN = re.compile(r"torchtitan|--parallelism\.|--training\.|run_train\.sh")
_MEGATRON = re.compile(
    r"--(?:tensor|pipeline)-model-parallel-size|pretrain_\w+\.py|--micro-batch-size|--num-layers\b"
)
_TRAINER_OF_TARGET = {"megatron-bridge": "megatron", "mindspeed": "megatron"}
_IN_PYTHON = ("megatron-bridge",)
"""Targets whose settings stand in a program that is emitted, not in arguments."""
_SCRIPTS = (".sh", ".bash", ".slurm", ".sbatch", ".txt", ".args", "")


def read_launch(
    trainer: str, path: Path, given: Given = (), hosts: tuple[LaunchHost, ...] = ()
) -> LaunchText:
    """The launch of this trainer in a file, or in a folder that hetplan emitted.

    `given` are values of variables and settings, `hosts` those that count over the launch's own.
    An InputError where it cannot be read.
    """
    if trainer not in TRAINERS:
        message = f"unknown trainer {trainer!a}; launches of {', '.join(TRAINERS)} are read"
        raise InputError(Fault(message=message))
    if path.is_dir():
        return _folder(trainer, path, given, hosts)
    if path.name == SCRIPT and (path.parent / AGENTS).is_file():
        return _folder(trainer, path.parent, given, hosts)
    if trainer == "flagscale" and path.suffix.lower() in (".yaml", ".yml"):
        return flagscale_launch(path, given, hosts)
    if trainer == "torchtitan" and path.suffix.lower() == ".toml":
        return toml_launch(str(path), read_text(path), given, hosts)
    return script_launch(trainer, str(path), read_text(path), given, hosts)


def _folder(trainer: str, folder: Path, given: Given, hosts: tuple[LaunchHost, ...]) -> LaunchText:
    target = emitted_target(folder)
    own = _TRAINER_OF_TARGET.get(target or "", target)
    if unread_target(folder):
        known = f"launches of {', '.join(TRAINERS)} are read"
        message = f"was emitted for {target}, and {known}; its plan is plan.json"
        raise InputError(Fault(file=str(folder), message=message))
    if target is not None and own != trainer:
        message = f"was emitted for {target}; import it as {own}"
        raise InputError(Fault(file=str(folder), message=message))
    experiment = folder / EXPERIMENT
    if trainer == "flagscale" and experiment.is_file() and not (folder / AGENTS).is_file():
        return flagscale_launch(experiment, given, hosts)
    script = folder / SCRIPT
    if not script.is_file():
        message = f"is a folder without {SCRIPT}; name a file, or a folder that hetplan emitted"
        raise InputError(Fault(file=str(folder), message=message))
    agents = folder / AGENTS
    if not hosts and agents.is_file():
        hosts = agents_of(agents)
    if trainer == "flagscale" and experiment.is_file():
        return flagscale_launch(experiment, given, hosts)
    text = read_text(script)
    if not agents.is_file():
        return script_launch(trainer, str(script), text, given, hosts)
    read = script_launch(trainer, str(script), plan_part(text), given, hosts, emitted=True)
    of_agents = variables_of(folder, agents_of(agents))
    return replace(read, environment=(*read.environment, *of_agents))


def unread_target(folder: Path) -> str:
    """The target of an emitted folder that is not read back; empty for any other path."""
    target = emitted_target(folder) if folder.is_dir() else None
    if target is None:
        return ""
    own = _TRAINER_OF_TARGET.get(target, target)
    return target if own not in TRAINERS or target in _IN_PYTHON else ""


def launch_of(path: Path, given: Given = ()) -> LaunchText | None:
    """The launch in a file or folder, whichever trainer's; None where it is no launch.

    An InputError where it is one that cannot be read.
    """
    trainer = trainer_of(path)
    return None if trainer is None else read_launch(trainer, path, given)


def trainer_of(path: Path) -> str | None:
    """Whose launch a file or folder is, by what stands in it; None for none."""
    if path.is_dir():
        target = emitted_target(path)
        found = _TRAINER_OF_TARGET.get(target or "", target)
        if found in TRAINERS:
            return found
        if (path / EXPERIMENT).is_file():
            return "flagscale"
        script = path / SCRIPT
        return trainer_of(script) if script.is_file() else None
    suffix = path.suffix.lower()
    if suffix in (".yaml", ".yml"):
        return "flagscale" if _is_experiment(path) else None
    if suffix == ".toml":
        return (
            "torchtitan"
            if re.search(r"(?m)^\s*\[(parallelism|training)", read_text(path))
            else None
        )
    if suffix not in _SCRIPTS:
        return None
    text = read_text(path)
    if _TITAN.search(text):
        return "torchtitan"
    if "hetero-process-meshes" in text or "flagscale/train" in text:
        return "flagscale"
    return "megatron" if _MEGATRON.search(text) else None


def _is_experiment(path: Path) -> bool:
    document = read_document(path)
    root = document.root
    if not isinstance(root, dict):
        return False
    experiment = isinstance(root.get("experiment"), dict) and (
        "train" in root
        or any(document.word(("defaults", at, "train")) for at in document.entries(("defaults",)))
    )
    return experiment or (
        isinstance(root.get("system"), dict) and isinstance(root.get("model"), dict)
    )
