"""Boundaries that share a link: slower than the search has them, and the bound still holds."""

from __future__ import annotations

from dataclasses import replace

import pytest
from search_jobs import island, job, model

from hetplan.cluster.spec import Cluster, Link, RegionLink, Transport
from hetplan.cost.step_model.pricer import Pricer
from hetplan.job.spec import Pins
from hetplan.predict.fit import FittedPredictor
from hetplan.search.result import SearchResult
from hetplan.search.search import search

PREDICTOR = FittedPredictor.datasheet_only()


def found(capacity: float | None) -> tuple[SearchResult, bool]:
    """There, back and there again over one leased line: three boundaries of four stages."""
    line = Link(
        bandwidth_bytes_per_second=1.5e8,
        latency_seconds=1e-3,
        transport=Transport.DEVICE_DIRECT,
        shared_bandwidth_bytes_per_second=capacity,
    )
    here = [island(name, nodes=1) for name in ("a", "c")]
    there = [replace(island(name, nodes=1), region="there") for name in ("b", "d")]
    cluster = Cluster(
        name="leased",
        islands=(*here, *there),
        region_links=(RegionLink(between=("here", "there"), link=line),),
        # Slow enough inside a region that nobody stays there.
        within_region=replace(line, bandwidth_bytes_per_second=1e6, latency_seconds=1.0),
    )
    asked = replace(
        job(8, gap=0.001),
        pin=Pins(pp=4, tp=1, dp=1, microbatch_size=1, embedding_on="a", head_on="d"),
    )
    result = search(model(6), cluster, asked, PREDICTOR)
    step = Pricer(model(6), cluster, asked, PREDICTOR).step(result.plan)
    return result, any(each.hops.shares for each in step.work)


def test_boundaries_that_share_a_line_are_slower_and_the_gap_says_so() -> None:
    alone, free = found(None)
    together, shared = found(1.5e8)
    assert (free, shared) == (False, True)
    assert [stage.island for stage in together.estimate.stages] == [
        "a", "b", "c", "d",
    ]  # fmt: skip
    for result in (alone, together):
        certificate, step = result.certificate, result.estimate.step_seconds
        assert certificate is not None
        assert certificate.lower_bound_seconds <= step
        assert certificate.gap == pytest.approx(1 - certificate.lower_bound_seconds / step)
    assert together.estimate.step_seconds > alone.estimate.step_seconds * 1.001
    assert alone.certificate is not None
    assert together.certificate is not None
    # The bound of the space leaves sharing out; a space as small as this is priced whole instead,
    # so that its shared lines are in the proof.
    assert alone.certificate.status == "optimal"
    assert together.certificate.status == "optimal"
    for result in (alone, together):
        assert result.certificate is not None
        assert result.certificate.gap <= result.inputs.job.gap * (1 + 1e-9)
