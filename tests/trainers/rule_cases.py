"""One change each of launches that are right: the rule that it breaks, and what is found."""

from __future__ import annotations

from typing import NamedTuple

from rule_launches import FLAGSCALE, FLAGSCALE_HOSTS, MEGATRON, TORCHTITAN, Flags, launch

from hetplan.trainers.launch_values import LaunchHost, LaunchText

SYSTEM, MODEL = "train.system.", "train.model."
HETERO = "train.system.hetero."
PARALLELISM = "parallelism."
_LAYOUT = "pipeline-model-parallel-layout"
_LISTS = PARALLELISM + "module_fqns_per_model_part"
_STATIC_PLACES = {"torchrun.nnodes": None, "torchrun.nproc-per-node": None}


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


SIZES = [
    *cases(
        "launch-loses-layers",
        MEGATRON,
        (
            "30 layers on 4 stages: up to core 0.9 Megatron-LM builds 7 on each, 28 in all, and "
            "says nothing; later versions stop. Write --pipeline-model-parallel-layout "
            "'Et*7|t*8|t*8|t*7L'",
            {"num-layers": 30},
        ),
        (
            "write --num-layers-per-virtual-pipeline-stage 2",
            {"num-layers-per-virtual-pipeline-stage": 3},
        ),
        ("core up to 0.10 drops 8 layers", {"num-virtual-stages-per-pipeline-rank": 3}),
        ("25 layers are left for the 3 stages between", {"decoder-first-pipeline-num-layers": 7}),
        ("1 counted for the ends on 4 stages", {"account-for-loss-in-pipeline-split": True}),
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
        "launch-layout-string",
        MEGATRON,
        ("has 3 segments, which 4 stages do not divide", {_LAYOUT: "Et*8|t*12|t*12L"}),
        ("'d'", {_LAYOUT: "Et*8|d*8|t*8|t*16L"}),
        ("has 31 times t for 32 layers", {_LAYOUT: "Et*8|t*8|t*8|t*7L"}),
        ("times m in the layout for 0 layers", {_LAYOUT: "E(t*8|)*3t*8mL"}),
        (
            "together with --account-for-embedding-in-pipeline-split",
            {_LAYOUT: "Et*8|t*8|t*8|t*8L", "account-for-embedding-in-pipeline-split": True},
        ),
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
        "ranks 4 to 7 lie on a0 and a1",
        {**_STATIC_PLACES, "global-batch-size": 4},
        hosts=hosts_of(6, 2, 8),
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
        "launch-hosts-disagree",
        "--nproc-per-node 8, and a2 has 4 devices",
        {"torchrun.nnodes": 3, "pipeline-model-parallel-size": 5, "num-layers": 30},
        hosts=hosts_of(8, 8, 4),
    ),
    Case(
        "launch-order-of-hosts",
        "--rdzv-backend c10d ignores --node-rank",
        {"torchrun.rdzv-backend": "c10d"},
    ),
    Case(
        "launch-order-of-hosts",
        "its hosts have unlike numbers of devices",
        {**_STATIC_PLACES, "torchrun.rdzv-backend": "c10d", "torchrun.node-rank": None},
        hosts=hosts_of(4, 12),
    ),
    *cases(
        "launch-order-of-hosts",
        FLAGSCALE,
        ("supports static only", {"torchrun.rdzv-backend": "c10d"}),
    ),
    *cases(
        "launch-is-refused",
        MEGATRON,
        ("does not divide the 24 ranks", {"torchrun.nnodes": 3}),
        ("it is --recompute-activations today", {"checkpoint-activations": True}),
    ),
    *cases(
        "launch-sizes-do-not-divide",
        MEGATRON,
        (
            "34 attention heads over tp 4",
            {"num-attention-heads": 34, "hidden-size": 4352, "num-query-groups": 4},
        ),
        ("6 key-value heads over tp 4", {"num-query-groups": 6}),
        ("hidden size 4100 over 32 heads", {"hidden-size": 4100}),
        (
            "it must be a multiple of 2 x cp = 4",
            {"seq-length": 4098, "context-parallel-size": 2, "tensor-model-parallel-size": 2},
        ),
        ("leaves 4098, which tp 4 does not divide", {"seq-length": 4098}),
        (
            "6 experts over ep 4",
            {"num-experts": 6, "expert-model-parallel-size": 4, "expert-tensor-parallel-size": 1},
        ),
        (
            "32 ranks for expert tp 4 x ep 4 x pp 4 = 64",
            {"num-experts": 8, "expert-model-parallel-size": 4},
        ),
        ("no --sequence-parallel", {"num-experts": 8, "sequence-parallel": None}),
    ),
]

