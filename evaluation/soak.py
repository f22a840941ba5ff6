"""Does planning many questions in one process cost memory, or leave anything? `evaluation soak`.

Every question is drawn from its number: islands of one or two kinds, a small model, a job, a
target. Some of them are planned in processes of their own as well, whose answers must be the same
bytes. Memory is what the process holds (resident) after a question, the garbage collected; the
first fifth of the questions is warm-up, in which bounded caches fill. The solver that few questions
need is loaded before them, so that its libraries are no growth.
"""

from __future__ import annotations

import ctypes
import gc
import hashlib
import importlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import hetplan
from evaluation.output import Answer, Section, frame_of
from hetplan.errors import HetplanError, InfeasibleError, LimitError
from hetplan.files.reading import document_of
from hetplan.job.load import read_job
from hetplan.library.inputs import predictor_of
from hetplan.model.load import load_model
from hetplan.plans.targets import TARGETS
from hetplan.predict.predictor import Predictor
from hetplan.search.files import result_text

MOST_GROWTH = 0.05
"""Of memory after warm-up; allocators keep freed pages, which differ by a few percent."""
_KINDS = ("h100", "a100", "v100", "mi300x", "mi210", "910b2")
_GAP = 0.5
"""Wide: a limit in time would make answers differ, and few questions are to take minutes."""
_RARE_SOLVER = "ortools.sat.python.cp_model"
_FIRST_BYTES = 16
"""Of the digest of an answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Soaked:
    """What a soak found."""

    questions: int
    plans: int
    """The others have none, which is an answer too."""
    warm_bytes: int
    """The most after any question of the second tenth."""
    end_bytes: int
    """The least after any of the last tenth."""
    compared: int
    different: tuple[int, ...]
    """Questions whose answer in a process of its own was another one."""
    left: tuple[str, ...]
    """Files, processes, namespaces and sockets that were not there before."""

    @property
    def growth(self) -> float:
        """Of memory after warm-up, a fraction."""
        return self.end_bytes / self.warm_bytes - 1.0

    @property
    def is_clean(self) -> bool:
        """Whether nothing grew, differed or was left."""
        return self.growth <= MOST_GROWTH and not self.different and not self.left


def soak(questions: int, fresh: int, seed: int, say: Callable[[str], None]) -> Soaked:
    """Plan that many questions here, and `fresh` of them in processes of their own.

    Temporary files lie in a folder of its own: other processes of hetplan leave nothing there.
    """
    before, known = tempfile.tempdir, os.environ.get("TMPDIR")
    with tempfile.TemporaryDirectory() as own:
        tempfile.tempdir = os.environ["TMPDIR"] = own
        try:
            return _soaked(questions, fresh, seed, say)
        finally:
            tempfile.tempdir = before
            os.environ.pop("TMPDIR")
            os.environ |= {"TMPDIR": known} if known else {}


def _soaked(questions: int, fresh: int, seed: int, say: Callable[[str], None]) -> Soaked:
    predictor = predictor_of(None)[0]
    importlib.import_module(_RARE_SOLVER)
    before = _machine()
    answers: list[str] = []
    memory: list[int] = []
    plans = 0
    for number in range(questions):
        text, has_plan = answer(seed, number, predictor)
        answers.append(_digest(text))
        plans += has_plan
        memory.append(_resident_bytes())
        say(
            f"{number + 1}: {'a plan' if has_plan else 'none'}, {memory[-1] / 2**20:.0f} MiB, "
            f"{time.process_time():.0f} CPU s so far"
        )
    compared = sorted(random.Random(seed).sample(range(questions), min(fresh, questions)))
    alone = {number: _in_a_fresh_process(seed, number) for number in compared}
    tenth = max(1, questions // 10)
    return Soaked(
        questions=questions,
        plans=plans,
        warm_bytes=max(memory[tenth : 2 * tenth] or memory),
        end_bytes=min(memory[-tenth:]),
        compared=len(compared),
        different=tuple(number for number in compared if alone[number] != answers[number]),
        left=tuple(sorted(_machine() - before)),
    )


def answer(seed: int, number: int, predictor: Predictor) -> tuple[str, bool]:
    """The plan file of a question, or why there is none; whether there is a plan."""
    rng = random.Random(f"{seed} {number}")
    kinds = rng.sample(_KINDS, rng.choice((1, 2, 2)))
    nodes = [f"{rng.randint(1, 2)}x{rng.choice((2, 4))} {kind} @{kind}" for kind in kinds]
    between = f"{kinds[0]} {kinds[-1]} {rng.choice((10, 100, 400))}Gbit {rng.choice((1, 20))}ms"
    heads, layers = rng.choice((4, 8, 16)), rng.choice((4, 6, 8, 12))
    model = {
        "schema": "hetplan.model/1",
        "name": f"m{number}",
        "architecture": rng.choice(("gpt", "llama")),
        "num_layers": layers,
        "hidden_size": 128 * heads,
        "ffn_hidden_size": 512 * heads,
        "num_attention_heads": heads,
        "num_kv_heads": heads,
        "vocab_size": rng.choice((32000, 50304)),
        "max_sequence_length": 4096,
        "tied_embeddings": False,
    }
    job = {
        "schema": "hetplan.job/4",
        "name": f"j{number}",
        "global_batch_size": rng.choice((8, 16, 24, 64)),
        "sequence_length": rng.choice((1024, 2048, 4096)),
        "precision": "bfloat16",
        "optimizer": "adamw",
        "target": rng.choice(sorted(TARGETS)),
        "gap": _GAP,
    }
    try:
        cluster = hetplan.Cluster.from_nodes(*nodes, between=between if len(kinds) > 1 else ())
        result = hetplan.plan(
            load_model(document_of("model.json", json.dumps(model).encode())),
            cluster,
            read_job(document_of("job.json", json.dumps(job).encode())),
            predictor,
            progress=False,
        )
    except (InfeasibleError, LimitError, HetplanError) as error:
        return f"{type(error).__name__}: {error}", False
    return result_text(result), True


def answer_here(seed: int, number: int) -> str:
    """The digest of one answer; what a process of its own prints."""
    return _digest(answer(seed, number, predictor_of(None)[0])[0])


def soak_answer(found: Soaked) -> Answer:
    """As a table of what was looked at."""
    rows = [
        ("questions, with a plan", f"{found.questions}, {found.plans}"),
        ("memory after warm-up", f"{found.warm_bytes / 2**20:.0f} MiB"),
        ("memory at the end", f"{found.end_bytes / 2**20:.0f} MiB ({found.growth:+.1%})"),
        ("answers of fresh processes", f"{found.compared}, {len(found.different)} of them others"),
        ("left on the machine", ", ".join(found.left) or "nothing"),
    ]
    frame = frame_of([{"what": what, "found": value} for what, value in rows])
    columns = {"soak": ("what", "{}"), "found": ("found", "{}")}
    return Answer(sections=(Section(name="soak", title="Soak", frame=frame, columns=columns),))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:_FIRST_BYTES]


def _in_a_fresh_process(seed: int, number: int) -> str:
    words = f"from evaluation.soak import answer_here; print(answer_here({seed}, {number}))"
    done = subprocess.run(
        [sys.executable, "-c", words], capture_output=True, text=True, check=False
    )
    return done.stdout.strip() if done.returncode == 0 else done.stderr


def _resident_bytes() -> int:
    gc.collect()
    # What glibc holds for later is no leak.
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _machine() -> set[str]:
    """What a process can leave: temporary files, children, namespaces, sockets and open files."""
    here = Path("/proc/self")
    children = (here / "task" / str(os.getpid()) / "children").read_text().split()
    handles = []
    for entry in (here / "fd").iterdir():
        try:
            handles.append(os.readlink(entry))
        except OSError:
            continue
    namespaces = Path("/run/netns")
    return {
        *(f"process {child}" for child in children),
        *(f"file {name}" for name in os.listdir(tempfile.gettempdir()) if "hetplan" in name),
        *(
            f"namespace {each.name}"
            for each in (namespaces.iterdir() if namespaces.is_dir() else ())
        ),
        *(f"open {each}" for each in handles if each.startswith(("socket:", "/"))),
    }
