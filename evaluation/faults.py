"""Does `hetplan compare --telemetry` name what makes a run slow? `evaluation faults`.

Eight ranks on four emulated hosts train one model, again and again, for real, at the pace of a
played device. A run is one training of `STEPS` steps, with one planted fault or with none. Faults,
culprits and strengths are drawn from the seed and the run's number:

slow host    all ranks of a host play a slower device
busy core    one rank does, one whose times scatter
shaped link  what a host sends to the next one gets a part of the rate (htb)
lossy link   a part of the packets on that way is dropped (a class whose queue holds none)

Processes stay for all runs, because each would import torch for seconds. The telemetry of every run
stays in the folder: an interrupted evaluation goes on from there, and a finished one judges again.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from evaluation.closed_loop.measuring import ENVIRONMENT
from evaluation.output import WORDS, Answer, Section, frame_of
from hetplan.cluster.load import load_cluster
from hetplan.comparison.suspects import judge
from hetplan.comparison.telemetry import Run, read_telemetry
from hetplan.emulation.running import emulated, end, start
from hetplan.emulation.tools import require
from hetplan.emulation.values import CONTROL_HOST, Emulation
from hetplan.errors import HetplanError
from hetplan.files.encoding import encode
from hetplan.files.reading import decode, document_of, read_document
from hetplan.files.writing import make_folder, write_atomically
from hetplan.job.load import read_job
from hetplan.launchers.run_folder import RunFolder
from hetplan.model.load import load_model
from hetplan.model.spec import LayerKind
from hetplan.predict.fit import fit_stores
from hetplan.profiling.pacing import Pace, PacedKind, PaceEntry
from hetplan.runtime.gradient_groups import sums_of
from hetplan.runtime.telemetry import Recorder
from hetplan.runtime.training import SCHEMA as TRAINING_SCHEMA
from hetplan.runtime.training import Training
from hetplan.search.result import SearchResult
from hetplan.search.search import search

CLEAN, SLOW_HOST, BUSY_CORE = "clean", "slow host", "busy core"
SHAPED_LINK, LOSSY_LINK = "shaped link", "lossy link"
FAULTS = (SLOW_HOST, SHAPED_LINK, LOSSY_LINK, BUSY_CORE)
STEPS = 24
WARMUP = 2
PASS_SECONDS = 0.01
"""Of a transformer layer, forward; some five times what it takes a core."""
SLOWER = (1.3, 2.0)
"""Times that a slow host or core takes."""
SCATTER = 0.2
"""Of a busy core's times."""
SHAPED = (0.3, 0.6)
"""Of the NIC's rate."""
LOST = (0.005, 0.02)
"""Of the packets, which hold up to 64 KiB here."""
HOSTS = 4
PORT = 29400
"""Of the ranks' store, on the emulation's own control network."""
NIC_BITS = 200_000_000
_CLUSTER = """
schema: hetplan.cluster/2
name: faults
devices:
  - {kind: played, vendor: generic, memory: 1 GiB, memory_bandwidth: 10 GB/s,
     peak: {float32: 1 GFLOP/s}, provenance: measured, source: a core of this machine}
regions:
  - name: here
    islands:
      - name: hosts
        device: played
        nodes: 4
        node_names: ["host[1-4]"]
        devices_per_node: 2
        intra_node: {bandwidth: 1 GB/s, latency: 50 us, transport: host-staged}
        inter_node: {bandwidth: 100 Mbit/s, latency: 50 us, transport: host-staged}
"""
_MODEL = """
{schema: hetplan.model/1, name: small, architecture: gpt, num_layers: 2, hidden_size: 128,
 ffn_hidden_size: 512, num_attention_heads: 4, num_kv_heads: 4, vocab_size: 256,
 max_sequence_length: 64, tied_embeddings: false}
"""
_JOB = """
{schema: hetplan.job/4, name: faults, global_batch_size: 16, sequence_length: 64,
 precision: float32, optimizer: adamw, target: native,
 pin: {pipelines: 1, virtual_stages: 1, depth: 0, sharded_optimizer: false, dp: 8}}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What is planted in a run."""

    number: int
    fault: str
    culprit: str = ""
    """Host, rank or way, as a suspect is named."""
    host: str = ""
    rank: int = 0
    to: str = ""
    strength: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A run and who was accused."""

    number: int
    fault: str
    culprit: str
    strength: float
    right: bool
    """Nobody of a clean run, the culprit and nobody else of another."""
    cause_right: bool
    """Also `lossy` of a lossy link alone."""
    wrong: int
    """Innocents who were accused."""
    accused: tuple[str, ...]
    step_seconds: float


def trial_of(seed: int, number: int) -> Trial:
    """The odd runs are clean, the others have the faults in turn."""
    rng = random.Random(f"{seed} {number}")
    fault = CLEAN if number % 2 else FAULTS[number // 2 % len(FAULTS)]
    at = rng.randrange(HOSTS)
    host, rank, before = f"host{at + 1}", 2 * at + rng.randrange(2), f"host{(at - 1) % HOSTS + 1}"
    if fault == CLEAN:
        return Trial(number=number, fault=fault)
    limits = {SHAPED_LINK: SHAPED, LOSSY_LINK: LOST}.get(fault, SLOWER)
    culprit = {SLOW_HOST: host, BUSY_CORE: f"{rank} on {host}"}.get(fault, f"{host} to {before}")
    return Trial(
        number=number,
        fault=fault,
        culprit=culprit,
        host=host,
        rank=rank,
        to=before,
        strength=rng.uniform(*limits),
    )


def planned() -> SearchResult:
    """The plan that is trained: eight copies of the model."""
    predictor, digest = fit_stores()
    return search(
        load_model(document_of("model.yaml", _MODEL.encode())),
        load_cluster(document_of("cluster.yaml", _CLUSTER.encode())),
        read_job(document_of("job.yaml", _JOB.encode())),
        predictor,
        sha256=(("predictor", digest),),
    )


# ---- planting


def prepare(emulation: Emulation) -> None:
    """Give the port to every host a usual class, a shaped one and one that drops all."""
    for host in emulation.hosts:
        port = f"d{host.number}"
        _tc(emulation, f"qdisc replace dev {port} root handle 1: htb default 1")
        for number in (1, 2, 3):
            _tc(emulation, _class(port, "add", number, 1.0))
        _tc(emulation, f"qdisc add dev {port} parent 1:3 bfifo limit 1")


def _class(port: str, verb: str, number: int, part: float) -> str:
    rate = round(NIC_BITS * part)
    return f"class {verb} dev {port} parent 1: classid 1:{number} htb rate {rate}bit burst 131072"


def _tc(emulation: Emulation, line: str, *more: str) -> None:
    """Run tc where the hosts' ports are: what is lost there the sender learns as from a network."""
    process = start(emulation, CONTROL_HOST, ("tc", *line.split(), *more), stderr=subprocess.PIPE)
    _, said = process.communicate(timeout=30)
    if process.returncode:
        raise HetplanError(f"tc {line}: {said.decode(errors='replace').strip()}")


