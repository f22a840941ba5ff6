"""Layer samples of one population per device to laws, with errors on sizes left out.

One law per (device kind, precision, layer kind, phase), whatever the architecture: the columns
say how GPT and Llama layers differ. An optimizer has one law per (device kind, precision).

Columns are dropped in the order of `layer.values` until the rows can tell the remaining ones
apart: at least as many distinct points as columns, and no column that is a mixture of others on
all rows (with one hidden size, bytes of elementwise work and operations grow alike). A transformer
layer's law may be held near a datasheet's rates instead (`layer.weak_prior`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hetplan.job.spec import Precision
from hetplan.model.spec import TRAINED_KINDS, Architecture, LayerKind
from hetplan.predict.datasheet import MATRIX_LOG_HALFWIDTH
from hetplan.predict.law_parts import (
    UNCHECKED,
    MeasuredRange,
    Term,
    interval,
    refuse,
    validation_of,
)
from hetplan.predict.layer.tables import (
    LayerTable,
    layer_tables,
    left_out_sizes,
    measured_layers,
    measured_updates,
    repaired,
    repeat_log_halfwidth,
    table_key,
)
from hetplan.predict.layer.values import (
    ALL_LAYERS,
    OPTIMIZER_SETS,
    Column,
    LayerLaw,
    column_sets,
    layer_columns,
    measured_layer,
    range_names,
)
from hetplan.predict.layer.weak_prior import Candidate, Passes, choose
from hetplan.predict.operator.laws import gain_is_earned
from hetplan.predict.predictor import LayerQuery
from hetplan.predict.regression import (
    MIN_CALIBRATION_ROWS,
    conformal_halfwidth,
    independent,
)
from hetplan.profiling.samples import LayerSample, Phase

_Key = tuple[str, str, str, str]
"""Device, precision, layer, phase."""

UNVALIDATED_LOG_HALFWIDTH = MATRIX_LOG_HALFWIDTH
"""Least half-width where too few errors set it: a law that was never tested on a size it had not
seen is trusted no more than a datasheet's, nor more than a second measurement."""

_OPTIMIZER_PREFIX = f"{Phase.OPTIMIZER.value}:"


@dataclass(frozen=True, slots=True)
class _Draft:
    """A law before its interval, with the errors that will set it."""

    law: LayerLaw
    """Its half-widths, their calibration and the layers that answer for themselves are not set."""
    originals: tuple[LayerSample, ...]
    """As measured."""
    samples: tuple[LayerSample, ...]
    """None slower than one of more work."""
    errors: tuple[float, ...]
    table_errors: tuple[float, ...]


def measured_values(query: LayerQuery) -> tuple[float, ...]:
    """Values of `range_names`, for one prediction or sample."""
    values: tuple[float, ...] = (
        query.model.hidden_size,
        query.sequence_length,
        query.microbatch_size,
        query.tp,
    )
    return values if query.layer is LayerKind.TRANSFORMER else (*values, query.model.vocab_size)


def sample_query(sample: LayerSample) -> LayerQuery:
    """What a sample is the answer to."""
    return measured_layer(
        sample,
        sample.vocab_size,
        layer=sample.layer,
        precision=sample.precision,
        phase=sample.phase,
        microbatch_size=sample.microbatch_size,
    )


def fit_layer_laws(samples: Sequence[LayerSample]) -> tuple[LayerLaw, ...]:
    """One law per device, precision, layer kind and phase in the samples, in that order.

    An InputError names every sample that cannot be used (an unknown word, a time that is no
    positive number).
    """
    refuse("layer", samples, "device", _problem)
    groups: dict[_Key, list[LayerSample]] = {}
    for sample in samples:
        groups.setdefault(_key(sample), []).append(sample)
    ordered = sorted(groups.items(), key=lambda item: item[0])
    drafts = [
        _draft(key, rows, [both for other, both in ordered if other[:3] == key[:3]])
        for key, rows in ordered
    ]
    return tuple(_finish(draft, drafts) for draft in drafts)


def _key(sample: LayerSample) -> _Key:
    layer = ALL_LAYERS if sample.phase.startswith(_OPTIMIZER_PREFIX) else sample.layer
    return sample.device, sample.precision, layer, sample.phase


