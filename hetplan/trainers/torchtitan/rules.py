"""Launches of torchtitan that train a smaller model: modules that no stage has.

What torchtitan refuses at its start with a message of its own is left to it.

Read in torchtitan b5bcd76: distributed/pipeline_parallel.py (_split_module keeps what a list names
and drops the rest without a check).
"""

from __future__ import annotations

from collections.abc import Iterator

from hetplan.errors import InputError
from hetplan.trainers.rules import Check, Launch, Violation, violation
from hetplan.trainers.torchtitan.read import listed_layers, module_parts

_LISTS = "module-fqns-per-model-part"
_HEADS = {"lm_head", "output"}
"""Name of the output projection today, and up to torchtitan 0.2."""


def _modules(launch: Launch) -> Iterator[Violation]:
    setting = launch.get(_LISTS)
    if setting is None or _LISTS in launch.unread_names or not setting.values:
        return
    try:
        names = {name for part in module_parts(setting) for name in part}
    except InputError:
        return  # a value of the wrong form is refused by the reader's own rule
    try:
        placed = listed_layers(launch.text, setting, launch.pp or 1, "1f1b")  # only counted
    except InputError as error:
        yield violation(error.faults[0].message, setting)
        return
    built, layers = sum(map(sum, placed)), launch.num_layers
    if layers is not None and built < layers:
        yield violation(
            f"layers from {built} on are in no stage: torchtitan drops them and trains {built} of "
            f"{layers} layers, without a word",
            setting,
        )
    elif layers is not None and built > layers:
        yield violation(f"layers.{built - 1}, and the model has {layers} layers", setting)
    missing = [name for name in ("tok_embeddings", "norm") if name not in names]
    missing += [] if names & _HEADS else ["lm_head"]
    if missing:
        yield violation(f"{', '.join(missing)} in no stage: the model is trained without", setting)


CHECKS: tuple[Check, ...] = (("launch-module-lists", _modules),)
