"""Random questions to `hetplan plan` with random limits: the worst overrun, the largest memory.

Every question is a command of its own in a process of its own: model and cluster files of random
sizes up to `MOST_ISLANDS`, `MOST_KINDS`, `MOST_DEVICES`, `MOST_LAYERS` and `MOST_BATCH`, each drawn
so that its logarithm is uniform, and one of `LIMITS` seconds. Of some questions every other size is
the largest. Time is CPU seconds of the one thread that plans, which a busy machine does not change.
A limit counts from the command's begin, without what loads and compiles
(`hetplan.kernels.loading`). Memory is the most that the process ever held.
"""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pandas

from evaluation.output import WORDS, Answer, Section, frame_of
from hetplan import kernels
from hetplan.cluster.catalogue import load_catalogue
from hetplan.cluster.devices import CPU_KIND
from hetplan.job.spec import Precision
from hetplan.plans.check_job import MAX_SEARCHED_ISLANDS
from hetplan.units import format_bytes

MOST_ISLANDS, MOST_KINDS, MOST_DEVICES, MOST_LAYERS, MOST_BATCH = 200, 64, 131_072, 1000, 10**6
MOST_BYTES = 2e9
LIMITS = (1, 2, 5, 10)
TARGETS = ("megatron", "flagscale", "torchtitan", "native", "any")
_HIDDEN = (1024, 2048, 4096, 8192, 12288)
_PER_NODE = 8
_REFUSED = 0.1
"""Part of the questions that may have more islands than are searched."""
_EXTREME = 0.2
"""Part of the questions of which every other size is the largest."""
_PATIENCE_SECONDS = 600
"""Until a command that does not end is killed, on a machine that others use."""
_ENDED = {0: "plan", 2: "refused", 3: "none", 4: "not in time"}
"""By exit code."""
_TEXTS = ("model", "cluster")


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One question: sizes, and its files' texts."""

    seed: int
    islands: int
    kinds: int
    devices: int
    layers: int
    batch: int
    target: str
    limit_seconds: int
    model: str
    cluster: str

    @property
    def sizes(self) -> dict[str, object]:
        """All but the texts."""
        return {name: getattr(self, name) for name in self.__slots__ if name not in _TEXTS}

    def words(self, folder: Path) -> list[str]:
        """The command's words; the files are written."""
        files = {"model": self.model, "cluster": self.cluster}
        for name, text in files.items():
            (folder / f"{name}.yaml").write_text(text, encoding="utf-8")
        paths = [word for name in files for word in (f"--{name}", str(folder / f"{name}.yaml"))]
        return [
            "plan", *paths, "--batch", str(self.batch), "--seq", "4096", "--target", self.target,
            "--set", "trainer.mixed_libraries=true", "--time-limit", f"{self.limit_seconds} s",
            "--out", str(folder / "plan.json"),
        ]  # fmt: skip


