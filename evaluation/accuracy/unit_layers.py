"""Sailor's layer profiles (sailor/layer_profiles) as layer samples.

A profile is {microbatch: {tp: {layer: [forward_s, backward_s, update_s]}}}; layer 0 is the
embedding, the last one the head. The files do not say that sequences have 2048 tokens, nor which
optimizer updated: AdamW is assumed.

float32 in these files is two things: on the A100 and GH200 most models ran in TF32, and OPT-30 on
the A100-40 in float32 itself, four times slower; one law cannot hold both, so a model whose layers
stay below the device's float32 rate where another's pass it is left out.

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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any, TypeAlias

from evaluation.accuracy.unit_links import node_link
from evaluation.accuracy.unit_operators import Notes, population
from hetplan.errors import Fault, InputError
from hetplan.files.reading import read_text
from hetplan.job.spec import Optimizer, Precision
from hetplan.lint.known import known_device, known_model
from hetplan.model.spec import LayerKind, ModelSpec
from hetplan.model.work import layer_work
from hetplan.profiling.samples import (
    LayerSample,
    LinkOperation,
    LinkSample,
    Phase,
    ProfileSet,
)
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
UNUSABLE = {"LLAMA-3-8": "too slow for what it says (2 to 21 TFLOP/s): unusable as labelled"}
"""Models of the folder that are not read, and why (README of the reference folder)."""
_COLUMNS = ("forward", "backward", "update")
_UPDATE = f"{Phase.OPTIMIZER.value}:{Optimizer.ADAMW.value}"
SEQUENCE_LENGTH = 2048  # what Sailor profiled; its files do not say it
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
_ONLY_IN_ALL = (("GPT-Neo-2.7", "GH-96"),)
"""(model, device) whose folder is empty and which the file of all models has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Profile:
    """One model on one device."""

    model: str
    label: str
    samples: tuple[LayerSample, ...]


def read_layers(folder: Path, notes: Notes, links: Sequence[LinkSample]) -> tuple[ProfileSet, ...]:
    """One population per device; `links` hold the all_reduce that is taken out of times."""
    if not (folder / FOLDER).is_dir():
        notes.words[f"{FOLDER} is not there: no layer profiles read"] = None
        return ()
    profiles = list(_profiles(folder / FOLDER, notes))
    labels = tuple(dict.fromkeys(profile.label for profile in profiles))
    usable: dict[str, list[LayerSample]] = {}
    for label in labels:
        here = [profile for profile in profiles if profile.label == label]
        usable[label] = [each for one in _of_one_format(here, notes) for each in one.samples]
    reductions = _reductions(links)
    return tuple(_population(label, usable[label], reductions, notes) for label in labels)


def _profiles(root: Path, notes: Notes) -> Iterator[_Profile]:
    seen = set()
    for path in sorted(root.glob("*/*/profile.json")):
        model, label = path.parts[-3], path.parts[-2]
        seen.add((model, label))
        yield from _profile(path, (), model, label, notes)
    everything = root / ALL_IN_ONE
    for model, label in _ONLY_IN_ALL:
        if (model, label) not in seen and everything.is_file():
            yield from _profile(everything, (model, label), model, label, notes)


def _profile(
    path: Path, keys: tuple[str, ...], model: str, label: str, notes: Notes
) -> Iterator[_Profile]:
    place = f"{FOLDER.name}: {model} on {label}"
    if model in UNUSABLE:
        notes.words[f"{place} is not read: {UNUSABLE[model]}"] = None
        return
    spec = known_model(model)
    if spec is None:
        notes.words[f"{place} is not read: the shape of the model is not known"] = None
        return
    found = _read_profile(path, keys, spec, notes.kind(label))
    if found.skipped:
        more = len(found.skipped) - 1
        notes.words[f"{place}: {found.skipped[0]}{f', and {more} more such' if more else ''}"] = (
            None
        )
    _note_warm_up(place, found.samples, notes)
    yield _Profile(model=model, label=label, samples=tuple(found.samples))


@dataclass(slots=True)
class _Reading:
    """Samples of one profile, and what it lists that is no measurement."""

    samples: list[LayerSample] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    updates: list[tuple[int, int, float]] = field(default_factory=list)
    """(microbatch size, tp, seconds) where every layer lists the update of the whole model."""


