"""One change each of launches that are right: the rule that it breaks, and what is found."""

from __future__ import annotations

from typing import NamedTuple

from rule_launches import (
    FLAGSCALE,
    FLAGSCALE_HOSTS,
    MEGATRON,
    TORCHTITAN,
    Flags,
    launch,
)

from hetplan.trainers.launch_values import LaunchHost, LaunchText

SYSTEM = "train.system."
HETERO = "train.system.hetero."
PARALLELISM = "parallelism."


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


SIZES = [
    # Layers.
    Case(
        "launch-loses-layers",
        "30 layers on 4 stages: up to core 0.9 Megatron-LM builds 7 on each, 28 in all",
        {"num-layers": 30},
    ),
    Case("launch-loses-layers", "'Et*7|t*8|t*8|t*7L'", {"num-layers": 30}),
    Case(
        "launch-loses-layers",
        "8 layers per stage in virtual stages of 3: Megatron-LM stops; write "
        "--num-layers-per-virtual-pipeline-stage 2",
        {"num-layers-per-virtual-pipeline-stage": 3},
    ),
    Case(
        "launch-loses-layers",
        "8 layers per stage in 3 virtual stages: core up to 0.10 drops 8 layers",
        {"num-virtual-stages-per-pipeline-rank": 3},
    ),
    Case(
        "launch-is-refused",
        "leave 8 for 0 stages between them",
        {
            "pipeline-model-parallel-size": 2,
            "decoder-first-pipeline-num-layers": 11,
            "decoder-last-pipeline-num-layers": 13,
        },
    ),
    Case(
        "launch-is-refused",
        "leave 27 for 0 stages between them",
        {"pipeline-model-parallel-size": 1, "decoder-last-pipeline-num-layers": 5},
    ),
    Case(
        "launch-loses-layers",
        "25 layers are left for the 3 stages between",
        {"decoder-first-pipeline-num-layers": 7},
    ),
    Case(
        "launch-is-refused",
        "leave -8 for 2 stages",
        {"decoder-first-pipeline-num-layers": 20, "decoder-last-pipeline-num-layers": 20},
    ),
    Case(
        "launch-loses-layers",
        "32 layers and 1 counted for the ends on 4 stages",
        {"account-for-loss-in-pipeline-split": True},
    ),
    Case(
        "launch-loses-layers",
        "32 layers on 3 stages without hetero_pipeline_layer_split: FlagScale builds 10 on each, "
        "30 in all, and says nothing. Write hetero_pipeline_layer_split: [11, 11, 10]",
        {HETERO + "hetero_pipeline_layer_split": None},
        FLAGSCALE,
    ),
    *(
        Case("launch-layout-string", says, {"pipeline-model-parallel-layout": layout})
        for layout, says in (
            ("Et*8|t*12|t*12L", "has 3 segments, which 4 stages do not divide"),
            ("Et*8 | t*8|t*8|t*8L", "has ' '"),
            ("t*8|t*8|t*8|t*8L", "must begin with its one E"),
            ("Et*8|d*8|t*8|t*16L", "'d'"),
        )
    ),
    # Layout strings.
    *(
        Case("launch-layout-string", says, {"pipeline-model-parallel-layout": layout})
        for layout, says in (
            ("Et*8|t*8|t*8|t*7L", "has 31 times t for 32 layers"),
            ("E(t*8|)*3t*8mL", "times m in the layout for 0 layers"),
        )
    ),
    Case(
        "launch-layout-string",
        "together with --account-for-embedding-in-pipeline-split",
        {
            "pipeline-model-parallel-layout": "Et*8|t*8|t*8|t*8L",
            "account-for-embedding-in-pipeline-split": True,
        },
    ),
    # Hosts.
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
        {"torchrun.nnodes": None, "torchrun.nproc-per-node": None, "global-batch-size": 4},
        hosts=(
            LaunchHost(name="a0", devices=6),
            LaunchHost(name="a1", devices=2),
            LaunchHost(name="a2", devices=8),
        ),
    ),
    Case(
        "launch-tp-across-hosts",
        "1 of 2 tensor-parallel groups span hosts of 2, 6, 8 devices",
        {},
        FLAGSCALE,
        (
            LaunchHost(name="b0", devices=8, type="B"),
            LaunchHost(name="b1", devices=8, type="B"),
            LaunchHost(name="a0", devices=6, type="A"),
            LaunchHost(name="a1", devices=2, type="A"),
        ),
    ),
    Case(
        "launch-tp-across-hosts",
        "Write a tp that divides the devices of every host (8 or a divisor of it)",
        {PARALLELISM + "tensor_parallel_degree": 16, PARALLELISM + "pipeline_parallel_degree": 1}
        | {
            PARALLELISM + "module_fqns_per_model_part": None,
            PARALLELISM + "data_parallel_shard_degree": 1,
            "training.num_tokens_per_train_step": None,
        },
        TORCHTITAN,
    ),
    Case(
        "launch-hosts-disagree",
        "--nnodes 4, and 3 hosts: torchrun waits",
        {"torchrun.nproc-per-node": None, "pipeline-model-parallel-size": 3, "num-layers": 33},
        hosts=tuple(LaunchHost(name=f"a{at}", devices=8) for at in range(3)),
    ),
    Case(
        "launch-hosts-disagree",
        "--nproc-per-node 8, and a2 has 4 devices",
        {
            "torchrun.nnodes": 3,
            "pipeline-model-parallel-size": 5,
            "num-layers": 30,
        },
        hosts=tuple(LaunchHost(name=f"a{at}", devices=8 - at // 2 * 4) for at in range(3)),
    ),
    Case(
        "launch-hosts-disagree",
        "a0 is in the hostfile twice",
        {},
        FLAGSCALE,
        (
            LaunchHost(name="a0", devices=8, type="A"),
            LaunchHost(name="a0", devices=16, type="B"),
        ),
    ),
    Case(
        "launch-order-of-hosts",
        "--rdzv-backend c10d ignores --node-rank",
        {"torchrun.rdzv-backend": "c10d"},
    ),
    Case(
        "launch-order-of-hosts",
        "its hosts have unlike numbers of devices",
        {
            "torchrun.rdzv-backend": "c10d",
            "torchrun.node-rank": None,
            "torchrun.nnodes": None,
            "torchrun.nproc-per-node": None,
        },
        hosts=(LaunchHost(name="a0", devices=4), LaunchHost(name="a1", devices=12)),
    ),
    Case(
        "launch-order-of-hosts",
        "supports static only",
        {"torchrun.rdzv-backend": "c10d"},
        FLAGSCALE,
    ),
    # Sizes.
    Case(
        "launch-is-refused",
        "does not divide the 24 ranks",
        {"torchrun.nnodes": 3},
    ),
    Case(
        "launch-is-refused",
        "the meshes have 24 ranks, the hosts start 16",
        {HETERO + "hetero_device_types": None},
        FLAGSCALE,
        (LaunchHost(name="a0", devices=8), LaunchHost(name="a1", devices=8)),
    ),
    Case(
        "launch-is-refused",
        "is not the 16 ranks of the launch",
        {PARALLELISM + "data_parallel_shard_degree": 8},
        TORCHTITAN,
    ),
    Case(
        "launch-is-refused",
        "is not the 16 ranks of the launch",
        {
            PARALLELISM + "data_parallel_shard_degree": -1,
            PARALLELISM + "context_parallel_degree": 3,
        },
        TORCHTITAN,
    ),
    Case(
        "launch-sizes-do-not-divide",
        "34 attention heads over tp 4",
        {"num-attention-heads": 34, "hidden-size": 4352, "num-query-groups": 4},
    ),
    Case(
        "launch-sizes-do-not-divide",
        "6 key-value heads over tp 4: tp must be a multiple or a divisor of them",
        {"num-query-groups": 6},
    ),
    Case(
        "launch-sizes-do-not-divide",
        "hidden size 4100 over 32 heads",
        {"hidden-size": 4100},
    ),
    Case(
        "launch-sizes-do-not-divide",
        "sequence length 4098 over cp 2: it must be a multiple of 2 x cp = 4",
        {"seq-length": 4098, "context-parallel-size": 2, "tensor-model-parallel-size": 2},
    ),
    Case(
        "launch-sizes-do-not-divide",
        "sequence length 4098 over cp 1 leaves 4098, which tp 4 does not divide",
        {"seq-length": 4098},
    ),
    Case(
        "launch-sizes-do-not-divide",
        "6 experts over ep 4",
        {"num-experts": 6, "expert-model-parallel-size": 4, "expert-tensor-parallel-size": 1},
    ),
    Case(
        "launch-sizes-do-not-divide",
        "32 ranks for expert tp 4 x ep 4 x pp 4 = 64",
        {"num-experts": 8, "expert-model-parallel-size": 4},
    ),
    Case(
        "launch-sizes-do-not-divide",
        "experts with tp 4 and no --sequence-parallel",
        {"num-experts": 8, "sequence-parallel": None},
    ),
]

FLAGS = [
    # Batch.
    Case(
        "launch-batch-does-not-divide",
        "global batch 127, microbatches of 1 on 2 data-parallel ranks: not a multiple of 2, and "
        "the trainer stops; write --global-batch-size 126 or 128",
        {"global-batch-size": 127},
    ),
    Case(
        "launch-batch-does-not-divide",
        "trains 126 sequences per step, 1 fewer",
        {"global-batch-size": 127, "decrease-batch-size-if-needed": True},
    ),
    Case(
        "launch-batch-does-not-divide",
        "global batch 62, microbatches of 2 on 2 data-parallel ranks",
        {"train.model.global_batch_size": 62},
        FLAGSCALE,
    ),
    Case(
        "launch-batch-does-not-divide",
        "131000 tokens per step, 131072 in one pass of all ranks",
        {"training.num_tokens_per_train_step": 131000},
        TORCHTITAN,
    ),
    Case(
        "launch-too-few-microbatches",
        "2 microbatches for 4 stages: with equal stages each device idles 60% of the step; write "
        "--global-batch-size for 8 microbatches",
        {"global-batch-size": 4},
    ),
    Case(
        "launch-too-few-microbatches",
        "1 microbatch for 2 stages: with equal stages each device idles 50% of the step; torch's "
        "1F1B stops",
        {
            PARALLELISM + "num_pp_microbatches": None,
        },
        TORCHTITAN,
    ),
    # Flags.
    Case(
        "launch-flags-contradict",
        "selective recomputation with --recompute-num-layers",
        {"recompute-granularity": "selective", "recompute-num-layers": 1},
    ),
    Case(
        "launch-flags-contradict",
        "selective recomputation with --recompute-method",
        {"recompute-activations": True, "recompute-method": "uniform"},
    ),
    Case(
        "launch-flags-contradict",
        "full recomputation without --recompute-method and --recompute-num-layers: the trainer "
        "stops; write --recompute-method uniform --recompute-num-layers 1",
        {"recompute-granularity": "full"},
    ),
    Case(
        "launch-flags-contradict",
        "--recompute-method without --recompute-granularity: nothing is recomputed",
        {"recompute-method": "block", "recompute-num-layers": 4},
    ),
    Case(
        "launch-flags-contradict",
        "--recompute-granularity whole",
        {"recompute-granularity": "whole"},
    ),
    Case(
        "launch-flags-contradict",
        "--recompute-method even",
        {
            "recompute-granularity": "full",
            "recompute-method": "even",
            "recompute-num-layers": 1,
        },
    ),
    Case(
        "launch-flags-contradict",
        "--overlap-param-gather without --overlap-grad-reduce",
        {"overlap-grad-reduce": None},
    ),
    Case(
        "launch-flags-contradict",
        "--overlap-param-gather without --use-distributed-optimizer or --use-megatron-fsdp",
        {"use-distributed-optimizer": None},
    ),
    Case(
        "launch-flags-contradict",
        "--tp-comm-overlap without --sequence-parallel",
        {"tp-comm-overlap": True, "sequence-parallel": None},
    ),
    Case(
        "launch-flags-contradict",
        "only Adam's state is sharded",
        {"optimizer": "sgd"},
    ),
    Case(
        "launch-flag-without-effect",
        "--sequence-parallel with tp 1",
        {"tensor-model-parallel-size": 1},
    ),
    Case(
        "launch-flag-without-effect",
        "--num-query-groups 8 without --group-query-attention",
        {"group-query-attention": None},
    ),
    Case(
        "launch-unknown-flag",
        "--tensor-model-paralel-size is no flag of Megatron-LM, which stops at unknown ones; did "
        "you mean --tensor-model-parallel-size?",
        {"tensor-model-paralel-size": 4},
    ),
    Case(
        "launch-is-refused",
        "it is --recompute-activations today",
        {"checkpoint-activations": True},
    ),
    Case("launch-unknown-flag", "--bf16 takes no value, and 1 follows it", {"bf16": 1}),
    Case(
        "launch-unknown-flag", "takes one whole number, not 1e3", {"max-position-embeddings": "1e3"}
    ),
    Case(
        "launch-unknown-flag",
        "did you mean --overlap-grad-reduce?",
        {"overlap-grad-reducee": True},
    ),
]

MESHES = [
    # Meshes.
    *(
        Case("launch-is-refused", says, {HETERO + name: value}, FLAGSCALE)
        for name, value, says in (
            ("hetero_process_meshes", [4, 1, 1, 2], "4 numbers; each mesh has five"),
            ("hetero_process_meshes", None, "enable_hetero needs hetero_process_meshes"),
            ("hetero_process_meshes", [4, 1, 1, 0, 1, 2, 1, 1, 4, 2], "from 1 on"),
            ("hetero_pipeline_layer_split", [14, 18], "2 numbers for 3 stages"),
            ("hetero_device_types", ["A"], "1 device types for 2 meshes"),
        )
    ),
    Case(
        "launch-meshes-do-not-fit",
        "pipeline_model_parallel_size 4, and the meshes have 3 stages",
        {SYSTEM + "pipeline_model_parallel_size": 4},
        FLAGSCALE,
    ),
    Case(
        "launch-meshes-do-not-fit",
        "adds up to 33, num_layers is 32",
        {HETERO + "hetero_pipeline_layer_split": [14, 10, 9]},
        FLAGSCALE,
    ),
    Case(
        "launch-is-refused",
        "dp 4 of mesh 1 does not divide dp 2 of the first mesh x micro_batch_size 1",
        {"train.model.micro_batch_size": 1},
        FLAGSCALE,
    ),
    Case(
        "launch-meshes-do-not-fit",
        "num_layers_per_virtual_pipeline_stage with meshes",
        {SYSTEM + "num_layers_per_virtual_pipeline_stage": 2},
        FLAGSCALE,
    ),
    Case(
        "launch-meshes-do-not-fit",
        "tp 4 in the first and 2 in the last mesh, and the embedding is tied",
        {"train.model.untie_embeddings_and_output_weights": None},
        FLAGSCALE,
    ),
    Case(
        "launch-meshes-do-not-fit",
        "write use_partial_reduce_for_shared_embedding: true",
        {
            "train.model.untie_embeddings_and_output_weights": None,
            HETERO + "hetero_process_meshes": [2, 1, 1, 4, 1, 2, 1, 1, 4, 1, 2, 1, 1, 2, 2],
            HETERO + "hetero_device_types": ["A", "B", "C"],
            HETERO + "hetero_pipeline_layer_split": [8, 8, 8, 8],
            SYSTEM + "pipeline_model_parallel_size": 4,
        },
        FLAGSCALE,
        tuple(LaunchHost(name=each, devices=8, type=each) for each in "ABC"),
    ),
    Case(
        "launch-mesh-types",
        "type A stands twice with another between (A, B, A)",
        {
            HETERO + "hetero_process_meshes": [4, 1, 1, 2, 1, 4, 1, 1, 2, 1, 4, 1, 1, 2, 1],
            HETERO + "hetero_device_types": ["A", "B", "A"],
        },
        FLAGSCALE,
        (
            LaunchHost(name="a0", devices=8, type="A"),
            LaunchHost(name="b0", devices=8, type="B"),
            LaunchHost(name="a1", devices=8, type="A"),
        ),
    ),
    Case(
        "launch-mesh-types",
        "meshes of type A have 8 ranks, its hosts 16",
        {},
        FLAGSCALE,
        tuple(LaunchHost(name=f"h{at}", devices=8, type=each) for at, each in enumerate("AAB")),
    ),
    Case(
        "launch-mesh-types",
        "hosts of type C, which hetero_device_types does not name",
        {HETERO + "hetero_device_types": ["A", "A"]},
        FLAGSCALE,
        tuple(LaunchHost(name=f"h{at}", devices=8, type=t) for at, t in enumerate("AAC")),
    ),
    Case(
        "launch-mesh-checkpoint",
        "tp 2, 4 in the meshes and no ckpt_format (torch_dist): saving fails",
        {SYSTEM + "checkpoint.ckpt_format": None},
        FLAGSCALE,
    ),
    # Module lists.
    *(
        Case(
            "launch-module-lists",
            says,
            {PARALLELISM + "module_fqns_per_model_part": lists(*parts)},
            TORCHTITAN,
        )
        for parts, says in (
            (
                ("tok_embeddings layers.0 layers.1", "layers.3 norm lm_head"),
                "layers.3 comes where layers.2 must; torchtitan drops a layer",
            ),
            (
                ("tok_embeddings layers.0 layers.1", "layers.1 layers.2 norm lm_head"),
                "layers.1 comes where layers.2 must",
            ),
            (("tok_embeddings layers.0", "layers.1 norm"), "lm_head in no stage"),
            (
                ("tok_embeddings layers.0", "layers.1", "layers.2 norm lm_head"),
                "3 lists of modules, which 2 pipeline ranks do not divide",
            ),
            (
                ("tok_embeddings layers.0", "layers.1", "layers.2", "layers.3 norm lm_head"),
                "schedule 1F1B runs one stage per rank, and there are 2",
            ),
            (
                ("tok_embeddings layers.1", "layers.0 norm lm_head"),
                "layers.1 comes where layers.0 must",
            ),
        )
    ),
    Case(
        "launch-module-lists",
        "schedule Interleaved1F1B needs two stages per rank",
        {PARALLELISM + "pipeline_parallel_schedule": "Interleaved1F1B"},
        TORCHTITAN,
    ),
    Case(
        "launch-module-lists",
        "2 model parts and pipeline_parallel_degree 1: the lists are not used",
        {
            PARALLELISM + "pipeline_parallel_degree": 1,
            PARALLELISM + "data_parallel_shard_degree": 8,
            "training.num_tokens_per_train_step": None,
        },
        TORCHTITAN,
    ),
]

WRONG = (*SIZES, *FLAGS, *MESHES)
