"""The trace of a plan: right by the format, times of the replay, memory of the estimate."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from command_line import run
from compare_cases import run_text, small_result
from cost_fakes import LinearPredictor, job, model
from estimate_plans import CLUSTER, plan_of
from test_comparison_compare import own_log
from trace_format import trace_faults

from hetplan.cost.replay.step import replay_step
from hetplan.cost.step_model.plan import sends_wait
from hetplan.cost.step_model.pricer import Pricer
from hetplan.plans.plan import OverlapSettings, Plan, Sharding
from hetplan.reports.trace import MICROSECONDS, trace_text
from hetplan.search.files import save_result

SHAPE = model(tied_embeddings=True)
ASKED = job(target="any", gradient_clipping=True, data_loading_seconds=0.01)
CASES = {
    "1f1b": [[0, 3, 5, 7]],
    "gpipe": [[0, 3, 5, 7]],
    "zb-h1": [[0, 3, 5, 7]],
    "interleaved-1f1b": [[0, 2, 3, 4], [5, 6, 7, 8]],
    "zbv": [[0, 2, 3, 4], [5, 6, 7, 8]],
}


def made(schedule: str, pipelines: int) -> tuple[Plan, Pricer]:
    plan = plan_of(
        [4] * 4, CASES[schedule], microbatches=6, pipelines=pipelines, shape=SHAPE, asked=ASKED,
        schedule=schedule, tp=2, sharding=Sharding.OPTIMIZER, shards=2,
        overlap=OverlapSettings(reduction=True),
    )  # fmt: skip
    return plan, Pricer(SHAPE, CLUSTER, ASKED, LinearPredictor())


def slices(text: str, *names: str) -> list[dict[str, Any]]:
    events = json.loads(text)["traceEvents"]
    return [e for e in events if e["ph"] == "X" and (not names or e["name"] in names)]


@pytest.mark.parametrize("schedule", CASES)
@pytest.mark.parametrize("pipelines", [1, 2])
def test_the_trace_is_right_and_its_times_are_the_replays(schedule: str, pipelines: int) -> None:
    plan, pricer = made(schedule, pipelines)
    step, text = pricer.step(plan), trace_text(plan, pricer)
    assert trace_faults(text) == []
    waits = sends_wait(plan)
    replayed = replay_step([each.times() for each in step.work], rendezvous=waits).pipelines
    # A process per stage, and every pass of the replay in it, when it ran.
    words = {"F": "forward", "B": "backward", "BW": "backward", "W": "weight gradients"}
    stages = [stage for pipeline in replayed for stage in pipeline.stages]
    expected = sorted(
        (process, words[o.kind], o.microbatch, o.chunk, o.start_seconds, o.end_seconds)
        for process, stage in enumerate(stages)
        for o in stage.operations
    )
    found = sorted(
        (
            e["pid"], e["name"], e["args"]["microbatch"], e["args"]["chunk"],
            e["ts"] / MICROSECONDS, (e["ts"] + e["dur"]) / MICROSECONDS,
        )
        for e in slices(text, *words.values())
    )  # fmt: skip
    assert [each[:4] for each in found] == [each[:4] for each in expected]
    for one, two in zip(found, expected, strict=True):
        assert one[4:] == pytest.approx(two[4:], rel=1e-12)
    # Transfers have a flow each, and what comes last ends with the step.
    sent = slices(text, "activations", "gradients")
    hops = [[hop is not None for hop in each.hops.row] for each in step.work]
    transfers = sum(hops[p][t.hop] for p, each in enumerate(replayed) for t in each.transfers)
    flows = [e for e in json.loads(text)["traceEvents"] if e["ph"] == "f"]
    assert len(sent) == len(flows) == transfers > 0
    last = max(e["ts"] + e["dur"] for e in slices(text))
    assert last / MICROSECONDS == pytest.approx(step.step_seconds, rel=1e-12)
    ends = {"optimizer", "gradient norm", "data loading"}
    ends |= {"tied embedding"} - ({"tied embedding"} if schedule == "zbv" else set())  # one stage
    assert all(slices(text, name) for name in ends)


@pytest.mark.parametrize("schedule", CASES)
def test_memory_counters_peak_at_the_estimate_and_end_without_activations(schedule: str) -> None:
    plan, pricer = made(schedule, 1)
    counted = defaultdict(list)
    for event in json.loads(trace_text(plan, pricer))["traceEvents"]:
        if event["ph"] == "C":
            counted[event["pid"]].append(event["args"])
    memory = pricer.step(plan).memory[0]
    assert sorted(counted) == list(range(len(memory)))
    for s, use in enumerate(memory):
        activations = [each["activations"] for each in counted[s]]
        assert max(activations) == pytest.approx(use.activation_bytes)
        assert activations[-1] == 0
        assert {each["state"] for each in counted[s]} == {
            use.total_bytes - use.activation_bytes - use.temporary_bytes
        }


def test_the_validator_notices_what_is_wrong() -> None:
    plan, pricer = made("1f1b", 1)
    right = json.loads(trace_text(plan, pricer))

    def broken(phase: str, **change: object) -> list[str]:
        events = [dict(event) for event in right["traceEvents"]]
        next(e for e in reversed(events) if e["ph"] == phase).update(change)
        return trace_faults(json.dumps({"traceEvents": events}))

    assert broken("X", dur=-1.0)
    assert broken("X", pid=99)
    assert broken("f", id=10**6)
    assert broken("f", ts=0.0)
    assert broken("C", args={"state": "much"})
    assert broken("C", ts=0.0)
    assert broken("M", ph="Q")
    assert trace_faults("[]")


def test_a_trainers_run_stands_behind_its_plan(tmp_path: Path) -> None:
    result, log, out = small_result(), tmp_path / "train.log", tmp_path / "trace.json"
    save_result(result, tmp_path / "plan.json")
    log.write_text(run_text(result))
    words = ("compare", str(log), "--plan", str(tmp_path / "plan.json"), "--trace", str(out))
    assert run(*words).exit_code == 0
    text = out.read_text()
    assert trace_faults(text) == []
    measured = [e["dur"] / MICROSECONDS for e in slices(text, "step")]
    assert len(measured) == 19  # the first was slow
    assert measured == pytest.approx([result.estimate.step_seconds] * 19, rel=1e-3)
    assert slices(text, "forward-compute")
    assert slices(text, "forward")
    assert run(*words[:2], "--runs", "x.yaml", "--trace", str(out)).exit_code == 2


def test_a_run_of_the_reference_trainer_has_a_process_per_stage(tmp_path: Path) -> None:
    save_result(small_result(), tmp_path / "plan.json")
    log, out = own_log(tmp_path), tmp_path / "trace.json"
    words = ("compare", str(log), "--plan", str(tmp_path / "plan.json"), "--trace", str(out))
    assert run(*words).exit_code == 0
    text = out.read_text()
    assert trace_faults(text) == []
    ranks = slices(text, "forward and backward")
    assert len(ranks) == sum(stage.replicas[0].num_devices for stage in small_result().plan.stages)
    assert len({e["pid"] for e in ranks}) == len(small_result().plan.stages)
