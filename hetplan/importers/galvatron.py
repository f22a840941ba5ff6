"""Galvatron's profiles (github.com/PKU-DAIR/Hetu-Galvatron): computation and hardware files.

Keys tell the files apart, and their units by Galvatron's profilers:
`layertype_0_bsz8_seq4096`        ms per sample of the forward pass of one layer, at tp 1
`allreduce_size_8_consec_1`       bus bandwidth of an all_reduce of 8 ranks, GB/s
`pp_size_4`                       send/recv bandwidth between 4 pipeline stages, GB/s
`allreduce_size_8_64MB_time`, `all2all_size_...`   ms of one operation; MB are 2**20 bytes
`overlap_coe`                     slowdown of computation and communication that overlap
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

from hetplan.errors import Fault, InputError
from hetplan.importers.lines import refuse_all
from hetplan.importers.peer_json import (
    PRECISION_WORDS,
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
)
from hetplan.importers.records import ImportContext, Imported, PathFigures
from hetplan.job.spec import Precision
from hetplan.model.spec import LayerKind
from hetplan.profiling.samples import LayerSample, LinkOperation, LinkSample, Phase
from hetplan.units import MEBIBYTE

KIND = "galvatron"

_MILLISECOND = 1e-3
_GIGABYTE = 1e9
_COUNT = "([0-9]{1,9})"
_LAYER = re.compile(f"layertype_{_COUNT}(?:_bsz{_COUNT}_seq{_COUNT})?", re.ASCII)
_ALL_REDUCE = re.compile(f"allreduce_size_{_COUNT}_consec_([01])", re.ASCII)
_PIPELINE = re.compile(f"pp_size_{_COUNT}", re.ASCII)
_TIME = re.compile(f"(allreduce|all2all)_size_{_COUNT}_{_COUNT}MB_time", re.ASCII)
_MEMORY = re.compile(r"layertype_[0-9]+(?:_sp)?|[0-9]+_[0-9]+_[0-9]+.*|other_memory_.*", re.ASCII)
_OPERATIONS = {"allreduce": LinkOperation.ALL_REDUCE, "all2all": LinkOperation.ALL_TO_ALL}


@dataclass(slots=True)
class _Reading:
    """What is found on the way through one file."""

    layers: list[LayerSample] = field(default_factory=list)
    links: list[LinkSample] = field(default_factory=list)
    paths: list[PathFigures] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    notes: dict[str, None] = field(default_factory=dict)
    """In order, each once."""
    left: list[str] = field(default_factory=list)
    """Keys of rows that are no layer, or not known."""

    @property
    def anything(self) -> bool:
        return bool(self.layers or self.links or self.paths or self.skipped)


def parse(text: str, context: ImportContext) -> Imported:
    """The samples or figures of one file; an InputError for what is none of them."""
    root = read_tree(text, context.file)
    found = _Reading()
    faults: list[Fault] = []
    for key, value in root.items():
        try:
            _read(key, value, context, found)
        except InputError as error:
            faults += error.faults
    refuse_all(faults)
    overlap = root.get("overlap_coe")
    if not found.anything and overlap is None:
        keys = ", ".join(tidy(key) for key in found.left[:6])
        raise root.refuse(
            f"no key of a Galvatron profile that can be imported; found {keys or 'none'}. Readable "
            "are computation_profiling_*, allreduce_bandwidth_*, p2p_bandwidth_*, sp_time_* and "
            "overlap_coefficient; raw layernum rows first need Galvatron's own processing"
        )
    if found.left:
        keys = ", ".join(tidy(key) for key in found.left[:4])
        more = f" and {len(found.left) - 4} more" if len(found.left) > 4 else ""
        found.notes[f"not imported: {keys}{more}"] = None
    return Imported(
        kind=KIND,
        links=tuple(found.links),
        layers=tuple(found.layers),
        paths=tuple(found.paths),
        notes=tuple(found.notes),
        skipped=tuple(found.skipped),
    )


def _read(key: str, value: Value, context: ImportContext, found: _Reading) -> None:
    """One key of the file."""
    if value.is_mapping and _MEMORY.fullmatch(key):
        raise value.refuse(
            "this is Galvatron's memory profile; hetplan keeps memory with times only: import "
            "computation_profiling_* and measure memory with `hetplan profile`"
        )
    for pattern, read in _READERS:
        parts = pattern.fullmatch(key)
        if parts is not None:
            number = value.number()
            if number <= 0:
                found.skipped.append(f"line {value.line}: {tidy(key)}: {number:g}, not measured")
            else:
                read(parts, value, number, context, found)
            return
    if key == "overlap_coe":
        found.notes[
            f"overlap coefficient {value.positive():g}: slowdown of computation and communication "
            "that run at the same time; hetplan has no such figure"
        ] = None
        return
    found.left.append(key)
    if key.startswith("layertype_other"):
        found.notes["layertype_other is embedding, head and loss together: no sample of either"] = (
            None
        )


def _read_layer(
    parts: re.Match[str], value: Value, number: float, context: ImportContext, found: _Reading
) -> None:
    """Forward time of one layer: the file's time per sample times the batch size."""
    kind, batch, sequence = parts.groups()
    if int(kind) > 0:
        found.skipped.append(
            f"line {value.line}: {tidy(parts[0])}: the model has one type of transformer layer, "
            "layertype_0"
        )
        return
    microbatch = int(batch) if batch else 1
    length = int(sequence) if sequence else need_sequence(context, "this key")
    if not microbatch or not length:
        raise value.refuse("batch size and sequence length are at least 1")
    measured = Measured(
        device=need_device(context, "Galvatron"),
        model=need_model(context, "Galvatron"),
        precision=_precision(context),
        sequence_length=length,
        microbatch_size=microbatch,
        tp=1,
    )
    seconds = number * _MILLISECOND * microbatch
    found.layers.append(
        layer_sample(measured, LayerKind.TRANSFORMER, Phase.FORWARD.value, [seconds])
    )
    found.notes["forward only, at tp 1: Galvatron takes backward as twice the forward"] = None
    found.notes["a difference of runs with more and fewer layers, so without the layer's ends"] = (
        None
    )
    if not batch:
        found.notes["no batch size in the key: the time per sample is taken as microbatch 1"] = None


