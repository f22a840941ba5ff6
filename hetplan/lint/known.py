"""Ceilings of devices that a file of measurements only names."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from hetplan.cluster.catalogue import kind_called, load_catalogue
from hetplan.cluster.devices import DeviceKind

DATA_CENTRE_MARGIN = 1.03  # peaks are quoted at the highest clock; 3 % for rounded times
DESK_MARGIN = 1.25  # peaks are quoted at the boost clock, which such cards exceed (RTX 3090: 1.24x)


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownDevice:
    """Ceilings of a device; 0 where a figure is not known."""

    name: str
    float32_flops_per_second: float
    tensor_float32_flops_per_second: float
    half_flops_per_second: float
    """float16 or bfloat16 with float32 accumulation; dense, as all rates here."""
    link_bytes_per_second: float
    """All direct links to other devices together, one direction."""
    margin: float
    """How much above its quoted peak a rate may be."""

    def peak(self, precision: str) -> float:
        """Operations per second that nothing of this precision exceeds; 0: not known."""
        if precision == "float32":
            return self.float32_flops_per_second * self.margin
        known = precision in ("float16", "bfloat16")
        return self.half_flops_per_second * self.margin if known else 0.0


@lru_cache(maxsize=256)
def known_device(label: str) -> KnownDevice | None:
    """The device of the catalogue that a file's label means; None where it means none.

    The label is a kind, a driver's name, or some of a kind's words, as in `A100-40`, `a100_pcie` or
    `RTX-3090`; of several kinds with these words, the SXM one and the smallest memory is meant. A
    label of several devices (`RTX-3090+Titan-RTX`) is none.
    """
    kinds = _catalogue()
    called = label.lower() if label.lower() in kinds else kind_called(label, kinds.values())
    words = re.findall(r"[a-z0-9]+", label.lower().partition("(")[0])
    if not called and words and "+" not in label:
        fitting = [kind for kind in kinds if _has_words(kind, words)]
        called = min(fitting, key=lambda kind: ("sxm" not in kind, len(kind), kind), default="")
    return _of_kind(kinds[called]) if called else None


def _has_words(kind: str, words: Sequence[str]) -> bool:
    """Whether every word is one of the kind's; `40` also means `40gb`, `gh` also `gh200`."""
    parts = kind.split("-")
    parts += [one + two for one, two in pairwise(parts)]  # `2080ti`
    return all(
        any(
            part == word or (part.startswith(word) and (word.isdecimal() or word.isalpha()))
            for part in parts
        )
        for word in words
    )


@lru_cache(maxsize=1)
def _catalogue() -> dict[str, DeviceKind]:
    return {kind.kind: kind for kind in load_catalogue()}


def _of_kind(kind: DeviceKind) -> KnownDevice:
    rates = dict(kind.peak_flops_per_second)
    link = kind.scale_up.bandwidth_bytes_per_second if kind.scale_up is not None else 0.0
    return KnownDevice(
        name=kind.kind,
        float32_flops_per_second=rates.get("float32", 0.0),
        tensor_float32_flops_per_second=rates.get("tf32", 0.0),
        half_flops_per_second=max(rates.get("float16", 0.0), rates.get("bfloat16", 0.0)),
        link_bytes_per_second=link,
        margin=DESK_MARGIN if "-rtx-" in kind.kind else DATA_CENTRE_MARGIN,
    )


def fastest_link() -> float:
    """Bytes per second, one direction, of the fastest links of any catalogue device."""
    fabrics = [kind.scale_up for kind in _catalogue().values()]
    return max(fabric.bandwidth_bytes_per_second for fabric in fabrics if fabric is not None)