def _read_profile(path: Path, keys: tuple[str, ...], spec: ModelSpec, device: str) -> _Reading:
    """One model on one device, under these keys of the file; an InputError for another form."""
    found = _Reading()
    try:
        profile = json.loads(read_text(path))
        for key in keys:
            profile = profile[key]
        for size, by_tp in profile.items():
            for tp, layers in by_tp.items():
                _read_layers(" ".join((*keys, size, tp)), layers, spec, device, found)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        message = f"no layer profile of Sailor: {error!r}"
        raise InputError(Fault(file=str(path), message=message)) from None
    has_head = _drop_false_head(spec, found)
    _drop_false_backward(spec, found)
    _add_updates(spec, device, found, has_head=has_head)
    if not found.samples:
        raise InputError(Fault(file=str(path), message="the file holds no time of any layer"))
    return found


def _read_layers(
    place: str, layers: dict[str, Any], spec: ModelSpec, device: str, found: _Reading
) -> None:
    """Samples of every layer at one microbatch size and tensor-parallel degree.

    One sample stands for all transformer layers.
    """
    size, tp = (int(key) for key in place.split(" ")[-2:])
    if len(layers) != spec.num_layers + 2:
        raise ValueError(f"{place}: {len(layers)} layers; {spec.name} has {spec.num_layers + 2}")
    gaps: dict[str, list[int]] = {}
    rows = [_times(layers[str(at)], at, gaps) for at in range(len(layers))]
    for reason, numbers in gaps.items():
        found.skipped.append(f"{place}: layers {_ranges(numbers)}: {reason}")
    kinds = (
        (LayerKind.EMBEDDING, rows[:1]),
        (LayerKind.TRANSFORMER, rows[1:-1]),
        (LayerKind.HEAD, rows[-1:]),
    )
    for at, phase in enumerate((Phase.FORWARD.value, Phase.BACKWARD.value, _UPDATE)):
        if phase == _UPDATE:
            every = {row[at] for row in rows}
            if None in every:
                break
            if len(every) == 1:
                found.updates.append((size, tp, rows[0][at] or 0.0))
                break
        for layer, part in kinds:
            seconds = [row[at] for row in part if row[at] is not None]
            if seconds:
                found.samples.append(layer_sample(spec, device, layer, phase, size, tp, seconds))


def _times(row: Sequence[Any], layer: int, gaps: dict[str, list[int]]) -> list[Any]:
    """Forward, backward and update seconds; None for what was not measured, which joins `gaps`."""
    if len(row) != len(_COLUMNS):
        raise ValueError(f"layer {layer} has {len(row)} numbers; {', '.join(_COLUMNS)} expected")
    times: list[float | None] = []
    for phase, value in zip(_COLUMNS, row, strict=True):
        seconds = float(value)
        reason = ""
        if seconds == 0:
            reason = "0 s, not measured"
        elif seconds < 0:
            reason = f"{seconds:g} s, no time"
        elif not seconds < _FAILED_SECONDS:
            reason = f"{seconds:g} s, the mark of a run that failed"
        if reason:
            gaps.setdefault(f"{phase}: {reason}", []).append(layer)
        times.append(None if reason else seconds)
    return times


def _ranges(numbers: Sequence[int]) -> str:
    """`0, 2-5` for 0, 2, 3, 4, 5."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def layer_sample(
    spec: ModelSpec,
    device: str,
    layer: LayerKind,
    phase: str,
    size: int,
    tp: int,
    seconds: Sequence[float],
    copies: int = 1,
    *,
    precision: str = Precision.FLOAT32.value,
    sequence_length: int = SEQUENCE_LENGTH,
) -> LayerSample:
    """One sample of layers that are alike.

    `repeats` counts different times: equal ones are one measurement, written once per layer.
    """
    timing = summarise(tuple(seconds), steady=True)
    return LayerSample(
        device=device,
        architecture=spec.architecture.value,
        layer=layer.value,
        phase=phase,
        precision=precision,
        hidden_size=spec.hidden_size,
        ffn_hidden_size=spec.ffn_hidden_size,
        num_attention_heads=spec.num_attention_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        vocab_size=spec.vocab_size,
        sequence_length=sequence_length,
        microbatch_size=size,
        tp=tp,
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


def _rate(sample: LayerSample, spec: ModelSpec) -> float:
    """Operations per second."""
    size, length = sample.microbatch_size, sample.sequence_length
    work = layer_work(spec, LayerKind(sample.layer), size, length, sample.tp)
    return work.flops / sample.median_seconds


def _drop_false_head(spec: ModelSpec, found: _Reading) -> bool:
    """Leave out heads that are too fast to hold the projection; whether the file has it.

    Only runs of the smallest tensor-parallel degree are compared: elsewhere the layers' times hold
    communication that the head's do not.
    """
    forward = [sample for sample in found.samples if sample.phase == Phase.FORWARD.value]
    least = min((sample.tp for sample in forward), default=0)
    rates = {
        (sample.microbatch_size, sample.layer): _rate(sample, spec)
        for sample in forward
        if sample.tp == least
    }
    ratios = [
        rate / rates[size, LayerKind.TRANSFORMER.value]
        for (size, layer), rate in rates.items()
        if layer == LayerKind.HEAD.value and (size, LayerKind.TRANSFORMER.value) in rates
    ]
    if not ratios or median(ratios) <= _NO_PROJECTION:
        return True
    kept = [sample for sample in found.samples if sample.layer != LayerKind.HEAD.value]
    found.skipped.append(
        f"the last layer of every run, {len(found.samples) - len(kept)} samples: it would run the "
        f"projection to {spec.vocab_size} words {median(ratios):.0f} times as fast as the other "
        "layers run, so it holds none (a norm alone)"
    )
    found.samples = kept
    return False


def _drop_false_backward(spec: ModelSpec, found: _Reading) -> None:
    """Leave out an embedding's backward that no memory could do: nobody waited for the device."""
    place = (LayerKind.EMBEDDING.value, Phase.BACKWARD.value)
    rates = []
    for sample in found.samples:
        if (sample.layer, sample.phase) == place:
            size, length = sample.microbatch_size, sample.sequence_length
            work = layer_work(spec, LayerKind.EMBEDDING, size, length, sample.tp)
            width = Precision(sample.precision).bytes_per_element
            rates.append(work.elementwise_elements * width / sample.median_seconds)
    if not rates or max(rates) <= _IMPOSSIBLE_BANDWIDTH:
        return
    found.skipped.append(
        f"the embedding's backward of every run, {len(rates)} samples: up to "
        f"{max(rates) / 1e12:.0f} TB/s, which no memory has: it was not waited for"
    )
    found.samples = [sample for sample in found.samples if (sample.layer, sample.phase) != place]


