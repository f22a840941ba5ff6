"""Sailor's layer profiles (sailor/layer_profiles) as layer samples.

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

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import TypeAlias

from evaluation.accuracy import sailor_profiles as sailor
from evaluation.accuracy.unit_collectives import node_link
from evaluation.accuracy.unit_notes import Notes, provenance
from hetplan.errors import InputError
from hetplan.files.reading import read_text
from hetplan.importers.records import ImportContext, Imported
from hetplan.job.spec import Precision
from hetplan.lint.known import known_device, known_model
from hetplan.model.spec import LayerKind
from hetplan.model.work import layer_work
from hetplan.profiling.samples import (
    LayerSample,
    LinkOperation,
    LinkSample,
    Phase,
    ProfileSet,
)

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
        yield from _profile(path, model, label, notes)
    everything = root / ALL_IN_ONE
    for model, label in _ONLY_IN_ALL:
        if (model, label) not in seen and everything.is_file():
            yield from _profile(everything, model, label, notes)


def _profile(path: Path, model: str, label: str, notes: Notes) -> Iterator[_Profile]:
    place = f"{FOLDER.name}: {model} on {label}"
    if model in UNUSABLE:
        notes.words[f"{place} is not read: {UNUSABLE[model]}"] = None
        return
    spec = known_model(model)
    if spec is None:
        notes.words[f"{place} is not read: the shape of the model is not known"] = None
        return
    context = ImportContext(file=str(path), device=notes.kind(label), model=spec)
    imported = sailor.parse(read_text(path), context)
    _note_skipped(place, imported, notes)
    _note_warm_up(place, imported.layers, notes)
    yield _Profile(model=model, label=label, samples=imported.layers)


def _note_skipped(place: str, imported: Imported, notes: Notes) -> None:
    if imported.skipped:
        first = imported.skipped[0].partition(": ")[2]
        more = len(imported.skipped) - 1
        notes.words[f"{place}: {first}{f', and {more} more such' if more else ''}"] = None


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
        layer_work(
            model,
            LayerKind.TRANSFORMER,
            sample.microbatch_size,
            sample.sequence_length,
            sample.tp,
        ).flops
        / sample.median_seconds
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
    words = (
        "float32 as labelled, TF32 where the device has it; attention not fused, ReLU of OPT and "
        "GELU of GPT-Neo; at tp > 1 the all_reduce measured on the same device is taken out; "
        "entries of microbatch 1 can hold warm-up"
    )
    return ProfileSet(
        layers=tuple(mine),
        links=(),
        provenance=(provenance(device, label, tool=TOOL, file=str(FOLDER), words=words),),
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
