"""Megatron-LM's flags that hetplan understands.

`flags.txt` is the one place that says what a flag takes and which value of hetplan's model, job
or plan it stands for; readers, rules and the list of printed arguments use it. Read at d98e8a64:
megatron/training/arguments.py, megatron/core/transformer/transformer_config.py and
megatron/training/argument_utils.py, which makes flags of the fields of configuration classes.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path


class Takes(StrEnum):
    """What follows a flag."""

    SWITCH = "switch"
    """Nothing."""
    OFF = "off"
    """Nothing; the flag makes its argument false."""
    VALUE = "value"
    """One word or more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """One flag."""

    name: str
    """Without leading dashes."""
    takes: Takes
    meaning: str
    """The value of hetplan's that it gives, as `plan: tp`."""
    argument: str
    """Name in the list of arguments that Megatron-LM prints."""


UNPLANNED = (
    "use-megatron-fsdp", "use-custom-fsdp", "use-torch-fsdp2", "tensor-parallel-num-weight-shards",
    "hybrid-layer-pattern", "hybrid-override-pattern", "encoder-num-layers",
    "num-experts-per-layer", "heterogeneous-layers-config-path", "yaml-cfg",
)  # fmt: skip
"""Flags that change the layout of a run in a way that no plan has."""

RENAMED = {
    "model-parallel-size": "tensor-model-parallel-size",
    "batch-size": "micro-batch-size",
    "checkpoint-activations": "recompute-activations",
}
"""Flags of old versions, which arguments.py refuses, and their names of today."""


def _flags() -> dict[str, Flag]:
    found: dict[str, Flag] = {}
    for line in Path(__file__).with_name("flags.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            continue
        name, takes, rest = line.split(maxsplit=2)
        meaning, _, argument = rest.partition("  ")
        found[name] = Flag(
            name=name,
            takes=Takes(takes),
            meaning=meaning.strip(),
            argument=argument.strip() or name.replace("-", "_"),
        )
    return found


FLAGS = _flags()
