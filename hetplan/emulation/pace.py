"""How fast each device kind of an emulated cluster computes.

A pace file (`hetplan.profiling.pacing`) makes a CPU core take a device's time. The fastest kind is
`headroom` times slower than one core of this machine alone, so that all ranks of all hosts find
enough of its cores; another kind is slower by the ratio of the peak rates in the cluster file, or
by a factor that the user gives.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from itertools import product

from hetplan.cluster.catalogue import load_catalogue
from hetplan.cluster.devices import CPU_KIND
from hetplan.cluster.spec import Cluster
from hetplan.errors import InputError
from hetplan.job.spec import Job
from hetplan.model.spec import TRAINED_KINDS, ModelSpec
from hetplan.predict.predictor import LayerQuery, Predictor
from hetplan.profiling.pacing import Pace, PacedKind, PaceEntry

MAX_MICROBATCH = 8
"""Largest microbatch size without --microbatch, as `hetplan demo` has it."""
BUSY_SHARE = 0.45
"""Of the cores' time that all ranks together compute in, as `hetplan demo` has it (0.93 of two
cores): the rest is for the links, the launcher and hiccups."""


def slow_downs(cluster: Cluster, precision: str, given: Mapping[str, float]) -> dict[str, float]:
    """How many times slower than the fastest each kind of the cluster is; the fastest has 1.

    From `given` if that names every kind, otherwise the rates of the kinds at this precision. An
    InputError where a kind has neither, or a kind that is given is not in the cluster.
    """
    kinds = {island.device.kind: island.device for island in cluster.islands}
    unknown = [kind for kind in given if kind not in kinds]
    if unknown:
        raise InputError(f"no island has device kind {unknown[0]}; there are {', '.join(kinds)}")
    if given and len(given) < len(kinds):
        lacking = ", ".join(kind for kind in kinds if kind not in given)
        raise InputError(
            f"--slow-down is not given for {lacking}; give it for every kind, or for none to "
            "take the peak rates of the cluster file"
        )
    if given:
        return {kind: given[kind] / min(given.values()) for kind in kinds}
    rates = {
        kind: dict(device.peak_flops_per_second).get(precision, 0.0)
        for kind, device in kinds.items()
    }
    without = [kind for kind, rate in rates.items() if not rate]
    if without:
        raise InputError(
            f"device kind {without[0]} has no peak rate for {precision}: give it one under "
            f"`devices` of the cluster file, or say --slow-down {without[0]}=2 (and so on for "
            "every kind)"
        )
    fastest = max(rates.values())
    return {kind: fastest / rate for kind, rate in rates.items()}


def least_headroom(cluster: Cluster, factors: Mapping[str, float], cores: int) -> float:
    """Times slower than a core that the fastest kind must be for all ranks to fit on the cores."""
    wanted = sum(
        island.num_usable_devices / factors[island.device.kind] for island in cluster.islands
    )
    return max(1.0, wanted / (BUSY_SHARE * cores))


def pace_of_cluster(
    predictor: Predictor,
    cluster: Cluster,
    model: ModelSpec,
    job: Job,
    *,
    slow_down: Mapping[str, float] | None = None,
    headroom: float | None = None,
    microbatch_sizes: Sequence[int] | None = None,
    tp_degrees: Sequence[int] | None = None,
) -> Pace:
    """The pace of every kind of a cluster.

    Left out are: `slow_down`, the cluster file's peak rates; `headroom`, so that all ranks fit on
    this machine's cores; microbatch sizes and degrees, the powers of two up to `MAX_MICROBATCH` and
    to the devices of a node.
    """
    factors = slow_downs(cluster, job.precision.value, slow_down or {})
    if headroom is None:
        headroom = least_headroom(cluster, factors, os.cpu_count() or 1)
    if not 1 <= headroom < 1e6:
        raise InputError(f"--headroom {headroom:g}: it is at least 1, a core's own speed")
    max_tp = max(island.devices_per_node for island in cluster.islands)
    sizes = microbatch_sizes or _powers_of_two(min(MAX_MICROBATCH, job.global_batch_size))
    shapes = tuple(product(sizes, tp_degrees or _powers_of_two(max_tp)))
    return Pace(
        kinds=tuple(
            paced_kind(
                predictor, model, job, device=device, slow_down=headroom * factor, shapes=shapes
            )
            for device, factor in factors.items()
        )
    )


def _powers_of_two(limit: int) -> tuple[int, ...]:
    return tuple(2**power for power in range(limit.bit_length()))


def paced_kind(
    predictor: Predictor,
    model: ModelSpec,
    job: Job,
    *,
    device: str,
    slow_down: float,
    shapes: Sequence[tuple[int, int]],
) -> PacedKind:
    """A kind `slow_down` times slower than what the predictor says of a CPU core.

    `shapes` are (microbatch size, tp). The fitted law rather than single medians: a real device's
    times are a smooth function of the shape, and one disturbed measurement must not become part of
    a device.
    """
    core = next(kind for kind in load_catalogue() if kind.kind == CPU_KIND)
    entries = []
    for layer, (microbatch_size, tp), is_backward in product(TRAINED_KINDS, shapes, (False, True)):
        query = LayerQuery(
            model=model,
            layer=layer,
            microbatch_size=microbatch_size,
            sequence_length=job.sequence_length,
            tp=tp,
            precision=job.precision,
            is_backward=is_backward,
        )
        entries.append(
            PaceEntry(
                layer=layer.value,
                phase=query.phase,
                microbatch_size=microbatch_size,
                tp=tp,
                seconds=slow_down * predictor.layer(core, query).seconds,
            )
        )
    return PacedKind(device=device, slow_down=slow_down, entries=tuple(entries))
