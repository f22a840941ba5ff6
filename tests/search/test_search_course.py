"""The course of a search: short, ordered, ended by the certificate, the same for the same steps."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from search_jobs import cluster, island, job, model

from hetplan.predict.fit import FittedPredictor
from hetplan.search.search import search
from hetplan.search.solver import MOST_POINTS, Best


@pytest.mark.parametrize("count", [3, 40, 1000])
def test_points_are_few_and_say_where_the_search_stood_by_then(count: int) -> None:
    best = Best(bounds=[1.0, 1.0])
    best.note()
    assert best.course == []  # there is no plan
    states = {}
    for step in range(1, count + 1):
        if step % 7 == 1:
            best.seconds = 10.0 - 5.0 * step / count
        best.bounds[step % 2] = 1.0 + step / count
        best.note_step()
        states[step] = (best.seconds, best.lower_bound)
    points = best.course
    assert 2 < len(points) <= MOST_POINTS
    for one, two in pairwise(points):
        assert one.steps < two.steps
        assert one.best_seconds >= two.best_seconds
        assert one.lower_bound_seconds <= two.lower_bound_seconds
    for point in points:
        seconds, bound = states[point.steps]
        assert point.best_seconds >= seconds
        assert point.lower_bound_seconds <= bound


def test_a_price_that_stands_in_for_the_best_plan_is_none_of_its_points() -> None:
    """`Scheduler.improve_below` raises the best step for a while."""
    best = Best(bounds=[1.0], seconds=2.0)
    best.note_step()
    best.seconds = 3.0
    best.note_step()
    assert [each.best_seconds for each in best.course] == [2.0]


def test_a_search_ends_its_course_with_the_certificate() -> None:
    of = cluster(island("a", nodes=2, per_node=2), island("b", kind="slow", teraflops=60, nodes=2))
    asked = replace(job(8), gap=0.02)
    one, two = (search(model(6), of, asked, FittedPredictor.datasheet_only()) for _ in range(2))
    assert one.certificate is not None
    assert two.certificate is not None
    assert one.certificate.course == two.certificate.course
    last = one.certificate.course[-1]
    assert last.best_seconds == one.estimate.step_seconds
    assert last.lower_bound_seconds == one.certificate.lower_bound_seconds
    assert last.steps >= one.certificate.searched > 0
