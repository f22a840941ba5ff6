"""Which runs are slower than their neighbours, with nothing in their configuration to cause it?

Rows of one model on the same devices differ in tp, pp, dp and microbatch size. What these cost is
a sum of few non-negative terms (symbols: m microbatches of a replica, p stages, b bubble
(m + p - 1) / m, t tp, T tokens per device, h hidden size, L layers):

    b * operations per device            compute, stretched by the bubble
    b * T * L * h * (t - 1)              tensor-parallel collectives; once more beyond a node
    parameters / p * 2 (dp - 1) / dp     gradient reduction; once more where a node's NICs are not
                                         all in the group (t below the node's devices)
    (m + p - 1) * L / p                  per microbatch and layer: launches
    (m + p - 1) * t                      per microbatch: latency of the tensor-parallel groups

The coefficients come from the rows themselves, by quantile regression: a row that nothing explains
does not move it, and the sum runs along the lower part of the rows, which is what undisturbed
hardware does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hetplan.lint.evidence import Evidence
from hetplan.lint.findings import Severity
from hetplan.lint.rows import RunRow
from hetplan.lint.rule import Rule, Sighting, grouped, sighting

SLOWER = 0.10  # on 73 published runs the others stay within 7 %, the disturbed begin at 13 %
MIN_ROWS = 14  # twice the coefficients: fewer rows bend the sum to themselves
MAX_EXPLAINED = 0.04  # median residual; above it the sum is no law for these rows
QUANTILE = 0.2  # most disturbances slow a run down; none speeds it up
ROUNDS = 100  # reweighting has settled to 1e-4 long before
MIN_RESIDUAL = 1e-3  # keeps weights finite; below the noise of a step time


def slower_rows(rows: Sequence[RunRow]) -> list[tuple[RunRow, float]]:
    """(row, time over what its neighbours say, minus 1) of rows above `SLOWER`; slowest first."""
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


def _slower(evidence: Evidence) -> Iterator[Sighting]:
    found = [
        entry
        for rows in grouped(evidence.material.runs, _group).values()
        if len(rows) >= MIN_ROWS
        for entry in slower_rows(rows)
    ]
    for group in grouped(found, lambda entry: entry[0].place.file).values():
        words = ", ".join(f"line {row.place.line} {excess:+.0%}" for row, excess in group)
        yield sighting((row.place for row, _ in group), words)


RULES = (
    Rule(
        id="slower-than-neighbours",
        severity=Severity.SUSPICIOUS,
        title="runs slower than their neighbours without a cause",
        explanation="Runs of one model on the same devices follow a sum of compute, bubble, "
        "collectives and launches with common coefficients. These rows take more than 10 % longer "
        "than it: a slow node, a busy network or memory pressure was measured, which no model of "
        "the configuration can predict.",
        advice="List them when accuracy is reported; do not fit them, do not drop them silently.",
        check=_slower,
    ),
)
