"""Do the meshes of a heterogeneous FlagScale launch fit the model, each other and the hosts?

Read in FlagScale da4935ec: flagscale/train/arguments.py (pre_validate_args),
flagscale/train/hetero/parallel_context.py (RankMapper, ParallelContext), runner/utils.py
(parse_hostfile); its `meshes` are runs of stages with degrees of their own, in pipeline order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import groupby

from hetplan.importers.launches.values import LaunchHost
from hetplan.lint.findings import Severity
from hetplan.lint.launch_rules_view import Launch, Seen, launch_rule, seen

_MESHES = "hetero-process-meshes"
_TYPES = "hetero-device-types"
_SPLIT = "hetero-pipeline-layer-split"
Mesh = tuple[int, int, int, int, int]


def meshes_of(launch: Launch) -> tuple[Mesh, ...]:
    """(tp, cp, ep, dp, pp) of each mesh; empty where they are not known or not whole."""
    numbers = launch.numbers(_MESHES)
    if not numbers or len(numbers) % 5:
        return ()
    rows = [numbers[at : at + 5] for at in range(0, len(numbers), 5)]
    if any(degree < 1 for row in rows for degree in row):
        return ()
    return tuple((tp, cp, ep, dp, pp) for tp, cp, ep, dp, pp in rows)


def _lists(launch: Launch) -> Iterator[Seen]:
    if not launch.is_hetero:
        return
    numbers = launch.numbers(_MESHES)
    shows = launch.get(_MESHES)
    if numbers is None:
        if not launch.may_have(_MESHES):
            yield seen(
                "enable_hetero without hetero_process_meshes: FlagScale stops",
                launch.get("enable-hetero"),
            )
        return
    if len(numbers) % 5:
        yield seen(
            f"{len(numbers)} numbers in hetero_process_meshes; they are five for each mesh: tp, "
            "cp, ep, dp, pp",
            shows,
        )
        return
    meshes = meshes_of(launch)
    if not meshes:
        yield seen("a degree below 1 in hetero_process_meshes", shows)
        return
    yield from _pipeline(launch, meshes)
    yield from _batch(launch, meshes)
    yield from _cannot(launch, meshes)
    yield from _ends(launch, meshes)


def _pipeline(launch: Launch, meshes: tuple[Mesh, ...]) -> Iterator[Seen]:
    stages, pp = sum(mesh[4] for mesh in meshes), launch.pp
    if pp is not None and pp != stages:
        yield seen(
            f"pipeline_model_parallel_size {pp}, and the meshes have {stages} stages; write "
            f"pipeline_model_parallel_size: {stages}",
            launch.get("pipeline-model-parallel-size"),
            launch.get(_MESHES),
        )
    split, layers = launch.numbers(_SPLIT), launch.num_layers
    if split is not None and len(split) != stages:
        yield seen(
            f"{len(split)} entries in hetero_pipeline_layer_split for {stages} stages",
            launch.get(_SPLIT),
            launch.get(_MESHES),
        )
    if split is not None and layers is not None and sum(split) != layers:
        yield seen(
            f"hetero_pipeline_layer_split adds up to {sum(split)}, num_layers is {layers}",
            launch.get(_SPLIT),
            launch.get("num-layers"),
        )
    types = launch.words(_TYPES)
    if types is not None and len(types) != len(meshes):
        yield seen(
            f"{len(types)} hetero_device_types for {len(meshes)} meshes; write one for each",
            launch.get(_TYPES),
            launch.get(_MESHES),
        )


def _batch(launch: Launch, meshes: tuple[Mesh, ...]) -> Iterator[Seen]:
    size, first = launch.number("micro-batch-size"), meshes[0][3]
    if size is None or size < 1:
        return
    wrong = [mesh[3] for mesh in meshes if first * size % mesh[3]]
    if wrong:
        good = next(
            each
            for each in range(size, size * max(wrong) + 1)
            if not any(first * each % mesh[3] for mesh in meshes)
        )
        yield seen(
            f"dp {first} of the first mesh times micro_batch_size {size} is {first * size} "
            f"sequences, which dp {wrong[0]} of another mesh does not divide; write "
            f"micro_batch_size: {good}",
            launch.get("micro-batch-size"),
            launch.get(_MESHES),
        )


def _cannot(launch: Launch, meshes: tuple[Mesh, ...]) -> Iterator[Seen]:
    if any(mesh[1] != 1 for mesh in meshes):
        yield seen(
            "cp above 1 in a mesh; the heterogeneous context asserts cp 1", launch.get(_MESHES)
        )
    eps = {mesh[2] for mesh in meshes}
    if len(eps) > 1:
        yield seen(
            f"ep {', '.join(map(str, sorted(eps)))} in the meshes: FlagScale's check of it rejects "
            "nothing, and its maintainers do not promise that it works (FlagScale#299)",
            launch.get(_MESHES),
        )
    for flag in ("num-layers-per-virtual-pipeline-stage", "num-virtual-stages-per-pipeline-rank"):
        if launch.has(flag):
            name = flag.replace("-", "_")
            yield seen(f"{name} with meshes: FlagScale does not interleave them", launch.get(flag))
    if launch.has("standalone-embedding-stage"):
        yield seen(
            "standalone_embedding_stage with meshes: FlagScale stops",
            launch.get("standalone-embedding-stage"),
        )


def _ends(launch: Launch, meshes: tuple[Mesh, ...]) -> Iterator[Seen]:
    flag = "untie-embeddings-and-output-weights"
    tied = not launch.may_have(flag)
    if not tied and not launch.number("mtp-num-layers", 0):
        return
    why = "the embedding is tied" if tied else "multi-token prediction"
    shows = (launch.get(_MESHES), launch.get(flag), launch.get("mtp-num-layers"))
    first, last = meshes[0], meshes[-1]
    if first[0] != last[0]:
        yield seen(
            f"tp {first[0]} in the first and {last[0]} in the last mesh, and {why}: both ends need "
            "one tp" + ("; write untie_embeddings_and_output_weights: true" if tied else ""),
            *shows,
        )
    if first[3] != last[3] and launch.has("use-distributed-optimizer"):
        if first[3] % last[3] and last[3] % first[3]:
            yield seen(
                f"dp {first[3]} in the first and {last[3]} in the last mesh, and {why}: one must "
                "divide the other",
                *shows,
            )
        elif not launch.may_have("use-partial-reduce-for-shared-embedding"):
            yield seen(
                f"dp {first[3]} in the first and {last[3]} in the last mesh, and {why}: write "
                "use_partial_reduce_for_shared_embedding: true",
                *shows,
            )


def _types(launch: Launch) -> Iterator[Seen]:
    """Types that put ranks of one device kind where the meshes mean another."""
    meshes, types = meshes_of(launch), launch.words(_TYPES)
    if not launch.is_hetero or not meshes or types is None or len(types) != len(meshes):
        return
    runs = [name for name, _ in groupby(types)]
    again = sorted({name for name in runs if runs.count(name) > 1})
    if again:
        fresh = [
            f"{name}{types[:at].count(name)}" if name in again else name
            for at, name in enumerate(types)
        ]
        yield seen(
            f"type {again[0]} stands twice with another between ({', '.join(types)}): ranks are "
            f"sorted by a type's first place, so a mesh gets devices that were meant for another. "
            f"Write hetero_device_types: {fresh}, and these types in the hostfile",
            launch.get(_TYPES),
        )
    yield from _slots(launch, meshes, types)


def _slots(launch: Launch, meshes: tuple[Mesh, ...], types: tuple[str, ...]) -> Iterator[Seen]:
    hosts = launch.text.hosts
    typed = [host for host in hosts if host.type]
    if not typed:
        return
    if len(typed) < len(hosts):
        yield seen("some hosts have a type and some have none; FlagScale wants all or none of them")
        return
    unknown = sorted({host.type for host in hosts} - {*types})
    if unknown:
        yield seen(
            f"hosts of type {', '.join(unknown)}, which hetero_device_types does not name",
            launch.get(_TYPES),
        )
    have: Counter[str] = Counter()
    need: Counter[str] = Counter()
    for host in hosts:
        have[host.type] += _devices(host, launch)
    for mesh, name in zip(meshes, types, strict=True):
        need[name] += mesh[0] * mesh[1] * mesh[3] * mesh[4]
    for name in dict.fromkeys(types):
        if have[name] != need[name] and name not in unknown:
            yield seen(
                f"meshes of type {name} have {need[name]} ranks, its hosts {have[name]}: ranks "
                "past the end of a type run on the next one, and nothing says so",
                launch.get(_MESHES),
                launch.get(_TYPES),
            )


def _devices(host: LaunchHost, launch: Launch) -> int:
    return host.devices or launch.text.devices_per_node or 0


def _checkpoint(launch: Launch) -> Iterator[Seen]:
    tps = {mesh[0] for mesh in meshes_of(launch)}
    if not launch.is_hetero or len(tps) < 2:
        return
    written = launch.word("ckpt-format")
    saves = launch.has("save") or launch.has("load") or launch.has("save-interval")
    if written == "torch" or "ckpt-format" in launch.unread_names or not saves:
        return
    what = f"ckpt_format {written}" if written else "no ckpt_format (torch_dist)"
    yield seen(
        f"tp {', '.join(map(str, sorted(tps)))} in the meshes and {what}: saving fails; write "
        "ckpt_format: torch (it cannot be re-sharded later)",
        launch.get("ckpt-format"),
        launch.get(_MESHES),
    )


RULES = (
    launch_rule(
        id="launch-meshes-do-not-fit",
        severity=Severity.ERROR,
        title="meshes of FlagScale that do not fit model, batch or each other",
        explanation="hetero_process_meshes has tp, cp, ep, dp, pp of each mesh in pipeline order. "
        "FlagScale checks their sums and divisions at the start, on every rank, after all hosts "
        "have joined; some faults it does not check.",
        advice="Let pp of the meshes add up to pipeline_model_parallel_size, the split to "
        "num_layers, and dp of the first mesh times micro_batch_size divide by every dp.",
        look=_lists,
    ),
    launch_rule(
        id="launch-mesh-types",
        severity=Severity.ERROR,
        title="device types that put meshes on the wrong devices",
        explanation="FlagScale sorts ranks by the first place of their host's type in "
        "hetero_device_types and deals them to the meshes in order. It does not check that a mesh "
        "gets devices of its type.",
        advice="Give every run of meshes a type name of its own, in the list and in the hostfile, "
        "and as many slots of it as its meshes have ranks.",
        look=_types,
    ),
    launch_rule(
        id="launch-mesh-checkpoint",
        severity=Severity.WARNING,
        title="distributed checkpoints of meshes with unlike tp",
        explanation="The format torch_dist, Megatron-LM's default, needs one tp for all "
        "stages; FlagScale's maintainers name ckpt_format torch for meshes whose tp differ "
        "(FlagScale#319).",
        advice="Write ckpt_format: torch.",
        look=_checkpoint,
    ),
)
