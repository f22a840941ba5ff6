"""The commands of the kill matrix: small questions, with files that were there before."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from emulation_cases import FOUR_HOSTS, traces
from importers_golden_inputs import FOLDER as IMPORTED
from kill_matrix import Command
from sweep_files import sweep_files

from hetplan.emulation.tools import missing

GOLDEN = Path(__file__).parents[1] / "golden"
NAME = f"kills-{os.getpid()}"


def _question(folder: Path) -> None:
    sweep_files(folder)
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


def _read_checkpoints(folder: Path) -> None:
    from hetplan.runtime.checkpoint_contents import open_checkpoint
    from hetplan.runtime.checkpoints import last_checkpoint

    found = last_checkpoint(folder / "saved")
    if found is not None:
        open_checkpoint(found)


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
        modules=("hetplan.cli.profile", "hetplan.profiling.run"),
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
        modules=("hetplan.cli.import_file", "hetplan.importers.storing"),
    ),
    Command(
        name="fit",
        prepare=_measured,
        words=("fit", "--store", "store", "--out", "predictor.json"),
        valid=_read_predictor,
        modules=("hetplan.cli.fit", "hetplan.predict.fit"),
    ),
    Command(
        name="plan",
        prepare=_question,
        words=_PLAN,
        again=lambda folder: (*_PLAN, "--resume") if (folder / "journal.jsonl").exists() else _PLAN,
        valid=_read_plans,
        same=False,  # a journal has times; the plan is compared in test_search_interrupted.py
        modules=("hetplan.cli.plan", "hetplan.whatif.smaller_questions", "hetplan.search.search"),
    ),
    Command(
        name="sweep",
        prepare=_question,
        words=_SWEEP,
        again=lambda folder: (*_SWEEP, "--resume"),
        valid=_read_plans,
        same=False,  # rows in the order in which they were planned
        modules=("hetplan.cli.sweep", "hetplan.whatif.sweep"),
    ),
    Command(
        name="emit",
        prepare=_plan_file,
        words=_EMIT,
        again=lambda folder: (*_EMIT, "--force"),
        valid=_read_emitted,
        modules=("hetplan.cli.emit", "hetplan.trainers.emission"),
    ),
    Command(
        name="launch",
        prepare=_cpu_plan,
        words=_LAUNCH,
        again=lambda folder: (
            (*_LAUNCH, "--steps", "3", "--load", "saved")
            if any((folder / "saved").iterdir())
            else _LAUNCH
        ),
        valid=_read_checkpoints,
        same=False,  # measured times
        modules=("hetplan.cli.launch", "hetplan.launchers.local"),
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
            modules=("hetplan.cli.emulate", "hetplan.emulation.making"),
        )
        for _ in [None]
        if not missing()
    ),
)
