"""`hetplan emulate pace`: how fast each device kind of an emulated cluster computes, as a file."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hetplan.cli.options import emit, read_predictor, say

MAX_MICROBATCH = 8
"""Largest microbatch size without --microbatch, as `hetplan demo` has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PaceRequest:
    """What the command line asks for."""

    cluster: Path
    model: Path | None
    job: Path | None
    predictor: Path | None
    stores: tuple[Path, ...]
    slow_down: tuple[str, ...]
    headroom: float | None
    microbatch: str | None
    tp: str | None
    out: Path | None


def write_pace(request: PaceRequest, *, as_json: bool) -> None:
    """Write the pace file, or print it."""
    from hetplan.cluster.load import load_cluster
    from hetplan.emulation.pace import least_headroom, make_pace, slow_downs
    from hetplan.errors import InputError
    from hetplan.files.encoding import encode
    from hetplan.files.writing import check_writable
    from hetplan.job.load import load_job
    from hetplan.model.load import load_model
    from hetplan.profiling.pacing import SCHEMA, save_pace

    if request.model is None or request.job is None:
        raise InputError("hetplan emulate pace needs --model and --job: which layers are paced")
    if request.out is None and not as_json:
        raise InputError("hetplan emulate pace needs --out FILE, or --json")
    if request.out is not None:
        check_writable(request.out)
    cluster, model, job = (
        load_cluster(request.cluster),
        load_model(request.model),
        load_job(request.job),
    )
    factors = slow_downs(cluster, job.precision.value, _factors(request.slow_down))
    headroom = request.headroom
    if headroom is None:
        headroom = least_headroom(cluster, factors, os.cpu_count() or 1)
    if not 1 <= headroom < 1e6:
        raise InputError(f"--headroom {headroom:g}: it is at least 1, a core's own speed")
    most_tp = max(island.devices_per_node for island in cluster.islands)
    microbatch_sizes = _numbers("--microbatch", request.microbatch) or _powers(
        min(MAX_MICROBATCH, job.global_batch_size)
    )
    tp_degrees = _numbers("--tp", request.tp) or _powers(most_tp)
    predictor, _ = read_predictor(request.predictor, list(request.stores))
    pace = make_pace(
        predictor,
        model,
        job,
        factors=factors,
        headroom=headroom,
        microbatch_sizes=microbatch_sizes,
        tp_degrees=tp_degrees,
    )
    if request.out is not None:
        save_pace(pace, request.out)
        say(f"wrote {request.out}")
    if as_json:
        emit(encode(pace, schema=SCHEMA))
        return
    for kind in pace.kinds:
        emit(f"{kind.device}: {kind.slow_down:.3g} times slower than a core of this machine")


def _powers(most: int) -> tuple[int, ...]:
    return tuple(2**power for power in range(most.bit_length()))


def _numbers(option: str, text: str | None) -> tuple[int, ...]:
    from hetplan.errors import InputError

    if text is None:
        return ()
    try:
        numbers = tuple(int(word) for word in text.split(","))
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) < 1:
        raise InputError(f"{option} {text}: write whole numbers with commas, as in 1,2,4")
    return numbers


def _factors(texts: Sequence[str]) -> dict[str, float]:
    from hetplan.errors import InputError

    factors: dict[str, float] = {}
    for text in texts:
        kind, _, number = text.rpartition("=")
        try:
            factor = float(number)
        except ValueError:
            factor = 0.0
        if not kind or not 0 < factor < 1e6:
            raise InputError(f"--slow-down {text}: write KIND=FACTOR, as in my-card=2.5")
        factors[kind] = factor
    return factors
