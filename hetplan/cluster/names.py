"""Which device kind somebody means: `h100`, `MI300X`, `a100-80gb`, `910b`, `NVIDIA H100 80GB HBM3`.

A name means the only kind that it fits. Where it fits several, it means the one that nodes are sold
with: the device of the first node template of them (configs/nodes.yaml), if the name is a word of
each kind's name, or the only templates' device if it begins the same word of each. Cluster files
and options are read so; what is stored has the catalogue's names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import lru_cache

from hetplan.cluster.catalogue import (
    fitting_kinds,
    is_model,
    kind_called,
    load_catalogue,
    nearest_kinds,
    own_kinds,
    words_of,
)
from hetplan.cluster.devices import DeviceKind
from hetplan.cluster.places import island_paths
from hetplan.cluster.templates import node_templates
from hetplan.errors import Fault, InputError, Severity
from hetplan.files.reading import Document


@dataclass(frozen=True, slots=True)
class MeantKind:
    """A kind, and the others that its name would fit."""

    kind: str
    others: tuple[str, ...] = ()


def meant_kind(name: str, kinds: Iterable[DeviceKind]) -> MeantKind:
    """The kind that is meant; an InputError names the candidates, or the nearest, otherwise."""
    known = {each.kind: each for each in kinds}
    if name in known:
        return MeantKind(name)
    called = kind_called(name, known.values())
    if called:
        return MeantKind(called)
    specific = any(len(word) >= _LEAST_LETTERS and is_model(word) for word in words_of(name))
    fits = fitting_kinds(name, known) if specific else ()
    fits = tuple(kind for kind in fits if _cuts_no_number(words_of(name), kind))
    if len(fits) == 1:
        return MeantKind(fits[0])
    usual = _usual(words_of(name), fits)
    if usual:
        return MeantKind(usual, tuple(kind for kind in fits if kind != usual))
    near = fits or nearest_kinds(name, known)
    shown = ", ".join(near[:_MAX_SHOWN]) or "hetplan doctor --kinds lists all"
    what = "may be each of" if fits else "is no device kind; nearest:" if near else "is no kind:"
    raise InputError(f"{name[:60]!a} {what} {shown}")


_LEAST_LETTERS = 2  # t4
_MAX_SHOWN = 8


def _cuts_no_number(asked: list[str], kind: str) -> bool:
    """Whether every number of the name is a whole one of the kind's: `mi21` is not mi210."""
    has = words_of(kind)
    if all(any(re.match(_begun(word), other) for other in has) for word in asked):
        return True
    letters = "".join(asked)
    before = r"(?<!\d)" if letters[0].isdigit() else ""
    return re.search(before + _begun(letters), " ".join(has)) is not None


def _begun(letters: str) -> str:
    """Pattern of these letters, whatever words they are in."""
    return " ?".join(letters) + (r"(?!\d)" if letters[-1].isdigit() else "")


def _usual(asked: list[str], fits: tuple[str, ...]) -> str:
    """The kind of these that is most common; empty where that cannot be said."""
    sold = [device for device in _sold_devices() if device in fits]
    if not sold:
        return ""
    if all(word in words_of(kind) for word in asked for kind in fits):
        return sold[0]
    begun = {
        re.sub(r"\d+$", "", other)
        for kind in fits
        for other in words_of(kind)
        if any(other.startswith(word) for word in asked)
    }
    return sold[0] if len(sold) == 1 and begun <= set(asked) else ""


@lru_cache(maxsize=1)
def _sold_devices() -> tuple[str, ...]:
    """Devices of the node templates in their order."""
    return tuple(dict.fromkeys(each.device for each in node_templates().values()))


def measured_kind(name: str) -> str:
    """The kind whose measurements are called so; the name itself where the catalogue has none.

    Measurements are of one kind: a name that several have is an InputError.
    """
    try:
        meant = meant_kind(name, load_catalogue())
    except InputError:
        return name
    if meant.others:
        several = ", ".join((meant.kind, *meant.others))
        raise InputError(f"{name[:60]!a} may be each of {several}; measurements are of one kind")
    return meant.kind


def with_kind_names(document: Document, kinds: Iterable[DeviceKind]) -> Document:
    """The cluster file with the catalogue's names of its islands' devices.

    A name that fits none, or several, stays: the rules of islands say what is wrong with it.
    """
    meant = _meant_in(document, kinds)
    if not meant:
        return document
    named = replace(document, root=deepcopy(document.root))
    for _, path in island_paths(document):
        island, name = named.at(*path), document.word((*path, "device"))
        if isinstance(island, dict) and name in meant:
            island["device"] = meant[name].kind
    return named


def guessed_kinds(document: Document) -> Iterator[Fault]:
    """A note for each name of a cluster file that fits several kinds: what it is taken for."""
    for name, meant in _meant_in(document, load_catalogue()).items():
        paths = (path for _, path in island_paths(document))
        path = next(path for path in paths if document.word((*path, "device")) == name)
        if meant.others:
            message = f"{name!a} is taken as {meant.kind}, not {', '.join(meant.others)}"
            yield replace(document.fault((*path, "device"), message), severity=Severity.NOTE)


def _meant_in(document: Document, kinds: Iterable[DeviceKind]) -> dict[str, MeantKind]:
    """What the names of islands' devices mean that are not the kinds' own."""
    known = {each.kind: each for each in kinds} | own_kinds(document)
    own = {document.word(("devices", at, "kind")) for at in document.entries(("devices",))}
    meant: dict[str, MeantKind] = {}
    for _, path in island_paths(document):
        name = document.word((*path, "device"))
        if name is not None and name not in known and name not in own and name not in meant:
            with suppress(InputError):
                meant[name] = meant_kind(name, known.values())
    return meant
