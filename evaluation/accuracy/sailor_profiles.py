"""Sailor's layer profiles (github.com/eth-easl/sailor) as layer samples.

The file is {microbatch: {tp: {layer: [forward_s, backward_s, update_s]}}}, one of a model and a
GPU, or {model: {gpu: ...}} of that. Layer 0 is the embedding, the last one the head. What the file
does not say is taken from Sailor's own set-up and noted: float32 (its kernels use TF32 where the
GPU has it), sequences of 2048 tokens.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TypeAlias

from evaluation.accuracy.json_values import (
    Measured,
    Value,
    layer_sample,
    need_device,
    need_model,
    read_tree,
    tidy,
)
from hetplan.errors import Fault, InputError
from hetplan.importers.lines import refuse_all
from hetplan.importers.records import ImportContext, Imported
from hetplan.job.spec import Optimizer, Precision
from hetplan.model.spec import Architecture, LayerKind, ModelSpec
from hetplan.model.work import layer_work
from hetplan.profiling.samples import LayerSample, Phase

KIND = "sailor"

SEQUENCE_LENGTH = 2048  # what Sailor profiled; its files do not say it
ASSUMED_OPTIMIZER = Optimizer.ADAMW  # the files name no optimizer, and this is the usual one
_FAILED_SECONDS = 1e3  # no layer of any model takes that long: a mark of a run that failed
# On the published profiles the head's product runs 1 to 7 times as fast as a whole layer, and
# GPT-Neo's last layer, a norm alone, would run one 38 to 135 times as fast; between the two.
_NO_PROJECTION = 16.0
_IMPOSSIBLE_BANDWIDTH = 30e12  # bytes/s; the fastest memory announced, HBM4 on Rubin, has 22e12
PROFILED_LAYERS = 2
"""Transformer layers of the model whose update every layer of a file lists.

