"""What a priced pass is made of: parts by what they are for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from hetplan.cost.estimate_values import Component
from hetplan.cost.step_model.overlap import Overlap
from hetplan.cost.terms import Part
from hetplan.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCost:
    """Passes of one layer, one microbatch."""

    forward: tuple[Part, ...]
    backward: tuple[Part, ...]
    """Without recomputation."""
    again: tuple[Part, ...]
    """Recomputation in the backward pass, where the layer recomputes."""
    weight_seconds: float
    """Of the backward pass, the gradients of the weights: what zero-bubble schedules delay."""

    @property
    def forward_seconds(self) -> float:
        """Forward pass."""
        return seconds_of_parts(self.forward)

    @property
    def backward_seconds(self) -> float:
        """Backward pass without recomputation."""
        return seconds_of_parts(self.backward)

    @property
    def again_seconds(self) -> float:
        """Recomputation."""
        return seconds_of_parts(self.again)


def seconds_of_parts(parts: Iterable[Part]) -> float:
    """Seconds of all parts together."""
    return sum((part.seconds for part in parts), 0.0)


def repeated(parts: Iterable[Part], count: float) -> tuple[Part, ...]:
    """Every part `count` times."""
    return tuple(
        replace(part, term=part.term.times(count), hidden_seconds=part.hidden_seconds * count)
        for part in parts
    )


def compute_seconds(parts: Iterable[Part]) -> float:
    """Seconds of the parts that the device computes."""
    return sum((part.seconds for part in parts if part.computes), 0.0)


def hidden_beside(
    parts: Sequence[Part], compute: Sequence[Part], found: Overlap
) -> tuple[Part, ...]:
    """What is left of communication that runs beside this compute, and what the compute takes
    longer.
    """
    left = found.exposed_seconds / seconds_of_parts(parts)
    delay = repeated(compute, found.compute_delay_seconds / compute_seconds(compute))
    return (
        *(
            replace(
                part,
                term=part.term.times(left),
                hidden_seconds=part.hidden_seconds + (1.0 - left) * part.seconds,
            )
            for part in parts
        ),
        *(replace(part, component=Component.SLOWED) for part in delay),
    )


def as_recompute(parts: Iterable[Part]) -> Iterator[Part]:
    """The parts repeated in a backward pass: compute counts as recomputation."""
    for part in parts:
        if part.computes:
            yield replace(part, component=Component.RECOMPUTE)
        else:
            yield part


@contextmanager
def asking(what: str) -> Iterator[None]:
    """Put `what` in front of a predictor's faults: it says which figure it lacks, only its caller
    knows for what.
    """
    try:
        yield
    except InputError as error:
        faults = (replace(each, message=f"{what}: {each.message}") for each in error.faults)
        raise InputError(*faults) from error
