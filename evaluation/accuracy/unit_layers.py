"""Sailor's layer profiles (sailor/layer_profiles) as layer samples.

A profile is {microbatch: {tp: {layer: [forward_s, backward_s, update_s]}}}; layer 0 is the
embedding, the last one the head. The files do not say that sequences have 2048 tokens, nor which
optimizer updated: AdamW is assumed.

float32 in these files is two things: on the A100 and GH200 most models ran in TF32, and OPT-30 on
the A100-40 in float32 itself, four times slower; one law cannot hold both, so the latter is left
out. So is the embedding's backward pass, which was not measured or not waited for (up to 3758 TB/s,
which no memory has), and GPT-Neo's last layer, which would run the projection 35 to 135 times as
fast as the other layers run: it is a norm alone.

At tp > 1 the times contain the tensor-parallel communication, which a layer sample must not. It is
taken out with the all_reduce that was measured on the same kind of device at the same size, that of
the activations (by the same project; on the A100-80 by vTrain): 2 in each pass of a transformer
layer, 1 in the embedding's forward and 1 in the head's backward pass. What remains of a transformer
layer is 1.0 to 1.1 of the tp-th part of its time at tp = 1 wherever launches do not bound it
(OPT-350 and OPT-30 on GH200, A100, V100, RTX 3090, Titan RTX at tp 2 and 4), so that is what is in
it. Where no such all_reduce was measured, or less than a quarter remains, the sample is left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, TypeAlias

from evaluation.accuracy.unit_data import Notes, population
from evaluation.accuracy.unit_links import node_link
from hetplan.errors import Fault, InputError
from hetplan.files.reading import read_text
from hetplan.job.spec import Optimizer, Precision
from hetplan.model.spec import Architecture, LayerKind, ModelSpec, plain_model
from hetplan.profiling.samples import LayerSample, LinkOperation, LinkSample, Phase, ProfileSet
from hetplan.profiling.timing import summarise

FOLDER = Path("sailor") / "layer_profiles"
ALL_IN_ONE = "all_models_profiles_tmp.json"
TOOL = "sailor"
_MIN_REST = 1 / 4  # all_reduce repeats within 8 %: of less than a quarter left, more is noise
_REDUCTIONS = {
    (LayerKind.TRANSFORMER.value, Phase.FORWARD.value): 2,
    (LayerKind.TRANSFORMER.value, Phase.BACKWARD.value): 2,
    (LayerKind.EMBEDDING.value, Phase.FORWARD.value): 1,
    (LayerKind.HEAD.value, Phase.BACKWARD.value): 1,
}
"""All-reduces of the activations in each pass of a layer (arXiv 1909.08053, section 3)."""
_UPDATE = f"{Phase.OPTIMIZER.value}:{Optimizer.ADAMW.value}"
SEQUENCE_LENGTH = 2048  # what Sailor profiled; its files do not say it
_FAILED_SECONDS = 1e3  # no layer of any model takes that long: a mark of a run that failed
PROFILED_LAYERS = 2
"""Transformer layers of the model whose update every layer of a file lists.

