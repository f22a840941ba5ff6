"""The commands of the kill matrix: small questions, with files that were there before."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from emulation_cases import FOUR_HOSTS, traces
from importers_golden_inputs import FOLDER as IMPORTED
from kill_matrix import Command
from sweep_files import SWEEP, sweep_files

from hetplan.emulation.tools import missing

GOLDEN = Path(__file__).parents[1] / "golden"
NAME = f"kills-{os.getpid()}"


def _question(folder: Path) -> None:
    two = SWEEP.replace("one.yaml, two", "one").replace("[2, 4]", "[2]")
    sweep_files(folder, two)
    (folder / "store").mkdir()
    (folder / "note.txt").write_text("mine\n")


def _measured(folder: Path) -> None:
    population = folder / "store" / "cpu" / "mine"
    population.mkdir(parents=True)
    shutil.copy(GOLDEN / "LayerSample.v2.csv", population / "layers.csv")
    shutil.copy(GOLDEN / "Provenance.v2.json", population / "provenance.json")
    (folder / "predictor.json").write_text((GOLDEN / "FittedLaws.v2.json").read_text())


def _output(folder: Path) -> None:
    shutil.copy(IMPORTED / "rccl-tests" / "all-gather.txt", folder / "output.txt")
    (folder / "store").mkdir()


def _plan_file(folder: Path) -> None:
    from dataclasses import replace

    from trainer_plans import two_regions

    from hetplan.search.files import SCHEMA, save_result

    save_result(replace(two_regions(), schema=SCHEMA), folder / "plan.json")


def _cpu_plan(folder: Path) -> None:
    from launch_results import result_of
    from runtime_cases import CPUS, GPT, job, plan_of

    from hetplan.search.files import save_result

    plan = plan_of(GPT, job(), (2, 2), microbatch_size=2)
    save_result(result_of(GPT, CPUS, job(), plan), folder / "plan.json")
    (folder / "saved").mkdir()


# ---- the library, which has no handler of signals


def _append() -> int:
    """Rows one by one; what was said to be on disk is counted."""
    from profiling_samples import PROVENANCE, layer

    from hetplan.profiling.store import LayerWriter

    writer = LayerWriter(Path("store"), PROVENANCE)
    for number in range(1, 5):
        writer.add_new([layer(sequence_length=number)])
        with Path(".said").open("a") as said:
            said.write(".")
    return 0


def _read_said(folder: Path) -> None:
    from hetplan.profiling.store import read_store

    _read_store(folder)
    said = (folder / ".said").read_text() if (folder / ".said").exists() else ""
    assert len(read_store(folder / "store").layers) >= min(len(said), 4)


STEPS = 3


def _train() -> int:
    """From the last checkpoint on; whether no step is left out and the losses are right."""
    if not Path("saved", f"step-{STEPS:08d}").exists():
        _train_on()
    steps = [json.loads(line) for line in Path(".steps").read_text().splitlines()]
    expected, numbers = _losses(), [step for step, _ in steps]
    assert sorted(set(numbers)) == list(range(STEPS)), numbers
    assert all(later - earlier in (0, 1) for earlier, later in pairwise(numbers)), numbers
    assert all(abs(loss / expected[step] - 1.0) < 1e-6 for step, loss in steps), steps
    return 0


def _train_on() -> None:
    import torch.distributed as dist
    from runtime_cases import SAVED_JOB, SAVED_MODEL, saving

    from hetplan.profiling.backends import CpuBackend
    from hetplan.runtime.checkpoints import last_checkpoint, settle
    from hetplan.runtime.loop import train
    from hetplan.runtime.training import CheckpointRequest

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    load = "saved" if last_checkpoint(Path("saved")) else ""
    request = CheckpointRequest(save="saved", save_every=1, keep=1, load=load)
    settled, _ = settle(request, SAVED_MODEL, SAVED_JOB, steps=STEPS)

    def tell(step: int, loss: float) -> None:
        with Path(".steps").open("a") as said:
            said.write(json.dumps([step, loss]) + "\n")

    train(saving(settled, STEPS), 0, CpuBackend(), on_step=lambda each: tell(each.step, each.loss))


def _losses() -> Sequence[float]:
    from runtime_cases import SAVED_JOB, SAVED_MODEL

    from hetplan.runtime.single import reference_losses

    return reference_losses(SAVED_MODEL, SAVED_JOB, steps=STEPS, microbatch_size=2)


def _saved(folder: Path) -> None:
    (folder / "saved").mkdir()


def _warm_ranks() -> None:
    """What a launch and its ranks import; torch imports more at the first update."""
    import torch.distributed  # noqa: F401

    import hetplan.cli.launch
    import hetplan.launchers.local
    import hetplan.launchers.worker
    import hetplan.runtime.loop  # noqa: F401

    _losses()


def _warm_emulation() -> None:
    import hetplan.cli.emulate
    import hetplan.emulation.making  # noqa: F401


# ---- what has to be whole after a run was ended


def _read_plans(folder: Path) -> None:
    from hetplan.trainers.emission import read_plan

    for path in (*folder.glob("plan.json"), *folder.glob("plans/*.json")):
        read_plan(path)


def _read_store(folder: Path) -> None:
    from hetplan.profiling.store import store_state

    for state in store_state(folder / "store"):
        assert not state.damage, state.damage


def _read_predictor(folder: Path) -> None:
    from hetplan.predict.fit import load_predictor

    if (folder / "predictor.json").exists():
        load_predictor(folder / "predictor.json")


def _read_emitted(folder: Path) -> None:
    from hetplan.trainers.folder import emitted_files

    run = folder / "run"
    if run.exists():
        listed = emitted_files(run)
        assert listed
        assert {path.name for path in run.iterdir()} == set(listed)


def _read_checkpoints(folder: Path) -> bool:
    from hetplan.runtime.checkpoint_contents import open_checkpoint
    from hetplan.runtime.checkpoints import last_checkpoint

    found = last_checkpoint(folder / "saved")
    if found is not None:
        open_checkpoint(found)
    return found is not None


_SMALL = ("--hidden", "64", "--seq", "16", "--vocab", "32", "--microbatch", "1", "--tp", "1")
_ASKED = ("--model", "model.yaml", "--cluster", "one.yaml", "--job", "job.yaml", "--store", "store")
_PLAN = ("plan", *_ASKED, "--out", "plan.json", "--journal", "journal.jsonl", "--no-native")
_SWEEP = ("sweep", "sweep.yaml", "--out", "table.csv", "--plans", "plans", "--store", "store")
_EMIT = ("emit", "plan.json", "--target", "megatron", "--out", "run")
_LAUNCH = ("launch", "plan.json", "--steps", "2", "--save", "saved", "--save-every", "1")
_EMULATE = ("emulate", "with", str(FOUR_HOSTS), "--name", NAME, "--here", "--", "true")

COMMANDS = (
    Command(
        name="profile",
        prepare=_output,
        words=("profile", "layers", "--device", "cpu", "--store", "store", *_SMALL),
        valid=_read_store,
        same=False,  # measured times
    ),
    Command(
        name="import",
        prepare=_output,
        words=(
            *("import", "samples", "output.txt", "--device", "amd-mi300x", "--store", "store"),
            *("--measured-on", "2026-01-02", "--link", "here", "--out", "records.json"),
        ),
        again=lambda folder: (
            *("import", "samples", "output.txt", "--device", "amd-mi300x", "--store", "store"),
            *("--measured-on", "2026-01-02", "--link", "here"),
            *(() if (folder / "records.json").exists() else ("--out", "records.json")),
        ),
        valid=_read_store,
    ),
    Command(
        name="fit",
        prepare=_measured,
        words=("fit", "--store", "store", "--out", "predictor.json"),
        valid=_read_predictor,
    ),
    Command(
        name="plan",
        prepare=_question,
        words=_PLAN,
        again=lambda folder: (*_PLAN, "--resume") if (folder / "journal.jsonl").exists() else _PLAN,
        valid=_read_plans,
        same=False,  # a journal has times; the plan is compared in test_search_interrupted.py
    ),
    Command(
        name="sweep",
        prepare=_question,
        words=_SWEEP,
        again=lambda folder: (*_SWEEP, "--resume"),
        valid=_read_plans,
        same=False,  # rows in the order in which they were planned
    ),
    Command(
        name="emit",
        prepare=_plan_file,
        words=_EMIT,
        again=lambda folder: (*_EMIT, "--force"),
        valid=_read_emitted,
    ),
    Command(
        name="launch",
        prepare=_cpu_plan,
        words=_LAUNCH,
        again=lambda folder: (
            (*_LAUNCH, "--steps", "3", "--load", "saved") if _read_checkpoints(folder) else _LAUNCH
        ),
        valid=_read_checkpoints,
        same=False,  # measured times
        warm=_warm_ranks,
        forked_ranks=True,
    ),
    Command(
        name="store rows",
        prepare=lambda folder: (folder / "store").mkdir(),
        work=_append,
        signals=(signal.SIGKILL,),
        valid=_read_said,
    ),
    Command(
        name="checkpoints",
        prepare=_saved,
        work=_train,
        signals=(signal.SIGKILL,),
        valid=_read_checkpoints,
        same=False,  # a checkpoint says when it was saved
        warm=_warm_ranks,
    ),
    *(
        Command(
            name="emulate",
            prepare=lambda folder: None,
            words=_EMULATE,
            again=lambda folder: (
                ("emulate", "down", "--name", NAME) if traces(NAME).folder else _EMULATE
            ),
            same=False,
            left=lambda: traces(NAME),
            warm=_warm_emulation,
        )
        for _ in [None]
        if not missing()
    ),
)
