"""Rules about training runs and plans: do their parts fit together?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median

from hetplan.lint.evidence import Evidence, stage_numbers
from hetplan.lint.findings import Severity
from hetplan.lint.known import known_device, known_model, precision_of
from hetplan.lint.rows import LayerRow, RunRow
from hetplan.lint.rule import Rule, Sighting, grouped, per_file, sighting, some

MFU_DISAGREES = 0.02  # published with three or four digits
RATE_FITS = 0.03  # parameters and vocabulary padding are known to 1 or 2 %
PROFILE_FITS = 0.25  # a sum of layers is within it; another precision is off by 2 or more
MIN_RUNS = 3


def _multiply(evidence: Evidence) -> Iterator[Sighting]:
    rows = [
        row
        for row in evidence.material.runs
        if row.devices is not None and row.tp * row.pp * row.cp * row.dp != row.devices
    ]
    yield from per_file(
        rows,
        lambda row: row.place,
        lambda group: (
            f"tp {group[0].tp} x pp {group[0].pp} x cp {group[0].cp} x dp "
            f"{group[0].dp} = "
            f"{group[0].tp * group[0].pp * group[0].cp * group[0].dp}, and the row has "
            f"{group[0].devices} devices"
        ),
    )


def _batches(evidence: Evidence) -> Iterator[Sighting]:
    rows = [
        row
        for row in evidence.material.runs
        if row.microbatch_size
        and row.global_batch_size
        and row.global_batch_size % (row.microbatch_size * row.dp)
    ]
    yield from per_file(
        rows,
        lambda row: row.place,
        lambda group: (
            f"microbatch size {group[0].microbatch_size} x dp {group[0].dp} does not "
            f"divide the batch of {group[0].global_batch_size}"
        ),
    )


def _mfu(evidence: Evidence) -> Iterator[Sighting]:
    wrong: list[tuple[RunRow, str]] = []
    for row in evidence.material.runs:
        device = known_device(row.device)
        peak = device.peak(precision_of(row.precision)) / device.margin if device else 0.0
        if row.mfu is None:
            continue
        if row.mfu > 1 or row.mfu <= 0:
            wrong.append((row, f"mfu is {row.mfu:g}"))
        elif row.flops_per_second and peak:
            each = row.flops_per_second / peak
            if abs(each / row.mfu - 1) > MFU_DISAGREES:
                wrong.append(
                    (
                        row,
                        f"mfu {row.mfu:g}, and {row.flops_per_second / 1e12:g} TFLOP/s are "
                        f"{each:.3f} of {row.device}'s peak",
                    )
                )
    yield from per_file(wrong, lambda entry: entry[0].place, lambda group: group[0][1])


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
    for row in evidence.material.runs:
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


def _rate_words(group: Sequence[tuple[RunRow, str, float, dict[str, float]]]) -> str:
    row, _, stated, ways = group[0]
    return (
        f"{row.model}: {(row.flops_per_second or 0) / 1e12:g} TFLOP/s amount to "
        f"{stated / ways['model']:.3f} of the model's operations with full attention "
        f"({stated / ways['causal']:.3f} with causal attention, {stated / ways['recompute']:.3f} "
        "with recompute)"
    )


def _recompute_counted(evidence: Evidence) -> Iterator[Sighting]:
    rows = [entry for entry in _counted(evidence) if entry[1] == "recompute"]
    yield from per_file(rows, lambda entry: entry[0].place, _rate_words)


def _causal_half(evidence: Evidence) -> Iterator[Sighting]:
    rows = [entry for entry in _counted(evidence) if entry[1] == "causal"]
    yield from per_file(rows, lambda entry: entry[0].place, _rate_words)


def _rate_disagrees(evidence: Evidence) -> Iterator[Sighting]:
    rows = [entry for entry in _counted(evidence) if entry[1] == "none"]
    yield from per_file(rows, lambda entry: entry[0].place, _rate_words)


def _mixed_kinds(evidence: Evidence) -> Iterator[Sighting]:
    for file, rows in grouped(evidence.material.runs, lambda row: row.place.file).items():
        kinds = grouped(rows, lambda row: (row.step_kind.split(":")[0].split() or [""])[0])
        if {"published", "derived"} <= set(kinds):
            yield Sighting(
                file=file,
                lines=tuple(row.place.line for row in kinds["derived"][:10]),
                count=len(kinds["derived"]),
                found=f"{len(kinds['published'])} published and {len(kinds['derived'])} derived "
                "step times in one table",
            )


def _unsaid(evidence: Evidence) -> Iterator[Sighting]:
    rows = [row for row in evidence.material.runs if row.step_seconds and not row.recompute]
    yield from per_file(
        rows,
        lambda row: row.place,
        lambda group: f"recompute is not said of {some(row.model for row in group)}",
    )


def _crosses_nodes(evidence: Evidence) -> Iterator[Sighting]:
    rows = [
        row
        for row in evidence.material.runs
        if row.devices_per_node is not None and row.tp > row.devices_per_node
    ]
    yield from per_file(
        rows,
        lambda row: row.place,
        lambda group: (
            f"tp {max(row.tp for row in group)} over nodes of {group[0].devices_per_node} devices"
        ),
    )


def _from_profile(row: RunRow, tables: dict[tuple[str, str], list[LayerRow]]) -> float | None:
    """Seconds of the step by a profile's layers, without transfers; None: it has them not."""
    layers = stage_numbers(row.other, "layers_per_stage")
    if layers is None or not row.microbatch_size or not row.global_batch_size:
        return None
    profile = {
        each.layer: each.forward_seconds + (each.backward_seconds or 0.0)
        for each in tables.get((row.device, _plain(row.model)), [])
        if each.tp == row.tp and each.microbatch_size == row.microbatch_size
    }
    if len(profile) < sum(layers):
        return None
    starts = [sum(layers[:position]) for position in range(len(layers))]
    stages = [
        sum(profile.get(layer, 0.0) for layer in range(start, start + count))
        for start, count in zip(starts, layers, strict=True)
    ]
    microbatches = row.global_batch_size // (row.dp * row.microbatch_size)
    return sum(stages) + (microbatches - 1) * max(stages)