With two, an update moves 35.0 to 35.2 bytes per parameter of OPT-350 and GPT-Neo at the memory
bandwidth of the A100-40, and 33.5 of both on the V100: AdamW's 28 bytes in float32 at 80 to 84 % of
it. As a part of the whole model's time it would be ten times that.
"""
_ONLY_IN_ALL = (("GPT-Neo-2.7", "GH-96"),)
"""(model, device) whose folder is empty and which the file of all models has."""
_UNUSABLE = {
    ("LLAMA-3-8", ""): "too slow for what it says (2 to 21 TFLOP/s): unusable as labelled",
    ("OPT-30", "A100-40"): "float32 itself, at most 18 TFLOP/s, where other models ran in TF32",
}
"""(model, device or all) whose profile is not read, and why (README of the reference folder)."""
_WITHOUT_HEAD = "gpt-neo"
_NO_TIME = f"{FOLDER.name}: 0 s, not measured, or the mark of a run that failed"
_FALSE_HEAD = f"{FOLDER.name}: GPT-Neo's last layer, which holds no projection (a norm alone)"
_FALSE_BACKWARD = f"{FOLDER.name}: the embedding's backward pass, which was not waited for"


_MODELS = (
    # config.json of facebook/opt-350m, facebook/opt-30b, meta-llama/Meta-Llama-3-8B: layers, hidden
    # and inner size, heads, key-value heads, vocabulary. GPT-Neo was measured with 32 heads and a
    # vocabulary of 128256 (unit/layer_times.csv says so by act_mb and weights_mb); its own: 20 and
    # 50257.
    (r"opt-?350", "opt-350m", (24, 1024, 4096, 16, 16, 50272)),
    (r"opt-?30(?!\d)", "opt-30b", (48, 7168, 28672, 56, 56, 50272)),
    (r"gpt-?neo-?2", "gpt-neo-2.7b", (32, 2560, 10240, 32, 32, 128256)),
    (r"llama-?3-8", "llama-3-8b", (32, 4096, 14336, 32, 8, 128256)),
)


def known_model(label: str) -> ModelSpec | None:
    """The model that a file of measurements names; None where its shape is not known."""
    for pattern, name, (layers, hidden, inner, heads, kv_heads, vocabulary) in _MODELS:
        if re.search(pattern, label.lower()):
            is_llama = name.startswith("llama")
            return plain_model(
                name=name,
                architecture=Architecture.LLAMA if is_llama else Architecture.GPT,
                num_layers=layers,
                hidden_size=hidden,
                ffn_hidden_size=inner,
                num_attention_heads=heads,
                num_kv_heads=kv_heads,
                head_dim=hidden // heads,
                vocab_size=vocabulary,
                max_sequence_length=8192 if is_llama else 2048,
            )
    return None


def read_layers(folder: Path, notes: Notes, links: Sequence[LinkSample]) -> tuple[ProfileSet, ...]:
    """One population per device; `links` hold the all_reduce that is taken out of times."""
    root = folder / FOLDER
    if not root.is_dir():
        notes.words[f"{FOLDER} is not there: no layer profiles read"] = None
        return ()
    by_label: dict[str, list[LayerSample]] = {}
    for path, model, label in _files(root):
        spec = known_model(model)
        why = _UNUSABLE.get((model, label)) or _UNUSABLE.get((model, ""))
        if why or spec is None:
            reason = why or "the shape of the model is not known"
            notes.words[f"{FOLDER.name}: {model} on {label} is not read: {reason}"] = None
            continue
        keys = (model, label) if path.name == ALL_IN_ONE else ()
        found = _read_profile(path, keys, spec, notes.kind(label), notes)
        by_label.setdefault(label, []).extend(found)
    reductions = _reductions(links)
    return tuple(
        _population(label, samples, reductions, notes) for label, samples in by_label.items()
    )


def _files(root: Path) -> Iterator[tuple[Path, str, str]]:
    """Path, model and device of every profile."""
    found = {path.parts[-3:-1]: path for path in sorted(root.glob("*/*/profile.json"))}
    for place in _ONLY_IN_ALL:
        if (root / ALL_IN_ONE).is_file():
            found.setdefault(place, root / ALL_IN_ONE)
    for (model, label), path in found.items():
        yield path, model, label


def _read_profile(
    path: Path, keys: tuple[str, ...], spec: ModelSpec, device: str, notes: Notes
) -> list[LayerSample]:
    """One model on one device, under these keys of the file; an InputError for another form."""
    found: list[LayerSample] = []
    try:
        profile = json.loads(read_text(path))
        for key in keys:
            profile = profile[key]
        for size, by_tp in profile.items():
            for tp, layers in by_tp.items():
                found += _read_layers(layers, spec, device, (int(size), int(tp)), notes)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        message = f"no layer profile of Sailor: {error!r}"
        raise InputError(Fault(file=str(path), message=message)) from None
    # The updates of a profile come after its passes.
    return sorted(found, key=lambda sample: sample.phase == _UPDATE and sample.copies > 1)


def _read_layers(
    layers: dict[str, Any], spec: ModelSpec, device: str, place: tuple[int, int], notes: Notes
) -> Iterator[LayerSample]:
    """Samples of every layer at one microbatch size and tensor-parallel degree.

    One sample stands for all transformer layers.
    """
    if len(layers) != spec.num_layers + 2:
        raise ValueError(f"{place}: {len(layers)} layers; {spec.name} has {spec.num_layers + 2}")
    rows = [[float(value) for value in layers[str(at)]] for at in range(len(layers))]
    forward, backward, update = zip(*rows, strict=True)
    has_head = not spec.name.startswith(_WITHOUT_HEAD)
    for phase, times in ((Phase.FORWARD.value, forward), (Phase.BACKWARD.value, backward)):
        for layer, part in (
            (LayerKind.EMBEDDING, times[:1]),
            (LayerKind.TRANSFORMER, times[1:-1]),
            (LayerKind.HEAD, times[-1:]),
        ):
            seconds = [each for each in part if 0 < each < _FAILED_SECONDS]
            if len(seconds) < len(part):
                notes.unused[_NO_TIME] += len(part) - len(seconds)
            if layer is LayerKind.EMBEDDING and phase == Phase.BACKWARD:
                notes.unused[_FALSE_BACKWARD] += len(seconds)
            elif layer is LayerKind.HEAD and not has_head:
                notes.unused[_FALSE_HEAD] += len(seconds)
            elif seconds:
                yield _layer_sample(spec, device, layer, phase, place, seconds)
    if len(set(update)) == 1 and 0 < update[0] < _FAILED_SECONDS:
        yield _update_sample(spec, device, place, update[0], has_head=has_head)


def _update_sample(
    spec: ModelSpec, device: str, place: tuple[int, int], seconds: float, *, has_head: bool
) -> LayerSample:
    """The part of the profiled model's update that its transformer layers have by parameters."""
    copies, tp = min(PROFILED_LAYERS, spec.num_layers), place[1]
    layers = copies * spec.parameters(LayerKind.TRANSFORMER, tp)
    ends = spec.parameters(LayerKind.EMBEDDING, tp)
    if has_head:
        ends += spec.parameters(LayerKind.HEAD, tp)
    share = [seconds * layers / (layers + ends)]
    return _layer_sample(spec, device, LayerKind.TRANSFORMER, _UPDATE, place, share, copies)


