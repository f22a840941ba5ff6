"""Which catalogue kind a driver's name of a device means."""

from __future__ import annotations

import re
from collections.abc import Sequence

from hetplan.cluster.catalogue import nearest_kinds
from hetplan.cluster.devices import DeviceKind


def catalogue_kind(name: str, kinds: Sequence[DeviceKind]) -> str:
    """The kind that is called so by its driver; empty where no kind or more than one is."""
    wanted = _letters(name)
    found = {
        kind.kind
        for kind in kinds
        if wanted and wanted in {_letters(each) for each in (kind.kind, *kind.driver_names)}
    }
    return found.pop() if len(found) == 1 else ""


def likely_kinds(name: str, kinds: Sequence[DeviceKind]) -> tuple[str, ...]:
    """Kinds that may be meant by a name that no kind has."""
    return nearest_kinds(name, (kind.kind for kind in kinds))


def _letters(name: str) -> str:
    # Drivers before 2021 print `A100-SXM4-40GB`, later ones with NVIDIA in front.
    return re.sub(r"[^a-z0-9]", "", name.lower()).removeprefix("nvidia")
