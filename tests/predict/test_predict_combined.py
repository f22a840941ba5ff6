"""Times of forward and backward together: the split, its interval, and where its width is from."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st
from predict_samples import REFERENCE, gpt, layer_grid, layer_sample

from hetplan.predict.layer.laws import (
    SPLIT_LOG_HALFWIDTHS,
    fit_layer_laws,
    split_combined,
)
from hetplan.profiling.samples import LayerSample, Phase

COMBINED = Phase.FORWARD_BACKWARD.value
SAILOR = REFERENCE / "sailor" / "layer_profiles"


def together(samples: list[LayerSample]) -> list[LayerSample]:
    """The samples as a tool writes them that times both passes at once."""
    return [replace(sample, phase=COMBINED) for sample in samples]


@given(st.floats(1e-9, 1e3), st.floats(1.0, 2.0), st.floats(0.5, 1.0))
def test_the_halves_sum_to_what_was_measured(seconds: float, up: float, down: float) -> None:
    sample = replace(
        layer_sample(gpt(), seconds, phase=COMBINED),
        p10_seconds=seconds * down,
        p90_seconds=seconds * up,
        activation_bytes=5.0,
    )
    (forward, backward), rows = split_combined([sample])
    assert (forward.phase, backward.phase) == ("forward", "backward")
    for name in ("median_seconds", "p10_seconds", "p90_seconds"):
        total = getattr(forward, name) + getattr(backward, name)
        assert total == pytest.approx(getattr(sample, name), rel=1e-15)
        assert getattr(backward, name) == pytest.approx(2 * getattr(forward, name))
    for half in (forward, backward):
        assert half.p10_seconds <= half.median_seconds <= half.p90_seconds
    assert (forward.activation_bytes, backward.activation_bytes) == (5.0, 0.0)
    assert sum(rows.halves.values()) == 2


def test_a_law_from_combined_times_says_so_and_is_wider() -> None:
    alone = {law.phase: law for law in fit_layer_laws(layer_grid())}["forward"]
    laws = {law.phase: law for law in fit_layer_laws(together(layer_grid()))}
    assert set(laws) == {"forward", "backward"}
    for phase, law in laws.items():
        added = SPLIT_LOG_HALFWIDTHS["transformer", phase]
        assert law.log_halfwidth == pytest.approx(alone.log_halfwidth + added, abs=1e-6)
        assert any("split of measured forward+backward by operations" in n for n in law.notes)
        assert f"{added:g} more for the split" in law.calibration


def test_a_phase_measured_alone_is_not_mixed_with_halves() -> None:
    forward = layer_grid()
    slow = [replace(each, median_seconds=each.median_seconds * 30) for each in forward]
    laws = {law.phase: law for law in fit_layer_laws([*forward, *together(slow)])}
    (alone,) = fit_layer_laws(forward)
    assert laws["forward"].terms == alone.terms
    assert laws["forward"].log_halfwidth == alone.log_halfwidth
    assert "not used: forward was measured alone" in laws["forward"].notes[-1]
    assert any("split of measured" in note for note in laws["backward"].notes)


def measured_pairs() -> dict[str, list[tuple[float, float]]]:
    """Forward and backward seconds of every published shape, by kind of layer."""
    pairs: dict[str, list[tuple[float, float]]] = {"transformer": [], "head": []}
    for path in sorted(SAILOR.glob("*/*/profile.json")):
        ends = 2 if "LLAMA" in str(path) else 1  # Llama's final norm is a layer of its own
        for by_tp in json.loads(path.read_text(encoding="utf-8")).values():
            for layers in by_tp.values():
                times = [layers[str(at)] for at in range(len(layers))]
                middle, last = times[1:-ends], times[-ends:]
                pairs["transformer"].append(
                    (median(each[0] for each in middle), median(each[1] for each in middle))
                )
                if "Neo" not in str(path):  # its last layer holds no projection
                    pairs["head"].append((sum(each[0] for each in last), sum(e[1] for e in last)))
    return pairs


def p90(errors: list[float]) -> float:
    return sorted(errors)[math.ceil(0.9 * len(errors)) - 1]


@pytest.mark.skipif(not SAILOR.is_dir(), reason="Sailor's published profiles are not here")
@pytest.mark.parametrize(
    ("layer", "count", "ratios", "stated"),
    [
        ("transformer", 210, (0.7, 2.1, 3.3), (0.292, 0.178)),
        ("head", 174, (0.7, 1.7, 9.1), (0.434, 0.291)),
    ],
)
def test_the_width_of_the_split_is_what_published_layers_show(
    layer: str,
    count: int,
    ratios: tuple[float, float, float],
    stated: tuple[float, float],
) -> None:
    pairs = measured_pairs()[layer]
    assert len(pairs) == count
    found = [backward / forward for forward, backward in pairs]
    assert (min(found), median(found), max(found)) == pytest.approx(ratios, abs=0.05)
    forward = p90([abs(math.log(f / ((f + b) / 3))) for f, b in pairs])
    backward = p90([abs(math.log(b / (2 * (f + b) / 3))) for f, b in pairs])
    assert (forward, backward) == pytest.approx(stated, abs=0.0006)
    assert forward <= SPLIT_LOG_HALFWIDTHS[layer, "forward"] <= forward * 1.1
    assert backward <= SPLIT_LOG_HALFWIDTHS[layer, "backward"] <= backward * 1.1
