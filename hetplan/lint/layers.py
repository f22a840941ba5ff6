"""Rules about times of layers and operators, and about efficiencies by shape.

What physics and the shape of training forbid, what exceeds the device, and what was copied.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from statistics import median
from typing import TypeVar

from hetplan.errors import Fault
from hetplan.lint.evidence import Evidence, Timed, is_sentinel, phases, row_name
from hetplan.lint.findings import MAX_LINES, Finding, Rule, Severity, at, grouped, some
from hetplan.lint.known import known_device
from hetplan.lint.rows import EfficiencyRow
from hetplan.model.spec import LayerKind

Owner = TypeVar("Owner", bound=Hashable)

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
FAR_SLOWER = 1 / 3  # efficiencies of one device differ by 2 between widths, not by 3
SAME_RATE = 0.5  # of the true float32 peak: what a device that uses it reaches
MIN_EQUAL = 8  # equal values: eight six-digit times do not agree by chance
SHARE_EQUAL = 0.9  # a copy is edited here and there
DIGITS = 3  # times with fewer digits agree by chance
ORIENTATION = frozenset({"layout", "stage"})
"""What beside the sizes decides which product it is; the rest is easily taken for decoration."""
DIFFERENCE = 0.02  # of the efficiency: less than 2 % is noise between two runs of one kernel
ATTENTION = ("sdp", "attention", "flash", "attn")


def _not_positive(evidence: Evidence) -> Iterator[Fault]:
    for row in evidence.inputs.layers:
        if row.forward_seconds <= 0 or (row.backward_seconds or 0.0) < 0:
            times = f"forward {row.forward_seconds:g} s, backward {row.backward_seconds} s"
            yield at(row.place, f"times of zero or below, as in {row_name(row)}: {times}")


def _sentinels(evidence: Evidence) -> Iterator[Fault]:
    for row in evidence.inputs.layers:
        for seconds in (row.forward_seconds, row.backward_seconds or 0.0):
            if is_sentinel(seconds):
                words = f"{seconds:g} s where the measurement failed"
                yield at(row.place, f"{words}, as in {row_name(row)}")
                break


def _backward_missing(evidence: Evidence) -> Iterator[Fault]:
    for row in evidence.timed:
        # Beyond tp 1 an operator's forward pass may contain communication.
        if row.backward is None or not row.forward or not (row.whole or row.tp == 1):
            continue
        if row.backward < BACKWARD_MISSING * row.forward:
            times = f"{row.backward * 1e6:.0f} us where forward is {row.forward * 1e6:.0f} us"
            yield at(row.place, f"backward is {times}: {row_name(row)}")


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


def _input_gradient(evidence: Evidence) -> Iterator[Fault]:
    ratios = _input_gradient_series(evidence)
    for row in evidence.timed:
        if row.series in ratios:
            words = f"backward takes {ratios[row.series]:.2f} of forward at tp 1"
            yield at(row.place, f"{words} in {row.operation}; both gradients would take 2")


def _backward_faster(evidence: Evidence) -> Iterator[Fault]:
    known = _input_gradient_series(evidence)
    for row in evidence.timed:
        if not row.weighted or row.tp != 1 or row.series in known:
            continue
        if not row.forward or not row.backward:
            continue
        ratio = row.backward / row.forward
        if BACKWARD_MISSING <= ratio < BACKWARD_FASTER:
            yield at(row.place, f"backward is {ratio:.2f} of forward, as in {row_name(row)}")


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


def _communication(evidence: Evidence) -> Iterator[Fault]:
    for rows in evidence.by_series.values():
        first = rows[0]
        # A store's rows are measured with communication apart.
        if not first.weighted or (first.whole and (first.layer is None or not first.flops)):
            continue
        for tp in sorted({row.tp for row in rows if row.tp > 1}):
            forward, backward = _excess(rows, tp, "forward"), _excess(rows, tp, "backward")
            if forward is None or backward is None:
                continue
            words = ""
            if first.whole:
                words = "neither pass shrinks" if min(forward, backward) > tp * NO_SHRINK else ""
            elif forward > COMMUNICATION * backward:
                words = "forward does not shrink"
            elif backward > COMMUNICATION * forward:
                words = "backward does not shrink"
            for row in rows:
                if words and row.tp == tp:
                    yield at(row.place, f"{words} with tp in {row.operation} on {row.device}")


def _warm_up(evidence: Evidence) -> Iterator[Fault]:
    for ordered in _by_microbatch(evidence):
        if len(ordered) < 2 or ordered[0].microbatch_size == ordered[1].microbatch_size:
            continue
        first, second = ordered[:2]
        if not first.forward or not second.forward or first.forward <= LAUNCH_SECONDS:
            continue
        ratio = first.forward / second.forward
        if ratio > WARM_UP * max(first.spread, second.spread):
            words = f"the smallest microbatch takes {ratio:.2f} times as long as the next one"
            yield at(first.place, f"{words}, as in {row_name(first)}")


def _by_microbatch(evidence: Evidence) -> Iterator[list[Timed]]:
    """Rows that differ in the microbatch size only, from the smallest."""
    for rows in evidence.by_series.values():
        for group in grouped(rows, lambda row: row.tp).values():
            yield sorted(group, key=lambda row: row.microbatch_size)


def _not_growing(evidence: Evidence) -> Iterator[Fault]:
    for ordered in _by_microbatch(evidence):
        # The first pair is the warm-up's affair.
        for before, after in pairwise(ordered[1:]):
            twice = after.microbatch_size >= 2 * before.microbatch_size
            if not after.weighted or not twice or max(before.spread, after.spread) > QUIET:
                continue
            for phase in ("forward", "backward"):
                short, long = getattr(before, phase), getattr(after, phase)
                if not (short and long and short > LAUNCH_SECONDS and long < FLAT * short):
                    continue
                least = min(getattr(row, phase) or short for row in ordered)
                if short > GREW * least or short > MAX_LAUNCH:
                    words = f"{phase} of {row_name(after)} takes {1e3 * long:.3g} ms"
                    size = before.microbatch_size
                    yield at(
                        after.place, f"{words}, and {1e3 * short:.3g} ms at microbatch size {size}"
                    )


def _mixed_precisions(evidence: Evidence) -> Iterator[Fault]:
    for file, rows in grouped(evidence.inputs.layers, lambda row: row.place.file).items():
        labels = grouped(rows, lambda row: row.precision)
        if len(labels) > 1:
            counts = ", ".join(f"{len(group)} of {label[:40]!a}" for label, group in labels.items())
            lines = sorted(group[0].place.line for group in labels.values())
            yield Finding(
                file=file,
                line=lines[0],
                lines=tuple(lines[:MAX_LINES]),
                count=len(rows),
                message=f"rows of {len(labels)} precisions in one table: {counts}",
            )


def _faster_than_peak(evidence: Evidence) -> Iterator[Fault]:
    above: list[tuple[float, Fault]] = []
    for row in evidence.timed:
        device = known_device(row.device)
        if device is None or not row.flops or not device.peak(row.precision):
            continue
        rate, phase = max((work / seconds, phase) for phase, seconds, work in phases(row))
        if rate <= device.peak(row.precision):
            continue
        peak = device.peak(row.precision) / device.margin
        tensor = device.tensor_float32_flops_per_second
        hint = ""
        if row.precision == "float32" and rate <= tensor:
            hint = f"; TF32 has {tensor / 1e12:.0f}: the label hides TF32"
        words = f"{rate / 1e12:.0f} TFLOP/s where {row.precision} has {peak / 1e12:.1f}"
        above.append((rate / peak, at(row.place, f"{words} ({phase} of {row_name(row)}){hint}")))
    yield from (fault for _, fault in sorted(above, key=lambda entry: -entry[0]))


def _rate(row: Timed) -> float:
    """Forward operations per second; 0 where there is no forward time."""
    return row.flops / row.forward if row.forward else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Slow:
    """Rows of one model in one file, and what they are measured against."""

    rows: tuple[Timed, ...]
    best: Timed
    """The fastest row of the slow model."""
    fast: Timed
    """The fastest row of the fastest narrower model."""


def _too_slow(evidence: Evidence) -> Iterator[_Slow]:
    """Models that reach far less than narrower ones on the same device, per file."""
    whole = [row for row in evidence.timed if row.whole and row.flops and row.width]
    # Populations of a store have circumstances of their own; profiles of one tool are compared
    # over their files, which often hold one model each.
    by_device = grouped(
        whole,
        lambda row: (
            row.origin if row.layer is None else "",
            row.device,
            row.precision,
            row.operation,
            row.tp,
        ),
    )
    for group in by_device.values():
        models = grouped(group, lambda row: row.model)
        best = {name: max(rows, key=_rate) for name, rows in models.items()}
        for name, rows in models.items():
            narrower = [
                row for other, row in best.items() if other != name and row.width <= rows[0].width
            ]
            fast = max(narrower, key=_rate, default=None)
            if fast is None or _rate(best[name]) >= FAR_SLOWER * _rate(fast):
                continue
            for in_file in grouped(rows, lambda row: row.place.file).values():
                yield _Slow(rows=tuple(in_file), best=best[name], fast=fast)


def _true_float32(slow: _Slow) -> bool:
    """Whether the slow rows are true float32 and the fast ones TF32 under the same label."""
    known = known_device(slow.best.device)
    rate, fast = _rate(slow.best), _rate(slow.fast)
    return (
        known is not None
        and slow.best.precision == "float32"
        and known.tensor_float32_flops_per_second > 0
        and SAME_RATE * known.float32_flops_per_second <= rate
        and rate <= known.float32_flops_per_second < fast
    )


def _slower_than_class(evidence: Evidence) -> Iterator[Fault]:
    found = [slow for slow in _too_slow(evidence) if not _true_float32(slow)]
    yield from _class_faults(found, "too slow for what they say")


def _label_of_two(evidence: Evidence) -> Iterator[Fault]:
    found = [slow for slow in _too_slow(evidence) if _true_float32(slow)]
    yield from _class_faults(found, "true float32 beside TF32 under one label")


def _class_faults(found: Sequence[_Slow], words: str) -> Iterator[Fault]:
    for slow in sorted(found, key=lambda each: _rate(each.best) / _rate(each.fast)):
        rates = (
            f"{slow.best.model} reaches {_rate(slow.best) / 1e12:.3g} TFLOP/s on "
            f"{slow.best.device} at tp {slow.best.tp}, the narrower {slow.fast.model} "
            f"{_rate(slow.fast) / 1e12:.3g}"
        )
        for row in slow.rows:
            yield at(row.place, f"{words}: {rates}")


def _is_attention(row: EfficiencyRow) -> bool:
    return any(word in row.operation.lower() for word in ATTENTION)


def _efficiency_above_one(evidence: Evidence) -> Iterator[Fault]:
    for row in sorted(evidence.inputs.efficiencies, key=lambda row: -row.efficiency):
        if row.efficiency > 1 and not _is_attention(row):
            yield at(row.place, f"{row.efficiency:.3f} in {row.operation} on {row.device}")


def _efficiency_not_positive(evidence: Evidence) -> Iterator[Fault]:
    for row in evidence.inputs.efficiencies:
        if row.efficiency <= 0:
            yield at(row.place, f"{row.efficiency:g} in {row.operation} on {row.device}")


def _causal_full(evidence: Evidence) -> Iterator[Fault]:
    for row in sorted(evidence.inputs.efficiencies, key=lambda row: -row.efficiency):
        if row.efficiency > 1 and _is_attention(row):
            words = f"{row.efficiency:.3f} of the peak in {row.operation} on {row.device}"
            yield at(row.place, f"{words}; all rows of attention there count the same way")


def _ignored_key(evidence: Evidence) -> Iterator[Fault]:
    by_size = grouped(
        evidence.inputs.efficiencies,
        lambda row: (row.place.file, row.source, row.device, row.operation, _sizes(row)),
    )
    for rows in by_size.values():
        known = [row for row in rows if row.efficiency > 0]
        if len(known) < 2:
            continue
        low = min(known, key=lambda row: row.efficiency)
        high = max(known, key=lambda row: row.efficiency)
        first, second = dict(_shape(low)), dict(_shape(high))
        names = {key for key in first.keys() | second.keys() if first.get(key) != second.get(key)}
        ratio = high.efficiency / low.efficiency
        if names and ratio > 1 + DIFFERENCE:
            words = f"{low.operation} on {low.device}: shapes alike but for {some(names)}"
            yield at(high.place, f"{words} differ by {ratio - 1:.0%}")


def _shape(row: EfficiencyRow) -> list[tuple[str, str]]:
    pairs = [part.partition("=") for part in row.shape.split(",")]
    return [(key.strip(), value.strip()) for key, _, value in pairs]


def _sizes(row: EfficiencyRow) -> tuple[tuple[str, str], ...]:
    """What decides the work: every number of the shape, and how its operands lie."""
    shape = _shape(row)
    return tuple(sorted(each for each in shape if each[1].isdecimal() or each[0] in ORIENTATION))


def _digits(seconds: float) -> int:
    """Significant digits of the time in microseconds, to a nanosecond."""
    return len(f"{seconds * 1e6:.3f}".replace(".", "").strip("0"))


def _equal(first: dict[object, float], second: dict[object, float]) -> int:
    """How many values two tables share at the same keys; 0 where too few of them do."""
    common = first.keys() & second.keys()
    telling = [key for key in common if _digits(first[key]) >= DIGITS]
    same = [key for key in telling if first[key] == second[key]]
    distinct = {first[key] for key in same}
    enough = len(distinct) >= MIN_EQUAL and len(same) >= SHARE_EQUAL * len(telling)
    return sum(first[key] == second[key] for key in common) if enough else 0


def _alike(
    tables: Mapping[Owner, dict[object, float]],
) -> Iterator[tuple[Owner, Owner, int]]:
    """Pairs of tables in their order that share values, and how many.

    Only pairs with enough telling values in common are compared: most tables have none.
    """
    owners: dict[tuple[object, float], list[int]] = {}
    for position, table in enumerate(tables.values()):
        for key, value in table.items():
            if _digits(value) >= DIGITS:
                owners.setdefault((key, value), []).append(position)
    shared: Counter[tuple[int, int]] = Counter()
    for group in owners.values():
        shared.update(combinations(group, 2))
    names = tuple(tables)
    for one, two in sorted(pair for pair, count in shared.items() if count >= MIN_EQUAL):
        same = _equal(tables[names[one]], tables[names[two]])
        if same:
            yield names[one], names[two], same


def _copied(evidence: Evidence) -> Iterator[Fault]:
    rows = [row for row in evidence.timed if row.forward is not None]
    for group in grouped(rows, lambda row: (row.origin, row.precision)).values():
        owners = grouped(group, lambda row: f"{row.model} on {row.device}")
        for one, two, same in _alike({name: _times(each) for name, each in owners.items()}):
            for source, copy in ((one, two), (two, one)):
                # Which of the two was measured, the numbers do not say.
                words = f"{same} times of {copy} equal those of {source} exactly"
                yield from (at(row.place, words) for row in owners[copy])
    samples = grouped(evidence.inputs.layer_samples, lambda row: row.sample.device)
    tables: dict[str, dict[object, float]] = {
        name: {row.sample.shape: row.sample.median_seconds for row in each}
        for name, each in samples.items()
    }
    for one, two, same in _alike(tables):
        words = f"{same} times of {two} equal those of {one} exactly"
        yield from (at(row.place, words) for row in samples[two])


def _times(rows: list[Timed]) -> dict[object, float]:
    times: dict[object, float] = {}
    for row in rows:
        key = (row.operation, row.layer, row.variant, row.microbatch_size, row.tp)
        times[(*key, "forward")] = row.forward or 0.0
        if row.backward is not None:
            times[(*key, "backward")] = row.backward
    return times


RULES = (
    Rule(
        id="time-not-positive",
        severity=Severity.ERROR,
        title="a time of zero or below",
        explanation="Work takes time. Zero usually stands for a row that was not measured or was "
        "rounded away.",
        advice="Leave the row out, or measure it again with more repeats.",
        check=_not_positive,
    ),
    Rule(
        id="time-sentinel",
        severity=Severity.ERROR,
        title="a mark for a failed measurement among the times",
        explanation="A round power of ten of many seconds is what profilers write when a "
        "configuration ran out of memory. A fit takes it for a time.",
        advice="Drop these rows, or turn them into a statement that the shape does not fit.",
        check=_sentinels,
    ),
    Rule(
        id="backward-not-measured",
        severity=Severity.WARNING,
        title="a backward pass of next to nothing",
        explanation="The backward pass takes less than a twentieth of the forward pass. Often the "
        "layer's input needs no gradient (the embedding), so its backward was never part of what "
        "was timed.",
        advice="Take the time of that backward pass from a measurement that has it.",
        check=_backward_missing,
    ),
    Rule(
        id="input-gradient-only",
        severity=Severity.WARNING,
        title="a backward pass of matrix products about as long as the forward pass",
        explanation="The backward pass of a product with weights is two products: the gradient of "
        "the input and that of the weights. A backward time near the forward time has one of them.",
        advice="Add one forward-sized product per product, or measure with weight gradients.",
        check=_input_gradient,
    ),
    Rule(
        id="backward-faster-than-forward",
        severity=Severity.WARNING,
        title="a backward pass shorter than the forward pass",
        explanation="The backward pass of a layer with weights has at least the operations of the "
        "forward pass. If it is shorter, the forward time contains something else (the first "
        "run, communication, the loss), or the two columns are swapped.",
        advice="Look at what was between the timers; measure both passes again.",
        check=_backward_faster,
    ),
    Rule(
        id="communication-inside",
        severity=Severity.WARNING,
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
        severity=Severity.WARNING,
        title="the smallest microbatch takes longer than the next one",
        explanation="More work cannot take less time. The smallest size is measured first, and "
        "its time contains what happens once: compilation, allocation, choice of algorithms.",
        advice="Drop the first size, or measure it again after a warm-up.",
        check=_warm_up,
    ),
    Rule(
        id="times-do-not-grow",
        severity=Severity.WARNING,
        title="the same time for twice the work",
        explanation="A device that is busy takes longer for twice the microbatch. Equal times mean "
        "that something else was measured (a queue that was not waited for), or copied.",
        advice="Check that the timer waits for the device; measure both sizes again.",
        check=_not_growing,
    ),
    Rule(
        id="mixed-precisions",
        severity=Severity.WARNING,
        title="rows of several precisions in one table",
        explanation="A reader that does not filter by precision averages times that differ by a "
        "factor of two to sixteen.",
        advice="Filter by the precision column, or split the table.",
        check=_mixed_precisions,
    ),
    Rule(
        id="faster-than-peak",
        severity=Severity.ERROR,
        title="more operations per second than the device has",
        explanation="The operations of the shape over the time exceed the device's peak rate in "
        "the precision that the row names. The label is wrong (TF32 called fp32, another device), "
        "or the row covers less work than it says.",
        advice="Find out in which precision it was measured, and on which device; relabel it.",
        check=_faster_than_peak,
    ),
    Rule(
        id="slower-than-class",
        severity=Severity.WARNING,
        title="a model far less efficient than narrower ones on the same device",
        explanation="Wider layers use a device better. Rows that reach less than a third of the "
        "rate of a narrower model were measured with something else: another precision, another "
        "shape, a device that was shared or throttled.",
        advice="Do not fit them together with the others; measure one of the rows again.",
        check=_slower_than_class,
    ),
    Rule(
        id="one-label-two-precisions",
        severity=Severity.WARNING,
        title="true float32 and TF32 under one label",
        explanation="Rows of one device and one label differ by what lies between its float32 and "
        "its TF32 rate: torch.backends.cuda.matmul.allow_tf32 was not the same.",
        advice="Split the rows by what they reach, and label both parts.",
        check=_label_of_two,
    ),
    Rule(
        id="efficiency-above-one",
        severity=Severity.ERROR,
        title="more than the peak rate",
        explanation="An efficiency above 1 is more operations per second than the device has: the "
        "peak belongs to another precision, or the operations are counted twice.",
        advice="Check the peak that the efficiency was computed with.",
        check=_efficiency_above_one,
    ),
    Rule(
        id="efficiency-not-positive",
        severity=Severity.ERROR,
        title="an efficiency of zero or below",
        explanation="Zero stands for a measurement that failed.",
        advice="Leave the row out.",
        check=_efficiency_not_positive,
    ),
    Rule(
        id="causal-attention-counted-full",
        severity=Severity.ERROR,
        title="attention with more than the peak rate",
        explanation="A causal kernel computes half of the scores. Its efficiency exceeds 1 when "
        "the full square is counted: then every attention row of the table counts it, those below "
        "1 too.",
        advice="Use full-attention operations with these efficiencies; do not halve them again.",
        check=_causal_full,
    ),
    Rule(
        id="key-ignores-a-column",
        severity=Severity.WARNING,
        title="equal sizes, different efficiencies",
        explanation="Rows agree in every size and differ in something that is easily left out of "
        "a key, such as the type of the output. A look-up by sizes returns one of them by chance.",
        advice="Make what differs part of the key.",
        check=_ignored_key,
    ),
    Rule(
        id="copied-values",
        severity=Severity.WARNING,
        title="numbers of another device or model",
        explanation="Many times with many digits are exactly equal under two names. Two "
        "measurements never are: one of them was copied, by hand or by a script that fell back.",
        advice="Find out which of the two was measured; leave the other out.",
        check=_copied,
    ),
)