def _packets(address: str, part: float) -> str:
    """A classic BPF program for tc: a random part of what comes from the address is of class 1:3,
    the rest of no class.
    """
    number = int.from_bytes(bytes(map(int, address.split("."))))
    steps = (
        "32 0 0 26",  # source address, behind 14 bytes of Ethernet
        f"21 0 3 {number}",
        "32 0 0 4294963256",  # a random number (SKF_AD_RANDOM)
        f"37 1 0 {round(part * 2**32)}",
        "6 0 0 65539",  # 1:3
        "6 0 0 0",
    )
    return f"{len(steps)},{','.join(steps)}"


@contextmanager
def faulty(emulation: Emulation, trial: Trial) -> Iterator[None]:
    """The link's fault, for as long as the block runs."""
    if trial.fault not in (SHAPED_LINK, LOSSY_LINK):
        yield
        return
    port, source = f"d{emulation.host(trial.to).number}", emulation.host(trial.host)
    head = f"filter add dev {port} parent 1: protocol ip prio 1"
    if trial.fault == SHAPED_LINK:
        _tc(emulation, _class(port, "change", 2, trial.strength))
        _tc(emulation, f"{head} u32 match ip src {source.data_address} flowid 1:2")
    else:
        program = _packets(source.data_address, trial.strength)
        _tc(emulation, f"{head} bpf bytecode", program)
    try:
        yield
    finally:
        _tc(emulation, f"filter del dev {port} parent 1: prio 1")


