"""Which device kinds hetplan knows, how one is written, and which one somebody may have meant."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

from pydantic import BeforeValidator, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from hetplan.cluster.devices import (
    DTYPES,
    FIGURES,
    MAX_LANES,
    PCIE_GENERATIONS,
    DeviceKind,
    FigureSource,
    HostInterface,
    ScaleUpFabric,
)
from hetplan.errors import Fault, InputError
from hetplan.files.nodes import Path as FieldPath
from hetplan.files.quantities import Bandwidth, FileForm, Memory, Name, Rate, Ratio, Watts, value_of
from hetplan.files.reading import Document, decode, read_document
from hetplan.files.shipped import shipped_folder
from hetplan.units import Dimension, parse_quantity, pattern

DEVICES_SCHEMA = "hetplan.devices/3"

Text: TypeAlias = Annotated[str, Field(min_length=1, max_length=500)]


def _operations(text: object) -> float:
    """`1979 TOP/s` -> operations per second; integers count as operations, not as FLOP."""
    as_rate = re.sub(r"(?<![L])OP/s\s*$", "FLOP/s", text) if isinstance(text, str) else text
    try:
        return parse_quantity(as_rate, Dimension.RATE)
    except InputError as error:
        message = str(error).replace("FLOP/s", "OP/s")
        raise PydanticCustomError("quantity", "{message}", {"message": message}) from error


Operations: TypeAlias = Annotated[
    float,
    BeforeValidator(_operations),
    WithJsonSchema(
        {
            "type": "string",
            "pattern": pattern(Dimension.RATE).replace("FLOP/s", "OP/s"),
            "examples": ["1979 TOP/s"],
        }
    ),
]
"""`1979 TOP/s` -> operations per second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakForm(FileForm):
    """Dense matrix rates, without sparsity; a format that the device lacks is left out."""

    bfloat16: Rate | None = None
    """bfloat16 with float32 accumulation."""
    float16: Rate | None = None
    """float16 with float32 accumulation; of cards with two rates, not the one that accumulates in
    float16."""
    float32: Rate | None = None
    """True float32, not TF32."""
    tf32: Rate | None = None
    """TF32, or the vendor's own like it."""
    float8: Rate | None = None
    """float8 with float32 accumulation."""
    float4: Rate | None = None
    """4-bit floats with a scale per block, float32 accumulation; not the sparse rate."""
    int8: Operations | None = None
    """8-bit integers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleUpForm(FileForm):
    """The vendor's own links between devices."""

    name: Text
    """As the vendor calls it, as NVLink 4."""
    bandwidth: Bandwidth
    """Of one device in one direction, all links together. Half of a bidirectional figure."""
    one_peer: Bandwidth | None = None
    """Of one pair of devices, in one direction; left out: all of it."""
    peers: Annotated[int, Field(ge=1, le=10**6)] | None = None
    """Devices that it reaches in a usual node or pod."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostForm(FileForm):
    """How the device is joined to its node."""

    pcie: Annotated[int, Field(ge=PCIE_GENERATIONS[0], le=PCIE_GENERATIONS[-1])]
    """Generation of PCI Express."""
    lanes: Annotated[int, Field(ge=1, le=MAX_LANES)]
    """Lanes of the device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceForm(FileForm):
    """One kind of device."""

    kind: Name
    """Name that islands use."""
    vendor: Name
    """Vendor; devices of one vendor share a communication library."""
    architecture: Name | None = None
    """What its kernels are built for, as sm90. Left out: not known, and no rule of kernels is
    checked."""
    peak: PeakForm = PeakForm()
    """Dense matrix rates; none: times of this kind come from measurements only."""
    memory: Memory | None = None
    """Memory of one device; left out: every island of this kind says its own."""
    memory_bandwidth: Bandwidth | None = None
    """Of the device's own memory; left out: times of this kind come from measurements only."""
    scale_up: ScaleUpForm | None = None
    """The vendor's own links between devices; left out: none, or not public."""
    host: HostForm | None = None
    """How the device is joined to its node."""
    max_power: Watts | None = None
    """The board's or module's limit."""
    overlap_compute_slowdown: Ratio | None = None
    """How many times as long compute takes beside communication; left out:
    unknown."""
    overlap_communication_slowdown: Ratio | None = None
    """How many times as long communication takes beside compute; left out: unknown."""
    fused_attention: Text | None = None
    """Library of fused attention with its backward pass; `none` where there is none; left out:
    unknown."""
    collectives: Name | None = None
    """Library of collectives, as nccl."""
    torch_device: Name | None = None
    """torch's device type, as cuda."""
    driver_names: list[Text] = field(default_factory=list)
    """What the driver or torch calls it."""
    provenance: Literal["datasheet", "measured"]
    """Where the figures come from."""
    source: Text
    """Where the figures were read that `sources` does not name."""
    sources: dict[str, Text] = field(default_factory=dict)
    """Where single figures were read: `memory: ...`, `peak.float8: ...`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicesForm(FileForm):
    """A file of the device catalogue."""

    devices: list[DeviceForm]
    """Device kinds."""


def check_sources(document: Document) -> Iterator[Fault]:
    """Every source belongs to a figure that its kind gives."""
    for at in document.entries(("devices",)):
        path: FieldPath = ("devices", at)
        sources = document.at(*path, "sources")
        for figure in sources if isinstance(sources, dict) else ():
            place = (*path, "sources", figure)
            if figure not in FIGURES:
                known = ", ".join(FIGURES)
                yield document.fault(place, f"{figure[:60]!a} is no figure; known: {known}")
            elif document.at(*path, *figure.split(".")) is None:
                yield document.fault(place, f"{figure} has a source and no value; give the figure")


# Two words are one misspelt from here on (share of equal letters): `a10o` and `a100` have 0.75,
# `tesla` and `ascend` 0.36.
_SAME_WORD = 0.6
_MAX_NEAREST = 5
# Two letters of `nvidia-h100-80gb-sxm` changed places: .06; one of `amd-mi300x` left out: .06.
_MISSPELT_UNLIKE = 0.1


def load_catalogue(folder: Path | None = None) -> tuple[DeviceKind, ...]:
    """Every device kind of a folder's *.yaml files, by name.

    Left out: the shipped catalogue with the user's own kinds over it. An InputError names every
    fault of the first file that has one.
    """
    if folder is not None:
        return _sorted(_read_folder(folder))
    kinds = _read_folder(shipped_folder("configs") / "devices")
    own = user_devices()
    if own.is_dir():
        kinds |= _read_folder(own)
    return _sorted(kinds)


def kind_called(name: str, kinds: Iterable[DeviceKind]) -> str:
    """The kind that a driver, torch or a tool calls so; empty where no kind or more than one is."""
    wanted = _letters(name)
    found = {
        kind.kind
        for kind in kinds
        if wanted and wanted in {_letters(each) for each in (kind.kind, *kind.driver_names)}
    }
    return found.pop() if len(found) == 1 else ""


def _letters(name: str) -> str:
    # Drivers before 2021 print `A100-SXM4-40GB`, later ones with NVIDIA in front.
    return re.sub(r"[^a-z0-9]", "", name.lower()).removeprefix("nvidia")


def user_devices() -> Path:
    """The folder of the user's own device kinds; it need not exist."""
    home = os.environ.get("XDG_CONFIG_HOME") or ""
    # The XDG specification says that a relative path there is to be ignored.
    # expanduser, unlike Path.home, answers also where a container's user has no home folder.
    base = Path(home) if os.path.isabs(home) else Path(os.path.expanduser("~")) / ".config"
    return base / "hetplan" / "devices"


