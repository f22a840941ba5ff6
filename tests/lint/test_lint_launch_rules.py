"""On launches that are right the rules say nothing; one fault makes one rule speak."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from lint_launch_cases import HETERO, PARALLELISM, SIZES, Case, lists, text_of
from lint_launch_cases_more import FLAGS, MESHES
from lint_launches import (
    FLAGSCALE,
    FLAGSCALE_HOSTS,
    MEGATRON,
    TORCHTITAN,
    Flags,
    judged,
    launch,
    unread,
)

from hetplan.cluster.catalogue import load_catalogue
from hetplan.cluster.load import load_cluster
from hetplan.importers.launches.values import Setting
from hetplan.lint.launch_rules import RULES
from hetplan.model.load import load_model

CONFIGS = Path(__file__).resolve().parents[2] / "configs"


WRONG = (*SIZES, *FLAGS, *MESHES)
ONE_HOST = {"torchrun.nnodes": 1}


@pytest.mark.parametrize("case", WRONG, ids=lambda case: f"{case.rule}: {case.says[:40]}")
def test_one_fault_makes_one_rule_speak(case: Case) -> None:
    found = judged(text_of(case))
    assert {each.rule for each in found} == {case.rule}, found
    assert any(case.says in each.message for each in found), found


RIGHT: list[tuple[Flags, Flags]] = [
    (MEGATRON, {}),
    (MEGATRON, {"pipeline-model-parallel-layout": "Et*10|t*10|t*6|t*6L"}),
    (MEGATRON, {"pipeline-model-parallel-layout": "Et*5|(t*3|)*6t*9L"}),
    (MEGATRON, {"num-layers": 30, "pipeline-model-parallel-layout": "Et*8,|t*8,|t*7|t*7L"}),
    (MEGATRON, {"decoder-first-pipeline-num-layers": 8}),
    (
        MEGATRON,
        {"decoder-first-pipeline-num-layers": 6, "decoder-last-pipeline-num-layers": 6},
    ),
    (
        MEGATRON,
        {
            "num-layers": 30,
            "account-for-embedding-in-pipeline-split": True,
            "account-for-loss-in-pipeline-split": True,
        },
    ),
    (MEGATRON, {"num-layers-per-virtual-pipeline-stage": 4}),
    (MEGATRON, {"recompute-granularity": "selective", "recompute-modules": ["core_attn", "mlp"]}),
    (
        MEGATRON,
        {
            "recompute-granularity": "full",
            "recompute-method": "block",
            "recompute-num-layers": 2,
        },
    ),
    (MEGATRON, {"num-layers": 30, "hybrid-layer-pattern": "M*M|M*M|M*M|M*M"}),
    (MEGATRON, {"torchrun.rdzv-backend": "c10d", "torchrun.node-rank": None}),
    (
        MEGATRON,
        {"torchrun.rdzv-backend": "c10d", "torchrun.nnodes": 1}
        | {"pipeline-model-parallel-size": 2},
    ),
    (MEGATRON, {"global-batch-size": 127, "rampup-batch-size": [16, 16, 1000]}),
    (MEGATRON, {"tensor-model-parallel-size": 8, "num-query-groups": 4}),
    (FLAGSCALE, {}),
    (FLAGSCALE, {HETERO + "hetero_pipeline_layer_split": None, "train.model.num_layers": 33}),
    (TORCHTITAN, {}),
    (TORCHTITAN, {PARALLELISM + "data_parallel_shard_degree": -1}),
    (TORCHTITAN, {PARALLELISM + "module_fqns_per_model_part": None}),
    (
        TORCHTITAN,
        {
            PARALLELISM + "pipeline_parallel_schedule": "Interleaved1F1B",
            PARALLELISM + "module_fqns_per_model_part": lists(
                "tok_embeddings layers.0", "layers.1", "layers.2", "layers.3 norm lm_head"
            ),
        },
    ),
]


@pytest.mark.parametrize(("base", "change"), RIGHT)
def test_nothing_is_said_of_launches_that_are_right(base: Flags, change: Flags) -> None:
    assert judged(text_of(Case("", "", change, base))) == ()


def test_a_variable_of_some_hosts_is_there() -> None:
    """FlagScale's node_specific: hosts whose mesh has tp 1 need none."""
    name = "experiment.envs.node_specific.a0.CUDA_DEVICE_MAX_CONNECTIONS"
    for value, rules in (("1", []), ("8", ["launch-device-connections"])):
        text = launch(
            {**FLAGSCALE, name: value},
            trainer="flagscale",
            environment={},
            hosts=FLAGSCALE_HOSTS,
        )
        assert [each.rule for each in judged(text)] == rules


