"""The whole loop on this machine: profile, fit, plan, train, compare.

Two device kinds are made of this machine's cores by pacing (hetplan/profiling/pacing.py): every
layer really computes and then sleeps until a nominal time. The nominal times come from a profile
of this CPU: `HEADROOM` times its own times for the fast kind, so that more ranks than cores do not
fight, and `SLOW_DOWN` times the fast ones for the slow kind. Both kinds are then profiled like any
other device, fitted, planned for and trained on; the predictor sees only those measurements.

Everything is done by the commands a user would type; they and what they print are in
`commands.txt`.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from hetplan.errors import HetplanError, LaunchError
from hetplan.files.shipped import shipped_folder
from hetplan.files.writing import write_atomically
from hetplan.job.load import load_job
from hetplan.launchers.run_log import RunLog, read_runs
from hetplan.model.spec import LayerKind
from hetplan.profiling.store import read_store
from hetplan.search.files import load_legal_plan
from hetplan.units import format_brief, format_bytes, format_range

FAST, SLOW, LINK = "demo-fast", "demo-slow", "demo-loopback"
RANKS_PER_KIND = 2
# Two fast and two slow ranks then compute (1/3 + 1/7.5) * 2 = 0.93 cores' worth of the time.
HEADROOM = 3.0
SLOW_DOWN = 2.5
MICROBATCH_SIZES = "1,2,8"
"""Measured; 4 lies between them."""
TP_DEGREES = "1,2"

Wait = Callable[[str], None]
"""Told again and again what the running command says last."""

_LOOK_SECONDS = 0.5
"""From one look at a running command to the next."""
_TAIL = 20
"""Lines of a command that failed which are told."""


class LoopFiles:
    """Files of one loop, all in one folder but for the model and its job, which are shipped."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = shipped_folder("configs") / "models" / "gpt-tiny.yaml"
        self.job = shipped_folder("configs") / "jobs" / "gpt-tiny.yaml"
        self.store = folder / "profiles"
        self.pace = folder / "pace.json"
        self.cluster = folder / "cluster.yaml"
        self.predictor = folder / "predictor.json"
        self.uneven = folder / "plan.json"  # as searched
        self.even = folder / "even.json"  # the same stages with equal numbers of layers
        self.run_log = folder / "runs.jsonl"
        self.commands = folder / "commands.txt"


def profile_this_cpu(files: LoopFiles, wait: Wait) -> None:
    """Measure this CPU's own layer times at three hidden sizes."""
    _hetplan(files, wait, *_profile(files, "cpu"))


def profile_lines(files: LoopFiles) -> Iterator[str]:
    """What was measured of this CPU."""
    layers = read_store(files.store).layers
    times = [
        each.median_seconds
        for each in layers
        if each.layer == LayerKind.TRANSFORMER and each.phase == "forward"
    ]
    yield (
        f"  {len(layers)} samples; a transformer layer forward: "
        f"{format_brief(min(times))} to {format_brief(max(times))}"
    )


def kind_lines(files: LoopFiles) -> Iterator[str]:
    """The two kinds and their link."""
    links = read_store(files.store).links
    yield f"  {FAST}: a core, paced to {HEADROOM:g} times its own times"
    yield f"  {SLOW}: {SLOW_DOWN:g} times those"
    yield (
        f"  {LINK}: {len(links)} samples of gloo, among 2 and {2 * RANKS_PER_KIND} ranks, to "
        f"{format_bytes(max(each.message_bytes for each in links))}"
    )


def plan_lines(files: LoopFiles) -> Iterator[str]:
    """Layers and predicted step of both plans."""
    for name, file in (("hetplan's plan", files.uneven), ("even split", files.even)):
        result = load_legal_plan(file)
        cluster, estimate = result.inputs.cluster, result.estimate
        layers = (
            f"{priced.transformer_layers} on "
            f"{cluster.island_of_device(stage.replicas[0].devices[0].start).name}"
            for stage, priced in zip(result.plan.stages, estimate.stages, strict=True)
        )
        interval = estimate.interval
        step = format_range(
            estimate.step_seconds, interval.p10_seconds, interval.p90_seconds, "80 %"
        )
        yield f"  {name}: layers {', '.join(layers)}; {step}"


def make_kinds(files: LoopFiles, wait: Wait) -> None:
    """Write the cluster file and the pace of both kinds, and profile both kinds."""
    write_atomically(files.cluster, cluster_text())
    # Every microbatch size that a plan of the job may have.
    batch = load_job(files.job).global_batch_size
    sizes = [str(size) for size in range(1, batch + 1) if batch % size == 0]
    _hetplan(
        files,
        wait,
        *("emulate", "pace", str(files.cluster)),
        *("--model", str(files.model), "--job", str(files.job), "--store", str(files.store)),
        *("--slow-down", f"{FAST}=1", "--slow-down", f"{SLOW}={SLOW_DOWN}"),
        *("--headroom", str(HEADROOM), "--microbatch", ",".join(sizes), "--tp", TP_DEGREES),
        *("--out", str(files.pace)),
    )
    for kind in (FAST, SLOW):
        _hetplan(
            files,
            wait,
            *(*_profile(files, kind), "--pace", str(files.pace)),
        )


def profile_links(files: LoopFiles, wait: Wait) -> None:
    """Measure gloo over loopback between as many ranks as the plan may have."""
    ranks = 2 * RANKS_PER_KIND
    command = (
        *("profile", "links", LINK, "--store", str(files.store), "--groups", f"2,{ranks}"),
        # Their gradients are the largest message that a plan sends.
        *("--model", str(files.model), "--job", str(files.job), "--device", "cpu"),
    )
    launch = ("--standalone", "--nproc-per-node", str(ranks), "-m", "hetplan", *command)
    _run(
        files,
        wait,
        ("torchrun", *launch),
        (sys.executable, "-m", "torch.distributed.run", *launch),
    )


