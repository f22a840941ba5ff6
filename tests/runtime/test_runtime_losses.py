"""Every plan trains the same model: its losses are those of one process."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from runtime_cases import CASES, GPT, Case, job

from hetplan.errors import InputError
from hetplan.job.spec import Precision
from hetplan.runtime.data import entropy_nats
from hetplan.runtime.single import reference_losses

RANKS = 4
# One process group trains all cases: keep its tests in one process of pytest-xdist too.
pytestmark = pytest.mark.xdist_group("runtime_losses")


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Two threads on shared cores are slower than one for models this small."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, list]]:
    """What rank 0 saw of every case."""
    folder = tmp_path_factory.mktemp("ranks")
    script = Path(__file__).with_name("runtime_ranks.py")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    ranks = []
    try:
        for rank in range(RANKS):
            with (folder / f"{rank}.log").open("wb") as log:
                ranks.append(
                    subprocess.Popen(
                        [sys.executable, script, str(rank), str(RANKS), folder],
                        stdout=log,
                        stderr=log,
                        env=environment,
                    )
                )
        codes = [rank.wait(timeout=120) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    logs = "\n".join((folder / f"{rank}.log").read_text()[-2000:] for rank in range(RANKS))
    assert codes == [0] * RANKS, logs
    return json.loads((folder / "0.json").read_text())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_losses_are_those_of_one_process(case: Case, trained: dict[str, dict[str, list]]) -> None:
    expected = reference_losses(case.model, case.job, steps=case.steps, microbatch_size=4)
    assert trained[case.name]["losses"] == pytest.approx(expected, rel=1e-5)
    assert len(set(expected)) == case.steps  # or agreement would show nothing


def test_the_loss_starts_at_ignorance_and_falls(trained: dict[str, dict[str, list]]) -> None:
    losses = trained["pp2 uneven"]["losses"]
    assert losses[0] == pytest.approx(math.log(GPT.vocab_size), rel=0.02)
    assert entropy_nats() < losses[-1] < losses[0] - 0.5


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_parts_of_a_step_fit_into_it(case: Case, trained: dict[str, dict[str, list]]) -> None:
    for seconds, busy, wait, reduction in trained[case.name]["ranks"]:
        assert 0 < busy < seconds
        assert wait >= 0
        # Medians of parts need not add up to the median of the whole; they are close to it.
        assert busy + wait + reduction < 1.5 * seconds


def test_losses_are_compared_in_float32_only() -> None:
    with pytest.raises(InputError, match="float32 only"):
        reference_losses(GPT, job(precision=Precision.BFLOAT16), steps=1, microbatch_size=1)
