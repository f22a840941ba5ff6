"""Which device kinds hetplan knows, and which of them somebody may have meant.

The shipped catalogue is the data in configs/devices. A user's own files in
`$XDG_CONFIG_HOME/hetplan/devices` (default `~/.config/hetplan/devices`) are read after it: a kind
of theirs replaces a shipped one of the same name.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from difflib import SequenceMatcher
from functools import lru_cache
from pathlib import Path

from hetplan.cluster.device_form import DEVICES_SCHEMA, DeviceForm, DevicesForm, check_sources
from hetplan.cluster.devices import (
    DTYPES,
    DeviceKind,
    FigureSource,
    HostInterface,
    ScaleUpFabric,
)
from hetplan.errors import InputError
from hetplan.files.reading import decode, read_document
from hetplan.files.shipped import shipped_folder

# Two words are one misspelt from here on (share of equal letters): `a10o` and `a100` have 0.75,
# `tesla` and `ascend` 0.36.
_SAME_WORD = 0.6
_MAX_NEAREST = 5


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
                raise _twice(path, kind.kind)
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
            raise InputError(
                document.fault(
                    ("devices", position, "kind"), f"{name} is already in the catalogue; rename one"
                )
            )
    return tuple(device_kind(device) for device in form.devices)


def _twice(path: Path, name: str) -> InputError:
    document = read_document(path)
    entries = document.entries(("devices",))
    at = next(at for at in entries if document.at("devices", at, "kind") == name)
    return InputError(
        document.fault(
            ("devices", at, "kind"),
            f"{name} is already in the catalogue, in another file of {path.parent}; rename one",
        )
    )


def device_kind(form: DeviceForm) -> DeviceKind:
    """The value of a device's file form; what the form leaves out is 0 or empty: unknown."""
    peaks = ((dtype, getattr(form.peak, dtype)) for dtype in DTYPES)
    return DeviceKind(
        kind=form.kind,
        vendor=form.vendor,
        peak_flops_per_second=tuple((name, rate) for name, rate in peaks if rate is not None),
        memory_bytes=form.memory or 0.0,
        memory_bandwidth_bytes_per_second=form.memory_bandwidth or 0.0,
        provenance=form.provenance,
        source=form.source,
        scale_up=None
        if form.scale_up is None
        else ScaleUpFabric(
            name=form.scale_up.name,
            bandwidth_bytes_per_second=form.scale_up.bandwidth,
            one_peer_bytes_per_second=form.scale_up.one_peer or 0.0,
            peers=form.scale_up.peers or 0,
        ),
        host=None
        if form.host is None
        else HostInterface(pcie_generation=form.host.pcie, lanes=form.host.lanes),
        max_power_watts=form.max_power or 0.0,
        overlap_compute_slowdown=form.overlap_compute_slowdown or 0.0,
        overlap_communication_slowdown=form.overlap_communication_slowdown or 0.0,
        fused_attention=form.fused_attention or "",
        collectives=form.collectives or "",
        torch_device=form.torch_device or "",
        driver_names=tuple(form.driver_names),
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


_WHOLE_WORDS, _BEGINNINGS, _INSIDE, _SOME_WORDS, _SPELT_ALIKE, _UNLIKE = range(6)


def _words(name: str) -> list[str]:
    return [word for word in re.split(r"[^a-z0-9]+", name.lower()) if word]


def _rank(text: str, kind: str) -> tuple[int, float, float]:
    """How a kind fits what was written: class, then what is left over, then unlike letters."""
    asked, has = _words(text), _words(kind)
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
    common = [word for word in asked if _is_model(word) and _meets(word, has)]
    if common:
        return _SOME_WORDS, -float(sum(len(word) for word in common)), unlike
    pairs = (SequenceMatcher(None, word, other).ratio() for word in asked for other in has)
    likest = max(1.0 - unlike, *pairs)
    return (_SPELT_ALIKE if likest >= _SAME_WORD else _UNLIKE), 1.0 - likest, unlike


def _is_model(word: str) -> bool:
    return any(letter.isdigit() for letter in word) and not re.fullmatch(r"\d+g[bi]?b?", word)


def _meets(word: str, has: list[str]) -> bool:
    return any(
        other.startswith(word) or (len(other) > 2 and word.startswith(other)) for other in has
    )
