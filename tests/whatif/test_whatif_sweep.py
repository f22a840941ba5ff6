"""Many questions at once: rows stream into a table, survive a kill, and are never asked twice."""

from __future__ import annotations

import csv
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from sweep_files import SWEEP, sweep_files
from typer.testing import CliRunner, Result

from hetplan.cli.main import app
from hetplan.errors import InputError
from hetplan.predict.fit import FittedPredictor
from hetplan.search.files import load_legal_plan
from hetplan.search.result import SearchResult
from hetplan.whatif import sweep as sweep_module
from hetplan.whatif.sweep import COLUMNS, run_sweep
from hetplan.whatif.sweep_grid import load_sweep, question

_PREDICTOR = FittedPredictor.datasheet_only()


def rows_of(table: Path) -> list[dict[str, str]]:
    with table.open(encoding="utf-8", newline="") as file:
        return sorted(csv.DictReader(file), key=lambda row: row["key"])


def plan_all(sweep: Path, table: Path, *, resume: bool = False, plans: Path | None = None) -> int:
    planned, left_out = run_sweep(
        load_sweep(sweep), table, resume=resume, predictor=_PREDICTOR, plans=plans, digest="none"
    )
    assert left_out == 0
    return planned


def command(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["sweep", *arguments])


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    return sweep_files(tmp_path)


def test_every_question_has_one_row_and_its_plan(sweep: Path, tmp_path: Path) -> None:
    table, plans = tmp_path / "table.csv", tmp_path / "plans"
    assert plan_all(sweep, table, plans=plans) == 8
    rows = rows_of(table)
    assert tuple(rows[0]) == COLUMNS
    asked = {(row["cluster"], row["global_batch_size"], row["links"]) for row in rows}
    assert len(asked) == len(rows) == 8
    for row in rows:
        assert row["status"] == "optimal"
        assert float(row["gap"]) <= 0.2
        kept = load_legal_plan(plans / f"{row['key']}.json")
        assert repr(kept.estimate.step_seconds) == row["step_seconds"]
        assert kept.inputs.cluster.name == row["cluster"].removesuffix(".yaml")
        link = kept.inputs.cluster.link_between("a", "b")
        # No device gets more than its own port of 80 Gbit/s.
        assert f"{link.bandwidth_bytes_per_second * 8e-9:g}" in ("1", "80")
    again = tmp_path / "again.csv"
    plan_all(sweep, again)
    assert rows_of(again) == rows


_MONOTONE = SWEEP.replace("[2, 4]", "[4]").replace(
    "[1 Gbit/s, 100 Gbit/s]",
    "[100 Gbit/s, 1 Gbit/s, 10 Gbit/s]\nnodes:\n  - {island: a, nodes: [2, 1]}",
)


def test_faster_links_more_memory_and_more_nodes_are_never_slower(tmp_path: Path) -> None:
    table = tmp_path / "table.csv"
    assert plan_all(sweep_files(tmp_path, _MONOTONE), table) == 12
    found = {}
    for row in rows_of(table):
        assert float(row["lower_bound_seconds"]) <= float(row["step_seconds"])
        gigabits = float(row["links"].split()[1])
        memory, nodes = row["cluster"] == "one.yaml", int(row["nodes"].split()[1])
        found[gigabits, memory, nodes] = float(row["step_seconds"])
    assert len(found) == 12
    for less, slower in found.items():
        for more, faster in found.items():
            if all(a <= b for a, b in zip(less, more, strict=True)):
                assert faster <= slower * (1.0 + 1e-9), (less, more)


@pytest.mark.slow
def test_workers_of_dask_give_the_same_rows(sweep: Path, tmp_path: Path) -> None:
    distributed = pytest.importorskip("distributed")
    plan_all(sweep, tmp_path / "alone.csv")
    text = SWEEP.replace("workers: 1", "backend: dask")
    asked = sweep_files(tmp_path, text)
    with (
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, processes=False, dashboard_address=None
        ) as cluster,
        distributed.Client(cluster) as client,
    ):
        assert len(client.scheduler_info()["workers"]) == 2
        assert plan_all(asked, tmp_path / "dask.csv") == 8
        ran = [key for key in client.run(lambda dask_worker: len(dask_worker.state.log)).values()]
    assert all(count > 0 for count in ran)
    assert rows_of(tmp_path / "dask.csv") == rows_of(tmp_path / "alone.csv")