def training_of(result: SearchResult, trial: Trial) -> Training:
    """The run, with the devices that its ranks play."""
    slowed = {
        SLOW_HOST: {rank for rank in range(2 * HOSTS) if f"host{rank // 2 + 1}" == trial.host},
        BUSY_CORE: {trial.rank},
    }.get(trial.fault, set())
    scatter = SCATTER if trial.fault == BUSY_CORE else 0.0
    kinds = [_played("played", 1.0, 0.0)]
    kinds += [_played("slowed", trial.strength, scatter)] if slowed else []
    return Training(
        model=result.inputs.model,
        job=result.inputs.job,
        plan=result.plan,
        device_kinds=tuple("slowed" if rank in slowed else "played" for rank in range(2 * HOSTS)),
        backend="cpu",
        pace=Pace(kinds=tuple(kinds)),
        steps=STEPS + WARMUP,
        warmup_steps=WARMUP,
        timeout_seconds=60.0,
        sums=sums_of(result.plan, result.inputs.cluster),
    )


def _played(kind: str, slower: float, scatter: float) -> PacedKind:
    weights = ((LayerKind.EMBEDDING, 0.3), (LayerKind.TRANSFORMER, 1.0), (LayerKind.HEAD, 0.5))
    return PacedKind(
        device=kind,
        slow_down=slower,
        jitter=scatter,
        entries=tuple(
            PaceEntry(
                layer=layer,
                phase=phase,
                microbatch_size=2,
                tp=1,
                seconds=PASS_SECONDS * weight * times * slower,
            )
            for layer, weight in weights
            for phase, times in (("forward", 1.0), ("backward", 2.0))
        ),
    )


# ---- ranks


