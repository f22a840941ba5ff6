"""The same runs under other readings of their clusters."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from evaluation_tables import write_runs

from evaluation.accuracy.calibration import (
    PredictedRun,
    ReadingErrors,
    other_readings,
    predict_rows,
)
from evaluation.accuracy.clusters import cluster_of
from evaluation.accuracy.rows import read_runs
from hetplan.cluster.node import RingNics
from hetplan.cost.estimate import estimate
from hetplan.predict.fit import FittedPredictor

PREDICTOR = FittedPredictor.datasheet_only()
STRIDED = {"inter_bw_note": "800Gbit/s per node (vtrain config)", "tp": "4", "pp": "1", "dp": "4"}
SLINGSHOT = {
    "inter_bw_note": "Alps/Clariden Slingshot", "gpu": "GH-96", "gpus_per_node": "4", "tp": "1",
    "dp": "16", "pp": "1",
}  # fmt: skip


def runs_of(folder: Path, *rows: dict[str, str]) -> tuple[PredictedRun, ...]:
    done, left = predict_rows(read_runs(write_runs(folder, *rows)).rows, (), PREDICTOR)
    assert not left
    return done


def of(found: tuple[ReadingErrors, ...], word: str) -> ReadingErrors:
    (one,) = [each for each in found if word in each.reading]
    return one


def test_rings_are_read_otherwise_where_a_cluster_says_them(tmp_path: Path) -> None:
    one, other = {**STRIDED}, {"source": "another"}
    runs = runs_of(tmp_path, one, other)
    nics = runs[0].run.cluster.islands[0].nics
    assert nics is not None
    assert nics.rings is RingNics.ONE
    found = other_readings(runs, PREDICTOR)
    for word, rings in (("own NIC", RingNics.OWN), ("usual choice", None)):
        row = of(found, word)
        assert (row.data_set, row.changed_rows, row.errors.rows) == ("made-up", 1, 1)
        run = runs[0].run
        island = replace(run.cluster.islands[0], nics=replace(nics, rings=rings))
        cluster = replace(run.cluster, islands=(island,))
        again = estimate(run.planned.plan, run.model, cluster, run.planned.job, PREDICTOR)
        assert row.errors.bias == pytest.approx(again.step_seconds / 0.5 - 1)
        assert row.as_published.bias == runs[0].judged().error
        # Four NICs instead of one make the reduction shorter.
        assert row.errors.bias < row.as_published.bias


def test_a_fabric_of_any_number_of_devices_is_found_at_once(tmp_path: Path) -> None:
    # Not by walking through all numbers of nodes, of which nonsense has a hundred thousand million.
    note = {"intra_bw_note": "NVL72", "gpus_per_node": "8", "gpu": "B200"}
    rows = read_runs(
        write_runs(
            tmp_path,
            {**note, "gpus": "64"},
            {**note, "gpus": "960"},
            {**note, "gpus": "800000000000"},
            {**note, "gpus": "800", "gpus_per_node": "80"},
        )
    ).rows
    first, second, _, wide = rows
    assert cluster_of(first, ()).islands[0].devices_per_node == 64
    assert cluster_of(second, ()).islands[0].devices_per_node == 64
    assert cluster_of(wide, ()).islands[0].devices_per_node == 80
    done, left = predict_rows((rows[2],), (), PREDICTOR)
    assert not done
    assert left
