"""What is printed about plans and runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from priced_layouts import planned

from hetplan.launchers.local_loop import even_split
from hetplan.reports.comparison import sparkline
from hetplan.reports.plans import (
    grouped,
    homogeneous_lines,
    launch_lines,
    mixing_line,
    refused_lines,
    restriction_line,
)
from hetplan.reports.summary import next_lines
from hetplan.search.result import BestAlone, HomogeneousSum, KindAlone, Restriction


def test_notes_of_one_text_share_a_line() -> None:
    notes = ["a: nothing was measured", "b: update: 5 > 4 measured", "c: nothing was measured"]
    assert list(grouped(notes)) == [
        "nothing was measured: a; c",
        "b: update: 5 > 4 measured",
    ]
    assert list(grouped(["a note without a subject"])) == ["a note without a subject"]


def test_sparkline_spans_low_to_high() -> None:
    assert sparkline([3.0, 2.0, 1.0]) == "█▅▁"
    assert sparkline([1.0, 1.0]) == "▁▁"


def test_a_ratio_that_is_unknown_is_not_invented() -> None:
    alone = KindAlone(
        device="cpu",
        devices=2,
        tokens_per_second=10.0,
        roofline_tokens_per_second=None,
        gap=0.01,
        reason="",
    )
    lines = list(
        homogeneous_lines(
            HomogeneousSum(kinds=(alone,), homogeneous_sum_ratio=0.5, roofline_ratio=None)
        )
    )
    assert "no peak rate known" in lines[0]
    assert lines[1].startswith("homogeneous-sum ratio 50.00%")
    assert lines[1].endswith("roofline ratio unknown")


def test_a_roofline_in_the_sum_is_told_apart() -> None:
    able = KindAlone(
        device="a",
        devices=2,
        tokens_per_second=60.0,
        roofline_tokens_per_second=100.0,
        gap=0.01,
        reason="",
    )
    unable = replace(able, device="b", tokens_per_second=0.0, reason="memory")
    figure = HomogeneousSum(kinds=(able, unable), homogeneous_sum_ratio=0.3, roofline_ratio=0.24)
    # 48 tokens/s over 160, or over the 60 of the kind that has a plan.
    assert (
        "30.00% (predicted on both sides; 80.00% without rooflines)"
        in [*homogeneous_lines(figure)][-1]
    )


@pytest.mark.parametrize(("layers", "stages"), [(12, 4), (13, 4), (3, 3), (96, 7)])
def test_the_even_split_is_even(layers: int, stages: int) -> None:
    split = even_split(layers, stages)
    assert sum(split) == layers
    assert len(split) == stages
    assert max(split) - min(split) <= 1


@pytest.mark.parametrize(
    ("target", "setting"),
    [("megatron", "trainer.scattered_sends=true"), ("torchtitan", "precision=float16")],
)
def test_a_plan_that_emit_refuses_is_printed_with_the_reasons(
    tmp_path: Path, target: str, setting: str
) -> None:
    mixed = "trainer.mixed_libraries=true"
    result = planned(tmp_path, target, "two-regions.yaml", "a100,mi300x", mixed, setting)
    lines = list(refused_lines(result))
    field = f"inputs.job.{setting.partition('=')[0]}"
    assert lines[0].startswith(f"`hetplan emit --target {target}` refuses this plan: {field}")
    assert lines[-1] == "`hetplan emit --nearest FILE` finds the fastest plan that it takes"
    assert len(lines) == 2


def test_a_plan_that_emit_takes_has_no_such_line(tmp_path: Path) -> None:
    result = planned(tmp_path, "megatron", "two-regions.yaml", "a100")
    assert not any(island.node_names for island in result.used_islands)
    assert list(refused_lines(result)) == []  # names can be given later


def test_a_megatron_plan_on_ascend_starts_under_mindspeed(tmp_path: Path) -> None:
    result = planned(tmp_path, "megatron", "four-vendors.yaml", "ascend")
    assert list(refused_lines(result)) == []
    *_, start = next_lines(result, Path("plan.json"))
    assert "hetplan emit plan.json --target mindspeed " in start


def test_hetplans_own_trainer_has_no_folder(tmp_path: Path) -> None:
    result = planned(tmp_path, "any", "two-regions.yaml", "a100")
    assert list(refused_lines(result)) == []


def test_a_mix_of_libraries_is_a_gain_or_advice_in_one_line() -> None:
    libraries = ("nccl", "rccl")
    faster = Restriction(
        target="flagscale", libraries=libraries, mixed=True,
        step_seconds=0.88, lower_bound_seconds=0.85,
    )  # fmt: skip
    line = restriction_line(faster, 1.0, ("amd-mi210",))
    assert line == "flagscale can mix nccl and rccl: 13.6% faster, at least (at most 17.6%)"
    # Faster, and not by a mix.
    assert "flagscale would be 13.6% faster" in restriction_line(replace(faster, mixed=False), 1.0)
    slower = replace(faster, step_seconds=1.1)
    line = restriction_line(slower, 1.0, ("amd-mi210",))
    assert line.startswith("flagscale, which can mix nccl and rccl, has no faster plan")
    assert line.endswith("; leave amd-mi210 out")
    proven = replace(slower, lower_bound_seconds=1.05)
    assert restriction_line(proven, 1.0, ("amd-mi210",)).endswith("1.05 s; leave amd-mi210 out")


@pytest.mark.parametrize(
    ("islands", "tokens", "words"),
    [
        ("a100,mi300x", 0.5, "the mix is 100.0% faster than 8 x nvidia-a100-80gb-sxm alone under "),
        ("a100,mi300x", 2.0, "the mix is 50.0% slower than 8 x nvidia-a100-80gb-sxm alone under "),
        ("a100,mi300x", 2.0, ": leave amd-mi300x out"),
        ("a100", 2.0, "megatron: plan for megatron"),
        ("a100", 1.0, "no mix that was found is faster than 8 x nvidia-a100-80gb-sxm alone under "),
    ],
)
def test_a_plan_beside_the_best_kind_alone(
    tmp_path: Path, islands: str, tokens: float, words: str
) -> None:
    if islands == "a100":
        result = planned(tmp_path, "any", "two-regions.yaml", "a100")
    else:
        result = planned(tmp_path, "flagscale", "two-regions.yaml", islands)
    best = KindAlone(
        device="nvidia-a100-80gb-sxm",
        devices=8,
        tokens_per_second=tokens * result.estimate.tokens_per_second,
        roofline_tokens_per_second=None,
        gap=0.01,
        reason="",
    )
    assert words in mixing_line(result, BestAlone(target="megatron", kind=best))


def test_what_launch_does_not_run_is_said_once_for_all_stages(tmp_path: Path) -> None:
    result = planned(tmp_path, "any", "two-regions.yaml", "a100,mi300x")
    (pipeline,) = result.plan.pipelines
    stages = tuple(
        replace(stage, replicas=tuple(replace(r, sequence_parallel=True) for r in stage.replicas))
        for stage in pipeline.stages
    )
    plan = replace(result.plan, pipelines=(replace(pipeline, stages=stages),))
    places = [line for line in launch_lines(plan) if "sequence parallelism" in line]
    assert len(places) == 1
    assert "pipelines[0].stages[0].replicas[0] and 1 more: " in places[0]


@pytest.mark.parametrize(
    ("step", "lower", "words"),
    [
        (0.9, 0.8, "native would be 11.1% faster (at most 25.0%)"),
        (1.0, 0.95, "native has no faster plan as far as was searched (at most 5.3% faster)"),
        (1.2, 1.1, "native cannot be faster"),
        (0.9, 0.0, "native would be 11.1% faster (no bound was found)"),
        (1.1, 0.0, "native has no faster plan as far as was searched (no bound was found)"),
    ],
)
def test_a_restriction_is_a_gain_and_its_bound(step: float, lower: float, words: str) -> None:
    found = Restriction(target="native", step_seconds=step, lower_bound_seconds=lower)
    assert words in restriction_line(found, 1.0)
