"""The whole loop on this machine: profile, fit, plan, train, compare.

Two device kinds are made of this machine's cores by pacing (hetplan/profiling/pacing.py): every
layer really computes and then sleeps until a nominal time. The nominal times come from a profile
of this CPU: `HEADROOM` times its own times for the fast kind, so that more ranks than cores do not
fight, and `SLOW_DOWN` times the fast ones for the slow kind. Both kinds are then profiled like any
other device, fitted, planned for and trained on; the predictor sees only those measurements.

Everything is done by the commands a user would type; they are shown as they run.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path

from hetplan.errors import HetplanError, LaunchError
from hetplan.files.shipped import shipped_folder
from hetplan.files.writing import write_atomically
from hetplan.job.load import load_job
from hetplan.launchers.run_log import RunLog, read_runs
from hetplan.search.files import load_plan

FAST, SLOW, LINK = "demo-fast", "demo-slow", "demo-loopback"
RANKS_PER_KIND = 2
# Two fast and two slow ranks then compute (1/3 + 1/7.5) * 2 = 0.93 cores' worth of the time.
HEADROOM = 3.0
SLOW_DOWN = 2.5
MICROBATCH_SIZES = "1,2,8"
"""Measured; 4 lies between them."""
TP_DEGREES = "1,2"

Say = Callable[[str], None]


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


def profile_this_cpu(files: LoopFiles, say: Say) -> None:
    """Measure this CPU's own layer times at three hidden sizes."""
    _hetplan(say, *_profile(files, "cpu"), into=files.folder / "profile-cpu.txt")


def make_kinds(files: LoopFiles, say: Say) -> None:
    """Write the cluster file and the pace of both kinds, and profile both kinds."""
    write_atomically(files.cluster, cluster_text())
    # Every microbatch size that a plan of the job may have.
    batch = load_job(files.job).global_batch_size
    sizes = [str(size) for size in range(1, batch + 1) if batch % size == 0]
    _hetplan(
        say,
        *("emulate", "pace", str(files.cluster)),
        *("--model", str(files.model), "--job", str(files.job), "--store", str(files.store)),
        *("--slow-down", f"{FAST}=1", "--slow-down", f"{SLOW}={SLOW_DOWN}"),
        *("--headroom", str(HEADROOM), "--microbatch", ",".join(sizes), "--tp", TP_DEGREES),
        *("--out", str(files.pace)),
    )
    for kind in (FAST, SLOW):
        _hetplan(
            say,
            *(*_profile(files, kind), "--pace", str(files.pace)),
            into=files.folder / f"profile-{kind}.txt",
        )


def profile_links(files: LoopFiles, say: Say) -> None:
    """Measure gloo over loopback between as many ranks as the plan may have."""
    ranks = 2 * RANKS_PER_KIND
    command = (
        *("profile", "links", LINK, "--store", str(files.store), "--groups", f"2,{ranks}"),
        # Their gradients are the largest message that a plan sends.
        *("--model", str(files.model), "--job", str(files.job), "--device", "cpu"),
    )
    launch = ("--standalone", "--nproc-per-node", str(ranks), "-m", "hetplan", *command)
    _run(
        say,
        ("torchrun", *launch),
        (sys.executable, "-m", "torch.distributed.run", *launch),
        files.folder / f"profile-{LINK}.txt",
    )


def fit_and_plan(files: LoopFiles, say: Say) -> None:
    """Fit the samples, search the best plan, price the even split of the same stages."""
    _hetplan(say, "fit", "--store", str(files.store), "--out", str(files.predictor))
    _hetplan(say, "plan", *_inputs(files), "--out", str(files.uneven))
    planned = load_plan(files.uneven)
    model, cluster = planned.inputs.model, planned.inputs.cluster
    stages = planned.plan.pipelines[0].stages
    replica = stages[0].replicas[0]
    islands = [
        cluster.island_of_device(stage.replicas[0].devices[0].start).name for stage in stages
    ]
    _hetplan(
        say,
        "estimate",
        *_inputs(files),
        *("--tp", str(replica.tp), "--dp", str(replica.dp), "--pp", str(len(stages))),
        *("--microbatch-size", str(replica.microbatch_size)),
        *("--layers", ",".join(map(str, even_split(model.num_layers, len(stages))))),
        *("--islands", ",".join(islands)),
        *("--out", str(files.even)),
    )


def train(files: LoopFiles, steps: int, say: Say) -> tuple[RunLog, RunLog]:
    """Train both plans for `steps` steps; the runs of the uneven and of the even one."""
    for plan in (files.uneven, files.even):
        _hetplan(
            say,
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


def plan_at_scale(files: LoopFiles, say: Say) -> Path:
    """Plan Llama-140B for 768 accelerators of two kinds from datasheet figures."""
    configs = shipped_folder("configs")
    out = files.folder / "llama-140b-768.json"
    _hetplan(
        say,
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


def _hetplan(say: Say, *arguments: str, into: Path | None = None) -> None:
    _run(say, ("hetplan", *arguments), (sys.executable, "-m", "hetplan", *arguments), into)


def _run(say: Say, shown: Sequence[str], command: Sequence[str], into: Path | None) -> None:
    """Run a command with its result on stdout or in the file `into`; an error if it fails."""
    line = shlex.join(_short(part) for part in shown)
    say(f"$ {line}" if into is None else f"$ {line} > {shlex.quote(_short(str(into)))}")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with nullcontext() if into is None else into.open("w") as stdout:
        done = subprocess.run(command, env=environment, stdout=stdout, check=False)
    if done.returncode:
        raise HetplanError(
            f"`{shlex.join(shown[:3])} ...` ended with exit code {done.returncode}; see above"
        )


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