def _problem(sample: LayerSample) -> str:
    """What is wrong with a sample; empty: nothing."""
    phases = (Phase.FORWARD.value, Phase.BACKWARD.value)
    if not (math.isfinite(sample.median_seconds) and sample.median_seconds > 0):
        return f"median_seconds is {sample.median_seconds}; a time is more than 0"
    if sample.layer not in TRAINED_KINDS:
        return f"layer is {sample.layer!r}; it is one of {', '.join(TRAINED_KINDS)}"
    if sample.architecture not in tuple(Architecture):
        return f"architecture is {sample.architecture!r}; it is one of {', '.join(Architecture)}"
    if sample.precision not in tuple(Precision):
        return f"precision is {sample.precision!r}; it is one of {', '.join(Precision)}"
    if sample.phase not in phases and not sample.phase.startswith(_OPTIMIZER_PREFIX):
        return f"phase is {sample.phase!r}; it is forward, backward or optimizer:<its name>"
    return ""


def _row_values(sample: LayerSample, columns: Sequence[Column]) -> tuple[float, ...]:
    if sample.phase.startswith(_OPTIMIZER_PREFIX):
        parameters = _updated_parameters(sample)
        return tuple(parameters if column is Column.PARAMETERS else 1.0 for column in columns)
    values = layer_columns(sample_query(sample))
    return tuple(values.value(column) for column in columns)


def _values(sample: LayerSample) -> tuple[float, ...]:
    """Values of the range names of the sample's law."""
    if sample.phase.startswith(_OPTIMIZER_PREFIX):
        return (_updated_parameters(sample),)
    return measured_values(sample_query(sample))


def _updated_parameters(sample: LayerSample) -> float:
    model, layer = sample_query(sample).model, LayerKind(sample.layer)
    return float(sample.copies * model.parameters(layer, sample.tp))


def _choose_columns(
    sets: Sequence[tuple[Column, ...]], samples: Sequence[LayerSample]
) -> tuple[tuple[Column, ...], list[tuple[float, ...]]]:
    """The richest column set that the samples can tell apart, and the rows' values."""
    seconds = [sample.median_seconds for sample in samples]
    for columns in sets[:-1]:
        rows = [_row_values(sample, columns) for sample in samples]
        if independent(rows, seconds):
            return columns, rows
    return sets[-1], [_row_values(sample, sets[-1]) for sample in samples]


def _leave_out(samples: Sequence[LayerSample], layer: str) -> tuple[str, list[float]]:
    """What to leave out, one value at a time, and its value in each row."""
    if layer == ALL_LAYERS:
        hidden = [float(sample.hidden_size) for sample in samples]
        if len(set(hidden)) > 1:
            return "hidden", hidden
    names = range_names(layer)
    columns = zip(*(_values(sample) for sample in samples), strict=True)
    by_name = {name: list(values) for name, values in zip(names, columns, strict=True)}
    for name in ("hidden", "microbatch", "sequence", "tp", "parameters"):
        if len(set(by_name.get(name, ()))) > 1:
            return name, by_name[name]
    return "", []


def _chosen(
    key: _Key,
    sets: Sequence[tuple[Column, ...]],
    samples: Sequence[LayerSample],
    both: Sequence[Sequence[LayerSample]],
) -> Candidate:
    """The columns that the samples can tell apart; of a transformer layer, what leaves least.

    `both` are all samples of each pass of the same layers.
    """
    columns, rows = _choose_columns(sets, samples)
    plain = Candidate(columns=columns, rows=rows)
    if key[2] != LayerKind.TRANSFORMER:
        return plain
    hidden = [float(sample.hidden_size) for sample in samples]
    measured = [_passes(each) for each in both]
    return choose(plain, key[0], key[1], _passes(samples), hidden, measured)


def _passes(samples: Sequence[LayerSample]) -> Passes:
    return Passes(
        phase=samples[0].phase,
        rows_of=lambda columns: [_row_values(sample, columns) for sample in samples],
        seconds=[sample.median_seconds for sample in samples],
    )


def _draft(
    key: _Key, originals: Sequence[LayerSample], both: Sequence[Sequence[LayerSample]]
) -> _Draft:
    device, precision, layer, phase = key
    # Updates do not depend on microbatches: only layers of more work cannot be faster.
    samples = tuple(originals) if layer == ALL_LAYERS else repaired(originals)
    sets = OPTIMIZER_SETS if layer == ALL_LAYERS else column_sets(LayerKind(layer))
    seconds = [sample.median_seconds for sample in samples]
    chosen = _chosen(key, sets, samples, both)
    coefficients = chosen.fit(chosen.rows, seconds)
    left_out, groups = _leave_out(samples, layer)
    errors = chosen.left_out(seconds, groups) if left_out else ()
    points = len({_row_values(sample, sets[0]) for sample in samples})
    tables, table_errors = _tables(layer, samples, chosen, seconds)
    columns = zip(*(_values(sample) for sample in samples), strict=True)
    law = LayerLaw(
        device=device,
        precision=precision,
        layer=layer,
        phase=phase,
        terms=tuple(
            Term(column=column.value, coefficient=coefficient)
            for column, coefficient in zip(chosen.columns, coefficients, strict=True)
        ),
        ranges=tuple(
            MeasuredRange(quantity=name, least=min(values), most=max(values))
            for name, values in zip(range_names(layer), columns, strict=True)
        ),
        log_halfwidth=0.0,
        calibration="",
        rows=len(samples),
        points=points,
        validation=validation_of(left_out, len(set(groups)), errors),
        notes=_notes(sets[0], chosen, samples, points, left_out, table_errors),
        tables=tables,
    )
    return _Draft(law, tuple(originals), samples, errors, table_errors)