FLAGS = [
    *cases(
        "launch-batch-does-not-divide",
        MEGATRON,
        (
            "global batch 127, microbatches of 1 on 2 data-parallel ranks: not a multiple of 2, "
            "and the trainer stops; write --global-batch-size 126 or 128",
            {"global-batch-size": 127},
        ),
        (
            "trains 126 sequences per step, 1 fewer",
            {"global-batch-size": 127, "decrease-batch-size-if-needed": True},
        ),
    ),
    *cases(
        "launch-batch-does-not-divide",
        TORCHTITAN,
        ("131072 in one pass of all ranks", {"training.num_tokens_per_train_step": 131000}),
    ),
    *cases(
        "launch-too-few-microbatches",
        MEGATRON,
        ("each device idles 60% of the step", {"global-batch-size": 4}),
    ),
    *cases(
        "launch-too-few-microbatches",
        TORCHTITAN,
        ("torch's 1F1B stops", {PARALLELISM + "num_pp_microbatches": None}),
    ),
    *cases(
        "launch-flags-contradict",
        MEGATRON,
        (
            "selective recomputation with --recompute-num-layers",
            {"recompute-granularity": "selective", "recompute-num-layers": 1},
        ),
        (
            "write --recompute-method uniform --recompute-num-layers 1",
            {"recompute-granularity": "full"},
        ),
        ("nothing is recomputed", {"recompute-method": "block", "recompute-num-layers": 4}),
        ("--recompute-granularity whole", {"recompute-granularity": "whole"}),
        (
            "--recompute-method even",
            {
                "recompute-granularity": "full",
                "recompute-method": "even",
                "recompute-num-layers": 1,
            },
        ),
        ("--overlap-param-gather without --overlap-grad-reduce", {"overlap-grad-reduce": None}),
        ("or --use-megatron-fsdp", {"use-distributed-optimizer": None}),
        ("only Adam's state is sharded", {"optimizer": "sgd"}),
    ),
    *cases(
        "launch-flag-without-effect",
        MEGATRON,
        ("--sequence-parallel with tp 1", {"tensor-model-parallel-size": 1}),
        ("without --group-query-attention", {"group-query-attention": None}),
    ),
    *cases(
        "launch-unknown-flag",
        MEGATRON,
        ("did you mean --tensor-model-parallel-size?", {"tensor-model-paralel-size": 4}),
        ("--bf16 takes no value, and 1 follows it", {"bf16": 1}),
        ("takes one whole number, not 1e3", {"max-position-embeddings": "1e3"}),
    ),
]

MESHES = [
    *cases(
        "launch-is-refused",
        FLAGSCALE,
        (
            "4 numbers; each mesh has five",
            {HETERO + "hetero_process_meshes": [4, 1, 1, 2]},
        ),
    ),
    *cases(
        "launch-meshes-do-not-fit",
        FLAGSCALE,
        ("and the meshes have 3 stages", {SYSTEM + "pipeline_model_parallel_size": 4}),
        ("adds up to 33", {HETERO + "hetero_pipeline_layer_split": [14, 10, 9]}),
        (
            "num_layers_per_virtual_pipeline_stage with meshes",
            {SYSTEM + "num_layers_per_virtual_pipeline_stage": 2},
        ),
        (
            "tp 4 in the first and 2 in the last mesh, and the embedding is tied",
            {MODEL + "untie_embeddings_and_output_weights": None},
        ),
    ),
    Case(
        "launch-meshes-do-not-fit",
        "write use_partial_reduce_for_shared_embedding: true",
        {
            MODEL + "untie_embeddings_and_output_weights": None,
            HETERO + "hetero_process_meshes": [2, 1, 1, 4, 1, 2, 1, 1, 4, 1, 2, 1, 1, 2, 2],
            HETERO + "hetero_device_types": ["A", "B", "C"],
            HETERO + "hetero_pipeline_layer_split": [8, 8, 8, 8],
            SYSTEM + "pipeline_model_parallel_size": 4,
        },
        FLAGSCALE,
        hosts_of(8, 8, 8, types="ABC"),
    ),
    Case(
        "launch-mesh-types",
        "type A stands twice with another between (A, B, A)",
        {
            HETERO + "hetero_process_meshes": [4, 1, 1, 2, 1, 4, 1, 1, 2, 1, 4, 1, 1, 2, 1],
            HETERO + "hetero_device_types": ["A", "B", "A"],
        },
        FLAGSCALE,
        hosts_of(8, 8, 8, types="ABA"),
    ),
    Case(
        "launch-mesh-types",
        "meshes of type A have 8 ranks, its hosts 16",
        {},
        FLAGSCALE,
        hosts_of(8, 8, 8, types="AAB"),
    ),
    Case(
        "launch-mesh-types",
        "hosts of type C, which hetero_device_types does not name",
        {HETERO + "hetero_device_types": ["A", "A"]},
        FLAGSCALE,
        hosts_of(8, 8, 8, types="AAC"),
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
        ("lm_head in no stage", {_LISTS: lists("tok_embeddings layers.0", "layers.1 norm")}),
        (
            "schedule 1F1B runs one stage per rank, and there are 2",
            {
                _LISTS: lists(
                    "tok_embeddings layers.0", "layers.1", "layers.2", "layers.3 norm lm_head"
                )
            },
        ),
        (
            "schedule Interleaved1F1B needs two stages per rank",
            {PARALLELISM + "pipeline_parallel_schedule": "Interleaved1F1B"},
        ),
        (
            "2 model parts and pipeline_parallel_degree 1: the lists are not used",
            {
                PARALLELISM + "pipeline_parallel_degree": 1,
                PARALLELISM + "data_parallel_shard_degree": 8,
                "training.num_tokens_per_train_step": None,
            },
        ),
    ),
]

WRONG = (*SIZES, *FLAGS, *MESHES)
