"""How long does the search take, and how far is its proof, from 16 to 131,072 devices?

Every instance and target is searched in a process of its own, so that its peak memory is its own.
There imports are done, kernels are compiled and the predictor (datasheet figures only) is made
before the clock of the search starts; a small search of the same target does that.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

from evaluation.search.instances import INSTANCES, Instance, instance_inputs
from hetplan.errors import HetplanError, InfeasibleError, InputError, LimitError

TARGETS = ("megatron", "flagscale", "torchtitan", "native")
GAP = 0.005
"""Asked of every search of the table."""
_WARM = Instance(devices=16, islands=2, kinds=2, regions=1)
_WARM_SECONDS = 20.0
"""Longest small search that compiles what the measured one needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingRow:
    """One search."""

    devices: int
    islands: int
    kinds: int
    regions: int
    model: str
    target: str
    seconds: float
    """CPU seconds of the search."""
    cold_seconds: float
    """CPU seconds of the whole process: imports, kernels and a small search with it."""
    peak_memory_bytes: float
    step_seconds: float | None
    """None without a plan."""
    gap: float | None
    status: str
    """Of the certificate, or why there is no plan."""
    families: int
    """That divide and fit."""
    searched: int
    programs: int
    """Subproblems that programs solved."""
    replays: int


def instances_of(sizes: Sequence[int]) -> tuple[Instance, ...]:
    """Those of the table with these numbers of devices; an InputError for other numbers."""
    known = sorted({each.devices for each in INSTANCES})
    for size in sizes:
        if size not in known:
            raise InputError(f"there is no instance of {size} devices; there are {known}")
    return tuple(each for each in INSTANCES if not sizes or each.devices in sizes)


def scaling(
    instances: Sequence[Instance],
    targets: Sequence[str],
    *,
    time_limit_seconds: float,
    progress: Callable[[str], None],
) -> tuple[ScalingRow, ...]:
    """A row per instance and target."""
    rows = []
    for instance in instances:
        for target in targets:
            progress(f"{instance.devices:,} devices, {instance.model}, {target}")
            rows.append(_apart(instance, target, time_limit_seconds))
    return tuple(rows)


def _apart(instance: Instance, target: str, limit_seconds: float) -> ScalingRow:
    question = json.dumps({"instance": asdict(instance), "target": target, "limit": limit_seconds})
    done = subprocess.run(
        [sys.executable, "-m", "evaluation.search.scaling", question],
        check=False,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no word"])[-1]
        return _row(instance, target, status=f"failed: {last[:200]}")
    return ScalingRow(**json.loads(done.stdout))


def measure(instance: Instance, target: str, limit_seconds: float) -> ScalingRow:
    """Search in this process."""
    from hetplan.predict.fit import FittedPredictor
    from hetplan.search.search import search

    predictor = FittedPredictor.datasheet_only()

    def run(each: Instance, seconds: float) -> ScalingRow:
        inputs = instance_inputs(each, target, GAP, seconds)
        begin = time.process_time()
        try:
            found = search(inputs.model, inputs.cluster, inputs.job, predictor, reasons=False)
        except (InfeasibleError, LimitError) as error:
            return replace(
                _row(each, target, status=str(error).splitlines()[0][:200]),
                seconds=time.process_time() - begin,
            )
        spent = time.process_time() - begin
        proof = found.certificate
        if proof is None:
            return replace(_row(each, target, status="no proof"), seconds=spent)
        return replace(
            _row(each, target, status=proof.status),
            seconds=spent,
            step_seconds=found.estimate.step_seconds,
            gap=proof.gap,
            families=proof.candidates,
            searched=proof.searched,
            programs=proof.explored,
            replays=proof.replays,
        )

    run(replace(_WARM, model=instance.model), _WARM_SECONDS)
    row = run(instance, limit_seconds)
    used = resource.getrusage(resource.RUSAGE_SELF)
    return replace(
        row,
        cold_seconds=used.ru_utime + used.ru_stime,
        # Kilobytes on Linux.
        peak_memory_bytes=used.ru_maxrss * 1024.0,
    )


def _row(instance: Instance, target: str, *, status: str) -> ScalingRow:
    return ScalingRow(
        devices=instance.devices,
        islands=instance.islands,
        kinds=instance.kinds,
        regions=instance.regions,
        model=instance.model,
        target=target,
        seconds=0.0,
        cold_seconds=0.0,
        peak_memory_bytes=0.0,
        step_seconds=None,
        gap=None,
        status=status,
        families=0,
        searched=0,
        programs=0,
        replays=0,
    )


def _worker(question: str) -> None:
    asked = json.loads(question)
    row = measure(Instance(**asked["instance"]), asked["target"], asked["limit"])
    sys.stdout.write(json.dumps(asdict(row)))


if __name__ == "__main__":
    try:
        _worker(sys.argv[1])
    except HetplanError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(1)