@pytest.mark.slow
def test_a_killed_sweep_goes_on_with_what_is_missing(tmp_path: Path) -> None:
    many = SWEEP.replace("workers: 1", "workers: 2").replace("[2, 4]", "[2, 4, 6, 8, 10, 12]")
    sweep, table = sweep_files(tmp_path, many), tmp_path / "table.csv"
    (tmp_path / "store").mkdir()
    arguments = ["sweep", str(sweep), "--out", str(table)]
    arguments += ["--store", str(tmp_path / "store")]
    running = subprocess.Popen(
        [sys.executable, "-m", "hetplan", *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        until = time.monotonic() + 120
        while time.monotonic() < until and not (table.exists() and len(rows_of(table)) >= 3):
            time.sleep(0.02)
        os.kill(running.pid, signal.SIGKILL)
        running.wait()
    finally:
        os.killpg(running.pid, signal.SIGKILL)  # its workers
    kept = rows_of(table)
    assert 3 <= len(kept) < 24
    with table.open("a", encoding="utf-8") as file:
        file.write("0123456789abcdef,model.yaml,one.y")  # a line that was cut off
    done = command(*arguments[1:], "--resume")
    assert done.exit_code == 0, done.output
    left = 24 - len(kept)
    words = f"{left} of 24 questions planned ({left} optimal); {len(kept)} were there before"
    assert words in done.stderr
    rows = rows_of(table)
    assert len({row["key"] for row in rows}) == len(rows) == 24
    assert [row for row in rows if row in kept] == kept
    assert all(row["status"] == "optimal" for row in rows)
    before = table.read_bytes()
    assert command(*arguments[1:], "--resume").exit_code == 0
    assert table.read_bytes() == before


def test_a_question_without_a_plan_is_a_row_with_its_reason(tmp_path: Path) -> None:
    text = SWEEP.replace("[one.yaml, two.yaml]", "[one.yaml]").replace("[2, 4]", "[4]")
    sweep = sweep_files(tmp_path, text + "sequence_length: [128, 4096]\n")
    cluster = (tmp_path / "one.yaml").read_text()
    (tmp_path / "one.yaml").write_text(
        cluster.replace(
            "devices_per_node: 1\n", "devices_per_node: 1\n        memory: 1 MB\n", 1
        ).replace("192 GB", "1 MB")
    )
    plan_all(sweep, tmp_path / "table.csv")
    found = {
        (row["sequence_length"], row["status"]): row for row in rows_of(tmp_path / "table.csv")
    }
    assert set(found) == {("128", "infeasible"), ("4096", "error")}
    assert "no plan of tiny for megatron fits" in found["128", "infeasible"]["reason"]
    assert "longer than max_sequence_length" in found["4096", "error"]["reason"]
    assert all(row["step_seconds"] == "" for row in found.values())


def test_axes_change_what_they_say(tmp_path: Path) -> None:
    text = SWEEP.replace("    bandwidth: [1 Gbit/s, 100 Gbit/s]\n", "    round_trip: [8 ms]\n")
    text += "nodes: [{island: a, nodes: [1, 3]}]\ntargets: [native]\nsequence_length: [64]\n"
    points = load_sweep(sweep_files(tmp_path, text)).points
    assert len(points) == 2 * 2 * 2
    nodes = []
    for point in points:
        asked = question(point)
        link = asked.cluster.link_between("a", "b")
        assert link.round_trip_seconds == 8e-3
        assert link.bandwidth_bytes_per_second == 1e9
        assert (asked.job.target, asked.job.sequence_length) == ("native", 64)
        nodes.append(asked.cluster.island("a").nodes)
    assert sorted(nodes) == [1, 1, 1, 1, 3, 3, 3, 3]


def test_other_inputs_and_another_predictor_are_other_questions(
    sweep: Path, tmp_path: Path
) -> None:
    keys = {point.key for point in load_sweep(sweep).points}
    job = tmp_path / "job.yaml"
    job.write_text(job.read_text().replace("gap: 0.2", "gap: 0.3"))
    changed = load_sweep(sweep)
    assert keys.isdisjoint(point.key for point in changed.points)
    asked = []
    for digest in ("one", "one", "two"):
        asked.append(
            run_sweep(changed, tmp_path / "t.csv", resume=True, predictor=_PREDICTOR, digest=digest)
        )
    assert asked == [(8, 0), (0, 0), (8, 0)]


def test_a_table_of_something_else_is_left_alone_and_a_torn_head_is_not(
    sweep: Path, tmp_path: Path
) -> None:
    table = tmp_path / "notes.csv"
    table.write_text("my,notes\n1,2\n")
    for options in ((), ("--resume",)):
        done = command(str(sweep), "--out", str(table), *options)
        assert done.exit_code == 2, done.output
        assert "notes.csv" in done.stderr
        assert table.read_text() == "my,notes\n1,2\n"
    table.write_text("key,model,clu")
    assert plan_all(sweep, table, resume=True) == 8


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("[one.yaml, two.yaml]", "[one.yaml, too.yaml]", "clusters[1]: there is no file"),
        ("[here, there]", "[here, where]", "no cluster has an island or region where"),
        ("    bandwidth: [1 Gbit/s, 100 Gbit/s]\n", "", "changes nothing; add bandwidth"),
        ("models: [model.yaml]", "models: [job.yaml]", "job.yaml:2: schema"),
        ("workers: 1", "nodes: [{island: c, nodes: [1]}]", "no cluster has an island c"),
        ("workers: 1", "speed: 3", "speed: unknown key"),
    ],
)
def test_a_wrong_file_is_refused_with_its_line(
    tmp_path: Path, old: str, new: str, words: str
) -> None:
    assert old in SWEEP
    sweep = sweep_files(tmp_path, SWEEP.replace(old, new))
    with pytest.raises(InputError) as error:
        load_sweep(sweep)
    text = str(error.value)
    assert words in text, text
    assert ".yaml:" in text


@pytest.mark.parametrize("interrupted_at", [1, 3])
def test_rows_of_neighbours_are_on_disk_when_a_sweep_is_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interrupted_at: int
) -> None:
    asked, table = sweep_files(tmp_path, _MONOTONE), tmp_path / "table.csv"
    best, calls = sweep_module.best_plan, iter(range(100))

    def few(*arguments: Any, **more: Any) -> SearchResult:
        if next(calls) == interrupted_at:
            raise KeyboardInterrupt
        return best(*arguments, **more)

    monkeypatch.setattr(sweep_module, "best_plan", few)
    with pytest.raises(KeyboardInterrupt):
        plan_all(asked, table)
    kept = rows_of(table)
    assert len(kept) == interrupted_at
    monkeypatch.setattr(sweep_module, "best_plan", best)
    whole = tmp_path / "whole.csv"
    every = plan_all(asked, whole)
    assert plan_all(asked, table, resume=True) == every - interrupted_at
    assert rows_of(table) == rows_of(whole)
