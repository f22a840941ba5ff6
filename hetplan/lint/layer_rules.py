"""Rules about times of layers and operators: what physics and the shape of training forbid."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from statistics import median

from hetplan.lint.evidence import Evidence, Timed, is_sentinel, row_name
from hetplan.lint.findings import Severity
from hetplan.lint.rule import MAX_LINES, Rule, Sighting, grouped, per_file, some
from hetplan.model.spec import LayerKind

WARM_UP = 1.10  # more work in less time by 10 %: three times the noise of a steady median (3 %)
BACKWARD_MISSING = 0.05  # a backward pass of a twentieth of the forward pass is no backward pass
BACKWARD_FASTER = 0.8  # backward has at least the input gradient: as many operations as forward
INPUT_GRADIENT_ONLY = 1.4  # both gradients are twice the forward pass; halfway to one of them
COMMUNICATION = 1.3  # tp makes one pass 30 % less than proportionally shorter than the other
NO_SHRINK = 0.95  # twice the ranks, at least 95 % of the time: no part of it was divided
FLAT = 1.02  # twice the work in less than 2 % more time: within noise, it did not grow
GREW = 1.3  # a series that grew by 30 % before has left the launch of its kernels behind
MAX_LAUNCH = 20e-3  # no host takes so long to launch one layer
LAUNCH_SECONDS = 1e-3  # below it the launch of 50 operators of 20 us each may hide the work
COMMUNICATION_SECONDS = 200e-6  # one operator above it is bound by its work, not by its launch
QUIET = 1.15  # p90 over p10 of a measurement that can tell 2 % more from none


def _not_positive(evidence: Evidence) -> Iterator[Sighting]:
    rows = [
        row
        for row in evidence.material.layers
        if row.forward_seconds <= 0 or (row.backward_seconds or 0.0) < 0
    ]
    yield from per_file(
        rows,
        lambda row: row.place,
        lambda group: (
            f"times of zero or below, as in {row_name(group[0])}: "
            f"forward {group[0].forward_seconds:g} s, backward {group[0].backward_seconds} s"
        ),
    )


def _sentinels(evidence: Evidence) -> Iterator[Sighting]:
    rows = [
        row
        for row in evidence.material.layers
        if is_sentinel(row.forward_seconds) or is_sentinel(row.backward_seconds or 0.0)
    ]
    yield from per_file(
        rows,
        lambda row: row.place,
        lambda group: (
            f"{max(row.forward_seconds for row in group):g} s stands where the "
            f"measurement failed, as in {row_name(group[0])}"
        ),
    )


def _backward_missing(evidence: Evidence) -> Iterator[Sighting]:
    rows = [
        row
        for row in evidence.timed
        if row.backward is not None
        and row.forward
        and row.backward < BACKWARD_MISSING * row.forward
        # Beyond tp 1 an operator's forward pass may contain communication.
        and (row.whole or row.tp == 1)
    ]
    yield from per_file(
        rows,
        lambda row: row.place,
        lambda group: (
            f"backward is {(group[0].backward or 0) * 1e6:.0f} us where forward is "
            f"{(group[0].forward or 0) * 1e6:.0f} us: {row_name(group[0])}"
        ),
    )


def _input_gradient_series(evidence: Evidence) -> dict[tuple[str, ...], float]:
    """Operators with weights, and whole transformer layers, whose backward is half of what it is.

    Value: the median of backward over forward at tp 1, where neither contains communication.
    """
    found = {}
    for series, rows in evidence.by_series.items():
        if not rows[0].weighted or not rows[0].flops:
            continue
        if rows[0].operation == LayerKind.HEAD:
            continue  # its forward pass contains the loss
        least = LAUNCH_SECONDS if rows[0].whole else COMMUNICATION_SECONDS
        ratios = [
            row.backward / row.forward
            for row in rows
            if row.tp == 1 and row.forward and row.backward and row.forward > least
        ]
        if len(ratios) >= 2 and BACKWARD_FASTER / 2 < median(ratios) < INPUT_GRADIENT_ONLY:
            found[series] = median(ratios)
    return found


def _input_gradient(evidence: Evidence) -> Iterator[Sighting]:
    every = _input_gradient_series(evidence)
    operators = [row for row in evidence.timed if row.series in every]

    def words(group: Sequence[Timed]) -> str:
        ratios = [every[row.series] for row in group]
        return (
            f"backward takes {min(ratios):.2f} to {max(ratios):.2f} of forward at tp 1 in "
            f"{some({row.operation for row in group})}; both gradients would take 2"
        )

    yield from per_file(operators, lambda row: row.place, words)


def _backward_faster(evidence: Evidence) -> Iterator[Sighting]:
    known = _input_gradient_series(evidence)
    rows = [
        row
        for row in evidence.timed
        if row.weighted
        and row.tp == 1
        and row.series not in known
        and row.forward
        and row.backward
        and BACKWARD_MISSING * row.forward <= row.backward < BACKWARD_FASTER * row.forward
    ]
    yield from per_file(
        rows,
        lambda row: row.place,
        lambda group: (
            f"backward down to {min((row.backward or 0) / (row.forward or 1) for row in group):.2f}"
            f" of forward, as in {row_name(group[0])}"
        ),
    )


def _excess(rows: Sequence[Timed], tp: int, phase: str) -> float | None:
    """Median over microbatch sizes of tp * time(tp) / time(1); 1: perfectly divided."""

    def seconds(row: Timed) -> float | None:
        return row.forward if phase == "forward" else row.backward

    alone = {row.microbatch_size: seconds(row) for row in rows if row.tp == 1}
    ratios = [
        tp * time / base
        for row in rows
        if row.tp == tp
        and (time := seconds(row))
        and (base := alone.get(row.microbatch_size))
        and base >= COMMUNICATION_SECONDS
    ]
    return median(ratios) if ratios else None


def _communication(evidence: Evidence) -> Iterator[Sighting]:
    found: list[tuple[Timed, str]] = []
    for rows in evidence.by_series.values():
        if rows[0].whole and rows[0].layer is None:
            continue  # a store's rows are measured with communication apart
        for tp in sorted({row.tp for row in rows if row.tp > 1}):
            slices = [row for row in rows if row.tp == tp]
            forward, backward = _excess(rows, tp, "forward"), _excess(rows, tp, "backward")
            if forward is None or backward is None or not rows[0].weighted:
                continue
            if rows[0].whole and not rows[0].flops:
                continue
            if rows[0].whole:
                if min(forward, backward) > tp * NO_SHRINK:
                    found += [(row, "both") for row in slices]
            elif forward > COMMUNICATION * backward:
                found += [(row, "forward") for row in slices]
            elif backward > COMMUNICATION * forward:
                found += [(row, "backward") for row in slices]

    def words(group: Sequence[tuple[Timed, str]]) -> str:
        parts = []
        for phase in ("forward", "backward", "both"):
            names = {row.operation for row, which in group if which == phase}
            if names:
                where = "neither pass shrinks" if phase == "both" else f"{phase} does not shrink"
                parts.append(f"{where} with tp in {some(names)}")
        devices = some(row.device for row, _ in group)
        return f"{'; '.join(parts)} (devices: {devices})"

    yield from per_file(found, lambda entry: entry[0].place, words)


def _warm_up(evidence: Evidence) -> Iterator[Sighting]:
    found: list[tuple[Timed, float]] = []
    for rows in evidence.by_series.values():
        for by_tp in grouped(rows, lambda row: row.tp).values():
            ordered = sorted(by_tp, key=lambda row: row.microbatch_size)
            if len(ordered) < 2 or ordered[0].microbatch_size == ordered[1].microbatch_size:
                continue
            first, second = ordered[:2]
            if (
                first.forward
                and second.forward
                and first.forward > WARM_UP * second.forward * max(first.spread, second.spread)
                and first.forward > LAUNCH_SECONDS
            ):
                found.append((first, first.forward / second.forward))
    yield from per_file(
        found,
        lambda entry: entry[0].place,
        lambda group: (
            f"the smallest microbatch takes up to {max(r for _, r in group):.2f} times "
            f"as long as the next one, as in {row_name(group[0][0])}"
        ),
    )


def _not_growing(evidence: Evidence) -> Iterator[Sighting]:
    found: list[tuple[Timed, Timed, str]] = []
    for rows in evidence.by_series.values():
        if not rows[0].weighted:
            continue
        for by_tp in grouped(rows, lambda row: row.tp).values():
            ordered = sorted(by_tp, key=lambda row: row.microbatch_size)
            # The first pair is the warm-up's affair.
            for before, after in pairwise(ordered[1:]):
                if after.microbatch_size < 2 * before.microbatch_size:
                    continue
                if max(before.spread, after.spread) > QUIET:
                    continue
                for phase in ("forward", "backward"):
                    short = getattr(before, phase)
                    long = getattr(after, phase)
                    if not (short and long and short > LAUNCH_SECONDS and long < FLAT * short):
                        continue
                    least = min(getattr(row, phase) or short for row in ordered)
                    if short > GREW * least or short > MAX_LAUNCH:
                        found.append((after, before, phase))
    yield from per_file(
        found,
        lambda entry: entry[0].place,
        lambda group: (
            f"{group[0][2]} of {row_name(group[0][0])} takes "
            f"{1e3 * getattr(group[0][0], group[0][2]):.3g} ms, and "
            f"{1e3 * getattr(group[0][1], group[0][2]):.3g} ms at microbatch size "
            f"{group[0][1].microbatch_size}"
        ),
    )


def _mixed_precisions(evidence: Evidence) -> Iterator[Sighting]:
    for file, rows in grouped(evidence.material.layers, lambda row: row.place.file).items():
        labels = grouped(rows, lambda row: row.precision)
        if len(labels) > 1:
            counts = ", ".join(f"{len(group)} of {label[:40]!a}" for label, group in labels.items())
            lines = sorted(group[0].place.line for group in labels.values())
            yield Sighting(
                file=file,
                lines=tuple(lines[:MAX_LINES]),
                count=len(rows),
                found=f"rows of {len(labels)} precisions in one table: {counts}",
            )


RULES = (
    Rule(
        id="time-not-positive",
        severity=Severity.IMPOSSIBLE,
        title="a time of zero or below",
        explanation="Work takes time. Zero usually stands for a row that was not measured or was "
        "rounded away.",
        advice="Leave the row out, or measure it again with more repeats.",
        check=_not_positive,
    ),
    Rule(
        id="time-sentinel",
        severity=Severity.IMPOSSIBLE,
        title="a mark for a failed measurement among the times",
        explanation="A round power of ten of many seconds is what profilers write when a "
        "configuration ran out of memory. A fit takes it for a time.",
        advice="Drop these rows, or turn them into a statement that the shape does not fit.",
        check=_sentinels,
    ),
    Rule(
        id="backward-not-measured",
        severity=Severity.SUSPICIOUS,
        title="a backward pass of next to nothing",
        explanation="The backward pass takes less than a twentieth of the forward pass. Often the "
        "layer's input needs no gradient (the embedding), so its backward was never part of what "
        "was timed.",
        advice="Take the time of that backward pass from a measurement that has it.",
        check=_backward_missing,
    ),
    Rule(
        id="input-gradient-only",
        severity=Severity.SUSPICIOUS,
        title="a backward pass of matrix products about as long as the forward pass",
        explanation="The backward pass of a product with weights is two products: the gradient of "
        "the input and that of the weights. A backward time near the forward time has one of them.",
        advice="Add one forward-sized product per product, or measure with weight gradients.",
        check=_input_gradient,
    ),
    Rule(
        id="backward-faster-than-forward",
        severity=Severity.SUSPICIOUS,
        title="a backward pass shorter than the forward pass",
        explanation="The backward pass of a layer with weights has at least the operations of the "
        "forward pass. If it is shorter, the forward time contains something else (the first "
        "run, communication, the loss), or the two columns are swapped.",
        advice="Look at what was between the timers; measure both passes again.",
        check=_backward_faster,
    ),
    Rule(
        id="communication-inside",
        severity=Severity.SUSPICIOUS,
        title="times that do not shrink with tp",
        explanation="With tp ranks each holds one slice, and its time shrinks in proportion. "
        "Where one pass shrinks and the other does not, the other contains the all-reduce of the "
        "slices: the forward pass of row-parallel products, the backward pass of column-parallel "
        "ones. Added to a communication model it is counted twice.",
        advice="Take the time of the slice from the pass that shrinks, or measure slices alone.",
        check=_communication,
    ),
    Rule(
        id="warm-up-inside",
        severity=Severity.SUSPICIOUS,
        title="the smallest microbatch takes longer than the next one",
        explanation="More work cannot take less time. The smallest size is measured first, and "
        "its time contains what happens once: compilation, allocation, choice of algorithms.",
        advice="Drop the first size, or measure it again after a warm-up.",
        check=_warm_up,
    ),
    Rule(
        id="times-do-not-grow",
        severity=Severity.SUSPICIOUS,
        title="the same time for twice the work",
        explanation="A device that is busy takes longer for twice the microbatch. Equal times mean "
        "that something else was measured (a queue that was not waited for), or copied.",
        advice="Check that the timer waits for the device; measure both sizes again.",
        check=_not_growing,
    ),
    Rule(
        id="mixed-precisions",
        severity=Severity.SUSPICIOUS,
        title="rows of several precisions in one table",
        explanation="A reader that does not filter by precision averages times that differ by a "
        "factor of two to sixteen.",
        advice="Filter by the precision column, or split the table.",
        check=_mixed_precisions,
    ),
)