With two, an update moves 35.0 to 35.2 bytes per parameter of OPT-350 and GPT-Neo at the memory
bandwidth of the A100-40, and 33.5 of both on the V100: AdamW's 28 bytes in float32 at 80 to 84 % of
it. As a part of the whole model's time it would be ten times that.
"""
_PHASES = ("forward", "backward", "update")
_FAILED_WORDS = frozenset(("", "oom", "nan", "inf", "none", "null", "failed", "error"))


_Times: TypeAlias = tuple[float | None, float | None, float | None]
_Gaps: TypeAlias = dict[str, list[Value]]
"""Why, and the places where, one run has no time."""


@dataclass(slots=True)
class _Reading:
    """What is found on the way through one file."""

    samples: list[LayerSample] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    updates: list[tuple[Measured, float]] = field(default_factory=list)
    """Updates of the model that was profiled, where every layer lists the same time."""


def parse(text: str, context: ImportContext) -> Imported:
    """The samples of one model on one GPU; an InputError for what is no such file."""
    device = need_device(context, "Sailor")
    model = need_model(context, "Sailor")
    profile, device_name = _choose(read_tree(text, context.file), device, model)
    precision = context.precision or Precision.FLOAT32
    sequence = context.sequence_length or SEQUENCE_LENGTH
    found = _Reading()
    for microbatch_key, by_tp in profile.items():
        microbatch = by_tp.count_key(microbatch_key, "microbatch size")
        if _failed(by_tp):
            found.skipped.append(_skip(by_tp, "the run failed"))
            continue
        for tp_key, layers in by_tp.items():
            measured = Measured(
                device=device,
                model=model,
                precision=precision,
                sequence_length=sequence,
                microbatch_size=microbatch,
                tp=layers.count_key(tp_key, "tensor-parallel degree"),
            )
            if _failed(layers):
                found.skipped.append(_skip(layers, "the run failed"))
            else:
                _read_layers(layers, measured, found)
    refuse_all(found.faults)
    has_head = _drop_false_head(profile, model, found)
    _drop_false_backward(profile, model, found)
    _add_updates(model, found, has_head=has_head)
    if not found.samples:
        raise profile.refuse("the file holds no time of any layer")
    return Imported(
        kind=KIND,
        device_name=device_name,
        layers=tuple(found.samples),
        notes=_notes(context, found),
        skipped=tuple(found.skipped),
    )


def _choose(root: Value, device: str, model: ModelSpec) -> tuple[Value, str]:
    """The profile of this model and device, and what the file calls the device."""
    if all(re.fullmatch(r"[0-9]+", key, re.ASCII) for key, _ in root.items()):
        return root, ""
    by_device = _one(root, model.name, "model")[1]
    name, profile = _one(by_device, device, "device")
    return profile, tidy(name)


def _one(parent: Value, wanted: str, what: str) -> tuple[str, Value]:
    """The entry whose name says what is wanted; names differ in case, dashes and additions."""
    entries = list(parent.items())
    tests: tuple[Callable[[str], bool], ...] = (
        lambda name: name == wanted,
        lambda name: _bare(name) == _bare(wanted),
        lambda name: (
            len(_bare(name)) >= 3 and (_bare(name) in _bare(wanted) or _bare(wanted) in _bare(name))
        ),
        # GH-96 is nvidia-gh200-96gb: every part of the one is a part of the other.
        lambda name: bool(_parts(name)) and _parts(name) <= _parts(wanted),
    )
    for test in tests:
        matching = [entry for entry in entries if test(entry[0])]
        if len(matching) == 1:
            return matching[0]
    have = ", ".join(tidy(name) for name, _ in entries[:40]) or "none"
    raise parent.refuse(
        f"no single {what} here fits {tidy(wanted)}; there are {have}: name one of them"
    )


def _bare(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.casefold())


def _parts(name: str) -> set[str]:
    return set(re.findall(r"[a-z]+|[0-9]+", name.casefold()))


def _failed(value: Value) -> bool:
    """Whether the file marks this as a run without a result."""
    scalar = value.node.scalar
    if value.node.items is not None:
        return not value.node.items
    if value.node.entries is not None:
        return False
    return scalar is None or (isinstance(scalar, str) and scalar.casefold() in _FAILED_WORDS)


def _skip(value: Value, reason: str) -> str:
    return f"line {value.line}: {' '.join(tidy(str(step)) for step in value.path)}: {reason}"


def _read_layers(layers: Value, measured: Measured, found: _Reading) -> None:
    """Samples of every layer at one microbatch size and tensor-parallel degree."""
    problems = measured.model.slicing_faults(measured.tp)
    if problems:
        found.faults.append(layers.fault("; ".join(problems)))
        return
    rows = _rows(layers, measured.model, found)
    if rows is None:
        return
    gaps: _Gaps = {}
    numbers = [_times(row, found, gaps) for row in rows]
    _skip_gaps(layers, gaps, found)
    split = measured.model.num_layers + 1
    places = (
        (LayerKind.EMBEDDING, range(1)),
        (LayerKind.TRANSFORMER, range(1, split)),
        (LayerKind.HEAD, range(split, len(rows))),
    )
    for phase_at, phase in enumerate((Phase.FORWARD, Phase.BACKWARD)):
        for layer, positions in places:
            seconds = [numbers[at][phase_at] for at in positions]
            good = [value for value in seconds if value is not None]
            if layer is LayerKind.HEAD:
                # Llama's final norm and projection are two layers of the file and one of the model.
                good = [sum(good)] if len(good) == len(seconds) else []
            if good:
                found.samples.append(layer_sample(measured, layer, phase.value, good))
    _read_updates([row[2] for row in numbers], measured, found)


def _rows(layers: Value, model: ModelSpec, found: _Reading) -> list[Value] | None:
    """The layers in order; None, with a fault, where they are not the model's."""
    numbered = {}
    for key, value in layers.items():
        if not re.fullmatch(r"[0-9]{1,6}", key, re.ASCII):
            found.faults.append(value.fault("layers are numbered from 0"))
            return None
        if int(key) in numbered:
            found.faults.append(value.fault(f"layer {int(key)} is here twice; keep one"))
            return None
        numbered[int(key)] = value
    allowed = [model.num_layers + 2]
    if model.architecture is Architecture.LLAMA:
        allowed.append(model.num_layers + 3)
    if len(numbered) not in allowed:
        found.faults.append(
            layers.fault(
                f"found {len(numbered)} layers; {tidy(model.name)} has {allowed[0]} (embedding, "
                f"{model.num_layers} transformer layers, head): give the model that was measured"
            )
        )
        return None
    missing = [at for at in range(len(numbered)) if at not in numbered]
    if missing:
        found.faults.append(layers.fault(f"layer {missing[0]} is missing"))
        return None
    return [numbered[at] for at in range(len(numbered))]


