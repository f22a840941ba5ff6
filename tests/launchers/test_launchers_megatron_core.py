"""Plans are trained by megatron-core itself, with the losses of the whole model in one process."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from core_cases import core_result
from runtime_cases import GPT, LLAMA, TIED_GPT, TIED_LLAMA, gpt, job, llama

from hetplan.comparison.compare import compare
from hetplan.errors import LaunchError
from hetplan.job.spec import Optimizer
from hetplan.launchers.megatron_core import launch_with_core
from hetplan.launchers.run_log import RunLog, append_run
from hetplan.model.numerics import Activation, RotaryScaling, RotaryScalingKind
from hetplan.plans.plan import (
    OverlapSettings,
    Recompute,
    RecomputeGranularity,
    RecomputeModule,
    Sharding,
)
from hetplan.runtime.measured import StepRecord
from hetplan.search.result import SearchResult

pytest.importorskip("megatron.core.package_info", reason="megatron-core is not installed")

STEPS = 5
# Of a loss, relative: the sums are made in another order. 1e-7 was seen.
CLOSE = 1e-6


@pytest.fixture(autouse=True)
def _temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def trained(result: SearchResult) -> RunLog:
    run = launch_with_core(result, steps=STEPS, check_loss=True, timeout_seconds=120)
    assert run.loss_check is not None
    assert run.loss_check.largest_relative_difference < CLOSE, run.loss_check
    assert run.steps[-1].loss < run.steps[0].loss
    assert [step.step for step in run.steps] == list(range(STEPS))
    return run


def processes(module: str) -> Iterator[tuple[int, int]]:
    """(process, rank) of this process's workers."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_text().split("\0")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if module in words and words[-2] == str(os.getpid()):
            yield int(folder.name), int(words[-3])


def test_uneven_stages_learn_as_one_process_and_are_compared(tmp_path: Path) -> None:
    result = core_result(TIED_GPT, ((3,), (1,)), microbatch_size=2)
    run = trained(result)
    assert run.trainer.startswith("megatron-core ")
    assert (run.backend, run.target, run.warmup_steps) == ("gloo", "megatron", 1)
    assert [(rank.rank, rank.stage) for rank in run.ranks] == [(0, 0), (1, 1)]
    for rank in run.ranks:
        assert 0 < rank.busy_seconds < rank.step_seconds
        assert rank.optimizer_seconds > 0
    # A run log that `hetplan compare` reads, with the measured parts of the step.
    append_run(tmp_path / "runs.jsonl", run)
    found = compare((tmp_path / "runs.jsonl",), result)
    assert found.measured.median_seconds == pytest.approx(run.median_step_seconds)
    assert {"busy", "wait", "optimizer_seconds"} <= {timer.timer for timer in found.timers}


def test_four_ranks_cut_layers_and_pipeline() -> None:
    # Two key-value heads on two ranks, a vocabulary that is padded from 61 to 256.
    result = core_result(llama(vocab_size=61), ((3,), (1,)), tp=2, microbatch_size=4)
    run = trained(result)
    places = [(rank.rank, rank.stage, rank.dp_index, rank.tp_index) for rank in run.ranks]
    assert places == [(0, 0, 0, 0), (1, 0, 0, 1), (2, 1, 0, 0), (3, 1, 0, 1)]


def test_data_parallel_ranks_shard_the_optimizer() -> None:
    result = core_result(GPT, ((4,),), dp=2, microbatch_size=2, sharding=Sharding.OPTIMIZER)
    run = trained(result)
    assert [rank.dp_index for rank in run.ranks] == [0, 1]
    assert all(rank.reduction_seconds > 0 for rank in run.ranks)


FULL = Recompute(granularity=RecomputeGranularity.FULL)
FIRST = Recompute(granularity=RecomputeGranularity.FULL, layers=1)
ATTENTION = Recompute(
    granularity=RecomputeGranularity.SELECTIVE, modules=(RecomputeModule.CORE_ATTENTION,)
)
MLP = Recompute(granularity=RecomputeGranularity.SELECTIVE, modules=(RecomputeModule.MLP,))
BESIDE = OverlapSettings(reduction=True, gathering=True)
SHARDED = Sharding.OPTIMIZER


