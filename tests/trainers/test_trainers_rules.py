"""On launches that are right the rules say nothing; one fault makes one rule speak."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from rule_cases import HETERO, PARALLELISM, WRONG, Case, text_of
from rule_launches import (
    FLAGSCALE,
    MEGATRON,
    TORCHTITAN,
    Flags,
    judged,
    launch,
    unread,
)

from hetplan.cluster.load import load_cluster
from hetplan.lint.launches import RULES
from hetplan.model.load import load_model
from hetplan.trainers.read import facts_of

CONFIGS = Path(__file__).resolve().parents[2] / "configs"

ONE_HOST = {"torchrun.nnodes": 1}


def test_one_fault_makes_one_rule_speak() -> None:
    for case in WRONG:
        found = judged(text_of(case))
        assert {each.rule for each in found} == {case.rule}, found
        assert any(case.says in each.message for each in found), found


RIGHT: list[tuple[Flags, Flags]] = [
    (MEGATRON, {}),
    (MEGATRON, {"pipeline-model-parallel-layout": "Et*5|(t*3|)*6t*9L"}),
    (MEGATRON, {"num-layers": 30, "pipeline-model-parallel-layout": "Et*8,|t*8,|t*7|t*7L"}),
    (MEGATRON, {"recompute-granularity": "selective", "recompute-modules": ["core_attn", "mlp"]}),
    (MEGATRON, {"num-layers": 30, "hybrid-layer-pattern": "M*M|M*M|M*M|M*M"}),
    (MEGATRON, {"torchrun.rdzv-backend": "c10d", "torchrun.node-rank": None}),
    (MEGATRON, {"global-batch-size": 127, "rampup-batch-size": [16, 16, 1000]}),
    (FLAGSCALE, {}),
    (FLAGSCALE, {HETERO + "hetero_pipeline_layer_split": None, "train.model.num_layers": 33}),
    (TORCHTITAN, {}),
    (TORCHTITAN, {PARALLELISM + "data_parallel_shard_degree": -1}),
    (TORCHTITAN, {PARALLELISM + "module_fqns_per_model_part": None}),
]


def test_nothing_is_found_in_launches_that_are_right() -> None:
    for base, change in RIGHT:
        assert judged(text_of(Case("", "", change, base))) == (), change


def test_every_rule_of_launches_is_tried() -> None:
    elsewhere = {
        "launch-timeout",
        "launch-tied-embeddings",
        "launch-out-of-memory",
    }
    assert {case.rule for case in WRONG} | elsewhere == {rule.id for rule in RULES}


def test_nothing_is_found_in_sizes_that_only_the_hosts_know() -> None:
    """With every value behind a variable no rule can know that something is wrong."""
    for case in WRONG:
        text = text_of(case)
        names = [each.name for each in text.settings if each.values]
        text = replace(unread(text, *names), nodes=None, devices_per_node=None, hosts=())
        assert {each.rule for each in judged(text)} <= {case.rule}, case
        if case.rule in ("launch-tp-across-hosts",):
            assert judged(text) == ()


def test_findings_stand_at_the_lines_of_the_flags() -> None:
    (found,) = judged(launch({**MEGATRON, "num-layers": 30}))
    names = list(MEGATRON)
    wanted = ("num-layers", "pipeline-model-parallel-size")
    assert found.lines == tuple(sorted(names.index(each) + 1 for each in wanted))
    assert (found.file, found.count) == ("run.sh", 1)


def test_long_links_need_a_longer_timeout() -> None:
    cluster = load_cluster(CONFIGS / "clusters" / "two-regions.yaml")
    assert len(cluster.regions) > 1
    found = judged(launch(ONE_HOST | {"bf16": True}), cluster=cluster)
    assert [each.rule for each in found] == ["launch-timeout"]
    assert "write --distributed-timeout-minutes 60" in found[0].message
    flags = {**ONE_HOST, "distributed-timeout-minutes": 60}
    assert judged(launch(flags), cluster=cluster) == ()


def test_tied_embeddings_over_stages_of_torchtitan() -> None:
    model = load_model(CONFIGS / "models" / "gpt-tiny.yaml")
    tied = replace(model, tied_embeddings=True)
    text = launch(
        {**TORCHTITAN, PARALLELISM + "module_fqns_per_model_part": None}, trainer="torchtitan"
    )
    assert "launch-tied-embeddings" in {each.rule for each in judged(text, model=tied)}
    untied = replace(model, tied_embeddings=False)
    assert "launch-tied-embeddings" not in {each.rule for each in judged(text, model=untied)}


def test_a_stage_that_needs_more_memory_than_its_devices_have() -> None:
    """Memory is that of the cost model, on the devices on which the stage runs."""
    model = load_model(CONFIGS / "models" / "llama-2-13b.yaml")
    cluster = load_cluster(CONFIGS / "clusters" / "two-regions.yaml")
    big = max(cluster.islands, key=lambda island: island.nodes * island.devices_per_node)
    nodes = min(2, big.nodes)
    flags: Flags = {
        "torchrun.nnodes": nodes,
        "torchrun.nproc-per-node": big.devices_per_node,
        "pipeline-model-parallel-size": 2,
        "num-layers": 40,
        "hidden-size": 5120,
        "num-attention-heads": 40,
        "seq-length": 4096,
        "micro-batch-size": 1,
        "global-batch-size": 128,
        "bf16": True,
        "swiglu": True,
        "untie-embeddings-and-output-weights": True,
        "distributed-timeout-minutes": 60,
    }
    text = launch(flags)
    facts = facts_of(text)
    one_kind = replace(cluster, islands=(big,), links=())
    (found,) = judged(text, model=model, cluster=one_kind, facts=facts)
    assert found.rule == "launch-out-of-memory"
    assert "stage 0 with 20 layers needs" in found.message