def _plain(model: str) -> str:
    known = known_model(model)
    return known.name if known is not None else model.lower()


def _other_precision(evidence: Evidence) -> Iterator[Sighting]:
    """Runs that a profile of another precision explains, where their own would be far off."""
    tables = grouped(
        [row for row in evidence.material.layers if row.layer is not None],
        lambda row: (row.device, _plain(row.model)),
    )
    fitting: list[tuple[RunRow, float, str]] = []
    for row in evidence.material.runs:
        said = precision_of(row.precision)
        labels = {
            precision_of(each.precision) for each in tables.get((row.device, _plain(row.model)), [])
        }
        if not said or len(labels) != 1 or said in labels or not row.step_seconds:
            continue
        seconds = _from_profile(row, tables)
        if seconds is not None:
            fitting.append((row, seconds / row.step_seconds, labels.pop()))
    for group in grouped(fitting, lambda entry: (entry[0].place.file, entry[0].device)).values():
        ratio = median(entry[1] for entry in group)
        if len(group) >= MIN_RUNS and abs(ratio - 1) <= PROFILE_FITS:
            row, _, label = group[0]
            yield sighting(
                (entry[0].place for entry in group),
                f"runs on {row.device} say {row.precision}, and the layer times labelled {label} "
                f"give {ratio:.2f} of their step time (median of {len(group)})",
            )


RULES = (
    Rule(
        id="degrees-do-not-multiply",
        severity=Severity.IMPOSSIBLE,
        title="tp x pp x cp x dp is not the number of devices",
        explanation="Every device belongs to one place of the mesh. A product that differs means "
        "a column that is wrong or that means something else.",
        advice="Correct the degree that is off.",
        check=_multiply,
    ),
    Rule(
        id="batch-does-not-divide",
        severity=Severity.IMPOSSIBLE,
        title="a batch that its microbatches do not divide",
        explanation="The global batch is microbatch size times dp times a whole number.",
        advice="Correct the batch, the microbatch size or dp.",
        check=_batches,
    ),
    Rule(
        id="mfu-disagrees",
        severity=Severity.IMPOSSIBLE,
        title="an mfu that the rate beside it does not give",
        explanation="Model FLOP/s utilisation is the rate over the device's dense peak.",
        advice="Recompute it; look for a peak with sparsity or of another precision.",
        check=_mfu,
    ),
    Rule(
        id="rate-counts-recompute",
        severity=Severity.SUSPICIOUS,
        title="FLOP/s that count recomputed operations",
        explanation="The stated rate is a third higher than the model's operations over the step "
        "time: it counts the second forward pass of full recompute.",
        advice="Divide by 4/3 before comparing with rates that count the model's operations once.",
        check=_recompute_counted,
    ),
    Rule(
        id="rate-counts-causal-half",
        severity=Severity.SUSPICIOUS,
        title="FLOP/s that count causal attention at half",
        explanation="The stated rate fits the model's operations with half of the attention "
        "square; most publications count all of it.",
        advice="Do not compare it with rates that count the full square; compare step times.",
        check=_causal_half,
    ),
    Rule(
        id="rate-disagrees",
        severity=Severity.SUSPICIOUS,
        title="FLOP/s that no way of counting gives",
        explanation="The stated rate and the step time of one row amount to other operations than "
        "the model has, however they are counted. About two thirds of them is fine-tuning with "
        "frozen weights, which has no weight gradients.",
        advice="Trust the step time; find out what the rate counts.",
        check=_rate_disagrees,
    ),
    Rule(
        id="mixed-step-time-kinds",
        severity=Severity.SUSPICIOUS,
        title="published and derived step times in one table",
        explanation="A derived step time inherits the rounding and the counting of the throughput "
        "it was computed from. An error over both kinds says little about either.",
        advice="Report the two kinds apart.",
        check=_mixed_kinds,
    ),
    Rule(
        id="recompute-not-said",
        severity=Severity.SUSPICIOUS,
        title="runs that do not say whether they recompute",
        explanation="Full recompute adds a third to the operations and divides the activations by "
        "ten. Without it neither time nor memory can be judged.",
        advice="Find it out, or leave the rows out of accuracy figures.",
        check=_unsaid,
    ),
    Rule(
        id="tp-crosses-nodes",
        severity=Severity.SUSPICIOUS,
        title="tensor parallelism over more than a node",
        explanation="tp is larger than the devices of a node: its collectives run over the "
        "network, several times slower than inside a node.",
        advice="Keep these rows apart when a law for one node is fitted.",
        check=_crosses_nodes,
    ),
    Rule(
        id="precision-label-contradicted",
        severity=Severity.SUSPICIOUS,
        title="runs that a profile of another precision explains",
        explanation="The layer times of another precision, summed up, give the step times; in the "
        "precision that the runs name they would be about half.",
        advice="Find out in which precision the runs were; relabel them.",
        check=_other_precision,
    ),
)