def _sorted(kinds: dict[str, DeviceKind]) -> tuple[DeviceKind, ...]:
    return tuple(kinds[name] for name in sorted(kinds))


def _read_folder(folder: Path) -> dict[str, DeviceKind]:
    kinds: dict[str, DeviceKind] = {}
    for path in sorted(folder.glob("*.yaml")):
        try:
            state = path.stat()
        except OSError:  # a dangling link: reading says what is wrong
            _read_file(path)
            continue
        for kind in _remembered(path, state.st_mtime_ns, state.st_size, state.st_ino):
            if kind.kind in kinds:
                document = read_document(path)
                at = next(
                    at
                    for at in document.entries(("devices",))
                    if document.at("devices", at, "kind") == kind.kind
                )
                raise _twice(document, at, kind.kind, f", in another file of {path.parent}")
            kinds[kind.kind] = kind
    return kinds


@lru_cache(maxsize=64)
def _remembered(path: Path, *_state: int) -> tuple[DeviceKind, ...]:
    # A command asks for the catalogue several times; a file that did not change is read once.
    return _read_file(path)


def _read_file(path: Path) -> tuple[DeviceKind, ...]:
    document = read_document(path)
    form = decode(document, DevicesForm, schema=DEVICES_SCHEMA, checks=(check_sources,))
    names = [device.kind for device in form.devices]
    for position, name in enumerate(names):
        if name in names[:position]:
            raise _twice(document, position, name)
    return tuple(device_kind(device) for device in form.devices)


def own_kinds(document: Document) -> dict[str, DeviceKind]:
    """The kinds that a cluster file adds; without those that are wrong, which reading it says."""
    found: dict[str, DeviceKind] = {}
    for at in document.entries(("devices",)):
        alone = {"schema": DEVICES_SCHEMA, "devices": [document.at("devices", at)]}
        try:
            (form,) = decode(
                replace(document, root=alone), DevicesForm, schema=DEVICES_SCHEMA
            ).devices
        except InputError:
            continue
        found[form.kind] = device_kind(form)
    return found


def _twice(document: Document, at: int, name: str, where: str = "") -> InputError:
    message = f"{name} is already in the catalogue{where}; rename one"
    return InputError(document.fault(("devices", at, "kind"), message))