def _times(row: Value, found: _Reading, gaps: _Gaps) -> _Times:
    """Forward, backward and update seconds; None for what was not measured, which joins `gaps`."""
    if _failed(row):
        gaps.setdefault("the run failed", []).append(row)
        return None, None, None
    try:
        entries = row.entries()
        if len(entries) != len(_PHASES):
            raise row.refuse(
                f"found {len(entries)} numbers; forward, backward and update seconds are expected"
            )
        forward, backward, update = (
            _seconds(entry, phase, gaps) for entry, phase in zip(entries, _PHASES, strict=True)
        )
    except InputError as error:
        found.faults.extend(error.faults)
        return None, None, None
    return forward, backward, update


def _seconds(entry: Value, phase: str, gaps: _Gaps) -> float | None:
    """The time; None where it is zero, negative or a mark of failure."""
    if _failed(entry):
        reason = "the run failed"
    else:
        seconds = entry.number()
        if 0 < seconds < _FAILED_SECONDS:
            return seconds
        if seconds == 0:
            reason = "0 s, not measured"
        elif seconds < 0:
            reason = f"{seconds:g} s, no time"
        else:
            reason = f"{seconds:g} s, the mark of a run that failed"
    gaps.setdefault(f"{phase}: {reason}", []).append(entry)
    return None


def _skip_gaps(layers: Value, gaps: _Gaps, found: _Reading) -> None:
    """One line per reason, with the line of the first and every layer's number."""
    depth = len(layers.path)
    for reason, values in gaps.items():
        which = _ranges([int(value.path[depth]) for value in values])
        place = " ".join(tidy(str(step)) for step in layers.path)
        found.skipped.append(f"line {values[0].line}: {place}: layers {which}: {reason}")


def _ranges(numbers: Sequence[int]) -> str:
    """`0, 2-5` for 0, 2, 3, 4, 5."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in parts)


def _drop_false_head(root: Value, model: ModelSpec, found: _Reading) -> bool:
    """Leave out heads that are too fast to hold the projection; whether the file has it.

    Only runs of the smallest tensor-parallel degree are compared: elsewhere the layers' times hold
    communication that the head's do not.
    """
    forward = [sample for sample in found.samples if sample.phase == Phase.FORWARD.value]
    least = min((sample.tp for sample in forward), default=0)
    rates: dict[tuple[int, str], float] = {}
    for sample in forward:
        if sample.tp == least:
            size, layer = sample.microbatch_size, LayerKind(sample.layer)
            work = layer_work(model, layer, size, sample.sequence_length, sample.tp)
            rates[size, layer.value] = work.flops / sample.median_seconds
    ratios = [
        rate / rates[size, LayerKind.TRANSFORMER.value]
        for (size, layer), rate in rates.items()
        if layer == LayerKind.HEAD.value and (size, LayerKind.TRANSFORMER.value) in rates
    ]
    if not ratios or median(ratios) <= _NO_PROJECTION:
        return True
    heads = [sample for sample in found.samples if sample.layer == LayerKind.HEAD.value]
    found.skipped.append(
        f"line {root.line}: the last layer of every run, {len(heads)} samples: it would run the "
        f"projection to {model.vocab_size} words {median(ratios):.0f} times as fast as the other "
        "layers run, so it holds none (a norm alone)"
    )
    found.samples = [sample for sample in found.samples if sample.layer != LayerKind.HEAD.value]
    return False


def _drop_false_backward(root: Value, model: ModelSpec, found: _Reading) -> None:
    """Leave out an embedding's backward that no memory could do: nobody waited for the device."""
    places = (LayerKind.EMBEDDING.value, Phase.BACKWARD.value)
    rows = [sample for sample in found.samples if (sample.layer, sample.phase) == places]
    rates = []
    for sample in rows:
        size, length = sample.microbatch_size, sample.sequence_length
        work = layer_work(model, LayerKind.EMBEDDING, size, length, sample.tp)
        width = Precision(sample.precision).bytes_per_element
        rates.append(work.elementwise_elements * width / sample.median_seconds)
    if not rates or max(rates) <= _IMPOSSIBLE_BANDWIDTH:
        return
    found.skipped.append(
        f"line {root.line}: the embedding's backward of every run, {len(rows)} samples: up to "
        f"{max(rates) / 1e12:.0f} TB/s, which no memory has: it was not waited for"
    )
    found.samples = [sample for sample in found.samples if (sample.layer, sample.phase) != places]


