"""Random questions are the same every time, within their bounds, and files that hetplan reads."""

from __future__ import annotations

from pathlib import Path

import pytest

from evaluation import limits
from hetplan.cluster.load import load_cluster
from hetplan.model.load import load_model


@pytest.mark.parametrize("seed", range(12))
def test_a_question_is_within_the_bounds_and_can_be_read(seed: int, tmp_path: Path) -> None:
    asked = limits.question(seed)
    assert asked == limits.question(seed) != limits.question(seed + 1)
    words = asked.words(tmp_path)
    cluster, model = load_cluster(tmp_path / "cluster.yaml"), load_model(tmp_path / "model.yaml")
    assert len(cluster.islands) == asked.islands <= limits.MOST_ISLANDS
    assert len({each.device.kind for each in cluster.islands}) == asked.kinds <= limits.MOST_KINDS
    assert cluster.num_devices == asked.devices
    assert asked.devices <= max(limits.MOST_DEVICES, 8 * asked.islands)
    assert len(model.layers) - 2 == asked.layers <= limits.MOST_LAYERS
    assert asked.batch <= limits.MOST_BATCH
    assert f"{asked.limit_seconds} s" in words


def test_a_limit_may_be_overrun_by_a_tenth_or_a_second() -> None:
    assert limits.overrun(5.0, 4.0, 1.0)["overrun_seconds"] == 0.0
    late = limits.overrun(30.0, 34.0, 1e9)
    assert (late["overrun_seconds"], late["allowed_seconds"]) == (4.0, 3.0)
    assert limits.overrun(2.0, 2.5, 1.0)["allowed_seconds"] == 1.0
