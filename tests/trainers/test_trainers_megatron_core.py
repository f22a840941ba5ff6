"""Megatron-core reads layouts, and deals layers to stages, as the reader of launches does."""

from __future__ import annotations

import random
import warnings

import pytest

pytest.importorskip("megatron.core", reason="megatron-core is not installed")
with warnings.catch_warnings():
    # Importing warns about missing accelerator libraries.
    warnings.simplefilter("ignore")
    from megatron.core.transformer.pipeline_parallel_layer_layout import (
        PipelineParallelLayerLayout,
    )
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_config import TransformerConfig

import torch

from hetplan.errors import InputError
from hetplan.trainers.launch_command import script_launch
from hetplan.trainers.megatron.read import layers_of_layout, segments_of, stage_layers


def layers(arguments: str, pp: int, num_layers: int | None = None) -> tuple[tuple[int, ...], ...]:
    return stage_layers(script_launch("megatron", "a.txt", arguments), pp, num_layers)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ("E((t)*2|)*2L", "'('"),
        ("Et|tLL", "must begin with its one E"),
        ("Et|t|tL", "has 3 segments, which 2 stages do not divide"),
        ("Et*99999999|L", "repeats something"),
        ("E" + "(t*999)*999999|L", "over 400,000 layers"),
    ],
)
def test_layouts_that_are_none_are_refused(layout: str, message: str) -> None:
    with pytest.raises(InputError, match=None) as caught:
        layers_of_layout(layout, 2)
    assert message in str(caught.value)


def test_layers_that_do_not_go_on_the_stages_are_refused_with_their_line() -> None:
    text = "--num-layers 8\n--decoder-first-pipeline-num-layers 12"
    with pytest.raises(InputError) as caught:
        layers(text, 4, 8)
    (fault,) = caught.value.faults
    assert (fault.file, fault.line, fault.field) == (
        "a.txt",
        2,
        "decoder-first-pipeline-num-layers",
    )
    with pytest.raises(InputError, match="a stage has 2"):
        layers("--num-layers 8 --num-layers-per-virtual-pipeline-stage 3", 4, 8)


@pytest.mark.filterwarnings("ignore")
def test_megatron_core_parses_layouts_alike() -> None:
    parse = PipelineParallelLayerLayout
    signs = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}
    rng = random.Random(11)
    agreed = refused = 0
    for _ in range(600):
        layout = _random_layout(rng)
        try:
            theirs = parse.parse_str_to_list(layout)
        except AssertionError:
            with pytest.raises(InputError):
                segments_of(layout)
            refused += 1
            continue
        assert segments_of(layout) == tuple(
            "".join(signs[each.name] for each in segment) for segment in theirs
        ), layout
        agreed += 1
    assert agreed > 150
    assert refused > 50


def _random_layout(rng: random.Random) -> str:
    parts = ("t", "t*3", "|", "|*2", "(tt|)*2", "(t|t)*3", "m", ",", "t*0", "E", "L", "(t*2|)*2")
    wrong = ("d", " ", "()", "(t)", "*", "((t)*2)*2")
    found = ["E", *(rng.choice(parts) for _ in range(rng.randint(0, 8))), "L"]
    if rng.random() < 0.3:
        found.insert(rng.randrange(len(found)), rng.choice(wrong))
    return "".join(found)


@pytest.mark.filterwarnings("ignore")  # of Megatron-core itself, about its own defaults
def test_megatron_core_builds_as_many_layers() -> None:
    rng = random.Random(3)
    checked = 0
    for _ in range(400):
        pp, virtual = rng.choice((1, 2, 3, 4)), rng.choice((1, 1, 2, 3))
        total = rng.randint(pp * virtual, 30)
        keys: dict[str, int | bool] = {}
        flags = f"--num-layers {total}"
        draw = rng.random()
        if draw < 0.3 and pp > 1:
            first = rng.randint(1, total)
            keys["num_layers_in_first_pipeline_stage"] = first
            flags += f" --decoder-first-pipeline-num-layers {first}"
        elif draw < 0.6:
            keys["account_for_embedding_in_pipeline_split"] = True
            flags += " --account-for-embedding-in-pipeline-split"
            if draw < 0.45:
                keys["account_for_loss_in_pipeline_split"] = True
                flags += " --account-for-loss-in-pipeline-split"
        if virtual > 1:
            if pp == 1:
                continue
            keys["virtual_pipeline_model_parallel_size"] = virtual
            flags += f" --num-virtual-stages-per-pipeline-rank {virtual}"
        try:
            made = TransformerConfig(
                num_layers=total,
                hidden_size=32,
                num_attention_heads=4,
                pipeline_model_parallel_size=pp,
                pipeline_dtype=torch.float32,
                **keys,
            )
            theirs = tuple(
                tuple(
                    get_num_layers_to_build(
                        made, vp_stage=chunk if virtual > 1 else None, pp_rank=stage
                    )
                    for chunk in range(virtual)
                )
                for stage in range(pp)
            )
        except (AssertionError, ValueError):
            continue
        assert layers(flags, pp, total) == theirs, flags
        checked += 1
    assert checked > 60