def test_every_rule_of_launches_is_tried() -> None:
    elsewhere = {
        "launch-timeout",
        "launch-flag-is-a-command",
        "launch-without-sizes",
        "launch-flag-twice",
        "launch-tied-embeddings",
        "launch-uneven-memory",
    }
    assert {case.rule for case in WRONG} | elsewhere == {rule.id for rule in RULES}


@pytest.mark.parametrize("case", WRONG, ids=lambda case: f"{case.rule}: {case.says[:40]}")
def test_nothing_is_said_of_sizes_that_only_the_hosts_know(case: Case) -> None:
    """With every value behind a variable no rule can know that something is wrong."""
    text = text_of(case)
    names = [each.name for each in text.settings if each.values]
    text = replace(unread(text, *names), nodes=None, devices_per_node=None, hosts=())
    assert {each.rule for each in judged(text)} <= {case.rule}
    if case.rule in ("launch-ranks-do-not-divide", "launch-tp-across-hosts"):
        assert judged(text) == ()


def test_findings_stand_at_the_lines_of_the_flags() -> None:
    (found,) = judged(launch({**MEGATRON, "num-layers": 30}))
    names = list(MEGATRON)
    wanted = ("num-layers", "pipeline-model-parallel-size")
    assert found.lines == tuple(sorted(names.index(each) + 1 for each in wanted))
    assert (found.file, found.count) == ("run.sh", 1)


def test_a_flag_given_twice() -> None:
    text = launch(MEGATRON)
    again = Setting(name="num-layers", values=("30",), file="run.sh", line=40)
    same = Setting(name="hidden-size", values=("4096",), file="run.sh", line=41)
    found = judged(replace(text, settings=(*text.settings, again, same)))
    assert [each.rule for each in found] == ["launch-loses-layers", "launch-flag-twice"]
    assert found[1].message == "--num-layers is given as 32, 30; the last one counts"
    assert found[1].lines == (8, 40)


def test_words_that_only_the_hosts_know_may_be_flags() -> None:
    text = launch(MEGATRON, environment={})
    assert [each.rule for each in judged(text)] == ["launch-device-connections"]
    more = Setting(name="", values=("$EXTRA_ARGS",), file="run.sh", line=40)
    assert judged(replace(text, unread=(more,))) == ()


def test_long_links_need_a_longer_timeout() -> None:
    cluster = load_cluster(CONFIGS / "clusters" / "two-regions.yaml")
    assert len(cluster.regions) > 1
    found = judged(launch(ONE_HOST | {"bf16": True}), cluster=cluster)
    assert [each.rule for each in found] == ["launch-timeout"]
    assert "write --distributed-timeout-minutes 60" in found[0].message
    flags = {**ONE_HOST, "distributed-timeout-minutes": 60}
    assert judged(launch(flags), cluster=cluster) == ()


def test_blackwell_needs_no_order_of_kernels() -> None:
    cluster = load_cluster(CONFIGS / "clusters" / "two-regions.yaml")
    flags = {**MEGATRON, "distributed-timeout-minutes": 60}
    for kind, rules in (
        ("nvidia-b200-180gb-sxm", []),
        ("nvidia-h100-80gb-sxm", ["launch-device-connections"]),
    ):
        device = next(each for each in load_catalogue() if each.kind == kind)
        islands = tuple(replace(island, device=device) for island in cluster.islands)
        text = launch(flags, environment={})
        found = judged(text, cluster=replace(cluster, islands=islands))
        assert [each.rule for each in found] == rules


def test_tied_embeddings_over_stages_of_torchtitan() -> None:
    model = load_model(CONFIGS / "models" / "gpt-tiny.yaml")
    tied = replace(model, tied_embeddings=True)
    text = launch(
        {**TORCHTITAN, PARALLELISM + "module_fqns_per_model_part": None}, trainer="torchtitan"
    )
    assert "launch-tied-embeddings" in {each.rule for each in judged(text, model=tied)}
    untied = replace(model, tied_embeddings=False)
    assert "launch-tied-embeddings" not in {each.rule for each in judged(text, model=untied)}
