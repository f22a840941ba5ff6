"""What does a launch ask of its trainer, with everything filled in that it leaves to defaults?"""

from __future__ import annotations

from hetplan.errors import Fault, InputError
from hetplan.importers.launches.facts_flagscale import flagscale_facts
from hetplan.importers.launches.facts_megatron import megatron_facts
from hetplan.importers.launches.facts_torchtitan import torchtitan_facts
from hetplan.importers.launches.values import LaunchFacts, LaunchText

TRAINERS = ("megatron", "flagscale", "torchtitan")
"""Whose launches are read."""


def title_of(facts: LaunchFacts) -> str:
    """What the launch asks for, in one line."""
    degrees = "; ".join(
        f"tp {each.tp}"
        + (f" cp {each.cp}" if each.cp > 1 else "")
        + (f" ep {each.ep}" if each.ep > 1 else "")
        + f" dp {each.dp} pp {each.pp}, microbatches of {each.microbatch_size}"
        for each in facts.meshes
    )
    length = facts.sequence_length if facts.sequence_length is not None else "?"
    return (
        f"{facts.text.trainer}: {facts.world_size} ranks, {degrees}; "
        f"{facts.num_microbatches} microbatches, batch {facts.global_batch_size} x {length} tokens"
    )


def facts_of(text: LaunchText, num_layers: int | None = None) -> LaunchFacts:
    """The facts; `num_layers` is what the model has, where the launch does not say it.

    An InputError with file and line where a setting is missing that has no default, is known to the
    host only, or is not what it must be.
    """
    if text.trainer == "megatron":
        return megatron_facts(text, num_layers)
    if text.trainer == "flagscale":
        return flagscale_facts(text, num_layers)
    if text.trainer == "torchtitan":
        return torchtitan_facts(text, num_layers)
    message = f"unknown trainer {text.trainer!a}; launches of {', '.join(TRAINERS)} are read"
    raise InputError(Fault(message=message))