@pytest.mark.slow
@pytest.mark.parametrize(
    "result",
    [
        pytest.param(lambda: core_result(GPT, ((4,),), microbatch_size=2), id="one rank"),
        pytest.param(
            lambda: core_result(
                gpt(tied_embeddings=True, vocab_size=61), ((4,),), tp=2, microbatch_size=4
            ),
            id="tp2, tied in one stage, odd vocabulary",
        ),
        pytest.param(
            lambda: core_result(LLAMA, ((4,),), tp=4, microbatch_size=8),
            id="tp4, fewer key-value heads",
        ),
        pytest.param(
            lambda: core_result(GPT, ((3,), (1,)), tp=2, sequence_parallel=True),
            id="sequence parallel, gpt",
        ),
        pytest.param(
            lambda: core_result(TIED_LLAMA, ((1,), (3,)), tp=2, sequence_parallel=True),
            id="sequence parallel, llama, tied",
        ),
        pytest.param(
            lambda: core_result(TIED_LLAMA, ((3,), (1,)), dp=2, sharding=SHARDED),
            id="pp2 x dp2, tied, sharded",
        ),
        pytest.param(
            lambda: core_result(LLAMA, ((3,), (1,)), dp=2, sharding=SHARDED, overlap=BESIDE),
            id="pp2 x dp2, overlapped reduction and gathering",
        ),
        pytest.param(
            lambda: core_result(GPT, ((3,), (1,)), dp=2, task=job(optimizer=Optimizer.SGD)),
            id="pp2 x dp2, sgd",
        ),
        pytest.param(
            lambda: core_result(LLAMA, ((3,), (1,)), recompute=FULL), id="full recomputation"
        ),
        pytest.param(
            lambda: core_result(LLAMA, ((3,), (1,)), recompute=FIRST), id="of the first layer"
        ),
        pytest.param(
            lambda: core_result(GPT, ((3,), (1,)), recompute=ATTENTION), id="of attention"
        ),
        pytest.param(lambda: core_result(LLAMA, ((3,), (1,)), recompute=MLP), id="of the MLP"),
        pytest.param(
            lambda: core_result(llama(num_layers=10), ((2, 1), (1, 1), (1, 1), (1, 2))),
            id="interleaved, uneven, 4 ranks",
        ),
        pytest.param(
            lambda: core_result(
                TIED_GPT, ((1, 1), (1, 1)), overlap=OverlapSettings(send=True), microbatch_size=2
            ),
            id="interleaved, 2 ranks, sends overlapped, tied",
        ),
    ],
)
def test_every_form_of_plan_learns_as_one_process(result) -> None:
    trained(result())


@pytest.mark.slow
def test_a_models_own_numerics_are_trained() -> None:
    stretched = RotaryScaling(kind=RotaryScalingKind.LLAMA3, factor=8.0)
    other = replace(
        LLAMA,
        norm_epsilon=1e-2,
        rotary_base=500.0,
        rotary_fraction=0.5,
        rotary_scaling=stretched,
        activation=Activation.GELU_TANH,
    )
    losses = []
    for model in (LLAMA, other):
        run = launch_with_core(core_result(model, ((3,), (1,))), steps=3, timeout_seconds=120)
        assert run.steps[-1].loss < run.steps[0].loss
        losses.append(run.steps[0].loss)
    assert abs(losses[1] / losses[0] - 1) > 100 * CLOSE


WORKER = "hetplan.launchers.megatron_core_worker"


@pytest.mark.slow
def test_a_rank_that_dies_ends_the_run() -> None:
    def kill(record: StepRecord) -> None:
        if record.step == 0:
            os.kill(next(pid for pid, rank in processes(WORKER) if rank == 1), signal.SIGKILL)

    with pytest.raises(LaunchError, match="rank 1 was ended by SIGKILL"):
        launch_with_core(core_result(GPT, ((2,), (2,))), steps=10_000, on_step=kill)
    assert not list(processes(WORKER))


@pytest.mark.slow
def test_a_rank_that_hangs_ends_the_run() -> None:
    def stop(record: StepRecord) -> None:
        if record.step == 0:
            os.kill(next(pid for pid, rank in processes(WORKER) if rank == 1), signal.SIGSTOP)

    with pytest.raises(LaunchError, match=r"rank 1 \(cpu, stage 1\) hangs: .* not heard of"):
        launch_with_core(
            core_result(GPT, ((2,), (2,))), steps=10_000, on_step=stop, timeout_seconds=5.0
        )
    assert not list(processes(WORKER))
