"""More of lint_launch_cases.py: batches, flags, meshes of FlagScale, modules of torchtitan."""

from __future__ import annotations

from lint_launch_cases import HETERO, PARALLELISM, SYSTEM, Case, lists
from lint_launches import FLAGSCALE, TORCHTITAN

from hetplan.importers.launches.values import LaunchHost

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
        "trains 126 sequences per step, 1 fewer than asked",
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
    Case(
        "launch-interleaving-groups",
        "interleaving of 62 microbatches in groups of 4 leaves 2, fewer than the 4 stages",
        {"global-batch-size": 124, "num-layers-per-virtual-pipeline-stage": 4},
    ),
    Case(
        "launch-interleaving-groups",
        "a group has from 4 to 64",
        {
            "num-layers-per-virtual-pipeline-stage": 4,
            "microbatch-group-size-per-virtual-pipeline-stage": 2,
        },
    ),
    Case(
        "launch-interleaving-groups",
        "interleaves from 3 stages on",
        {
            "pipeline-model-parallel-size": 2,
            "pipeline-model-parallel-layout": "Et*8|t*8|t*8|t*8L",
            "no-overlap-p2p-communication": True,
        },
    ),
    # Flags.
    Case(
        "launch-recompute-flags",
        "selective recomputation with --recompute-num-layers",
        {"recompute-granularity": "selective", "recompute-num-layers": 1},
    ),
    Case(
        "launch-recompute-flags",
        "selective recomputation with --recompute-method",
        {"recompute-activations": True, "recompute-method": "uniform"},
    ),
    Case(
        "launch-recompute-flags",
        "full recomputation without --recompute-method and --recompute-num-layers: the trainer "
        "stops; write --recompute-method uniform --recompute-num-layers 1",
        {"recompute-granularity": "full"},
    ),
    Case(
        "launch-recompute-flags",
        "--recompute-method without --recompute-granularity: nothing is recomputed",
        {"recompute-method": "block", "recompute-num-layers": 4},
    ),
    Case(
        "launch-recompute-flags",
        "--recompute-granularity whole",
        {"recompute-granularity": "whole"},
    ),
    Case(
        "launch-recompute-flags",
        "--recompute-method even",
        {
            "recompute-granularity": "full",
            "recompute-method": "even",
            "recompute-num-layers": 1,
        },
    ),
    Case(
        "launch-recompute-flags",
        "have them split already",
        {
            "recompute-granularity": "full",
            "recompute-method": "block",
            "recompute-num-layers": 1,
            "distribute-saved-activations": True,
        },
    )._replace(says="has them split already"),
    Case(
        "launch-device-connections",
        "tp 4, and CUDA_DEVICE_MAX_CONNECTIONS is not set here",
        {},
        environment={},
    ),
    Case(
        "launch-device-connections",
        "tp 4 and cp 2, and CUDA_DEVICE_MAX_CONNECTIONS is 8",
        {"context-parallel-size": 2, "pipeline-model-parallel-size": 2},
        environment={"CUDA_DEVICE_MAX_CONNECTIONS": "8"},
    ),
    Case(
        "launch-device-connections",
        "CUDA_DEVICE_MAX_CONNECTIONS=1 with --use-megatron-fsdp",
        {"use-megatron-fsdp": True},
    ),
    Case(
        "launch-flag-needs-another",
        "--overlap-param-gather without --overlap-grad-reduce",
        {"overlap-grad-reduce": None},
    ),
    Case(
        "launch-flag-needs-another",
        "--overlap-param-gather without --use-distributed-optimizer or --use-megatron-fsdp",
        {"use-distributed-optimizer": None},
    ),
    Case(
        "launch-flag-needs-another",
        "--tp-comm-overlap without --sequence-parallel",
        {"tp-comm-overlap": True, "sequence-parallel": None},
    ),
    Case(
        "launch-flag-needs-another",
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
        "launch-unknown-flag",
        "did you mean --overlap-grad-reduce?",
        {"overlap-grad-reducee": True},
    ),
]

MESHES = [
    # Meshes.
    *(
        Case("launch-meshes-do-not-fit", says, {HETERO + name: value}, FLAGSCALE)
        for name, value, says in (
            ("hetero_process_meshes", [4, 1, 1, 2], "4 numbers in hetero_process_meshes"),
            ("hetero_process_meshes", None, "enable_hetero without hetero_process_meshes"),
            ("hetero_process_meshes", [4, 1, 1, 0, 1, 2, 1, 1, 4, 2], "a degree below 1"),
            ("hetero_pipeline_layer_split", [14, 18], "2 entries in hetero_pipeline_layer_split"),
            ("hetero_pipeline_layer_split", [14, 10, 9], "adds up to 33, num_layers is 32"),
            ("hetero_device_types", ["A"], "1 hetero_device_types for 2 meshes"),
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
        "dp 2 of the first mesh times micro_batch_size 1 is 2 sequences, which dp 4 of another "
        "mesh does not divide; write micro_batch_size: 2",
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
                "layers 2 of 4 stand in no stage: torchtitan drops it and trains 3 layers",
            ),
            (
                ("tok_embeddings layers.0 layers.1", "layers.1 layers.2 norm lm_head"),
                "layers.1 in several stages",
            ),
            (("tok_embeddings layers.0", "layers.1 norm"), "lm_head in no stage"),
            (
                ("tok_embeddings layers.0", "layers.1", "layers.2 norm lm_head"),
                "3 model parts over 2 pipeline ranks",
            ),
            (
                ("tok_embeddings layers.0", "layers.1", "layers.2", "layers.3 norm lm_head"),
                "schedule 1F1B runs one stage per rank, and there are 2",
            ),
            (
                ("tok_embeddings layers.1", "layers.0 norm lm_head"),
                "layers.1 stands before an earlier layer",
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
