"""Ranks and groups of random plans, and plans that the trainer does not run."""

from __future__ import annotations

from dataclasses import replace

import pytest
from runtime_cases import (
    CPUS,
    GPT,
    job,
    pipeline_of,
    plan_of,
    unlike_plan,
)

from hetplan.errors import InputError
from hetplan.runtime.placement import first_samples, place_ranks, vocabulary_faults


def test_ranks_of_several_pipelines_and_replicas() -> None:
    plan = unlike_plan(
        GPT,
        job(10),
        pipeline_of(2, ("a 2 1 1 + b 1 2 1", 3), ("b 1 1 3", 1)),
        pipeline_of(2, ("a 1 2 1", 4)),
    )
    places = place_ranks(plan)
    assert [(p.pipeline, p.stage, p.position, p.dp_index, p.tp_index) for p in places] == [
        (0, 0, 0, 0, 0),
        (0, 0, 0, 0, 1),
        (0, 0, 0, 1, 0),
        (0, 0, 0, 2, 0),
        (0, 1, 1, 0, 0),
        (1, 2, 0, 0, 0),
        (1, 2, 0, 1, 0),
    ]
    assert [(p.first_sample, p.microbatch_size) for p in places] == [
        (0, 1),
        (0, 1),
        (1, 1),
        (2, 1),
        (0, 3),
        (0, 1),
        (1, 1),
    ]
    assert [p.tp_ranks for p in places[:3]] == [(0, 1), (0, 1), (2,)]
    assert first_samples(plan) == (0, 6)


def test_a_rank_of_an_interleaved_stage_has_no_single_range_of_layers() -> None:
    plan = unlike_plan(GPT, job(8), pipeline_of(4, ("a 1 1 2", (1, 1)), ("b 1 1 2", (1, 1))))
    place = place_ranks(plan)[0]
    assert [(each.start, each.stop) for each in place.chunks] == [(0, 2), (3, 4)]
    with pytest.raises(InputError, match="rank 0 holds 2 layer ranges"):
        _ = place.layers


def test_another_padding_of_the_vocabulary_is_refused() -> None:
    plan = plan_of(GPT, job(8), (2, 2), CPUS)
    assert not list(vocabulary_faults(plan, GPT))
    (fault,) = vocabulary_faults(replace(plan, padded_vocab_size=128), GPT)
    assert "pads 64 to 64" in fault.message