def _layer_sample(
    spec: ModelSpec,
    device: str,
    layer: LayerKind,
    phase: str,
    place: tuple[int, int],
    seconds: Sequence[float],
    copies: int = 1,
) -> LayerSample:
    """One sample of layers that are alike, at `place` (microbatch size, tp).

    `repeats` counts different times: equal ones are one measurement, written once per layer.
    """
    timing = summarise(tuple(seconds), steady=True)
    return LayerSample(
        device=device,
        architecture=spec.architecture.value,
        layer=layer.value,
        phase=phase,
        precision=Precision.FLOAT32.value,
        hidden_size=spec.hidden_size,
        ffn_hidden_size=spec.ffn_hidden_size,
        num_attention_heads=spec.num_attention_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        vocab_size=spec.vocab_size,
        sequence_length=SEQUENCE_LENGTH,
        microbatch_size=place[0],
        tp=place[1],
        copies=copies,
        median_seconds=timing.median_seconds,
        p10_seconds=timing.p10_seconds,
        p90_seconds=timing.p90_seconds,
        repeats=len(set(seconds)),
        outliers=0,
        steady=True,
        activation_bytes=0.0,
        peak_memory_bytes=0.0,
        clock_hertz=0.0,
    )


_Reductions: TypeAlias = dict[tuple[str, int, int], tuple[float, ...]]
"""Seconds of each all_reduce by (link, ranks, bytes)."""


def _reductions(links: Sequence[LinkSample]) -> _Reductions:
    found: _Reductions = {}
    for each in links:
        if each.operation == LinkOperation.ALL_REDUCE.value and each.nodes == 1:
            key = (each.link, each.group_size, each.message_bytes)
            found[key] = (*found.get(key, ()), each.median_seconds)
    return found


def _population(
    label: str, samples: Sequence[LayerSample], reductions: _Reductions, notes: Notes
) -> ProfileSet:
    device = notes.kind(label)
    mine = []
    for sample in samples:
        count = _REDUCTIONS.get((sample.layer, sample.phase), 0) if sample.tp > 1 else 0
        alone = _alone(sample, count, reductions)
        if alone is None:
            notes.unused[_WITH_COMMUNICATION] += 1
        else:
            mine.append(alone)
    return population(
        device,
        label,
        tool=TOOL,
        file=FOLDER,
        layers=mine,
        words="float32 as labelled, TF32 where the device has it; attention not fused, ReLU of OPT "
        "and GELU of GPT-Neo; at tp > 1 the all_reduce measured on the same device is taken out; "
        "entries of microbatch 1 can hold warm-up",
    )


_WITH_COMMUNICATION = (
    "layer_profiles: tp > 1, where no all_reduce of this size was measured to take out or less "
    "than a quarter of the time would remain"
)


def _alone(sample: LayerSample, count: int, reductions: _Reductions) -> LayerSample | None:
    """The sample without its communication; None where that cannot be told."""
    if not count:
        return sample
    width = Precision(sample.precision).bytes_per_element
    size = sample.microbatch_size * sample.sequence_length * sample.hidden_size * width
    each = reductions.get((node_link(sample.device), sample.tp, size))
    if not each:
        return None
    least, usual, most = (count * seconds for seconds in (min(each), median(each), max(each)))
    if sample.p10_seconds - most < _MIN_REST * sample.median_seconds:
        return None
    return replace(
        sample,
        median_seconds=sample.median_seconds - usual,
        p10_seconds=sample.p10_seconds - most,
        p90_seconds=sample.p90_seconds - least,
    )
