"""A time limit is the whole search's: time for the last price is kept back."""

from __future__ import annotations

import math

import pytest
from search_jobs import cluster, island, job, model

from hetplan import kernels
from hetplan.deadline import LATE_SECONDS, ends_by
from hetplan.errors import OutOfTimeError
from hetplan.search import search as driver
from hetplan.search.final_pricing import pricing_seconds
from hetplan.search.result import Question
from hetplan.search.solver import Best

NOW = 100.0
ASKED = Question(model=model(), cluster=cluster(island("a")), job=job(2))


def begun(limit: float | None, pricing: float, monkeypatch: pytest.MonkeyPatch) -> Best:
    monkeypatch.setattr(kernels.loading, "now", lambda: NOW + kernels.loading.seconds)
    monkeypatch.setattr(driver, "pricing_seconds", lambda _: pricing)
    return driver._nothing_yet(ASKED.with_job(time_limit_seconds=limit), None)


@pytest.mark.parametrize("limit", [0.0, 0.1, 1.0, 10.0, 1000.0])
@pytest.mark.parametrize("pricing", [0.01, 0.3, 0.7, 3.0])
def test_the_price_of_the_plan_is_kept_back(
    limit: float, pricing: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    best = begun(limit, pricing, monkeypatch)
    kept = min(pricing, limit / 2)
    assert best.deadline == pytest.approx(NOW + limit - kept)
    # A first plan has its price by the limit and what it may be overrun by.
    assert best.deadline <= best.first_plan_by + 1e-9
    assert best.first_plan_by + kept <= NOW + limit + 2 * LATE_SECONDS + 1e-9


def test_without_a_limit_nothing_is_kept_back(monkeypatch: pytest.MonkeyPatch) -> None:
    best = begun(None, 3.0, monkeypatch)
    assert best.deadline == best.first_plan_by == math.inf


def test_a_search_within_another_ones_time_is_not_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels.loading, "now", lambda: NOW + kernels.loading.seconds)
    with ends_by(NOW + 5.0):
        best = begun(10.0, 0.3, monkeypatch)
    assert best.first_plan_by == NOW + 5.0
    assert best.deadline == NOW + 4.7


def test_a_plan_ends_the_time_for_a_first_one(monkeypatch: pytest.MonkeyPatch) -> None:
    best = begun(1.0, 0.3, monkeypatch)
    monkeypatch.setattr(kernels.loading, "now", lambda: NOW + 1.0 + kernels.loading.seconds)
    best.check_time()
    best.chosen = object()  # type: ignore[assignment]  # any
    with pytest.raises(OutOfTimeError):
        best.check_time()


def test_pricing_takes_longer_with_devices_and_stages() -> None:
    wide = cluster(island("a", nodes=10_000))
    one, deep, many = (
        pricing_seconds(Question(model=model(layers), cluster=on, job=ASKED.job))
        for layers, on in ((1, ASKED.cluster), (500, wide), (1, wide))
    )
    assert one < many < deep
