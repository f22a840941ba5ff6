"""Metis' profiles (github.com/SamsungLabs/Metis, `DeviceType.X_tpT_bsB.json`) as layer samples.

One file is one run: the tensor-parallel degree and the microbatch size stand in its name only.
`execution_time.layer_compute_total_ms` lists forward and backward together, layer by layer, from
the embedding to the head, so the samples are of phase `forward_backward`. The file says neither
precision nor sequence length.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from hetplan.errors import Fault, InputError
from hetplan.importers.lines import refuse_all
from hetplan.importers.peer_json import (
    Measured,
    Value,
    base_name,
    layer_sample,
    need_device,
    need_model,
    need_precision,
    need_sequence,
    read_tree,
    tidy,
    transformer_share,
)
from hetplan.importers.records import ImportContext, Imported
from hetplan.job.spec import Optimizer
from hetplan.model.spec import LayerKind, ModelSpec
from hetplan.profiling.samples import LayerSample, Phase

KIND = "metis"

ASSUMED_OPTIMIZER = Optimizer.ADAMW  # Metis' guide speaks of Adam updates; the files name none
_NAME = re.compile(
    r"DeviceType\.(?P<device>.{1,100})_tp(?P<tp>[0-9]{1,6})_bs(?P<bs>[0-9]{1,6})\.json",
    re.ASCII | re.IGNORECASE,
)
_MILLISECOND = 1e-3
_PARAMETER_BYTES = (2, 4)  # 16 and 32 bits
_SAME_MODEL = 0.05  # biases and norms that one count has and another has not are below 1 %
_NOT_IMPORTED = (
    "batch_generator_time_ms",
    "layernorm_grads_all_reduce_time_ms",
    "embedding_grads_all_reduce_time_ms",
)


def parse(text: str, context: ImportContext) -> Imported:
    """The samples of one run; an InputError where the name or the file does not say enough."""
    device_name, tp, microbatch = _from_name(context.file)
    measured = Measured(
        device=need_device(context, "Metis"),
        model=need_model(context, "Metis"),
        precision=need_precision(context, "Metis"),
        sequence_length=need_sequence(context, "Metis"),
        microbatch_size=microbatch,
        tp=tp,
    )
    problems = measured.model.slicing_faults(tp)
    if problems:
        raise InputError(Fault(file=context.file, message="; ".join(problems)))
    root = read_tree(text, context.file)
    times = root.need("execution_time")
    listed = times.need("layer_compute_total_ms")
    skipped: list[str] = []
    samples = _layers(listed, measured, skipped)
    samples += _update(times, measured, skipped)
    if not samples:
        raise listed.refuse("no layer has a time above 0")
    return Imported(
        kind=KIND,
        device_name=device_name,
        layers=tuple(samples),
        notes=(*_notes(times, samples), *_other_model(root, measured)),
        skipped=tuple(skipped),
    )


def _from_name(file: str) -> tuple[str, int, int]:
    """Device, tensor-parallel degree and microbatch size from the name of the file."""
    name = base_name(file)
    found = _NAME.fullmatch(name)
    if found is None or not int(found["tp"]) or not int(found["bs"]):
        message = (
            f"the name {tidy(name)} does not say the tensor-parallel degree and the batch size; "
            "Metis names its files DeviceType.A100_tp2_bs4.json"
        )
        raise InputError(Fault(file=file, message=message))
    return tidy(found["device"]), int(found["tp"]), int(found["bs"])


def _layers(listed: Value, measured: Measured, skipped: list[str]) -> list[LayerSample]:
    """Forward and backward together: embedding, all transformer layers, head."""
    entries = listed.entries()
    _check_count(listed, len(entries), measured.model)
    faults: list[Fault] = []
    seconds: list[float | None] = []
    for at, entry in enumerate(entries):
        number = entry.try_number()
        if number is None:
            faults.append(entry.fault(f"found {entry.words()}; a number of milliseconds is due"))
        elif number <= 0:
            skipped.append(f"line {entry.line}: layer {at}: {number:g} ms, not measured")
        seconds.append(number * _MILLISECOND if number is not None and number > 0 else None)
    refuse_all(faults)
    samples = []
    for layer, positions in (
        (LayerKind.EMBEDDING, slice(0, 1)),
        (LayerKind.TRANSFORMER, slice(1, -1)),
        (LayerKind.HEAD, slice(-1, None)),
    ):
        good = [value for value in seconds[positions] if value is not None]
        if good:
            samples.append(layer_sample(measured, layer, Phase.FORWARD_BACKWARD.value, good))
    return samples


def _check_count(listed: Value, count: int, model: ModelSpec) -> None:
    if count != model.num_layers + 2:
        raise listed.refuse(
            f"found {count} layers; {tidy(model.name)} has {model.num_layers + 2} (embedding, "
            f"{model.num_layers} transformer layers, head): give the model that was measured"
        )


def _update(times: Value, measured: Measured, skipped: list[str]) -> list[LayerSample]:
    """The transformer layers' part, by parameters, of the optimizer's time on one rank."""
    value = times.get("optimizer_time_ms")
    if value is None:
        return []
    milliseconds = value.number()
    total = times.get("total_time_ms")
    iteration = None if total is None else total.number()
    if milliseconds <= 0:
        skipped.append(f"line {value.line}: optimizer_time_ms: {milliseconds:g} ms, not measured")
        return []
    if iteration is not None and milliseconds > iteration:
        skipped.append(
            f"line {value.line}: optimizer_time_ms: {milliseconds:g} ms is more than the "
            f"{iteration:g} ms of the whole iteration"
        )
        return []
    seconds = milliseconds * _MILLISECOND * transformer_share(measured.model, measured.tp)
    phase = f"{Phase.OPTIMIZER.value}:{ASSUMED_OPTIMIZER.value}"
    copies = measured.model.num_layers
    return [layer_sample(measured, LayerKind.TRANSFORMER, phase, [seconds], copies=copies)]


def _notes(times: Value, samples: list[LayerSample]) -> tuple[str, ...]:
    notes = [
        "forward and backward are one time per layer: a fit splits it by operations",
        "one sample for all transformer layers; repeats counts different times",
        "layer memory is not imported: Metis counts parameters, gradients, optimizer state and "
        "activations together",
    ]
    if any(sample.phase.startswith(Phase.OPTIMIZER.value) for sample in samples):
        notes.append(
            f"the file names no optimizer: its time is taken as {ASSUMED_OPTIMIZER.value}'s, and "
            "the transformer layers get their part of it by parameters"
        )
    left = [name for name in _NOT_IMPORTED if times.get(name) is not None]
    if left:
        notes.append(f"not imported: {', '.join(left)}")
    return tuple(notes)


def _other_model(root: Value, measured: Measured) -> Iterator[str]:
    """A note where the file's bytes per layer are not those of a model of the given shape."""
    value: Value | None = root
    for key in ("model", "parameters", "parameters_per_layer_bytes"):
        value = None if value is None else value.get(key)
    if value is None or value.node.entries is None:
        return
    listed = [entry.try_number() for entry in value.entries()]
    if len(listed) != measured.model.num_layers + 2 or listed[1] is None:
        yield f"line {value.line}: parameters_per_layer_bytes does not list the model's layers"
        return
    parameters = measured.model.parameters(LayerKind.TRANSFORMER, measured.tp)
    each = listed[1] / parameters
    if min(abs(each / known - 1) for known in _PARAMETER_BYTES) > _SAME_MODEL:
        yield (
            f"line {value.line}: a transformer layer has {listed[1]:g} bytes of parameters, "
            f"{each:.2f} for each of the {parameters} that {tidy(measured.model.name)} has at tp "
            f"{measured.tp}: is it the model that was measured?"
        )