def fit_and_plan(files: LoopFiles, wait: Wait) -> None:
    """Fit the samples, search the best plan, price the even split of the same stages."""
    _hetplan(files, wait, "fit", "--store", str(files.store), "--out", str(files.predictor))
    _hetplan(files, wait, "plan", *_inputs(files), "--out", str(files.uneven))
    planned = load_legal_plan(files.uneven)
    model, cluster = planned.inputs.model, planned.inputs.cluster
    stages = planned.plan.pipelines[0].stages
    replica = stages[0].replicas[0]
    islands = [
        cluster.island_of_device(stage.replicas[0].devices[0].start).name for stage in stages
    ]
    _hetplan(
        files,
        wait,
        "estimate",
        *_inputs(files),
        *("--tp", str(replica.tp), "--dp", str(replica.dp), "--pp", str(len(stages))),
        *("--microbatch-size", str(replica.microbatch_size)),
        *("--layers", ",".join(map(str, even_split(model.num_layers, len(stages))))),
        *("--islands", ",".join(islands)),
        *("--out", str(files.even)),
    )


def train(files: LoopFiles, steps: int, wait: Wait) -> tuple[RunLog, RunLog]:
    """Train both plans for `steps` steps; the runs of the uneven and of the even one."""
    for plan in (files.uneven, files.even):
        _hetplan(
            files,
            wait,
            "launch",
            str(plan),
            *("--steps", str(steps), "--pace", str(files.pace)),
            *("--run-log", str(files.run_log)),
        )
    runs = read_runs(files.run_log)
    if len(runs) < 2:
        raise LaunchError(f"{files.run_log} holds {len(runs)} runs where two were made")
    return runs[-2], runs[-1]


def even_split(layers: int, stages: int) -> tuple[int, ...]:
    """Layers per stage as equal as they can be, the first stages taking the remainder."""
    return tuple(layers // stages + (stage < layers % stages) for stage in range(stages))


def plan_at_scale(files: LoopFiles, wait: Wait) -> Path:
    """Plan Llama-140B for 768 accelerators of two kinds from datasheet figures."""
    configs = shipped_folder("configs")
    out = files.folder / "llama-140b-768.json"
    _hetplan(
        files,
        wait,
        "plan",
        *("--model", str(configs / "models" / "llama-140b.yaml")),
        *("--cluster", str(configs / "clusters" / "mixed-768.yaml")),
        *("--job", str(configs / "jobs" / "llama-140b.yaml")),
        *("--predictor", str(files.predictor)),
        *("--out", str(out), "--target", "flagscale", "--no-native"),
    )
    return out


def _profile(files: LoopFiles, kind: str) -> tuple[str, ...]:
    return (
        *("profile", "layers"),
        *("--model", str(files.model), "--job", str(files.job), "--store", str(files.store)),
        *("--device", "cpu", "--kind", kind, "--microbatch", MICROBATCH_SIZES, "--tp", TP_DEGREES),
    )


def _inputs(files: LoopFiles) -> tuple[str, ...]:
    return (
        *("--model", str(files.model), "--cluster", str(files.cluster), "--job", str(files.job)),
        *("--predictor", str(files.predictor)),
    )


def _hetplan(files: LoopFiles, wait: Wait, *arguments: str) -> None:
    _run(files, wait, ("hetplan", *arguments), (sys.executable, "-m", "hetplan", *arguments))


def _run(files: LoopFiles, wait: Wait, shown: Sequence[str], command: Sequence[str]) -> None:
    """Run a command with its output into the file of all; an error if it fails."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with files.commands.open("a") as output:
        output.write(f"$ {shlex.join(_short(part) for part in shown)}\n")
        output.flush()
        began = output.tell()
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
        try:
            while process.poll() is None:
                time.sleep(_LOOK_SECONDS)
                wait((_printed(files, began) or [""])[-1])
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
    if process.returncode:
        said = "\n".join(_printed(files, began)[-_TAIL:])
        raise HetplanError(
            f"{said}\n`{shlex.join(shown[:3])} ...` ended with exit code {process.returncode}; "
            f"all that it said is in {files.commands}"
        )


def _printed(files: LoopFiles, began: int) -> list[str]:
    """Lines of the last command so far."""
    with files.commands.open(errors="replace") as text:
        text.seek(began)
        return text.read().splitlines()


def _short(part: str) -> str:
    """A path relative to where the reader stands, where that is shorter."""
    if not part.startswith(os.sep):
        return part
    relative = os.path.relpath(part)
    return relative if len(relative) < len(part) else part


def cluster_text() -> str:
    """The cluster file of the two kinds, as a user would write it."""
    # gloo over loopback, order of magnitude; the measured samples replace it.
    link = f"bandwidth: 1 GB/s, latency: 100 us, transport: host-staged, samples: {LINK}"
    islands = "".join(
        f"""
      - name: {name}
        device: {kind}
        nodes: 1
        devices_per_node: {RANKS_PER_KIND}
        memory: 2 GiB
        intra_node: {{{link}}}
        inter_node: {{{link}}}"""
        for name, kind in (("fast", FAST), ("slow", SLOW))
    )
    devices = "".join(
        f"""
  - kind: {kind}
    vendor: this-machine
    provenance: measured
    source: a core of this CPU, paced by hetplan demo"""
        for kind in (FAST, SLOW)
    )
    return f"""schema: hetplan.cluster/1
name: demo
regions:
  - name: here
    islands:{islands}
links:
  - {{between: [fast, slow], {link}}}
devices:{devices}
"""