def device_kind(form: DeviceForm) -> DeviceKind:
    """The value of a device's file form; what the form leaves out is 0 or empty: unknown."""
    scale_up, host = form.scale_up, form.host
    peaks = ((dtype, getattr(form.peak, dtype)) for dtype in DTYPES)
    return value_of(
        DeviceKind,
        form,
        peak_flops_per_second=tuple((name, rate) for name, rate in peaks if rate is not None),
        memory_bytes=form.memory or 0.0,
        memory_bandwidth_bytes_per_second=form.memory_bandwidth or 0.0,
        scale_up=None
        if scale_up is None
        else ScaleUpFabric(
            name=scale_up.name,
            bandwidth_bytes_per_second=scale_up.bandwidth,
            one_peer_bytes_per_second=scale_up.one_peer or 0.0,
            peers=scale_up.peers or 0,
        ),
        host=None if host is None else HostInterface(pcie_generation=host.pcie, lanes=host.lanes),
        max_power_watts=form.max_power or 0.0,
        sources=tuple(
            FigureSource(figure=figure, source=source)
            for figure, source in sorted(form.sources.items())
        ),
    )


def nearest_kinds(name: str, known: Iterable[str]) -> tuple[str, ...]:
    """The known names that `name` most likely means, best first; none when nothing is like it.

    Words count before letters: a name whose words are all words, or beginnings of words, of a
    kind's name is that kind written short (`a100`, `mi300`, `h100 80gb`), and only kinds that fit
    as well are shown beside it. Edit distance decides where no word fits.
    """
    text = name[:100].lower()
    ranked = sorted((_rank(text, kind), kind) for kind in set(known))
    kept = [(rank, kind) for rank, kind in ranked if rank[0] < _UNLIKE]
    if not kept:
        return ()
    # Beside a real match of words, kinds that are merely spelt alike would only distract.
    worst = max(kept[0][0][0], _BEGINNINGS)
    return tuple(kind for rank, kind in kept if rank[0] <= worst)[:_MAX_NEAREST]


def meant_kinds(name: str, known: Iterable[str]) -> tuple[str, ...]:
    """The known names that `name` cuts short or misspells; none where it may be a name of its own.

    Likest first.
    """
    ranked = sorted((_rank(name[:100].lower(), kind), kind) for kind in set(known))
    return tuple(
        kind for rank, kind in ranked if rank[0] <= _INSIDE or rank[2] <= _MISSPELT_UNLIKE
    )[:_MAX_NEAREST]


def fitting_kinds(name: str, known: Iterable[str]) -> tuple[str, ...]:
    """The known names that have every word of `name`, or else begin with each, or hold it."""
    ranked = sorted((_rank(name[:100].lower(), kind)[0], kind) for kind in set(known))
    best = ranked[0][0] if ranked else _UNLIKE
    least = 1 if best == _WHOLE_WORDS else 3  # `a3` is not a30
    enough = best <= _INSIDE and len("".join(words_of(name))) >= least
    return tuple(kind for rank, kind in ranked if rank == best) if enough else ()


_WHOLE_WORDS, _BEGINNINGS, _INSIDE, _SOME_WORDS, _SPELT_ALIKE, _UNLIKE = range(6)


def words_of(name: str) -> list[str]:
    """Runs of letters and digits, in small letters."""
    return [word for word in re.split(r"[^a-z0-9]+", name.lower()) if word]


def _rank(text: str, kind: str) -> tuple[int, float, float]:
    """How a kind fits what was written: class, then what is left over, then unlike letters."""
    asked, has = words_of(text), words_of(kind)
    squeezed, whole = "".join(asked), "".join(has)
    unlike = 1.0 - SequenceMatcher(None, squeezed, whole).ratio()
    spare = float(sum(word not in asked for word in has))
    if len(squeezed) < 2:
        return _UNLIKE, spare, unlike
    if all(word in has for word in asked):
        return _WHOLE_WORDS, spare, unlike
    if all(any(other.startswith(word) for other in has) for word in asked):
        return _BEGINNINGS, spare, unlike
    if len(squeezed) > 2 and squeezed in whole:
        return _INSIDE, spare, unlike
    # The vendor alone says nothing about which device is meant, and its memory little.
    common = [word for word in asked if is_model(word) and _meets(word, has)]
    if common:
        return _SOME_WORDS, -float(sum(len(word) for word in common)), unlike
    pairs = (SequenceMatcher(None, word, other).ratio() for word in asked for other in has)
    likest = max(1.0 - unlike, *pairs)
    return (_SPELT_ALIKE if likest >= _SAME_WORD else _UNLIKE), 1.0 - likest, unlike


def is_model(word: str) -> bool:
    """Whether a word tells devices of one vendor apart, as h100 does and 80gb does not."""
    return any(letter.isdigit() for letter in word) and not re.fullmatch(r"\d+g[bi]?b?", word)


def _meets(word: str, has: list[str]) -> bool:
    return any(
        other.startswith(word) or (len(other) > 2 and word.startswith(other)) for other in has
    )
