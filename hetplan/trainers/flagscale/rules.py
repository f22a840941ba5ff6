"""Launches of FlagScale that run meshes on the wrong devices, lose layers, or fail to save.

Megatron-LM's rules hold too. What pre_validate_args (flagscale/train/arguments.py) and
ParallelContext refuse at the start is left to them.

Read in FlagScale da4935ec: flagscale/train/hetero/parallel_context.py (RankMapper),
runner/utils.py (parse_hostfile). Meshes are runs of stages with degrees of their own, in pipeline
order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import groupby

from hetplan.trainers.megatron.rules import CHECKS as MEGATRON_CHECKS
from hetplan.trainers.rules import Check, Launch, Violation, violation

_MESHES = "hetero-process-meshes"
_TYPES = "hetero-device-types"
Meshes = tuple[tuple[int, int, int, int, int], ...]


def _expert_parallelism(launch: Launch) -> Iterator[Violation]:
    degrees = {mesh[2] for mesh in launch.meshes}
    if len(degrees) > 1:
        yield violation(
            f"ep {', '.join(map(str, sorted(degrees)))} in the meshes: FlagScale's check of it "
            "rejects nothing, and its maintainers do not promise that it works (FlagScale#299)",
            launch.get(_MESHES),
        )


def _types(launch: Launch) -> Iterator[Violation]:
    """Types that put ranks of one device kind where the meshes mean another."""
    meshes, types = launch.meshes, launch.words(_TYPES)
    if not launch.is_hetero or not meshes or types is None or len(types) != len(meshes):
        return
    runs = [name for name, _ in groupby(types)]
    again = sorted({name for name in runs if runs.count(name) > 1})
    if again:
        fresh = [
            f"{name}{types[:at].count(name)}" if name in again else name
            for at, name in enumerate(types)
        ]
        yield violation(
            f"type {again[0]} appears twice with another between ({', '.join(types)}): ranks are "
            f"sorted by a type's first place, so a mesh gets devices that were meant for another. "
            f"Write hetero_device_types: {fresh}, and these types in the hostfile",
            launch.get(_TYPES),
        )
    yield from _slots(launch, meshes, types)


def _slots(launch: Launch, meshes: Meshes, types: tuple[str, ...]) -> Iterator[Violation]:
    hosts = launch.text.hosts
    if not hosts or not all(host.type for host in hosts):
        return
    unknown = sorted({host.type for host in hosts} - {*types})
    if unknown:
        yield violation(
            f"hosts of type {', '.join(unknown)}, which hetero_device_types does not name",
            launch.get(_TYPES),
        )
    have: Counter[str] = Counter()
    need: Counter[str] = Counter()
    for host in hosts:
        have[host.type] += host.devices or launch.text.devices_per_node or 0
    for mesh, name in zip(meshes, types, strict=True):
        need[name] += mesh[0] * mesh[1] * mesh[3] * mesh[4]
    for name in dict.fromkeys(types):
        if have[name] != need[name] and name not in unknown:
            yield violation(
                f"meshes of type {name} have {need[name]} ranks, its hosts {have[name]}: ranks "
                "past the end of a type run on the next one, and nothing says so",
                launch.get(_MESHES),
                launch.get(_TYPES),
            )


def _checkpoint(launch: Launch) -> Iterator[Violation]:
    tps = {mesh[0] for mesh in launch.meshes}
    if not launch.is_hetero or len(tps) < 2:
        return
    written = launch.word("ckpt-format")
    saves = launch.has("save") or launch.has("load") or launch.has("save-interval")
    if written == "torch" or "ckpt-format" in launch.unread_names or not saves:
        return
    what = f"ckpt_format {written}" if written else "no ckpt_format (torch_dist)"
    yield violation(
        f"tp {', '.join(map(str, sorted(tps)))} in the meshes and {what}: saving fails; write "
        "ckpt_format: torch (it cannot be re-sharded later)",
        launch.get("ckpt-format"),
        launch.get(_MESHES),
    )


def _lost(launch: Launch) -> Iterator[Violation]:
    """FlagScale rounds down without a split (pre_validate_args), and no check is left."""
    layers, pp = launch.num_layers, launch.pp
    if not launch.is_hetero or not layers or not pp or pp < 1 or layers % pp == 0:
        return
    if launch.may_have("hetero-pipeline-layer-split"):
        return
    built, rest = divmod(layers, pp)
    split = [built + (1 if stage < rest else 0) for stage in range(pp)]
    yield violation(
        f"{layers} layers on {pp} stages without hetero_pipeline_layer_split: FlagScale builds "
        f"{built} on each, {built * pp} in all, and says nothing. Write "
        f"hetero_pipeline_layer_split: {split}",
        launch.get("num-layers"),
        launch.get("pipeline-model-parallel-size"),
    )


CHECKS: tuple[Check, ...] = (
    *MEGATRON_CHECKS,
    ("launch-loses-layers", _lost),
    ("launch-meshes-do-not-fit", _expert_parallelism),
    ("launch-mesh-types", _types),
    ("launch-mesh-checkpoint", _checkpoint),
)
