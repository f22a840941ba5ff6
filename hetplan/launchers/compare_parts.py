"""The step in parts that add up, by the same sums of timers on both sides.

With F, B the forward and backward passes of the slowest rank, S the whole schedule (Megatron-LM's
forward-backward), R the reduction after it, E the sum of a tied embedding's gradients, O the end:

    waits = S - F - B, less R and E where S holds them
    rest  = step - all of the above: barriers, waits for other stages, data, logging

The predicted side is made of the predicted timers by the same formulas, so that a part compares
like with like. Where S is missing, the waits are what the send and receive timers say, or stay in
the rest, and the part's name says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hetplan.cost.estimate_values import Component
from hetplan.launchers.compare_timers import components_of
from hetplan.launchers.compare_values import PartRow, TimerRow
from hetplan.trainers.training_log import Quantity

_INSIDE_SCHEDULE = {"all-grads-sync", "bwd_allreduce"}
"""Megatron-core reduces inside forward-backward where it has the first of these timers
(megatron/core/distributed/finalize_model_grads.py), Megatron-DeepSpeed where it has the second;
before, the reduction came after it."""
_SAME = {"step": "optimizer"}
"""Timers of Megatron-DeepSpeed that count what one of Megatron-LM's counts as well."""

REST = "rest of the step"
_ROUNDING = 1e-9

Seconds = Mapping[Quantity, float]
"""Seconds of the rank that counts, per quantity that the log tells."""


def parts_of(
    timers: Sequence[TimerRow], predicted: Seconds, measured_step: float, predicted_step: float
) -> tuple[PartRow, ...]:
    """The parts that these timers tell, and the rest; nothing where they tell none.

    `predicted` has every quantity of the timers, on the side that `counted_side` says.
    """
    names = {row.timer for row in timers}
    known = [
        row
        for row in timers
        if row.quantity
        and Quantity(row.quantity) in predicted
        and _SAME.get(row.timer) not in names
    ]
    measured: dict[Quantity, float] = {}
    for row in known:
        quantity = Quantity(row.quantity)
        # Several timers of one quantity are parts of it; the prediction is of all of them.
        counted = counted_side(row.measured_least_seconds, row.measured_most_seconds, quantity)
        measured[quantity] = measured.get(quantity, 0.0) + counted
    waits = (Quantity.WAITS, Quantity.EMBEDDING)
    if all(each in measured for each in waits) and Quantity.WAITS_TO_THE_END in predicted:
        # The last stage sums a tied embedding with the first and waits for it in that timer.
        measured[Quantity.WAITS_TO_THE_END] = sum(measured[each] for each in waits)
    inside = any(row.timer in _INSIDE_SCHEDULE for row in known)
    mine = _rows(measured, inside=inside)
    if not mine:
        return ()
    theirs = {
        name: seconds
        for name, _, seconds, _ in _rows({each: predicted[each] for each in measured}, inside=True)
    }
    rows = [
        PartRow(
            part=name,
            components=tuple(each.value for each in components),
            predicted_seconds=theirs.get(name, 0.0),
            measured_seconds=seconds,
            note=note,
        )
        for name, components, seconds, note in mine
    ]
    told = {component for row in rows for component in row.components}
    rows.append(
        PartRow(
            part=REST,
            components=tuple(each.value for each in Component if each.value not in told),
            predicted_seconds=_left(predicted_step, [row.predicted_seconds for row in rows]),
            measured_seconds=_left(measured_step, [row.measured_seconds for row in rows]),
            note="what no timer of the log counts",
        )
    )
    return tuple(rows)


def counted_side(least: float, most: float, quantity: Quantity) -> float:
    """Which end of a timer's span makes up the step: the slowest rank's, and of waits the least,
    because the rank with the longest passes waits least.
    """
    return least if quantity is Quantity.WAITS else most


def _left(step: float, parts: Sequence[float]) -> float:
    """What the parts leave of the step; nothing where only rounding is left."""
    left = step - sum(parts)
    return left if abs(left) > _ROUNDING * step else 0.0


_Row = tuple[str, tuple[Component, ...], float, str]


def _rows(seconds: Seconds, *, inside: bool) -> list[_Row]:
    rows: list[_Row] = []

    def add(quantity: Quantity, value: float, note: str = "") -> None:
        rows.append((quantity.value, components_of(quantity), max(value, 0.0), note))

    both = Quantity.FORWARD in seconds and Quantity.BACKWARD in seconds
    passes = seconds.get(Quantity.PASSES)
    if both:
        passes = seconds[Quantity.FORWARD] + seconds[Quantity.BACKWARD]
        add(Quantity.FORWARD, seconds[Quantity.FORWARD], "tp, cp and ep communication inside")
        add(Quantity.BACKWARD, seconds[Quantity.BACKWARD], "recomputation and the same inside")
    elif passes is not None:
        add(Quantity.PASSES, passes, "tp, cp and ep communication inside")
    after = [each for each in (Quantity.REDUCTION, Quantity.EMBEDDING) if each in seconds]
    reduced = sum(seconds[each] for each in after)
    schedule = seconds.get(Quantity.SCHEDULE)
    if schedule is not None:
        # Without timers of the reduction, what the schedule holds of it cannot be taken out.
        name, held = _schedule_name(passes is None, told=bool(after))
        left = schedule - (reduced if inside else 0.0) - (passes or 0.0)
        note = "bubble and transfers are not told apart"
        rows.append((name, held, max(left, 0.0), note))
    elif Quantity.WAITS_TO_THE_END in seconds:
        note = "bubble, transfers and the wait for the first stage are not told apart"
        add(Quantity.WAITS_TO_THE_END, seconds[Quantity.WAITS_TO_THE_END], note)
        after = [each for each in after if each is not Quantity.EMBEDDING]
    elif Quantity.WAITS in seconds:
        add(Quantity.WAITS, seconds[Quantity.WAITS], "bubble and transfers are not told apart")
    for each in after:
        add(each, seconds[each], "what nothing hides")
    return rows + _end(seconds)


def _end(seconds: Seconds) -> list[_Row]:
    """The end of the step as finely as the timers tell it."""
    parts = [each for each in (Quantity.NORM, Quantity.GATHERING) if each in seconds]
    rows = [(each.value, components_of(each), seconds[each], "") for each in parts]
    whole = seconds.get(Quantity.END)
    if whole is None:
        if Quantity.UPDATE in seconds:
            update = seconds[Quantity.UPDATE]
            rows.append((Quantity.UPDATE.value, components_of(Quantity.UPDATE), update, ""))
        return rows
    held = {component for each in parts for component in components_of(each)}
    left = tuple(each for each in components_of(Quantity.END) if each not in held)
    name = Quantity.END.value
    if parts:
        name = " and ".join(each.value for each in left if each is not Component.OFFLOAD)
    inner = sum(seconds[each] for each in parts)
    rows.append(
        (name, left, max(whole - inner, 0.0), "what is left of the whole end" * bool(parts))
    )
    return rows


def _schedule_name(whole: bool, *, told: bool) -> tuple[str, tuple[Component, ...]]:
    """Name and components of what is left of the schedule."""
    if told:
        quantity = Quantity.PASSES_AND_WAITS if whole else Quantity.WAITS
        return quantity.value, components_of(quantity)
    if whole:
        return Quantity.SCHEDULE.value, components_of(Quantity.SCHEDULE)
    reduced = (*components_of(Quantity.REDUCTION), *components_of(Quantity.EMBEDDING))
    return "waits and reduction", (*components_of(Quantity.WAITS), *reduced)
