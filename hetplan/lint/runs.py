"""Rules about training runs: do their parts fit together, and what made some of them slow?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from hetplan.errors import Fault
from hetplan.lint.evidence import Evidence
from hetplan.lint.findings import Rule, Severity, at, finding, grouped
from hetplan.lint.known import known_device, precision_of
from hetplan.lint.rows import RunRow

MFU_DISAGREES = 0.02  # published with three or four digits
RATE_FITS = 0.03  # parameters and vocabulary padding are known to 1 or 2 %
SLOWER = 0.10  # on 73 published runs the others stay within 7 %, the disturbed begin at 13 %
MIN_ROWS = 14  # twice the coefficients: fewer rows bend the sum to themselves
MAX_EXPLAINED = 0.04  # median residual; above it the sum is no law for these rows
QUANTILE = 0.2  # most disturbances slow a run down; none speeds it up
ROUNDS = 100  # reweighting has settled to 1e-4 long before
MIN_RESIDUAL = 1e-3  # keeps weights finite; below the noise of a step time


def _multiply(evidence: Evidence) -> Iterator[Fault]:
    for row in evidence.inputs.runs:
        product = row.tp * row.pp * row.cp * row.dp
        if row.devices is not None and product != row.devices:
            degrees = f"tp {row.tp} x pp {row.pp} x cp {row.cp} x dp {row.dp} = {product}"
            yield at(row.place, f"{degrees}, and the row has {row.devices} devices")


def _batches(evidence: Evidence) -> Iterator[Fault]:
    for row in evidence.inputs.runs:
        size, batch = row.microbatch_size, row.global_batch_size
        if size and batch and batch % (size * row.dp):
            words = f"microbatch size {size} x dp {row.dp} does not divide the batch of {batch}"
            yield at(row.place, words)


def _mfu(evidence: Evidence) -> Iterator[Fault]:
    for row in evidence.inputs.runs:
        device = known_device(row.device)
        peak = device.peak(precision_of(row.precision)) / device.margin if device else 0.0
        if row.mfu is None:
            continue
        if row.mfu > 1 or row.mfu <= 0:
            yield at(row.place, f"mfu is {row.mfu:g}")
        elif row.flops_per_second and peak:
            share = row.flops_per_second / peak
            if abs(share / row.mfu - 1) > MFU_DISAGREES:
                rate = f"{row.flops_per_second / 1e12:g} TFLOP/s are {share:.3f}"
                yield at(row.place, f"mfu {row.mfu:g}, and {rate} of {row.device}'s peak")


def _counts(row: RunRow) -> dict[str, float] | None:
    """Operations per token by the ways of counting them; None where the row says too little.

    N is the number of weights in products, 6 operations per weight and token; attention takes
    12 * layers * width * sequence with the full square (arXiv 2104.04473).
    """
    if not (row.layers and row.hidden and row.ffn_hidden and row.heads and row.sequence_length):
        return None
    if row.experts:
        return None  # the table does not say how many experts a token visits
    kv = (row.kv_heads or row.heads) / row.heads
    attention = row.hidden * row.hidden * (2 + 2 * kv)
    shapes = [attention + matrices * row.hidden * row.ffn_hidden for matrices in (2, 3)]
    vocabulary = (row.vocab or 0) * row.hidden
    layer = shapes[0]
    if row.parameters:
        layer = min(
            shapes,
            key=lambda each: abs(row.layers * each + 2 * vocabulary - row.parameters),  # type: ignore[operator]
        )
    products, head = 6.0 * row.layers * layer, 6.0 * vocabulary
    square = 12.0 * row.layers * row.hidden * row.sequence_length
    return {
        "model": products + square + head,
        "causal": products + square / 2 + head,
        "recompute": (products + square) * 4 / 3 + head,
    }


def _stated(row: RunRow) -> float | None:
    """Operations per token that the stated rate amounts to."""
    if not (row.flops_per_second and row.devices and row.step_seconds):
        return None
    if not (row.global_batch_size and row.sequence_length):
        return None
    tokens = row.global_batch_size * row.sequence_length
    return row.flops_per_second * row.devices * row.step_seconds / tokens


def _counted(evidence: Evidence) -> Iterator[tuple[RunRow, str, float, dict[str, float]]]:
    """(row, the way of counting that fits, stated operations, all ways); `none` where none fits."""
    for row in evidence.inputs.runs:
        stated, ways = _stated(row), _counts(row)
        if stated is None or ways is None:
            continue
        # Where two ways fit (short sequences), the usual one is meant.
        order = ("model", "causal", "recompute")
        best = min(order, key=lambda name: abs(stated / ways[name] - 1))
        if abs(stated / ways["model"] - 1) < RATE_FITS / 3:
            best = "model"
        fits = abs(stated / ways[best] - 1) <= RATE_FITS
        yield row, best if fits else "none", stated, ways


def _rates(evidence: Evidence, way: str) -> Iterator[Fault]:
    """Rows whose rate fits this way of counting."""
    for row, best, stated, ways in _counted(evidence):
        if best == way:
            yield at(
                row.place,
                f"{row.model}: {(row.flops_per_second or 0) / 1e12:g} TFLOP/s amount to "
                f"{stated / ways['model']:.3f} of the model's operations with full attention "
                f"({stated / ways['causal']:.3f} with causal attention, "
                f"{stated / ways['recompute']:.3f} with recompute)",
            )


def _mixed_kinds(evidence: Evidence) -> Iterator[Fault]:
    for rows in grouped(evidence.inputs.runs, lambda row: row.place.file).values():
        kinds = grouped(rows, lambda row: (row.step_kind.split(":")[0].split() or [""])[0])
        if {"published", "derived"} <= set(kinds):
            counts = f"{len(kinds['published'])} published and {len(kinds['derived'])} derived"
            places = [row.place for row in kinds["derived"]]
            yield finding(places, f"{counts} step times in one table")


def _unsaid(evidence: Evidence) -> Iterator[Fault]:
    for row in evidence.inputs.runs:
        if row.step_seconds and not row.recompute:
            yield at(row.place, f"recompute is not given, as for {row.model}")


def _crosses_nodes(evidence: Evidence) -> Iterator[Fault]:
    for row in evidence.inputs.runs:
        if row.devices_per_node is not None and row.tp > row.devices_per_node:
            yield at(row.place, f"tp {row.tp} over nodes of {row.devices_per_node} devices")


def slower_rows(rows: Sequence[RunRow]) -> list[tuple[RunRow, float]]:
    """(row, time over what its neighbours say, minus 1) of rows above `SLOWER`; slowest first.

    Rows of one model on the same devices differ in tp, pp, dp and microbatch size. What these cost
    is a sum of few non-negative terms (symbols: m microbatches of a replica, p stages, b bubble
    (m + p - 1) / m, t tp, T tokens per device, h hidden size, L layers):

        b * operations per device            compute, stretched by the bubble
        b * T * L * h * (t - 1)              tensor-parallel collectives; once more beyond a node
        parameters / p * 2 (dp - 1) / dp     gradient reduction; once more where a node's NICs are
                                             not all in the group (t below the node's devices)
        (m + p - 1) * L / p                  per microbatch and layer: launches
        (m + p - 1) * t                      per microbatch: latency of the tensor-parallel groups

    The coefficients come from the rows themselves, by quantile regression: a row that nothing
    explains does not move it, and the sum runs along the lower part of the rows, which is what
    undisturbed hardware does.
    """
    import numpy as np
    from scipy.optimize import nnls

    usable = [row for row in rows if _complete(row)]
    if len(usable) < MIN_ROWS:
        return []
    terms = np.array([_terms(row) for row in usable])
    times = np.array([row.step_seconds or 0.0 for row in usable])
    # Columns of like size, so that no term is lost to rounding; a term that never occurs is left.
    scale = terms.max(axis=0)
    terms = terms[:, scale > 0] / scale[scale > 0]
    weights = np.ones(len(usable))
    residuals = weights
    for _ in range(ROUNDS):
        coefficients, _ = nnls(terms * (weights / times)[:, None], weights)
        expected = terms @ coefficients
        if not (expected > 0).all():
            return []
        residuals = times / expected - 1
        side = np.where(residuals > 0, QUANTILE, 1 - QUANTILE)
        weights = np.sqrt(side / np.maximum(np.abs(residuals), MIN_RESIDUAL))
    if float(np.median(np.abs(residuals))) > MAX_EXPLAINED:
        return []
    # The sum runs along the lower part of the rows: the middle of them is what a run takes.
    excess = (1 + residuals) / (1 + np.median(residuals)) - 1
    # A quantile regression can end on a corner that few rows support: what is left after a plain
    # fit of all the other rows is disturbed.
    rest = excess <= SLOWER
    coefficients, _ = nnls(terms[rest] / times[rest][:, None], np.ones(int(rest.sum())))
    expected = terms @ coefficients
    if rest.sum() < MIN_ROWS // 2 or not (expected > 0).all():
        return []
    again = times / expected - 1
    found = [
        (row, float(each))
        for row, each, second in zip(usable, excess, again, strict=True)
        if each > SLOWER and second > SLOWER
    ]
    return sorted(found, key=lambda entry: -entry[1])


def _complete(row: RunRow) -> bool:
    needed = (row.layers, row.hidden, row.sequence_length, row.devices, row.devices_per_node)
    batch = row.microbatch_size and row.global_batch_size and row.step_seconds
    return all(needed) and bool(batch) and (row.step_seconds or 0) > 0 and _microbatches(row) >= 1


def _microbatches(row: RunRow) -> int:
    return (row.global_batch_size or 0) // (row.dp * (row.microbatch_size or 1))


def _terms(row: RunRow) -> tuple[float, ...]:
    layers, hidden = float(row.layers or 0), float(row.hidden or 0)
    node, microbatches = row.devices_per_node or 1, float(_microbatches(row))
    slots = microbatches + row.pp - 1
    bubble = slots / microbatches
    batch = float(row.global_batch_size or 0)
    tokens = batch * (row.sequence_length or 0) / (row.devices or 1)
    parameters = 12.0 * layers * hidden * hidden
    collectives = bubble * tokens * layers * hidden * (row.tp - 1)
    reduction = parameters / row.pp * 2 * (row.dp - 1) / row.dp
    return (
        bubble * tokens * parameters,
        collectives,
        collectives * (row.tp > node),
        reduction,
        reduction * (row.tp < node and row.dp > 1),
        slots * layers / row.pp,
        slots * row.tp,
    )


def _group(row: RunRow) -> tuple[object, ...]:
    return (
        row.place.file,
        row.source,
        row.model,
        row.device,
        row.devices,
        row.global_batch_size,
        row.sequence_length,
        row.precision,
        row.recompute,
    )


def _slower(evidence: Evidence) -> Iterator[Fault]:
    found = [
        entry
        for rows in grouped(evidence.inputs.runs, _group).values()
        if len(rows) >= MIN_ROWS
        for entry in slower_rows(rows)
    ]
    for group in grouped(found, lambda entry: entry[0].place.file).values():
        words = ", ".join(f"line {row.place.line} {excess:+.0%}" for row, excess in group)
        yield finding((row.place for row, _ in group), words)


RULES = (
    Rule(
        id="degrees-do-not-multiply",
        severity=Severity.ERROR,
        title="tp x pp x cp x dp is not the number of devices",
        explanation="Every device belongs to one place of the mesh. A product that differs means "
        "a column that is wrong or that means something else.",
        advice="Correct the degree that is off.",
        check=_multiply,
    ),
    Rule(
        id="batch-does-not-divide",
        severity=Severity.ERROR,
        title="a batch that its microbatches do not divide",
        explanation="The global batch is microbatch size times dp times a whole number.",
        advice="Correct the batch, the microbatch size or dp.",
        check=_batches,
    ),
    Rule(
        id="mfu-disagrees",
        severity=Severity.ERROR,
        title="an mfu that the rate beside it does not give",
        explanation="Model FLOP/s utilisation is the rate over the device's dense peak.",
        advice="Recompute it; look for a peak with sparsity or of another precision.",
        check=_mfu,
    ),
    Rule(
        id="rate-counts-recompute",
        severity=Severity.WARNING,
        title="FLOP/s that count recomputed operations",
        explanation="The stated rate is a third higher than the model's operations over the step "
        "time: it counts the second forward pass of full recompute.",
        advice="Divide by 4/3 before comparing with rates that count the model's operations once.",
        check=partial(_rates, way="recompute"),
    ),
    Rule(
        id="rate-counts-causal-half",
        severity=Severity.WARNING,
        title="FLOP/s that count causal attention at half",
        explanation="The stated rate fits the model's operations with half of the attention "
        "square; most publications count all of it.",
        advice="Do not compare it with rates that count the full square; compare step times.",
        check=partial(_rates, way="causal"),
    ),
    Rule(
        id="rate-disagrees",
        severity=Severity.WARNING,
        title="FLOP/s that no way of counting gives",
        explanation="The stated rate and the step time of one row amount to other operations than "
        "the model has, however they are counted. About two thirds of them is fine-tuning with "
        "frozen weights, which has no weight gradients.",
        advice="Trust the step time; find out what the rate counts.",
        check=partial(_rates, way="none"),
    ),
    Rule(
        id="mixed-step-time-kinds",
        severity=Severity.WARNING,
        title="published and derived step times in one table",
        explanation="A derived step time inherits the rounding and the counting of the throughput "
        "it was computed from. An error over both kinds says little about either.",
        advice="Report the two kinds apart.",
        check=_mixed_kinds,
    ),
    Rule(
        id="recompute-not-said",
        severity=Severity.WARNING,
        title="runs that do not say whether they recompute",
        explanation="Full recompute adds a third to the operations and divides the activations by "
        "ten. Without it neither time nor memory can be judged.",
        advice="Find it out, or leave the rows out of accuracy figures.",
        check=_unsaid,
    ),
    Rule(
        id="tp-crosses-nodes",
        severity=Severity.WARNING,
        title="tensor parallelism over more than a node",
        explanation="tp is larger than the devices of a node: its collectives run over the "
        "network, several times slower than inside a node.",
        advice="Keep these rows apart when a law for one node is fitted.",
        check=_crosses_nodes,
    ),
    Rule(
        id="slower-than-neighbours",
        severity=Severity.WARNING,
        title="runs slower than their neighbours without a cause",
        explanation="Runs of one model on the same devices follow a sum of compute, bubble, "
        "collectives and launches with common coefficients. These rows take more than 10 % longer "
        "than it: a slow node, a busy network or memory pressure was measured, which no model of "
        "the configuration can predict.",
        advice="List them when accuracy is reported; do not fit them, do not drop them silently.",
        check=_slower,
    ),
)
