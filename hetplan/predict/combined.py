"""Times of forward and backward together, as two: what a law needs where a tool wrote one.

Backward is taken as twice the forward, by operations (`model.work`): a gradient of the inputs and
one of the weights for every product. Kernels do not keep to that, so the interval of a law from
such halves is wider. How far real layers are from it: Sailor's published profiles, 210 shapes (7
GPU kinds, 4 models, microbatch 1 to 128, tp 1 to 8) with backward between 0.7 and 3.3 times the
forward (median 2.1), and 174 heads with 0.7 to 9.1 times (median 1.7). 90 % of the halves lie
within the factors below; tests/predict/test_predict_combined.py computes them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from hetplan.model.spec import LayerKind
from hetplan.predict.laws import LayerLaw
from hetplan.profiling.samples import LayerSample, Phase

FORWARD_SHARE = 1 / 3  # 1 part forward, 2 parts backward, by operations

TRANSFORMER_LOG_HALFWIDTHS = (0.30, 0.18)  # forward, backward: p90 of 210 shapes is 0.292, 0.178
HEAD_LOG_HALFWIDTHS = (0.44, 0.30)  # p90 of 174 shapes is 0.434, 0.291
# All of an embedding's time may be its forward, log(3 / 1) = 1.10; nobody publishes a backward that
# was waited for (Sailor's are 3 us at every size), so its half gets the same.
EMBEDDING_LOG_HALFWIDTHS = (1.10, 1.10)

_HALVES = (Phase.FORWARD.value, Phase.BACKWARD.value)

_Key = tuple[str, str, str, str]
"""Device, precision, layer, phase."""


@dataclass(frozen=True, slots=True)
class CombinedRows:
    """Which laws stand on halves of combined times, and which laws needed none."""

    halves: Counter[_Key]
    """Rows that were split, per law."""
    unused: Counter[_Key]
    """Rows whose half was measured alone as well."""

    def widened(self, law: LayerLaw) -> LayerLaw:
        """The law with the interval and the notes that its rows ask for."""
        key = (law.device, law.precision, law.layer, law.phase)
        notes = law.notes
        if self.unused[key]:
            notes += (
                f"{self.unused[key]} rows of forward and backward together are not used: "
                f"{law.phase} was measured alone",
            )
        if not self.halves[key]:
            return law if notes == law.notes else replace(law, notes=notes)
        added = split_log_halfwidth(law.layer, law.phase)
        return replace(
            law,
            log_halfwidth=law.log_halfwidth + added,
            table_log_halfwidth=law.table_log_halfwidth + added,
            measured=(),  # a half is not measured
            calibration=f"{law.calibration}; {added:g} more for the split",
            notes=(
                *notes,
                "split of measured forward+backward by operations: an assumption (backward is "
                "twice forward)",
            ),
        )


def split_log_halfwidth(layer: str, phase: str) -> float:
    """Half-width that the split alone adds to a law of this layer and phase."""
    widths = TRANSFORMER_LOG_HALFWIDTHS
    if layer == LayerKind.HEAD.value:
        widths = HEAD_LOG_HALFWIDTHS
    elif layer == LayerKind.EMBEDDING.value:
        widths = EMBEDDING_LOG_HALFWIDTHS
    return widths[_HALVES.index(phase)]


def split_combined(
    samples: Sequence[LayerSample],
) -> tuple[tuple[LayerSample, ...], CombinedRows]:
    """The samples with every combined one as a forward and a backward one, which sum to it.

    A phase that was measured alone for the same device, precision and layer keeps to those rows.
    """
    combined = Phase.FORWARD_BACKWARD.value
    rows = CombinedRows(Counter(), Counter())
    if all(sample.phase != combined for sample in samples):
        return tuple(samples), rows
    alone = {_key(sample, sample.phase) for sample in samples if sample.phase != combined}
    result: list[LayerSample] = []
    for sample in samples:
        if sample.phase != combined:
            result.append(sample)
            continue
        for half in _split(sample):
            key = _key(half, half.phase)
            if key in alone:
                rows.unused[key] += 1
            else:
                rows.halves[key] += 1
                result.append(half)
    return tuple(result), rows


def _key(sample: LayerSample, phase: str) -> _Key:
    return sample.device, sample.precision, sample.layer, phase


def _split(sample: LayerSample) -> Iterator[LayerSample]:
    """Its forward, and as backward what is left of each time."""
    forward = replace(
        sample,
        phase=Phase.FORWARD.value,
        median_seconds=sample.median_seconds * FORWARD_SHARE,
        p10_seconds=sample.p10_seconds * FORWARD_SHARE,
        p90_seconds=sample.p90_seconds * FORWARD_SHARE,
    )
    yield forward
    yield replace(
        sample,
        phase=Phase.BACKWARD.value,
        median_seconds=sample.median_seconds - forward.median_seconds,
        p10_seconds=sample.p10_seconds - forward.p10_seconds,
        p90_seconds=sample.p90_seconds - forward.p90_seconds,
        activation_bytes=0.0,
    )
