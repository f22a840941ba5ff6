"""On launches that are right the rules say nothing; one fault makes one rule speak."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from hetplan.cluster.load import load_cluster
from hetplan.cluster.spec import Cluster
from hetplan.lint.evidence import Inputs
from hetplan.lint.findings import Finding
from hetplan.lint.launches import CHECKS, known_places
from hetplan.lint.registry import judge
from hetplan.model.load import load_model
from hetplan.model.spec import ModelSpec
from hetplan.trainers.launch_values import LaunchHost, LaunchText, Setting
from hetplan.trainers.rules import Launch

CONFIGS = Path(__file__).resolve().parents[2] / "configs"

Flags = Mapping[str, str | int | bool | Sequence[int | str] | None]

MEGATRON: Flags = {
    "torchrun.nnodes": 4,
    "torchrun.nproc-per-node": 8,
    "torchrun.node-rank": 0,
    "torchrun.master-addr": "node0",
    "torchrun.master-port": 29500,
    "tensor-model-parallel-size": 4,
    "pipeline-model-parallel-size": 4,
    "num-layers": 32,
    "hidden-size": 4096,
    "num-attention-heads": 32,
    "group-query-attention": True,
    "num-query-groups": 8,
    "seq-length": 4096,
    "micro-batch-size": 1,
    "global-batch-size": 128,
    "vocab-size": 128256,
    "make-vocab-size-divisible-by": 128,
    "sequence-parallel": True,
    "use-distributed-optimizer": True,
    "overlap-grad-reduce": True,
    "overlap-param-gather": True,
    "bf16": True,
    "ckpt-format": "torch_dist",
    "save": "/checkpoints",
}

FLAGSCALE: Flags = {
    "experiment.runner.rdzv_backend": "static",
    "train.system.tensor_model_parallel_size": 4,
    "train.system.pipeline_model_parallel_size": 3,
    "train.system.sequence_parallel": "true",
    "train.system.use_distributed_optimizer": "true",
    "train.system.hetero.enable_hetero": "true",
    "train.system.hetero.hetero_process_meshes": [4, 1, 1, 2, 1, 2, 1, 1, 4, 2],
    "train.system.hetero.hetero_pipeline_layer_split": [14, 10, 8],
    "train.system.hetero.hetero_device_types": ["A", "B"],
    "train.system.checkpoint.ckpt_format": "torch",
    "train.system.checkpoint.save": "/checkpoints",
    "train.model.num_layers": 32,
    "train.model.num_attention_heads": 32,
    "train.model.seq_length": 4096,
    "train.model.micro_batch_size": 2,
    "train.model.global_batch_size": 64,
    "train.model.untie_embeddings_and_output_weights": "true",
}
FLAGSCALE_HOSTS = (
    LaunchHost(name="a0", devices=8, type="A", file="hostfile", line=1),
    LaunchHost(name="b0", devices=8, type="B", file="hostfile", line=2),
    LaunchHost(name="b1", devices=8, type="B", file="hostfile", line=3),
)

TORCHTITAN: Flags = {
    "torchrun.nnodes": 2,
    "torchrun.nproc-per-node": 8,
    "parallelism.tensor_parallel_degree": 2,
    "parallelism.pipeline_parallel_degree": 2,
    "parallelism.data_parallel_shard_degree": 4,
    "parallelism.num_pp_microbatches": 8,
    "parallelism.module_fqns_per_model_part": [
        '["tok_embeddings", "layers.0", "layers.1", "layers.2"]',
        '["layers.3", "norm", "lm_head"]',
    ],
    "training.num_tokens_per_microbatch_per_dp_rank": 4096,
    "training.num_tokens_per_train_step": 4096 * 8 * 4,
    "training.max_context_length": 4096,
}


def launch(
    flags: Flags,
    *,
    trainer: str = "megatron",
    hosts: tuple[LaunchHost, ...] = (),
) -> LaunchText:
    """A launch of these flags, one per line; a flag of None or False is left out."""
    settings = tuple(
        Setting(name=name, values=_values(value), file="run.sh", line=line)
        for line, (name, value) in enumerate(flags.items(), start=1)
        if value is not None and value is not False
    )
    counts = {"torchrun.nnodes": 0, "torchrun.nproc-per-node": 0}
    counts |= {each.name: int(each.values[0]) for each in settings if each.name in counts}
    return LaunchText(
        trainer=trainer,
        settings=settings,
        hosts=hosts,
        nodes=counts["torchrun.nnodes"] or None,
        devices_per_node=counts["torchrun.nproc-per-node"] or None,
    )


def _values(value: str | int | bool | Sequence[int | str]) -> tuple[str, ...]:
    if value is True:
        return ()
    if isinstance(value, str | int):
        return (str(value),)
    return tuple(str(each) for each in value)


def unread(text: LaunchText, *names: str) -> LaunchText:
    """The launch with these flags known to the hosts only."""
    return replace(
        text,
        settings=tuple(each for each in text.settings if each.name not in names),
        unread=tuple(
            replace(each, values=(f"$V{at}",)) if each.name else each
            for at, each in enumerate(text.settings)
            if each.name in names
        ),
    )


def judged(
    text: LaunchText, model: ModelSpec | None = None, cluster: Cluster | None = None
) -> tuple[Finding, ...]:
    """What the rules find in the launch."""
    row = Launch(file="run.sh", text=text)
    return judge(Inputs(launches=known_places((row,), Inputs(), (), model=model, cluster=cluster)))


# ---- one change each of launches that are right

SYSTEM = "train.system."
HETERO = "train.system.hetero."
PARALLELISM = "parallelism."
_LAYOUT = "pipeline-model-parallel-layout"
_LISTS = PARALLELISM + "module_fqns_per_model_part"


class Case(NamedTuple):
    """One change of a launch that is right, the rule that speaks of it, and what it says."""

    rule: str
    says: str
    change: Flags
    base: Flags = MEGATRON
    hosts: tuple[LaunchHost, ...] = ()


def text_of(case: Case) -> LaunchText:
    trainer = {id(FLAGSCALE): "flagscale", id(TORCHTITAN): "torchtitan"}.get(
        id(case.base), "megatron"
    )
    hosts = case.hosts or (FLAGSCALE_HOSTS if trainer == "flagscale" else ())
    return launch({**case.base, **case.change}, trainer=trainer, hosts=hosts)


def lists(*parts: str) -> list[str]:
    return [str(part.split()).replace("'", '"') for part in parts]


def hosts_of(*devices: int, types: str = "") -> tuple[LaunchHost, ...]:
    return tuple(
        LaunchHost(name=f"a{at}", devices=count, type=types[at : at + 1])
        for at, count in enumerate(devices)
    )


def cases(rule: str, base: Flags, *rows: tuple[str, Flags]) -> list[Case]:
    return [Case(rule, says, change, base) for says, change in rows]


WRONG = [
    *cases(
        "launch-loses-layers",
        MEGATRON,
        (
            "28 of 30 layers are on the 4 stages: old versions of Megatron-LM train this smaller "
            "model and say nothing, later ones stop. Write --pipeline-model-parallel-layout "
            "'Et*7|t*8|t*8|t*7L'",
            {"num-layers": 30},
        ),
        ("24 of 32 layers", {"num-virtual-stages-per-pipeline-rank": 3}),
        ("31 of 32 layers", {_LAYOUT: "Et*8|t*8|t*8|t*7L"}),
    ),
    *cases(
        "launch-loses-layers",
        FLAGSCALE,
        (
            "Write hetero_pipeline_layer_split: [11, 11, 10]",
            {HETERO + "hetero_pipeline_layer_split": None},
        ),
    ),
    *cases(
        "launch-is-refused",
        MEGATRON,
        ("has 3 segments, which 4 stages do not divide", {_LAYOUT: "Et*8|t*12|t*12L"}),
        ("does not divide the 24 ranks", {"torchrun.nnodes": 3}),
    ),
    *cases(
        "launch-is-refused",
        FLAGSCALE,
        ("4 numbers; each mesh has five", {HETERO + "hetero_process_meshes": [4, 1, 1, 2]}),
    ),
    Case(
        "launch-tp-across-hosts",
        "2 of 6 tensor-parallel groups span hosts of 6 devices: ranks 4 to 7 lie on host 0 and "
        "host 1; ranks 16 to 19 lie on host 2 and host 3",
        {
            "torchrun.nproc-per-node": 6,
            "pipeline-model-parallel-size": 2,
            "global-batch-size": 126,
        },
    ),
    Case(
        "launch-tp-across-hosts",
        "1 of 2 tensor-parallel groups span hosts of 2, 6, 8 devices",
        {},
        FLAGSCALE,
        hosts_of(8, 8, 6, 2, types="BBAA"),
    ),
    Case(
        "launch-hosts-disagree",
        "--nnodes 4, and 3 hosts: torchrun waits",
        {"torchrun.nproc-per-node": None, "pipeline-model-parallel-size": 3, "num-layers": 33},
        hosts=hosts_of(8, 8, 8),
    ),
    Case(
        "launch-order-of-hosts",
        "--rdzv-backend c10d ignores --node-rank",
        {"torchrun.rdzv-backend": "c10d"},
    ),
    *cases(
        "launch-order-of-hosts",
        FLAGSCALE,
        ("supports static only", {"torchrun.rdzv-backend": "c10d"}),
    ),
    *cases(
        "launch-too-few-microbatches",
        MEGATRON,
        ("each device idles 60% of the step", {"global-batch-size": 4}),
    ),
    *cases(
        "launch-flag-without-effect",
        MEGATRON,
        ("--sequence-parallel with tp 1", {"tensor-model-parallel-size": 1}),
        (
            "trains 126 sequences per step, 1 fewer",
            {"global-batch-size": 127, "decrease-batch-size-if-needed": True},
        ),
    ),
    *cases(
        "launch-meshes-do-not-fit",
        FLAGSCALE,
        (
            "ep 1, 2 in the meshes",
            {HETERO + "hetero_process_meshes": [4, 1, 1, 2, 1, 2, 1, 2, 4, 2]},
        ),
    ),
    Case(
        "launch-mesh-types",
        "meshes of type A have 8 ranks, its hosts 16",
        {},
        FLAGSCALE,
        hosts_of(8, 8, 8, types="AAB"),
    ),
    *cases(
        "launch-mesh-checkpoint",
        FLAGSCALE,
        (
            "tp 2, 4 in the meshes and no ckpt_format (torch_dist): saving fails",
            {SYSTEM + "checkpoint.ckpt_format": None},
        ),
    ),
    *cases(
        "launch-module-lists",
        TORCHTITAN,
        (
            "layers.3 comes where layers.2 must; torchtitan drops a layer",
            {_LISTS: lists("tok_embeddings layers.0 layers.1", "layers.3 norm lm_head")},
        ),
    ),
]


def test_one_fault_makes_one_rule_speak() -> None:
    for case in WRONG:
        found = judged(text_of(case))
        assert {each.rule for each in found} == {case.rule}, found
        assert any(case.says in each.message for each in found), found


RIGHT: list[tuple[Flags, Flags]] = [
    (MEGATRON, {}),
    (MEGATRON, {"pipeline-model-parallel-layout": "Et*5|(t*3|)*6t*9L"}),
    (MEGATRON, {"num-layers": 30, "pipeline-model-parallel-layout": "Et*8,|t*8,|t*7|t*7L"}),
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
        "launch-out-of-memory",
    }
    assert {case.rule for case in WRONG} | elsewhere == {*CHECKS}


def test_nothing_is_found_in_sizes_that_only_the_hosts_know() -> None:
    """With every value behind a variable no rule can know that something is wrong."""
    for case in WRONG:
        text = text_of(case)
        names = [each.name for each in text.settings if each.values]
        text = replace(unread(text, *names), nodes=None, devices_per_node=None, hosts=())
        assert {each.rule for each in judged(text)} <= {case.rule}, case
        if case.rule in ("launch-tp-across-hosts",):
            assert judged(text) == ()


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
    one_kind = replace(cluster, islands=(big,), links=())
    (found,) = judged(text, model=model, cluster=one_kind)
    assert found.rule == "launch-out-of-memory"
    assert "stage 0 with 20 layers needs" in found.message