@contextmanager
def rank_processes(emulation: Emulation) -> Iterator[list[subprocess.Popen[bytes]]]:
    """One process per rank, which trains one run after another."""
    processes = [
        start(
            emulation,
            f"host{rank // 2 + 1}",
            (sys.executable, "-m", "evaluation.faults", str(rank)),
            environment=ENVIRONMENT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        for rank in range(2 * HOSTS)
    ]
    try:
        yield processes
    finally:
        end(processes)
        for process in processes:
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    stream.close()


def _train_all(processes: Sequence[subprocess.Popen[bytes]], folder: RunFolder) -> None:
    for process in processes:
        assert process.stdin is not None
        process.stdin.write(f"{folder.path.absolute()}\n".encode())
        process.stdin.flush()
    for rank, process in enumerate(processes):
        assert process.stdout is not None
        if process.stdout.readline() != b"done\n":
            raise HetplanError(f"rank {rank} of a run failed")


def main(rank: int) -> None:
    """Train as this rank in each folder that stdin names."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import torch
    import torch.distributed as dist
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

    from hetplan.profiling.backends import open_backend
    from hetplan.runtime.loop import train

    torch.set_num_threads(1)
    limit = timedelta(seconds=120)
    address = os.environ["HETPLAN_RENDEZVOUS_ADDRESS"]
    store = TCPStore(address, PORT, is_master=rank == 0, wait_for_workers=False, timeout=limit)
    for line in sys.stdin:
        folder = RunFolder(Path(line.strip()))
        training = decode(read_document(folder.training), Training, schema=TRAINING_SCHEMA)
        dist.init_process_group(
            "gloo",
            store=PrefixStore(folder.path.name, store),
            rank=rank,
            world_size=len(training.device_kinds),
            timeout=limit,
        )
        try:
            recorder = Recorder(folder.telemetry(rank), rank, compute_apart=True)
            train(training, rank, open_backend("cpu", index=0), on_rank_step=recorder)
        finally:
            dist.destroy_process_group()
        print("done", file=answers, flush=True)


# ---- runs


def judged_run(trial: Trial, folder: RunFolder, result: SearchResult) -> Judged:
    """Who is accused by a run's telemetry, its first steps left out."""
    run = Run.of(result, folder.path)
    whole = read_telemetry([folder.path], run)
    begin = min(each.begin_seconds for each in whole if each.step == WARMUP)
    records = [each for each in whole if each.begin_seconds >= begin]
    suspects = judge(records, run).suspects
    right = [each for each in suspects if each.name == trial.culprit]
    cause = "lossy" if trial.fault == LOSSY_LINK else "slow"
    steps = {each.step: each.window_seconds for each in records if each.step is not None}
    only = len(right) == len(suspects) and bool(suspects) == (trial.fault != CLEAN)
    return Judged(
        number=trial.number,
        fault=trial.fault,
        culprit=trial.culprit,
        strength=trial.strength,
        right=only,
        cause_right=only and all(each.cause == cause for each in suspects),
        wrong=len(suspects) - len(right),
        accused=tuple(each.line for each in suspects),
        step_seconds=sum(steps.values()) / len(steps),
    )


def faults(runs: int, seed: int, out: Path, say: Callable[[str], None]) -> Answer:
    """That many runs with a fault and as many without."""
    require()
    make_folder(out)
    result = planned()
    trials = [trial_of(seed, number) for number in range(2 * runs)]
    folders = [RunFolder(out / f"run-{seed}-{trial.number}") for trial in trials]
    missing = [
        (trial, folder)
        for trial, folder in zip(trials, folders, strict=True)
        if not folder.stop.exists()
    ]
    if missing:
        name = f"faults-{os.getpid()}"
        with emulated(result.inputs.cluster, name=name) as emulation:
            prepare(emulation)
            with rank_processes(emulation) as processes:
                for trial, folder in missing:
                    make_folder(folder.path)
                    folder.clear()
                    text = encode(training_of(result, trial), schema=TRAINING_SCHEMA)
                    write_atomically(folder.training, text)
                    with faulty(emulation, trial):
                        _train_all(processes, folder)
                    folder.stop.touch()
                    say(f"run {trial.number}: {trial.fault}")
    pairs = zip(trials, folders, strict=True)
    return _answer([judged_run(trial, folder, result) for trial, folder in pairs])


def _answer(done: Sequence[Judged]) -> Answer:
    frame = frame_of(done)
    table = (
        frame.assign(nobody=frame.accused.map(len) == 0, wrong=frame.wrong > 0)
        .groupby("fault", sort=False)
        .agg(
            runs=("right", "size"),
            right=("right", "sum"),
            cause=("cause_right", "sum"),
            wrong=("wrong", "sum"),
            nobody=("nobody", "sum"),
            step_seconds=("step_seconds", "median"),
        )
        .reset_index()
    )
    columns = {
        "planted": ("fault", WORDS),
        "runs": ("runs", "{}"),
        "named right": ("right", "{}"),
        "and its cause": ("cause", "{}"),
        "accused wrongly": ("wrong", "{}"),
        "nobody": ("nobody", "{}"),
        "step": ("step_seconds", "{:.2f} s"),
    }
    clean, planted = frame[frame.fault == CLEAN], frame[frame.fault != CLEAN]
    lines = (
        f"named right: {int(planted.right.sum())} of {len(planted)} (goal: 95 of 100); clean runs "
        f"that accuse nobody: {int(clean.right.sum())} of {len(clean)} (goal: 95 of 100)",
        f"each of {STEPS} steps of {2 * HOSTS} ranks on {os.cpu_count()} cores",
    )
    return Answer(
        sections=(
            Section(frame=table, name="faults", title="Planted faults", columns=columns),
            Section(frame=frame, name="runs"),
        ),
        lines=lines,
    )


if __name__ == "__main__":
    main(int(sys.argv[1]))
