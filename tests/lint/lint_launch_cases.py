"""One change each of launches that are right: the rule that speaks of it, and what it says.

Layers, layout strings, hosts and sizes; the others are in lint_launch_cases_more.py.
"""

from __future__ import annotations

from typing import NamedTuple

from lint_launches import (
    ENVIRONMENT,
    FLAGSCALE,
    FLAGSCALE_HOSTS,
    MEGATRON,
    TORCHTITAN,
    Flags,
    launch,
)

from hetplan.importers.launches.values import LaunchHost, LaunchText

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
    environment: dict[str, str] = dict(ENVIRONMENT)  # noqa: RUF012


def text_of(case: Case) -> LaunchText:
    trainer = {id(FLAGSCALE): "flagscale", id(TORCHTITAN): "torchtitan"}.get(
        id(case.base), "megatron"
    )
    hosts = case.hosts or (FLAGSCALE_HOSTS if trainer == "flagscale" else ())
    return launch(
        {**case.base, **case.change}, trainer=trainer, environment=case.environment, hosts=hosts
    )


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
        "launch-loses-layers",
        "24 layers on the ends of 2 stages, and 32 in the model: core up to 0.15 trains 24",
        {
            "pipeline-model-parallel-size": 2,
            "decoder-first-pipeline-num-layers": 11,
            "decoder-last-pipeline-num-layers": 13,
        },
    ),
    Case(
        "launch-loses-layers",
        "5 layers on the end of 1 stage, and 32 in the model: core up to 0.15 trains 5 layers",
        {"pipeline-model-parallel-size": 1, "decoder-last-pipeline-num-layers": 5},
    ),
    Case(
        "launch-loses-layers",
        "25 layers are left for the 3 stages between",
        {"decoder-first-pipeline-num-layers": 7},
    ),
    Case(
        "launch-loses-layers",
        "40 layers on first and last stage, and 32 in the model",
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
    # Layout strings.
    *(
        Case("launch-layout-string", says, {"pipeline-model-parallel-layout": layout})
        for layout, says in (
            ("Et*8|t*8|t*8|t*7L", "has 31 times t for 32 layers"),
            ("Et*8|t*12|t*12L", "has 3 stages for --pipeline-model-parallel-size 4"),
            ("Et*8 | t*8|t*8|t*8L", "white space is refused"),
            ("t*8|t*8|t*8|t*8L", "the first symbol is E"),
            ("Et*8|Et*8|t*8|t*8L", "has 2 times E"),
            ("Et*8|d*8|t*8|t*16L", "'d'"),
            ("E(t*8|)*3t*8L|mL", "times m in the layout for 0 layers"),
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
        "launch-group-across-hosts",
        "context-parallel groups of 6 ranks (with tp) span hosts of 8 devices",
        {
            "tensor-model-parallel-size": 2,
            "context-parallel-size": 3,
            "pipeline-model-parallel-size": 1,
            "torchrun.nnodes": 3,
            "seq-length": 4104,
        },
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
        "a0 stands twice",
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
        "launch-ranks-do-not-divide",
        "24 ranks for tp 4 x pp 4 x cp 1 = 16",
        {"torchrun.nnodes": 3},
    ),
    Case(
        "launch-ranks-do-not-divide",
        "16 ranks, and hetero_process_meshes asks for 24",
        {HETERO + "hetero_device_types": None},
        FLAGSCALE,
        (LaunchHost(name="a0", devices=8), LaunchHost(name="a1", devices=8)),
    ),
    Case(
        "launch-ranks-do-not-divide",
        "16 ranks for dp_replicate x dp_shard x cp x tp x pp = 32",
        {PARALLELISM + "data_parallel_shard_degree": 8},
        TORCHTITAN,
    ),
    Case(
        "launch-ranks-do-not-divide",
        "no whole data_parallel_shard_degree",
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
    Case(
        "launch-padded-vocabulary",
        "vocabulary 128257 becomes 128384 at tp 1, 128512 at tp 4: a checkpoint of format torch, "
        "or a loss, is not the same at another tp. Write --make-vocab-size-divisible-by 32128 at "
        "tp 4, 128512 at tp 1, which keeps 128512",
        {"vocab-size": 128257, "make-vocab-size-divisible-by": None},
    ),
]
