"""Rough figures of a whole table of families are those of its families one by one, to the bit."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from search_jobs import cluster, island, job, model

from hetplan.cluster.load import load_cluster
from hetplan.cluster.spec import Cluster
from hetplan.job.load import load_job
from hetplan.job.spec import Job, Pins, TrainerOptions
from hetplan.model.load import load_model
from hetplan.model.spec import ModelSpec
from hetplan.predict.fit import FittedPredictor
from hetplan.search.bounds.order_free_table import OrderFreeTable
from hetplan.search.space.allowed import allowed_cluster
from hetplan.search.table_maker import TableMaker

CONFIGS = Path(__file__).parents[2] / "configs"
PREDICTOR = FittedPredictor.datasheet_only()
TARGETS = ["any", "flagscale", "megatron", "native", "torchtitan"]


def _compared(spec: ModelSpec, where: Cluster, asked: Job, most: int) -> tuple[int, int]:
    """(families that fit, that do not) of those that were compared."""
    allowed = allowed_cluster(where, asked)
    makers = [
        TableMaker(model=spec, cluster=allowed, job=asked, predictor=PREDICTOR) for _ in range(3)
    ]
    found, table = makers[1].families, makers[0].order_free_bounds()
    assert table.bounds.shape == table.estimates.shape == (len(found),)
    compared = random.Random(5).sample(range(len(found)), min(most, len(found)))
    for at in compared:
        one = makers[1].order_free(found[at])
        assert (one.bound_seconds, one.estimate_seconds) == (table.bounds[at], table.estimates[at])
    _below(makers[2], table)
    fits = int(np.isfinite(table.bounds[compared]).sum())
    return fits, len(compared) - fits


_RESOLUTION = 1e-4
"""Part by which two bounds differ that were found by halving unlike ranges: 1e-6 of the range,
which is up to some ten times the bound."""


def _below(maker: TableMaker, table: OrderFreeTable) -> None:
    """Bounds that are shared are no higher; they are a family's own where they are below."""
    own = table.bounds
    below = float(np.median(own[np.isfinite(own)])) if np.isfinite(own).any() else 1.0
    found = maker.order_free_bounds(below)
    assert (found.bounds <= own * (1.0 + _RESOLUTION)).all()
    low = found.bounds < below
    assert (found.bounds[low] == own[low]).all()
    # Guesses are over the numbers of stages that may be below.
    assert (found.estimates[low] >= table.estimates[low]).all()
    assert (own[~low] >= below * (1.0 - _RESOLUTION)).all()


@pytest.mark.parametrize("trainer", TARGETS)
@pytest.mark.parametrize(
    ("model_name", "cluster_name", "pin"),
    [
        ("llama-140b", "mixed-768", Pins()),
        pytest.param("llama-2-70b", "three-regions", Pins(), marks=pytest.mark.slow),
        ("deepseek-v3", "four-vendors", Pins(tp=8, microbatch_size=1)),
    ],
)
def test_a_table_says_what_its_families_say(
    model_name: str, cluster_name: str, pin: Pins, trainer: str
) -> None:
    spec = load_model(CONFIGS / "models" / f"{model_name}.yaml")
    where = load_cluster(CONFIGS / "clusters" / f"{cluster_name}.yaml")
    asked = load_job(CONFIGS / "jobs" / "llama-140b.yaml")
    mixed = TrainerOptions(mixed_libraries=True)  # no maker's devices alone hold the experts
    asked = replace(asked, target=trainer, pin=pin, trainer=mixed)
    fits, _ = _compared(spec, where, asked, 80)
    assert fits > 0


@pytest.mark.parametrize(
    "pin",
    [
        Pins(virtual_stages=2),
        *(
            pytest.param(pin, marks=pytest.mark.slow)
            for pin in (Pins(), Pins(pp=3), Pins(recompute=True), Pins(depth=2))
        ),
    ],
)
def test_pins_and_little_memory_are_seen(pin: Pins) -> None:
    seen = [0, 0]
    for gigabytes in (0.6, 1.0, 4.0):
        where = cluster(
            island("a", kind="x", gigabytes=gigabytes, nodes=3, per_node=2),
            island("b", kind="x", gigabytes=gigabytes, nodes=2, per_node=2),
            island("c", kind="y", gigabytes=2 * gigabytes, nodes=1, per_node=4),
        )
        for trainer in TARGETS:
            asked = replace(job(12, target=trainer), pin=pin)
            fits, not_ = _compared(model(8), where, asked, 40)
            seen[0] += fits
            seen[1] += not_
    assert min(seen) > 0
