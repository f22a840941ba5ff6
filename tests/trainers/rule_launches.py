"""Launches of each trainer that are right, to damage one thing of them at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from hetplan.lint.findings import Finding
from hetplan.lint.registry import judge
from hetplan.lint.rows import Inputs
from hetplan.trainers.launch_values import LaunchHost, LaunchText, Setting
from hetplan.trainers.rules import Launch

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


def judged(text: LaunchText, **known: object) -> tuple[Finding, ...]:
    """What the rules find in the launch."""
    row = Launch(file="run.sh", text=text, **known)  # type: ignore[arg-type]
    return judge(Inputs(launches=(row,)))
