"""Which device kind does a table of measurements mean by its name for it?

Tables write `A100-80GB-SXM (multi: ...)`, `GH-96`, `B200-SXM`, `RTX-3090`. Names are looked up in
the catalogue: by what a driver calls the kind, by the labels of the tables, then by the words of
the name, where devices in a module come before devices in a slot, as large runs have them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from evaluation.accuracy.unit_notes import KINDS
from hetplan.cluster.catalogue import kind_called, nearest_kinds
from hetplan.cluster.devices import DeviceKind
from hetplan.errors import InputError

_ALIASES = {
    "gh200": "nvidia-gh200-96gb",
    "v100": "nvidia-v100-16gb-sxm",
    "a100-sxm": "nvidia-a100-80gb-sxm",
}
"""Names, as `_plain` writes them, that several kinds share; the one that the tables mean."""


def kind_names(text: str) -> tuple[str, ...]:
    """The devices of a row: `RTX-3090+Titan-RTX` are two."""
    return tuple(part.strip() for part in text.split(" (")[0].split("+") if part.strip())


def device_kind_of(name: str, kinds: Sequence[DeviceKind]) -> DeviceKind:
    """The kind that a table means; an InputError where no kind, or more than one, is like it."""
    known = {kind.kind: kind for kind in kinds}
    plain = _plain(name)
    labels = {_plain(label): kind for label, kind in KINDS} | _ALIASES
    called = (
        known.get(name) or known.get(labels.get(plain, "")) or known.get(kind_called(name, kinds))
    )
    if called is not None:
        return called
    # The vendor's words and the memory's size stand in the kind's name or say nothing.
    words = [word for word in plain.split("-") if word]
    found = [
        kind
        for kind in known.values()
        if words and all(_begins(word, kind.kind.lower().split("-")) for word in words)
    ]
    in_modules = [kind for kind in found if "sxm" in kind.kind] or found
    if len(in_modules) == 1:
        return in_modules[0]
    near = nearest_kinds(name, known)
    like = f"; nearest: {', '.join(near)}" if near else ""
    raise InputError(f"{name!a} is no kind of the catalogue{like}")


def _begins(word: str, words: Sequence[str]) -> bool:
    return any(each.startswith(word) for each in words)


def _plain(name: str) -> str:
    """Lower case, `80GB` and `80GiB` as in the catalogue's names, `_` and spaces as `-`.

    `SXM4` is `sxm`, `RTX3090` and `2080Ti` are several words; families' names say nothing more.
    """
    text = re.sub(r"[_\s]+", "-", name.split(" (")[0].strip().lower()).replace("gib", "gb")
    text = re.sub(r"\bsxm\d", "sxm", text)
    text = re.sub(r"\b(rtx|tpu|ascend)(?=[v\d])", r"\1-", text)
    text = re.sub(r"(?<=\d)ti\b", "-ti", text)
    return re.sub(r"^(nvidia-|amd-instinct-|tesla-|geforce-)+", "", text)