def _precision(context: ImportContext) -> Precision:
    """From the user or the file's name, which must not disagree."""
    name = base_name(context.file)
    parts = re.split(r"[_.-]", name.lower())
    named = next((PRECISION_WORDS[part] for part in parts if part in PRECISION_WORDS), None)
    if named is None:
        return need_precision(context, "the file's name")
    if context.precision not in (None, named):
        message = f"{context.precision} was given, and the name {tidy(name)} says {named}"
        raise InputError(Fault(file=context.file, field="precision", message=message))
    return named


def _read_all_reduce(
    parts: re.Match[str], value: Value, number: float, context: ImportContext, found: _Reading
) -> None:
    ranks = "consecutive ranks" if parts[2] == "1" else "ranks spread over the job"
    found.paths.append(
        PathFigures(
            measured=f"all_reduce bus bandwidth, {parts[1]} {ranks}",
            bandwidth_bytes_per_second=number * _GIGABYTE,
        )
    )
    found.notes[_BANDWIDTH_NOTE] = None


def _read_pipeline(
    parts: re.Match[str], value: Value, number: float, context: ImportContext, found: _Reading
) -> None:
    found.paths.append(
        PathFigures(
            measured=f"send/recv bandwidth, pipeline of {parts[1]} stages",
            bandwidth_bytes_per_second=number * _GIGABYTE,
        )
    )
    found.notes[_BANDWIDTH_NOTE] = None


_BANDWIDTH_NOTE = (
    "bandwidths are read as GB/s, as nccl-tests prints them; Galvatron's torch profiler writes "
    "MiB/ms under the same keys, which is 4.9 % more per unit"
)


def _read_time(
    parts: re.Match[str], value: Value, number: float, context: ImportContext, found: _Reading
) -> None:
    """Time of one collective among consecutive ranks."""
    if context.link is None:
        message = "times of collectives become samples of a link; name the link"
        raise InputError(Fault(file=context.file, field="link", message=message))
    ranks, size = int(parts[2]), int(parts[3])
    if ranks < 2 or not size:
        reason = "message of 0 MB" if ranks >= 2 else f"{ranks} ranks exchange nothing"
        found.skipped.append(f"line {value.line}: {tidy(parts[0])}: {reason}")
        return
    seconds = number * _MILLISECOND
    found.links.append(
        LinkSample(
            link=context.link,
            operation=_OPERATIONS[parts[1]].value,
            backend="nccl",
            group_size=ranks,
            message_bytes=size * MEBIBYTE,
            median_seconds=seconds,
            p10_seconds=seconds,
            p90_seconds=seconds,
            repeats=1,
            outliers=0,
        )
    )
    found.notes["times are means of Galvatron's runs; p10 and p90 repeat them"] = None


_READERS: tuple[
    tuple[
        re.Pattern[str],
        Callable[[re.Match[str], Value, float, ImportContext, _Reading], None],
    ],
    ...,
] = (
    (_LAYER, _read_layer),
    (_ALL_REDUCE, _read_all_reduce),
    (_PIPELINE, _read_pipeline),
    (_TIME, _read_time),
)
