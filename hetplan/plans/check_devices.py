"""Which devices does each stage have, where are they, and do its degrees fit them?"""

from __future__ import annotations

import numpy as np

from hetplan.plans.places import device_array, stage_array
from hetplan.plans.plan import Replica, Stage
from hetplan.plans.rules import Asked, Found, Rule, some


def devices_exist(asked: Asked) -> Found:
    """No range of devices leaves the cluster, and no list of them is longer than it."""
    total = asked.cluster.num_devices
    lists = [(f"{field}.devices", replica.devices) for field, replica in asked.replicas()]
    lists += [
        (f"reduction_groups[{g}].members", group.members)
        for g, group in enumerate(asked.plan.reduction_groups)
    ]
    lists += [
        ("tied_embedding_devices", asked.plan.tied_embedding_devices),
        ("unused_devices", asked.plan.unused_devices),
    ]
    for field, parts in lists:
        beyond = [part.last for part in parts if part.last >= total]
        count = sum(part.count for part in parts)
        if beyond:
            message = f"devices {some(beyond)} do not exist; the cluster has {total}"
            yield Rule.DEVICES_EXIST, field, message
        elif count > total:
            yield Rule.DEVICES_EXIST, field, f"lists {count} devices; the cluster has {total}"


def devices_once(asked: Asked) -> Found:
    """No device is in two places, and every device is somewhere."""
    owner = np.full(asked.cluster.num_devices, -1, dtype=np.int64)
    names: list[str] = []
    twice = False
    for at, (field, _, stage) in enumerate(asked.stages()):
        names.append(field)
        devices = stage_array(stage)
        taken = devices[owner[devices] >= 0]
        if taken.size:
            yield (
                Rule.DEVICES_ONCE,
                field,
                f"device {taken[0]} is already used by {names[owner[taken[0]]]}",
            )
            twice = True
        elif np.unique(devices).size < devices.size:
            yield Rule.DEVICES_ONCE, field, "lists a device twice"
            twice = True
        owner[devices] = at
    unused = device_array(asked.plan.unused_devices)
    used = unused[owner[unused] >= 0]
    if twice:
        return
    if used.size:
        message = f"device {used[0]} is used by {names[owner[used[0]]]}"
        yield Rule.DEVICES_COUNTED, "unused_devices", message
        return
    owner[unused] = len(names)
    missing = np.flatnonzero(owner < 0)
    if missing.size or np.unique(unused).size < unused.size:
        yield (
            Rule.DEVICES_COUNTED,
            "unused_devices",
            f"devices {some(missing)} are neither used nor listed"
            if missing.size
            else "lists a device twice",
        )


def degrees(asked: Asked) -> Found:
    """Every replica's degrees are at least 1 and divide its devices."""
    for field, _, stage in asked.stages():
        if not stage.replicas:
            yield Rule.DEGREES, f"{field}.replicas", "a stage needs at least one replica"
    for field, replica in asked.replicas():
        tp, cp, ep, etp = replica.tp, replica.cp, replica.ep, replica.etp
        count = replica.num_devices
        if min(tp, cp, ep, etp, replica.microbatch_size) < 1:
            yield (
                Rule.DEGREES,
                field,
                f"tp {tp}, cp {cp}, ep {ep}, etp {etp} and microbatch_size "
                f"{replica.microbatch_size} must all be at least 1",
            )
        elif count == 0 or count % (tp * cp):
            yield Rule.DEGREES, field, f"{count} devices are not a multiple of tp {tp} x cp {cp}"
        elif count % (ep * etp):
            yield (
                Rule.EXPERT_DEGREES,
                field,
                f"ep {ep} x etp {etp} does not divide its {count} devices",
            )


def nodes(asked: Asked) -> Found:
    """Where the devices of every stage are, and what their degrees cut."""
    for field, _, stage in asked.stages():
        out = asked.places.out(stage_array(stage))
        if out.size:
            yield Rule.NODES_USABLE, field, f"devices {some(out)} are in nodes that are out"
        for r, replica in enumerate(stage.replicas):
            where = f"{field}.replicas[{r}]"
            islands = np.unique(asked.places.islands(device_array(replica.devices)))
            if islands.size > 1:
                named = ", ".join(asked.cluster.islands[at].name for at in islands)
                yield (
                    Rule.ONE_ISLAND,
                    where,
                    f"mixes islands {named}; give the devices of each an entry of their own",
                )
            yield from _slices(asked, where, stage, replica)


def _slices(asked: Asked, where: str, stage: Stage, replica: Replica) -> Found:
    for fault in asked.model.slicing_faults(replica.tp):
        yield Rule.SLICES, where, fault
    devices = device_array(replica.devices)
    at = asked.places.nodes(devices).reshape(-1, replica.tp)
    spread = np.flatnonzero((at != at[:, :1]).any(axis=1))
    if spread.size:
        first = int(spread[0])
        group = devices.reshape(-1, replica.tp)[first]
        count = np.unique(at[first]).size
        yield (
            Rule.TP_IN_NODE,
            where,
            f"tensor-parallel group {some(group)} spans {count} nodes",
        )
    experts = [each for chunk in stage.chunks for each in asked.experts_at(chunk.start, chunk.stop)]
    everywhere = asked.experts_at(0, len(asked.model.layers))
    if not everywhere and (replica.ep, replica.etp) != (1, 1):
        yield (
            Rule.SLICES,
            where,
            f"ep {replica.ep} and etp {replica.etp}, but {asked.model.name} has no experts: use 1",
        )
    for each in dict.fromkeys(experts):
        if each.num_experts % replica.ep:
            message = f"ep {replica.ep} does not divide {each.num_experts} experts"
            yield Rule.SLICES, f"{where}.ep", message
        if each.expert_ffn_hidden_size % replica.etp:
            message = (
                f"etp {replica.etp} does not divide expert_ffn_hidden_size "
                f"{each.expert_ffn_hidden_size}"
            )
            yield Rule.SLICES, f"{where}.etp", message