def _add_updates(spec: ModelSpec, device: str, found: _Reading, *, has_head: bool) -> None:
    """The part of each profiled model's update that its transformer layers have by parameters."""
    copies = min(PROFILED_LAYERS, spec.num_layers)
    for size, tp, seconds in found.updates:
        layers = copies * spec.parameters(LayerKind.TRANSFORMER, tp)
        ends = spec.parameters(LayerKind.EMBEDDING, tp)
        if has_head:
            ends += spec.parameters(LayerKind.HEAD, tp)
        share = [seconds * layers / (layers + ends)]
        layer = LayerKind.TRANSFORMER
        found.samples.append(layer_sample(spec, device, layer, _UPDATE, size, tp, share, copies))


def _note_warm_up(place: str, samples: Sequence[LayerSample], notes: Notes) -> None:
    """Where one microbatch took longer than two: warm-up is in it."""
    times = {
        (each.layer, each.phase, each.tp, each.microbatch_size): each.median_seconds
        for each in samples
    }
    odd = [
        f"{layer} {phase} tp {tp}"
        for (layer, phase, tp, size), seconds in times.items()
        # Updates do not depend on the microbatch size.
        if size == 1 and not phase.startswith(Phase.OPTIMIZER.value)
        if seconds > times.get((layer, phase, tp, 2), seconds)
    ]
    if odd:
        listed = ", ".join(odd[:6]) + (", ..." if len(odd) > 6 else "")
        notes.words[f"{place}: longer at microbatch 1 than at 2, so with warm-up: {listed}"] = None


def _of_one_format(profiles: Sequence[_Profile], notes: Notes) -> tuple[_Profile, ...]:
    """Profiles of one device without those in float32 itself beside others in TF32."""
    known = known_device(profiles[0].label)
    limit = 0.0 if known is None else known.peak("float32")
    rates = [_fastest(profile) for profile in profiles]
    if not limit or max(rates) <= limit:
        return tuple(profiles)
    kept = []
    for profile, rate in zip(profiles, rates, strict=True):
        if rate > limit:
            kept.append(profile)
            continue
        reason = (
            f"{FOLDER.name}: {profile.model} on {profile.label}: float32 itself, at most "
            f"{rate / 1e12:.0f} TFLOP/s, where other models ran in TF32"
        )
        notes.unused[reason] += len(profile.samples)
    return tuple(kept)


def _fastest(profile: _Profile) -> float:
    """Operations per second of the fastest forward pass of a transformer layer."""
    model = known_model(profile.model)
    if model is None:
        raise InputError(f"{profile.model}: the shape of the model is not known")
    rates = [
        _rate(sample, model)
        for sample in profile.samples
        if (sample.layer, sample.phase) == (LayerKind.TRANSFORMER.value, Phase.FORWARD.value)
    ]
    return max(rates, default=0.0)


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
