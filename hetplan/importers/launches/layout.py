"""Which layers does Megatron-LM's `--pipeline-model-parallel-layout` put where?

The grammar (megatron/core/transformer/pipeline_parallel_layer_layout.py, parse_str_to_list): commas
are dropped; once `(TEXT)*n` becomes TEXT n times, then once `x*n` becomes the sign x n times, `|`
too; `|` ends a segment; E embedding, t transformer layer, m multi-token prediction, L loss. Segment
i is virtual stage i // PP of stage i % PP.
"""

from __future__ import annotations

import re

from hetplan.errors import InputError
from hetplan.importers.lines import shown

_GROUP = re.compile(r"\(([^)]+)\)\*(\d+)")
_SIGN = re.compile(r"(.)\*(\d+)")
_MAX_SIGNS = 400_000
"""More layers than a model has (`hetplan.model.spec.MAX_LAYERS`), and their separators."""


def segments_of(layout: str) -> tuple[str, ...]:
    """The segments, written out; an InputError for a layout that is none."""
    text = layout.replace(",", "")
    for pattern in (_GROUP, _SIGN):
        total = len(text)
        for found in pattern.finditer(text):
            times = found.group(2)
            if len(times) > 7:
                raise InputError(f"{shown(layout)} repeats something {times[:20]} times")
            total += len(found.group(1)) * int(times)
        if total > _MAX_SIGNS:
            raise InputError(f"{shown(layout)} has over {_MAX_SIGNS:,} layers")
        text = pattern.sub(lambda found: found.group(1) * int(found.group(2)), text)
    wrong = sorted({sign for sign in text if sign not in "EtmL|"})
    if wrong:
        raise InputError(
            f"{shown(layout)} has {wrong[0]!a}, which is neither E, t, m, L nor |, or a bracket "
            "without a number after it"
        )
    return tuple(text.split("|"))


def layers_of_layout(layout: str, pp: int) -> tuple[tuple[int, ...], ...]:
    """Transformer layers of each stage, one number per virtual stage.

    An InputError where Megatron-LM refuses the layout for so many stages.
    """
    segments = segments_of(layout)
    if len(segments) % pp:
        raise InputError(
            f"{shown(layout)} has {len(segments)} segments, which {pp} stages do not divide"
        )
    whole = "".join(segments)
    if whole.count("E") != 1 or whole.count("L") != 1 or whole[0] != "E" or whole[-1] != "L":
        raise InputError(f"{shown(layout)} must begin with its one E and end with its one L")
    if re.search("mt", whole.replace("|", "")) is not None:
        raise InputError(f"{shown(layout)} has a t behind an m; multi-token prediction comes last")
    virtual = len(segments) // pp
    return tuple(
        tuple(segments[stage + chunk * pp].count("t") for chunk in range(virtual))
        for stage in range(pp)
    )


def prediction_places(layout: str, pp: int) -> tuple[int, ...]:
    """Stages of the segments that hold multi-token prediction layers."""
    return tuple(at % pp for at, text in enumerate(segments_of(layout)) if "m" in text)