def _read_updates(updates: Sequence[float | None], measured: Measured, found: _Reading) -> None:
    """Samples of the optimizer's update.

    Sailor profiles a model of few layers and lists the one update of all of it for each layer: the
    same time for an embedding of 50 million parameters and a layer of 12. Such times are kept for
    `_add_updates`.
    """
    good = [value for value in updates if value is not None]
    phase = f"{Phase.OPTIMIZER.value}:{ASSUMED_OPTIMIZER.value}"
    if len(good) < len(updates):
        return
    split = measured.model.num_layers + 1
    if len(set(good)) == 1:
        found.updates.append((measured, good[0]))
        return
    for layer, values in (
        (LayerKind.EMBEDDING, good[:1]),
        (LayerKind.TRANSFORMER, good[1:split]),
        (LayerKind.HEAD, [sum(good[split:])]),
    ):
        found.samples.append(layer_sample(measured, layer, phase, values))


def _add_updates(model: ModelSpec, found: _Reading, *, has_head: bool) -> None:
    """The part of each profiled model's update that its transformer layers have by parameters."""
    phase = f"{Phase.OPTIMIZER.value}:{ASSUMED_OPTIMIZER.value}"
    copies = min(PROFILED_LAYERS, model.num_layers)
    for measured, seconds in found.updates:
        layers = copies * model.parameters(LayerKind.TRANSFORMER, measured.tp)
        ends = model.parameters(LayerKind.EMBEDDING, measured.tp)
        if has_head:
            ends += model.parameters(LayerKind.HEAD, measured.tp)
        share = seconds * layers / (layers + ends)
        found.samples.append(
            layer_sample(measured, LayerKind.TRANSFORMER, phase, [share], copies=copies)
        )


def _notes(context: ImportContext, found: _Reading) -> tuple[str, ...]:
    notes = []
    if context.precision is None:
        notes.append("precision: float32, as Sailor measured (TF32 where the GPU has it)")
    if context.sequence_length is None:
        notes.append(f"sequence length: {SEQUENCE_LENGTH}, as Sailor measured")
    notes.append(
        "one sample for all transformer layers of a run; repeats counts different times, because "
        "equal ones are copies of one measurement"
    )
    if any(sample.phase.startswith(Phase.OPTIMIZER.value) for sample in found.samples):
        notes.append(f"the file names no optimizer: updates are taken as {ASSUMED_OPTIMIZER.value}")
    if found.updates:
        notes.append(
            "every layer lists one update of the model that was profiled, taken as embedding, "
            f"{PROFILED_LAYERS} transformer layers and head: the transformer layers together get "
            "their part of it by parameters"
        )
    if any(sample.tp > 1 for sample in found.samples):
        notes.append("at tp > 1 the times contain the tensor-parallel communication")
    notes.append("activation and peak memory are not in the file: 0")
    return tuple(notes)
