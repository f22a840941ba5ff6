"""The timeline of a plan: valid events, none on top of another, times of the replay."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from cost_fakes import LinearPredictor, job, model
from estimate_plans import CLUSTER, plan_of

from hetplan.cost.replay.step import replay_step
from hetplan.cost.step_model.pricer import Pricer
from hetplan.plans.plan import OverlapSettings, Sharding
from hetplan.reports.trace import MICROSECONDS, trace_text

SHAPE = model(tied_embeddings=True)
ASKED = job(target="any", gradient_clipping=True, data_loading_seconds=0.01)
CASES = {
    "1f1b": [[0, 3, 5, 7]],
    "gpipe": [[0, 3, 5, 7]],
    "zb-h1": [[0, 3, 5, 7]],
    "interleaved-1f1b": [[0, 2, 3, 4], [5, 6, 7, 8]],
}


@pytest.mark.parametrize("schedule", CASES)
@pytest.mark.parametrize("pipelines", [1, 2])
def test_events_are_the_replays_and_never_overlap(schedule: str, pipelines: int) -> None:
    plan = plan_of(
        [4] * 4, CASES[schedule], microbatches=6, pipelines=pipelines, shape=SHAPE, asked=ASKED,
        schedule=schedule, tp=2, sharding=Sharding.OPTIMIZER, shards=2,
        overlap=OverlapSettings(reduction=True),
    )  # fmt: skip
    pricer = Pricer(SHAPE, CLUSTER, ASKED, LinearPredictor())
    step = pricer.step(plan)
    document = json.loads(trace_text(plan, pricer))
    events = [event for event in document["traceEvents"] if event["ph"] == "X"]
    names = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in document["traceEvents"]
        if event["ph"] == "M" and event["name"] == "thread_name"
    }
    assert {event["ph"] for event in document["traceEvents"]} == {"M", "X"}
    threads: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in events:
        assert event["dur"] >= 0
        threads.setdefault((event["pid"], event["tid"]), []).append(
            (event["ts"], event["ts"] + event["dur"])
        )
    assert set(threads) <= set(names)
    for spans in threads.values():
        for (_, end), (start, _) in pairwise(sorted(spans)):
            assert start >= end - 1e-6 * step.step_seconds
    # Every pass of the replay, when it ran.
    replayed = replay_step([each.times() for each in step.work], rendezvous=True)
    words = {"F": "forward", "B": "backward", "W": "weight gradients"}
    expected = sorted(
        (p, s, words[one.kind], one.microbatch, one.chunk, one.start_seconds, one.end_seconds)
        for p, pipeline in enumerate(replayed.pipelines)
        for s, stage in enumerate(pipeline.stages)
        for one in stage.operations
    )
    found = sorted(
        (
            event["pid"], event["tid"], event["name"], event["args"]["microbatch"],
            event["args"]["chunk"], event["ts"] / MICROSECONDS,
            (event["ts"] + event["dur"]) / MICROSECONDS,
        )
        for event in events
        if "chunk" in event["args"]
    )  # fmt: skip
    assert [each[:5] for each in found] == [each[:5] for each in expected]
    for one, two in zip(found, expected, strict=True):
        assert one[5:] == pytest.approx(two[5:], rel=1e-12)
    # Transfers, and the end: what comes last ends with the step.
    transfers = sum(len(pipeline.transfers) for pipeline in replayed.pipelines)
    assert sum("arrives_microseconds" in event["args"] for event in events) == transfers
    last = max(end for spans in threads.values() for _, end in spans)
    assert last / MICROSECONDS == pytest.approx(step.step_seconds, rel=1e-12)
    assert {"optimizer", "gradient norm", "tied embedding", "data loading"} <= {
        event["name"] for event in events
    }
