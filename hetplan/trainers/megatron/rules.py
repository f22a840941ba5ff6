"""Launches of Megatron-LM that start, and then train something else or idle.

What Megatron-LM refuses at its start with a message of its own is left to it.

Sources, read from core 0.4 to d98e8a64: megatron/core/transformer/transformer_block.py
(get_num_layers_to_build), megatron/training/arguments.py (validate_args).

- layers % stages: up to core 0.9 rounded down silently without virtual stages; pretrain scripts of
  0.10 and later refuse it, core itself from 0.11 (NVIDIA/Megatron-LM#1304).
- layers of a stage % virtual stages: core up to 0.10 drops the rest, later versions refuse it.
- --decoder-first/last-pipeline-num-layers: with no stage left between them the layers that are
  left over are dropped up to core 0.15, and refused from 0.16 (#2718, #1778).
"""

from __future__ import annotations

from collections.abc import Iterator

from hetplan.errors import InputError
from hetplan.trainers.megatron.read import stage_layers
from hetplan.trainers.rules import Check, Launch, Violation, violation

_LAYOUT = "pipeline-model-parallel-layout"
_ENDS = ("decoder-first-pipeline-num-layers", "decoder-last-pipeline-num-layers")
_OWN_BLOCKS = (
    "hybrid-layer-pattern",
    "hybrid-override-pattern",
    "is-hybrid-model",
    "decoder-num-layers",
)
"""Flags other than --num-layers that say which blocks the model has."""


def even_layout(layers: int, stages: int) -> str:
    """The layout string that spreads layers evenly, the larger stages after the first."""
    smaller, larger_stages = divmod(layers, stages)
    counts = [smaller + (1 if 0 < stage <= larger_stages else 0) for stage in range(stages)]
    texts = [f"t*{count}" if count > 1 else "t" * count for count in counts]
    return "E" + "|".join(texts) + "L"


def _lost(launch: Launch) -> Iterator[Violation]:
    layers, pp = launch.num_layers, launch.pp
    if launch.is_hetero or layers is None or pp is None or pp < 1:
        return
    if any(map(launch.may_have, _OWN_BLOCKS)) or launch.is_open:
        return
    try:
        placed = stage_layers(launch.text, pp, layers)
    except InputError:
        return  # refused, or known to the hosts only
    built = sum(map(sum, placed))
    if built != layers:
        yield violation(
            f"{built} of {layers} layers are on the {pp} stages: old versions of Megatron-LM train "
            "this smaller model and say nothing, later ones stop. Write "
            f"--{_LAYOUT} '{even_layout(layers, pp)}' (core 0.13 and later)",
            *map(launch.get, ("num-layers", "pipeline-model-parallel-size", _LAYOUT, *_ENDS)),
        )


def _without_effect(launch: Launch) -> Iterator[Violation]:
    if launch.has("sequence-parallel") and launch.tp == 1 and not launch.is_hetero:
        yield violation(
            "--sequence-parallel with tp 1: it is switched off; leave it out",
            launch.get("sequence-parallel"),
        )
    if (
        launch.has("num-query-groups")
        and not launch.may_have("group-query-attention")
        and launch.number("num-query-groups") != launch.number("num-attention-heads")
        and not launch.may_have("multi-latent-attention")
    ):
        yield violation(
            f"--num-query-groups {launch.word('num-query-groups')} without "
            "--group-query-attention: every head gets keys and values of its own, a larger model; "
            "write --group-query-attention",
            launch.get("num-query-groups"),
        )
    recomputed = ("recompute-granularity", "recompute-activations")
    if not any(map(launch.may_have, recomputed)):
        for flag in ("recompute-method", "recompute-num-layers"):
            if launch.has(flag):
                yield violation(
                    f"--{flag} without --recompute-granularity: nothing is recomputed; write "
                    "--recompute-granularity full, or leave it out",
                    launch.get(flag),
                )
    if launch.has("decrease-batch-size-if-needed") and launch.facts is not None:
        mesh, batch = launch.facts.meshes[0], launch.facts.global_batch_size
        rest = batch % (mesh.dp * mesh.microbatch_size)
        if rest:
            yield violation(
                f"--decrease-batch-size-if-needed trains {batch - rest} sequences per step, {rest} "
                f"fewer than --global-batch-size {batch}, with one line in the log",
                launch.get("global-batch-size"),
            )


def _timeout(launch: Launch) -> Iterator[Violation]:
    cluster = launch.cluster
    flag = "distributed-timeout-minutes"
    if cluster is None or len(cluster.regions) < 2 or launch.may_have(flag):
        return
    regions = ", ".join(cluster.regions[:4])
    yield violation(
        f"regions {regions}, and no --{flag}: a collective that waits 10 minutes for a rank "
        f"elsewhere ends the run; write --{flag} 60"
    )


CHECKS: tuple[Check, ...] = (
    ("launch-loses-layers", _lost),
    ("launch-flag-without-effect", _without_effect),
    ("launch-timeout", _timeout),
)
"""Of Megatron-LM's arguments, whatever trainer takes them."""
