"""The ten lines of a plan."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from priced_layouts import planned

from hetplan.job.spec import RecomputeModule
from hetplan.plans.plan import Recompute, RecomputeGranularity
from hetplan.reports.summary import next_lines, summarize
from hetplan.reports.terminal import folded
from hetplan.search.result import Certificate, IdleCause, IdleReason, SearchResult


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> SearchResult:
    mixed = "trainer.mixed_libraries=true"
    folder = tmp_path_factory.mktemp("plan")
    return planned(folder, "megatron", "two-regions.yaml", "a100,mi300x", mixed)


def text(result: SearchResult, width: int = 80) -> str:
    return "\n".join(summarize(result).lines(width))


def test_rows_hold_every_stage_once_and_its_figures(result: SearchResult) -> None:
    rows = summarize(result).rows
    estimates = iter(result.estimate.stages)
    for row in rows:
        members = [next(estimates) for _ in range(row.first, row.last + 1)]
        assert row.layers == tuple(each.transformer_layers for each in members)
        assert row.most_memory_bytes == max(each.memory.total_bytes for each in members)
        assert row.least_busy == min(each.busy_seconds for each in members) / (
            result.estimate.step_seconds
        )
        assert row.least_busy <= row.most_busy <= 1.0
    assert next(estimates, None) is None
    for before, after in pairwise(rows):
        if before.pipelines == after.pipelines:
            assert after.first == before.last + 1


def test_stages_that_differ_in_more_than_layers_have_rows_of_their_own(
    result: SearchResult,
) -> None:
    plan = result.plan
    pipeline = plan.pipelines[0]
    assert len(pipeline.stages) > 1
    first, *others = pipeline.stages
    wider = replace(
        first, replicas=tuple(replace(each, microbatch_size=64) for each in first.replicas)
    )
    unlike = replace(
        result,
        plan=replace(
            plan, pipelines=(replace(pipeline, stages=(wider, *others)), *plan.pipelines[1:])
        ),
    )
    row = summarize(unlike).rows[0]
    assert (row.first, row.last, row.microbatch_size) == (0, 0, (64,))
    assert "microbatch" in text(unlike).split("\n\n")[1]


@pytest.mark.parametrize("width", [60, 80, 100])
def test_nothing_is_wider_than_the_terminal(result: SearchResult, width: int) -> None:
    assert max(map(len, summarize(result).lines(width))) <= width


def test_the_step_and_its_interval_have_one_unit(result: SearchResult) -> None:
    slow = replace(
        result.estimate, step_seconds=100.0, p5_seconds=99.0, p95_seconds=600.0, components=()
    )
    assert "100 s a step (90 %: 99.0 to 600 s)" in text(replace(result, estimate=slow))


def certificate(**values: object) -> Certificate:
    plain = Certificate(
        lower_bound_seconds=9.9,
        gap=0.01,
        status="optimal",
        space="",
        candidates=1,
        pruned_by_bound=0,
        searched=1,
        replays=1,
    )
    return replace(plain, **values)


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (certificate(), "proven within 1.0% of the best: no plan takes less than 9.9 s"),
        (certificate(status="limit", gap=0.5), "up to 50.0% shorter could exist (bound 9.9 s)"),
        (certificate(status="open", gap=1.0, lower_bound_seconds=0.0), "not proven: no bound"),
        (certificate(status="interrupted", gap=0.2), "was interrupted"),
        (None, "priced, not searched"),
    ],
)
def test_what_is_proven_is_said_and_no_more(
    result: SearchResult, found: Certificate | None, words: str
) -> None:
    said = " ".join(text(replace(result, certificate=found)).split())
    assert words in said
    assert ("proven within" in said) == (found is not None and found.status == "optimal")


def test_a_stage_without_room_is_marked(result: SearchResult) -> None:
    stage = result.estimate.stages[0]
    memory = replace(stage.memory, activation_bytes=2 * stage.memory.available_bytes)
    full = replace(
        result.estimate,
        stages=(replace(stage, memory=memory), *result.estimate.stages[1:]),
    )
    assert "TOO FULL" not in text(result)
    assert "TOO FULL" in text(replace(result, estimate=full))


def test_a_stored_reason_takes_the_place_of_the_pointer_to_explain(result: SearchResult) -> None:
    island = result.inputs.cluster.islands[0]
    reason = IdleReason(
        island=island.name,
        idle_devices=1,
        usable_devices=island.num_usable_devices,
        busy_share=0.0,
        causes=(IdleCause.MEMORY,),
        gain=0.1,
    )
    said = " ".join(text(replace(result, idle=(reason,))).split())
    assert "its memory is too small" in said


def test_names_are_no_markup(result: SearchResult) -> None:
    whole = summarize(result)
    row = whole.rows[0]
    twice = tuple(replace(row.islands[0], name=name) for name in ("[red]a[/red]", "[b]"))
    named = replace(whole, rows=(replace(row, islands=twice),))
    assert "[red]a[/red] + [b]" in "\n".join(named.lines(100))


def test_commands_that_come_next_take_any_file_name(result: SearchResult) -> None:
    first, *_ = next_lines(result, Path("a plan; rm x.json"))
    assert "'a plan; rm x.json'" in first


def test_a_dense_model_recomputes_activations_of_no_experts(result: SearchResult) -> None:
    norms = Recompute(
        granularity=RecomputeGranularity.SELECTIVE,
        modules=(RecomputeModule.NORMS, RecomputeModule.ACTIVATION),
    )
    (pipeline,) = result.plan.pipelines
    stages = tuple(replace(each, recompute=norms) for each in pipeline.stages)
    plan = replace(result.plan, pipelines=(replace(pipeline, stages=stages),))
    assert " layernorm+act\n" in text(replace(result, plan=plan))


def test_words_are_not_broken() -> None:
    assert list(folded(["one two-three four", ""], 8)) == ["one", "  two-three", "  four"]


def test_a_table_without_room_takes_more_lines_and_loses_nothing(result: SearchResult) -> None:
    wide = {*" ".join(summarize(result).lines(200)).split()}
    narrow = list(summarize(result).lines(50))
    assert not [line for line in narrow if "…" in line]
    assert {word for word in wide if word.isdigit()} <= {*" ".join(narrow).split()}


def test_words_of_stages_of_several_kinds_stay_whole_at_80_columns(result: SearchResult) -> None:
    summary = summarize(result)
    islands = tuple(
        replace(island, device=replace(island.device, kind=kind))
        for island, kind in zip(
            result.inputs.cluster.islands[:2], ("nvidia-h100-80gb-sxm", "amd-mi300x"), strict=True
        )
    )
    rows = tuple(
        replace(
            row,
            islands=islands,
            tp=(8, 4),
            cp=(2, 1),
            ep=(1, 2),
            dp=(16, 32),
            microbatch_size=(4, 2),
            layers=(10, 11, 9, 12),
        )
        for row in summary.rows
    )
    lines = list(replace(summary, rows=rows).lines(80))
    assert max(map(len, lines)) <= 80
    assert {"h100-80gb-sxm", "mi300x", "tp", "16/32", "layers", "memory,"} <= {
        *" ".join(lines).split()
    }
    assert not [line for line in lines if "\u2026" in line]
