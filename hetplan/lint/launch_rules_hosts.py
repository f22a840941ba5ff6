"""Does a launch put its groups where the hosts' fast links are, and its hosts where it means to?

Ranks count tensor parallelism first, then context, data, and pipeline parallelism last (Megatron-LM
core/parallel_state.py, order tp-cp-ep-dp-pp; torchtitan distributed/parallel_dims.py), so a
tensor-parallel group is tp ranks that follow each other, wherever a host ends. torchrun numbers
hosts by --node-rank with static rendezvous only (torch/distributed/run.py); others sort the hosts
that join (torch/distributed/elastic/rendezvous/dynamic_rendezvous.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

from hetplan.lint.findings import Severity
from hetplan.lint.launch_rules_view import Launch, Seen, host_name, launch_rule, product, seen

_TP = "tensor-model-parallel-size"
_EP = "expert-model-parallel-size"
_MAX_SHOWN = 3


def _spanning(launch: Launch) -> Iterator[Seen]:
    """Tensor-parallel groups over several hosts."""
    for first, count, tp, devices, names in _meshes(launch):
        if tp < 2:
            continue
        split = [
            (start, hosts)
            for start, hosts in _split_groups(first, count, tp, devices)
            # Several agents of one host are one host.
            if not names or len({names[at] for at in hosts}) > 1
        ]
        if not split:
            continue
        shown = "; ".join(
            f"ranks {start} to {start + tp - 1} lie on "
            + " and ".join(names[at] if names else f"host {at}" for at in hosts)
            for start, hosts in split[:_MAX_SHOWN]
        )
        more = f"; {len(split) - _MAX_SHOWN} more" if len(split) > _MAX_SHOWN else ""
        least = min(devices)
        fits = max((each for each in range(1, least + 1) if _fits(each, devices)), default=1)
        yield seen(
            f"{len(split)} of {count // tp} tensor-parallel groups span hosts of "
            f"{_counts(devices)} devices: {shown}{more}. Write a tp that divides the devices of "
            f"every host ({fits} or a divisor of it)",
            launch.get(_TP) or launch.get("tensor-parallel-degree"),
            launch.get("hetero-process-meshes"),
            launch.torchrun("nproc-per-node"),
        )


def _fits(tp: int, devices: tuple[int, ...]) -> bool:
    return all(each % tp == 0 for each in devices)


def _counts(devices: tuple[int, ...]) -> str:
    return ", ".join(str(each) for each in sorted(set(devices)))


def _split_groups(
    first: int, count: int, size: int, devices: tuple[int, ...]
) -> list[tuple[int, tuple[int, ...]]]:
    """Groups of `size` ranks from `first` on that have ranks on several hosts, with those hosts."""
    ends = [*accumulate(devices)]
    found: list[tuple[int, tuple[int, ...]]] = []
    for start in range(first, first + count - size + 1, size):
        hosts = [
            at for at, end in enumerate(ends) if end > start and end - devices[at] < start + size
        ]
        if len(hosts) > 1:
            found.append((start, tuple(hosts)))
    return found


def _meshes(
    launch: Launch,
) -> Iterator[tuple[int, int, int, tuple[int, ...], tuple[str, ...]]]:
    """(first rank, ranks, tp, devices of hosts in rank order, names of hosts) of each mesh."""
    devices = launch.host_devices
    if devices is None:
        return
    hosts = launch.text.hosts
    names = tuple(host_name(hosts, at) for at in range(len(devices))) if hosts else ()
    if not launch.is_hetero:
        if launch.tp is not None and launch.tp > 0:
            yield 0, sum(devices), launch.tp, devices, names
        return
    meshes, order = launch.numbers("hetero-process-meshes"), launch.host_order
    if not meshes or len(meshes) % 5 or order is None:
        return
    # Ranks are sorted by the first mesh that has the host's type (RankMapper).
    devices = tuple(devices[at] for at in order)
    names = tuple(names[at] for at in order) if names else ()
    first = 0
    for at in range(0, len(meshes), 5):
        tp, cp, _, dp, pp = meshes[at : at + 5]
        count = product((tp, cp, dp, pp))
        if count is None:
            return
        yield first, count, tp, devices, names
        first += count


def _crooked(launch: Launch) -> Iterator[Seen]:
    """Context or expert parallel groups that a host could hold, over several hosts."""
    devices = launch.host_devices
    if devices is None or launch.is_hetero or not launch.is_megatron_like:
        return
    tp, cp, ep = launch.tp, launch.cp, launch.ep
    etp = launch.number("expert-tensor-parallel-size", tp)
    for what, size, flag in (
        ("context-parallel", product((tp, cp)) if cp and cp > 1 else None, "context-parallel-size"),
        ("expert-parallel", product((etp, ep)) if ep and ep > 1 else None, _EP),
    ):
        if size is None or size > min(devices):
            continue
        split = _split_groups(0, sum(devices), size, devices)
        if split:
            yield seen(
                f"{len(split)} of {sum(devices) // size} {what} groups of {size} ranks (with tp) "
                f"span hosts of {_counts(devices)} devices, though a host could hold one; write "
                "degrees whose product divides the devices of every host",
                launch.get(flag),
                launch.get(_TP),
            )


def _hosts(launch: Launch) -> Iterator[Seen]:
    """Numbers of hosts and ranks that do not agree."""
    hosts, nodes = launch.text.hosts, launch.text.nodes
    shows = launch.torchrun("nnodes")
    if hosts and nodes is not None and nodes != len(hosts):
        late = ": torchrun waits for hosts that nobody starts" if nodes > len(hosts) else ""
        yield seen(f"--nnodes {nodes}, and {len(hosts)} hosts{late}", shows)
    per = launch.text.devices_per_node
    unlike = [host for host in hosts if host.devices and per and host.devices < per]
    if unlike:
        yield seen(
            f"--nproc-per-node {per}, and {unlike[0].name} has {unlike[0].devices} devices",
            launch.torchrun("nproc-per-node"),
        )
    twice = sorted(
        {host.name for host in hosts if [each.name for each in hosts].count(host.name) > 1}
    )
    if twice and launch.text.trainer == "flagscale":
        yield seen(f"{twice[0]} stands twice in the hostfile; FlagScale refuses it")
    cluster, world = launch.cluster, launch.world_size
    if cluster is not None and world is not None and world > cluster.num_devices:
        yield seen(
            f"{world} ranks, and {cluster.num_devices} devices in the cluster file",
            shows,
            launch.torchrun("nproc-per-node"),
        )


def _rendezvous(launch: Launch) -> Iterator[Seen]:
    backend = launch.torchrun("rdzv-backend")
    if backend is None or not backend.values or backend.values[0] == "static":
        return
    name = backend.values[0]
    nodes = len(launch.host_devices) if launch.host_devices else launch.text.nodes
    if nodes is not None and nodes < 2:
        return
    rank = launch.torchrun_written("node-rank")
    if launch.is_hetero:
        yield seen(
            f"rdzv_backend {name}: FlagScale's heterogeneous training supports static only; write "
            "rdzv_backend: static",
            backend,
        )
    elif rank is not None:
        yield seen(
            f"--rdzv-backend {name} ignores --node-rank: ranks go to hosts in an order of their "
            "own; write --rdzv-backend static with --master-addr and --master-port",
            backend,
            rank,
        )
    elif _minds_order(launch):
        yield seen(
            f"--rdzv-backend {name} sorts hosts by itself, and this launch needs an order: "
            f"{_minds_order(launch)}. Write --rdzv-backend static --node-rank N --master-addr "
            "ADDRESS --master-port PORT",
            backend,
        )


def _minds_order(launch: Launch) -> str:
    """Why it matters which host gets which ranks; empty: it does not."""
    devices = launch.host_devices
    if devices and len(set(devices)) > 1:
        return "its hosts have unlike numbers of devices"
    cluster = launch.cluster
    if cluster is not None and len({island.device.kind for island in cluster.islands}) > 1:
        return "its cluster has several device kinds"
    if cluster is not None and len(cluster.islands) > 1 and launch.pp != 1:
        return "stages lie in several islands of its cluster"
    return ""


def _timeout(launch: Launch) -> Iterator[Seen]:
    cluster = launch.cluster
    flag = "distributed-timeout-minutes"
    if cluster is None or len(cluster.regions) < 2 or not launch.is_megatron_like:
        return
    if not launch.may_have(flag):
        regions = ", ".join(cluster.regions[:4])
        yield seen(
            f"regions {regions}, and no --{flag}: a collective that waits 10 minutes for a rank "
            f"elsewhere ends the run; write --{flag} 60"
        )


RULES = (
    launch_rule(
        id="launch-tp-across-hosts",
        severity=Severity.WARNING,
        title="tensor-parallel groups that span hosts",
        explanation="A tensor-parallel group is tp ranks that follow each other. Where the devices "
        "of a host are no multiple of tp, a group begins on one host and ends on the next: every "
        "layer then waits four times for the network between hosts. No trainer says so.",
        advice="Choose tp so that it divides the devices of every host; on hosts of unlike size "
        "use a part of their devices, or FlagScale's meshes.",
        look=_spanning,
    ),
    launch_rule(
        id="launch-group-across-hosts",
        severity=Severity.WARNING,
        title="context or expert parallel groups that straddle hosts",
        explanation="These groups are ranks that follow each other as well. One that a host could "
        "hold, and that begins in the middle of one, sends every layer's exchange over the slower "
        "network.",
        advice="Choose degrees whose product with tp divides the devices of every host.",
        look=_crooked,
    ),
    launch_rule(
        id="launch-hosts-disagree",
        severity=Severity.ERROR,
        title="numbers of hosts or devices that do not agree",
        explanation="torchrun starts training when --nnodes hosts have joined with "
        "--nproc-per-node ranks each; too few wait until they time out, too many ranks of a host "
        "share devices or stop.",
        advice="Make --nnodes the number of hosts and --nproc-per-node the devices of each.",
        look=_hosts,
    ),
    launch_rule(
        id="launch-order-of-hosts",
        severity=Severity.WARNING,
        title="a rendezvous that orders hosts by itself",
        explanation="Which host gets which ranks decides which stage runs on which device. Only "
        "static rendezvous keeps --node-rank; c10d and etcd sort the hosts that join, so a stage "
        "made for one device kind may run on another, and it may change at the next start.",
        advice="Write --rdzv-backend static with --node-rank, --master-addr and --master-port.",
        look=_rendezvous,
    ),
    launch_rule(
        id="launch-timeout",
        severity=Severity.WARNING,
        title="ten minutes for collectives between regions",
        explanation="Megatron-LM gives a collective 10 minutes by default "
        "(distributed_timeout_minutes in training/config/common_config.py). Between regions one "
        "rank may wait longer for the others: while they start, load or write a checkpoint, or a "
        "route is lost. All ranks end then.",
        advice="Write --distributed-timeout-minutes 60.",
        look=_timeout,
    ),
)