def _tables(
    layer: str, samples: Sequence[LayerSample], law: Candidate, seconds: Sequence[float]
) -> tuple[tuple[LayerTable, ...], tuple[float, ...]]:
    """Tables of the measured layers and their errors on sizes left out, where they beat the law."""
    sizes = [sample.microbatch_size for sample in samples]
    if layer == ALL_LAYERS or len(set(sizes)) < 3:
        return (), ()
    tables = layer_tables(samples)
    inner = left_out_sizes(tables)
    at = [(table_key(sample), size) for sample, size in zip(samples, sizes, strict=True)]
    judged = [index for index, each in enumerate(at) if each in inner]
    if len(judged) < MIN_CALIBRATION_ROWS:
        return (), ()
    by_law = law.left_out(seconds, sizes)
    by_table = tuple(inner[at[index]] for index in judged)
    if not gain_is_earned([by_law[index] for index in judged], by_table, 1.0):
        return (), ()
    return tables, by_table


def _notes(
    richest: Sequence[Column],
    law: Candidate,
    samples: Sequence[LayerSample],
    points: int,
    left_out: str,
    table_errors: Sequence[float],
) -> tuple[str, ...]:
    notes, columns = [], law.columns
    if law.centre:
        notes.append(f"coefficients are held near the datasheet's: {law.words}")
    elif len(columns) < len(richest):
        notes.append(
            f"{points} distinct points cannot tell {len(richest)} columns apart: fitted "
            f"{', '.join(columns)}"
        )
    if not left_out:
        notes.append("one size only: nothing could be left out, so the law is untested")
    elif left_out not in ("hidden", "parameters"):
        notes.append(f"one hidden size only: the errors leave out whole {left_out} sizes instead")
    unsteady = sum(not sample.steady for sample in samples)
    if unsteady:
        notes.append(f"{unsteady} of {len(samples)} rows did not reach a steady time")
    if table_errors:
        mean = sum(abs(math.expm1(-error)) for error in table_errors) / len(table_errors)
        notes.append(
            "times between measured microbatch sizes of one layer from its own table: "
            f"{mean:.1%} mean error on {len(table_errors)} sizes left out"
        )
    return tuple(notes)


def _halfwidth(draft: _Draft, drafts: Sequence[_Draft]) -> tuple[float, str]:
    """The interval's half-width and which errors set it."""
    device = draft.law.device
    pooled = [error for other in drafts if other.law.device == device for error in other.errors]
    usual = max(UNVALIDATED_LOG_HALFWIDTH, repeat_log_halfwidth(device))
    words = f"{usual:g}, what datasheets and second measurements are off by"
    if draft.errors:
        return interval(draft.errors, [(f"all laws of {device}", pooled)], usual, words)
    # A law that was never tested is not made surer by the others.
    return interval((), (), max(usual, conformal_halfwidth(pooled) or 0.0), words)


def _finish(draft: _Draft, drafts: Sequence[_Draft]) -> LayerLaw:
    """The law with its interval, and what was measured beside it where that knows better."""
    halfwidth, calibration = _halfwidth(draft, drafts)
    inside, between, checked = halfwidth, 0.0, UNCHECKED not in calibration
    if draft.law.tables:
        between = conformal_halfwidth(draft.table_errors) or 0.0
        inside = min(halfwidth, between)
    law = replace(
        draft.law,
        log_halfwidth=halfwidth,
        calibration=calibration,
        table_log_halfwidth=between,
    )
    if law.layer != ALL_LAYERS:
        layers = measured_layers(draft.originals, draft.samples, inside, checked=checked)
        return replace(law, measured=layers)
    parameters = [int(_updated_parameters(sample)) for sample in draft.samples]
    updates = measured_updates(draft.originals, parameters, inside, checked=checked)
    return replace(law, measured_updates=updates)
