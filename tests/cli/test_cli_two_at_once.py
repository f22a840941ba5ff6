"""Two commands on one table, journal, store or folder: the second is told of the first."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import run
from profiling_samples import LAYER, PROVENANCE
from sweep_files import plan_command, sweep_files
from test_cli_edited_plan import planned
from trainer_plans import two_regions

from hetplan.errors import InputError
from hetplan.files.locks import Lock
from hetplan.files.writing import write_atomically
from hetplan.launchers.local import LaunchSettings, kept_folders
from hetplan.profiling import store
from hetplan.search.files import save_result
from hetplan.search.result import IdleCause, IdleReason
from hetplan.whatif import baselines

REASON = IdleReason(
    island="slow", idle_devices=1, usable_devices=8, busy_share=0.5, causes=(IdleCause.MEMORY,)
)
HELD = f"process {os.getpid()} on "


def _contents(folder: Path) -> dict[str, bytes]:
    return {str(each): each.read_bytes() for each in folder.rglob("*") if each.is_file()}


def _refused(place: Path, *words: str) -> None:
    """The command is refused while this process has the place, and changes nothing."""
    with Lock(place).take():
        before = _contents(place.parent)
        found = run(*words)
        assert found.exit_code == 2
        assert HELD in " ".join(found.stderr.split())
        assert _contents(place.parent) == before


def test_a_sweep_leaves_the_table_of_another_alone(tmp_path: Path) -> None:
    _refused(tmp_path / "t.csv", "sweep", str(sweep_files(tmp_path)), "--out", f"{tmp_path}/t.csv")


def test_a_journal_is_of_one_search(tmp_path: Path) -> None:
    sweep_files(tmp_path)
    journal = tmp_path / "j"
    with Lock(journal).take():
        refused = plan_command(tmp_path, "--journal", str(journal))
        assert refused.exit_code == 2
        assert HELD in " ".join(refused.stderr.split())
        assert not journal.exists()
    assert plan_command(tmp_path, "--journal", str(journal)).exit_code == 0
    assert not [each for each in tmp_path.iterdir() if each.name.startswith(".")]


def test_a_journal_that_was_made_meanwhile_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep_files(tmp_path)
    journal = tmp_path / "j"
    # Both have looked before one has made it.
    monkeypatch.setattr("hetplan.cli.plan._check_journal", lambda *_: None)
    assert plan_command(tmp_path, "--journal", str(journal)).exit_code == 0
    before = journal.read_bytes()
    second = plan_command(tmp_path, "--journal", str(journal))
    assert second.exit_code == 2
    assert "exists already" in " ".join(second.stderr.split())
    assert journal.read_bytes() == before


def test_the_best_kind_alone_is_not_written_over_a_newer_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep_files(tmp_path)
    plan, alone = tmp_path / "p.json", baselines.strongest_alone
    monkeypatch.setattr(
        baselines,
        "strongest_alone",
        lambda *given: write_atomically(plan, "{}\n") or alone(*given),
    )
    found = plan_command(tmp_path, "--target", "native")
    assert found.exit_code == 2
    assert "was replaced while" in " ".join(found.stderr.split())
    assert plan.read_text() == "{}\n"


def test_a_folder_is_emitted_by_one(tmp_path: Path) -> None:
    plan, out = tmp_path / "plan.json", tmp_path / "run"
    save_result(two_regions(), plan)
    words = ("emit", str(plan), "--target", "megatron", "--out", str(out))
    assert run(*words).exit_code == 0
    _refused(out, *words, "--force")
    assert run(*words, "--force").exit_code == 0


def test_files_of_init_are_of_one(tmp_path: Path) -> None:
    out = tmp_path / "mine"
    out.mkdir()
    words = ("init", "--nodes", "1x8 h100", "--model", "llama-3-8b", "--out", str(out))
    _refused(out, *words)
    assert run(*words).exit_code == 0
    assert not [each for each in out.iterdir() if each.name.startswith(".")]


@pytest.mark.parametrize("option", ["--save", "--log-folder"])
def test_checkpoints_and_logs_are_of_one_run(option: str, tmp_path: Path) -> None:
    place = tmp_path / "kept"
    place.mkdir()
    plan, other = planned(tmp_path), tmp_path / "other"
    given = {"--save": other, option: place}
    words = [str(each) for pair in given.items() for each in pair]
    _refused(place, "launch", "elastic", str(plan), "--save-every", "1", *words)


@pytest.mark.parametrize("left", ["training.json", "phase-1/rank-0.log"])
def test_logs_of_an_earlier_run_are_not_written_over(left: str, tmp_path: Path) -> None:
    plan, logs = planned(tmp_path), tmp_path / "run"
    kept = logs / left
    kept.parent.mkdir(parents=True)
    kept.write_text("{}")
    words = ("--save-every", "1", "--save", str(tmp_path / "saved"), "--log-folder", str(logs))
    found = run("launch", "elastic", str(plan), *words)
    assert found.exit_code == 2
    assert f"{logs}: has the logs of another run" in " ".join(found.stderr.split())
    with pytest.raises(InputError), kept_folders(LaunchSettings(log_folder=logs)):
        pass
    assert kept.read_text() == "{}"


def test_writers_of_a_store_wait_for_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = store.LayerWriter(tmp_path, PROVENANCE)
    monkeypatch.setattr(store, "_LOCK_SECONDS", 0.05)
    with Lock(writer.folder).take(), pytest.raises(InputError, match=HELD):
        writer.append(LAYER)
    writer.append(LAYER)
    assert store.read_store(tmp_path).layers == (LAYER,)


def test_reasons_are_not_saved_into_a_plan_that_was_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = planned(tmp_path)
    newer = plan.read_text().rstrip() + "\n\n"
    monkeypatch.setattr(
        "hetplan.whatif.idle.idle_reasons",
        lambda *_, **__: write_atomically(plan, newer) or (REASON,),
    )
    found = run("explain", "idle", str(plan))
    assert found.exit_code == 2
    assert "was replaced while" in " ".join(found.stderr.split())
    assert plan.read_text() == newer


def test_two_sweeps_at_once_lose_no_row(tmp_path: Path) -> None:
    grid, table = sweep_files(tmp_path), tmp_path / "t.csv"
    command = [sys.executable, "-m", "hetplan", "sweep", str(grid), "--out", str(table)]
    sweeps = [
        subprocess.Popen([*command, "--resume"], stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    said = [each.communicate(timeout=120)[1] for each in sweeps]
    ended = sorted(each.returncode for each in sweeps)
    # Both may have had it, one after the other.
    assert ended in ([0, 2], [0, 0]), said
    with table.open() as file:
        assert len({row["key"] for row in csv.DictReader(file)}) == 8
    assert sum(line.startswith("key,") for line in table.read_text().splitlines()) == 1


def test_new_files_are_nobody_elses_to_write(tmp_path: Path) -> None:
    old = tmp_path / "old"
    old.write_text("")
    old.chmod(0o4777)
    before = os.umask(0)
    try:
        for name in ("old", "new"):
            write_atomically(tmp_path / name, "text")
        command = "from hetplan.cli import main as m; m.app = lambda: open({!r}, 'w'); m.main()"
        path = str(tmp_path / "f")
        subprocess.run([sys.executable, "-c", command.format(path)], check=True)
    finally:
        os.umask(before)
    modes = {each.name: each.stat().st_mode & 0o7777 for each in tmp_path.iterdir()}
    assert modes == {"old": 0o775, "new": 0o664, "f": 0o664}
