"""Which predictor comes out of a folder's unit measurements?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hetplan.cluster.devices import DeviceKind
from hetplan.job.spec import Precision
from hetplan.predict.fit import FittedPredictor, fit_populations
from hetplan.profiling.samples import LayerSample, OperatorSample, ProfileSet


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """A predictor and what it knows."""

    predictor: FittedPredictor
    populations: tuple[ProfileSet, ...]
    notes: tuple[str, ...]
    """Measurements that were not used, by reason."""

    def lent(self, device: DeviceKind, precision: Precision) -> str:
        """Whose laws of operators stand in for a kind that has no sample of its own; else empty."""
        key = device.kind, precision.value
        if any(_count(one.layers, *key) or _count(one.operators, *key) for one in self.populations):
            return ""
        found = self.predictor.lent(device, precision)
        return "" if found is None else found.lenders

    def what(self, device: str, precision: str) -> str:
        """In a few words, what is known of a device kind in one number format."""
        layers = operators = links = 0
        for each in self.populations:
            layers += _count(each.layers, device, precision)
            operators += _count(each.operators, device, precision)
            links += sum(sample.link.startswith(f"{device} ") for sample in each.links)
        counted = ((operators, "operators"), (layers, "layers"), (links, "collectives"))
        words = ", ".join(f"{count} {name}" for count, name in counted if count)
        return f"{device} {precision}: {words or 'nothing'}"


def _count(
    samples: Sequence[LayerSample] | Sequence[OperatorSample], device: str, precision: str
) -> int:
    return sum(each.device == device and each.precision == precision for each in samples)


def fitted(folder: Path | None) -> Fitted:
    """Fitted on `unit/` and `sailor/` of a folder; on nothing where there is none of them."""
    if folder is None:
        nothing = FittedPredictor.datasheet_only()
        return Fitted(predictor=nothing, populations=(), notes=())
    from evaluation.accuracy.unit import read_unit

    unit = read_unit(folder)
    return Fitted(
        predictor=fit_populations(unit.populations),
        populations=unit.populations,
        notes=unit.notes,
    )
