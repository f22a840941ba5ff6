"""The demo's loop: its files are right, and (slow) it holds from profile to trained plan."""

from __future__ import annotations

from pathlib import Path

import pytest

from hetplan.cluster.load import load_cluster
from hetplan.files.writing import write_atomically
from hetplan.launchers import local_loop
from hetplan.launchers.run_log import RunLog
from hetplan.search.files import load_plan


def test_the_cluster_of_the_loop_is_a_valid_file(tmp_path: Path) -> None:
    files = local_loop.LoopFiles(folder=tmp_path)
    write_atomically(files.cluster, local_loop.cluster_text())
    cluster = load_cluster(files.cluster)
    assert [island.device.kind for island in cluster.islands] == [local_loop.FAST, local_loop.SLOW]
    assert cluster.num_devices == 2 * local_loop.RANKS_PER_KIND
    assert cluster.link_between("fast", "slow").samples == local_loop.LINK


@pytest.mark.slow
def test_the_whole_loop(tmp_path: Path) -> None:
    files = local_loop.LoopFiles(folder=tmp_path)
    said: list[str] = []
    local_loop.profile_this_cpu(files, said.append)
    local_loop.make_kinds(files, said.append)
    local_loop.profile_links(files, said.append)
    local_loop.fit_and_plan(files, said.append)
    uneven, even = local_loop.train(files, 5, said.append)
    layers = [stage.num_layers for stage in load_plan(files.uneven).plan.pipelines[0].stages]
    assert len(set(layers)) > 1, "two unlike kinds got equal stages"
    assert losses(uneven) == pytest.approx(losses(even), rel=1e-4)
    if not (uneven.valid and even.valid):
        pytest.skip("the machine is too busy to compare times: too many passes overran")
    assert uneven.median_step_seconds < even.median_step_seconds
    assert abs(uneven.relative_error) < 0.25, "the demo promises 10 % on a quiet machine"


def losses(run: RunLog) -> list[float]:
    return [step.loss for step in run.steps]