def question(seed: int) -> Question:
    """The question of this seed."""
    draw = random.Random(seed)
    extreme = draw.random() < _EXTREME

    def size(least: int, most: int) -> int:
        if extreme and draw.random() < 0.5:
            return most
        return min(most, round(least * math.exp(draw.random() * math.log(most / least))))

    every = sorted(
        kind.kind
        for kind in load_catalogue()
        if kind.kind != CPU_KIND and Precision.BFLOAT16 in dict(kind.peak_flops_per_second)
    )
    refused = draw.random() < _REFUSED
    islands = size(1, MOST_ISLANDS if refused else MAX_SEARCHED_ISLANDS)
    names = draw.sample(every, min(islands, draw.randint(1, MOST_KINDS)))
    kinds = len(names)
    names += [draw.choice(names) for _ in range(islands - kinds)]
    nodes = max(1, size(_PER_NODE, MOST_DEVICES) // _PER_NODE // islands)
    layers, hidden = size(2, MOST_LAYERS), draw.choice(_HIDDEN)
    return Question(
        seed=seed,
        islands=islands,
        kinds=kinds,
        devices=islands * nodes * _PER_NODE,
        layers=layers,
        batch=size(8, MOST_BATCH),
        target=draw.choice(TARGETS),
        limit_seconds=draw.choice(LIMITS),
        model=model_text(layers, hidden),
        cluster="\n".join(cluster_lines(names, nodes, draw.randint(1, min(4, islands)))) + "\n",
    )


def model_text(layers: int, hidden: int) -> str:
    """The model file."""
    return (
        f"schema: hetplan.model/3\nname: random\narchitecture: llama\nnum_layers: {layers}\n"
        f"hidden_size: {hidden}\nffn_hidden_size: {hidden * 7 // 2}\n"
        f"num_attention_heads: {hidden // 128}\nnum_kv_heads: {min(8, hidden // 128)}\n"
        "vocab_size: 32000\nmax_sequence_length: 4096\n"
    )


def cluster_lines(names: list[str], nodes: int, regions: int) -> Iterator[str]:
    """Lines of the cluster file: islands of these kinds, all with so many nodes."""
    yield from ("schema: hetplan.cluster/4", "name: random", "regions:")
    for region in range(regions):
        yield from (f"  - name: r{region}", "    islands:")
        for at in range(region, len(names), regions):
            yield (
                f"      - {{name: i{at}, device: {names[at]}, nodes: {nodes}, "
                f"devices_per_node: {_PER_NODE}, intra_node: {{bandwidth: 200 GB/s, latency: 5 us}}"
                ", inter_node: {bandwidth: 25 GB/s, latency: 10 us}}"
            )
    staged = "latency: {}, transport: host-staged}}"
    yield "links_default:"
    yield "  within_region: {bandwidth_per_device: 100 Gbit/s, " + staged.format("30 us")
    if regions > 1:
        yield "  across_regions: {bandwidth_per_device: 10 Gbit/s, " + staged.format("5 ms")


def limits(count: int, seed: int, journal: Path | None, progress: Callable[[str], None]) -> Answer:
    """A row per target, and every question in the JSON.

    Every answer is added to the journal when it is there, and one that is there is not asked again.
    """
    known = {} if journal is None else answers_in(journal)
    rows = []
    for at in range(seed, seed + count):
        asked = question(at)
        sizes = asked.sizes
        row = known.get(at)
        if row is None or {name: row.get(name) for name in sizes} != sizes:
            row = answered(asked)
            if journal is not None:
                with journal.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
            progress(
                f"{at}: {asked.islands} islands, {asked.devices:,} devices, {asked.layers} layers, "
                f"batch {asked.batch:,}, {asked.target}, {asked.limit_seconds} s: {row['ended']}, "
                f"{row['overrun_seconds']:.2f} s over, "
                f"{format_bytes(float(str(row['peak_memory_bytes'])))}"
            )
        rows.append(row)
    frame = frame_of(rows)
    held = frame.overrun_seconds <= frame.allowed_seconds
    held &= frame.peak_memory_bytes <= MOST_BYTES
    held &= frame.ended.isin(_ENDED.values())
    frame["held"] = held
    columns: dict[str, tuple[str, str | Callable[[object], str]]] = {
        "target": ("target", WORDS),
        "asked": ("questions", "{}"),
        **{words: (words, "{}") for words in _ENDED.values()},
        "overrun": ("overrun_seconds", "{:.2f} s"),
        "memory": ("peak_memory_bytes", lambda each: format_bytes(float(str(each)))),
        "held": ("held", "{}"),
    }
    return Answer(
        sections=(
            Section(frame=frame, name="limits"),
            Section(frame=_by_target(frame), title="Time limits and memory", columns=columns),
        ),
        lines=tuple(
            f"not held: seed {row.seed}: {row.ended}, {row.overrun_seconds:.2f} s over "
            f"{row.limit_seconds} s, {format_bytes(float(str(row.peak_memory_bytes)))}"
            for row in frame[~held].itertuples()
        ),
    )


def answers_in(journal: Path) -> dict[int, dict[str, object]]:
    """Rows by seed; what a kill cut off is taken away, so that the next row is whole."""
    if not journal.exists():
        return {}
    text = journal.read_text(encoding="utf-8")
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        journal.write_text(whole, encoding="utf-8")
    rows = map(json.loads, whole.splitlines())
    return {row["seed"]: row for row in rows}


def _by_target(frame: pandas.DataFrame) -> pandas.DataFrame:
    rows = []
    for name in (*sorted(set(frame.target)), "all"):
        own = frame if name == "all" else frame[frame.target == name]
        rows.append(
            {
                "target": name,
                "questions": len(own),
                **{words: int((own.ended == words).sum()) for words in _ENDED.values()},
                "overrun_seconds": own.overrun_seconds.max(),
                "peak_memory_bytes": own.peak_memory_bytes.max(),
                "held": int(own.held.sum()),
            }
        )
    return pandas.DataFrame(rows)


def answered(asked: Question) -> dict[str, object]:
    """Sizes of the question, how it ended and what it took."""
    sizes = asked.sizes
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-m", "evaluation.limits", *asked.words(Path(folder))]
        one_thread = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        try:
            done = subprocess.run(
                words,
                check=False,
                capture_output=True,
                text=True,
                timeout=_PATIENCE_SECONDS,
                env={**os.environ, **one_thread},
            )
            told = json.loads(done.stderr.splitlines()[-1])
        except (subprocess.TimeoutExpired, ValueError, IndexError):
            spent: float = _PATIENCE_SECONDS
            return sizes | overrun(asked.limit_seconds, spent, 0.0) | {"ended": "killed"}
    ended = _ENDED.get(done.returncode, f"exit {done.returncode}")
    return sizes | overrun(asked.limit_seconds, told["seconds"], told["bytes"]) | {"ended": ended}


def overrun(limit: float, spent_seconds: float, peak_bytes: float) -> dict[str, object]:
    """By how much a command took longer than its limit, which it may by a tenth or a second."""
    return {
        "overrun_seconds": max(0.0, spent_seconds - limit),
        "allowed_seconds": max(1.0, 0.1 * limit),
        "peak_memory_bytes": peak_bytes,
    }


def run_command(words: list[str]) -> None:
    """`hetplan` in this process, by CPU seconds; the last line on stderr is what it took."""
    from hetplan.cli.main import main

    kernels.count_cpu_seconds()
    began = time.process_time()  # imports of the command line are loading, too
    sys.argv = ["hetplan", *words]
    try:
        main()
    finally:
        spent = time.process_time() - began - kernels.loading.seconds
        print(json.dumps({"seconds": spent, "bytes": _most_bytes()}), file=sys.stderr)


def _most_bytes() -> int:
    """The most memory that this program held; `ru_maxrss` counts who started it, too."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["VmHWM"].split()[0]) * 1024


if __name__ == "__main__":
    run_command(sys.argv[1:])
