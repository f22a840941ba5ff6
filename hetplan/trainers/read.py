"""Detects the trainer of a launch file, reads its settings, and works out what they mean."""

from __future__ import annotations

import re
from pathlib import Path

from hetplan.errors import Fault, InputError
from hetplan.files.reading import read_document, read_text
from hetplan.trainers.flagscale.read import flagscale_facts, flagscale_launch
from hetplan.trainers.launch_command import script_launch
from hetplan.trainers.launch_values import Given, LaunchFacts, LaunchHost, LaunchText
from hetplan.trainers.megatron.log import ARGUMENTS, printed_arguments
from hetplan.trainers.megatron.read import megatron_facts
from hetplan.trainers.torchtitan.read import toml_launch, torchtitan_facts

_FACTS = {
    "megatron": megatron_facts,
    "flagscale": flagscale_facts,
    "torchtitan": torchtitan_facts,
}
TRAINERS = tuple(_FACTS)
"""Trainers whose launches are read; Megatron-LM's arguments are those of MindSpeed as well."""

PLAN_FILE = "plan.json"
"""The plan in a folder that hetplan emitted; its launch is read from nothing else."""

_TITAN = re.compile(r"torchtitan|--parallelism\.|--training\.|run_train\.sh")
_MEGATRON = re.compile(
    r"--(?:tensor|pipeline)-model-parallel-size|pretrain_\w+\.py|--micro-batch-size|--num-layers\b"
)
_SCRIPTS = (".sh", ".bash", ".slurm", ".sbatch", ".txt", ".args", "")
_LOGS = (".log", ".out", ".gz", *_SCRIPTS)


def read_launch(
    path: Path,
    trainer: str | None = None,
    given: Given = (),
    hosts: tuple[LaunchHost, ...] = (),
) -> LaunchText:
    """The launch in a script, a list of arguments, a log, a YAML or a TOML file.

    `trainer` is one of TRAINERS; None: detected. `given` are values of variables and
    settings, `hosts` override the launch's own. An InputError where it cannot be read.
    """
    if trainer is not None and trainer not in TRAINERS:
        message = f"unknown trainer {trainer!a}; launches of {', '.join(TRAINERS)} are read"
        raise InputError(Fault(message=message))
    if not path.exists():
        raise InputError(Fault(file=str(path), message="there is no such file or folder"))
    if path.is_dir():
        message = f"is a folder without {PLAN_FILE}; name the launch's file"
        raise InputError(Fault(file=str(path), message=message))
    trainer = trainer or trainer_of(path)
    if trainer is None:
        message = f"is not recognised as a launch; give --trainer ({', '.join(TRAINERS)})"
        raise InputError(Fault(file=str(path), message=message))
    suffix = path.suffix.lower()
    if trainer == "flagscale" and suffix in (".yaml", ".yml"):
        return flagscale_launch(path, given, hosts)
    if trainer == "torchtitan" and suffix == ".toml":
        return toml_launch(str(path), read_text(path), given, hosts)
    if trainer != "torchtitan" and _is_log(path):
        return printed_arguments(path, trainer, given, hosts)
    return script_launch(trainer, str(path), read_text(path), given, hosts)


def facts_of(text: LaunchText, num_layers: int | None = None) -> LaunchFacts:
    """The settings of a launch with the trainer's defaults filled in.

    `num_layers` is the model's, for a launch that does not give it.
    An InputError with file and line where a setting without default is missing, is known to the
    host only, or has the wrong form.
    """
    return _FACTS[text.trainer](text, num_layers)


def trainer_of(path: Path) -> str | None:
    """The trainer of a launch file, detected from its content; None: the file is no launch."""
    suffix = path.suffix.lower()
    if suffix in (".yaml", ".yml"):
        return "flagscale" if _is_experiment(path) else None
    if suffix == ".toml":
        is_titan = re.search(r"(?m)^\s*\[(parallelism|training)", read_text(path))
        return "torchtitan" if is_titan else None
    if suffix in _LOGS and _is_log(path):
        return "megatron"
    if suffix not in _SCRIPTS:
        return None
    text = read_text(path)
    if _TITAN.search(text):
        return "torchtitan"
    if "hetero-process-meshes" in text or "flagscale/train" in text:
        return "flagscale"
    return "megatron" if _MEGATRON.search(text) else None


def _is_log(path: Path) -> bool:
    """Whether Megatron-LM's list of arguments is near the beginning of the file."""
    if path.suffix.lower() == ".gz":
        return True
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return ARGUMENTS in file.read(1 << 20)


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
