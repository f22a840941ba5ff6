"""A training that is saved under one plan goes on under another as if nothing had happened."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from checkpoints_ranks import MOVES, SAVED_STEPS, STEPS, Move, main
from forked_ranks import run_ranks
from runtime_cases import CASES_NORM

from hetplan.job.spec import Precision
from hetplan.profiling.weights import RULE_STATES
from hetplan.runtime import gradients
from hetplan.runtime.checkpoint_contents import read_manifest, state_key
from hetplan.runtime.checkpoint_format import Reader
from hetplan.runtime.checkpoints import last_checkpoint, step_folder, trained_job
from hetplan.runtime.placement import place_ranks
from hetplan.runtime.single import reference_losses
from hetplan.runtime.weight_slices import weights_of

# One process group trains all cases: keep its tests in one process of pytest-xdist too.
pytestmark = pytest.mark.xdist_group("runtime_checkpoints")

SMOKE = MOVES[3]
each_move = pytest.mark.parametrize(
    "move",
    [pytest.param(move, marks=() if move is SMOKE else pytest.mark.slow) for move in MOVES],
    ids=lambda move: move.name,
)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Move], Path]:
    """What four processes trained, saved and loaded together: one move, or all others."""

    @cache
    def of_tier(smoke: bool) -> Path:
        made = tmp_path_factory.mktemp("ranks")
        for name in ("same", "other"):
            (made / name).mkdir()
        moves = [move for move in MOVES if (move is SMOKE) == smoke]
        run_ranks(partial(main, moves), made, seconds=500.0)
        return made

    return lambda move: of_tier(move is SMOKE)


@each_move
def test_the_losses_go_on_under_the_other_plan(
    move: Move, folder_of: Callable[[Move], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_of(move)
    monkeypatch.setattr(gradients, "MAX_NORM", CASES_NORM)
    first = json.loads((folder / "0.json").read_text())[move.name]
    if move.job.precision is Precision.FLOAT32:
        tolerance = 1e-5
        expected = reference_losses(move.model, move.job, steps=STEPS, microbatch_size=4)
    else:
        # The sharded sum adds in another order, and bfloat16 keeps 8 bits of it.
        tolerance = 2e-3
        expected = tuple(loss for _, loss in first["undisturbed"])
    for rank in range(4):
        told = json.loads((folder / f"{rank}.json").read_text())[move.name]
        for part, plan, steps in (
            ("before", move.before, range(SAVED_STEPS)),
            ("after", move.after, range(SAVED_STEPS, STEPS)),
        ):
            if rank >= len(place_ranks(plan)):
                assert told[part] is None
                continue
            assert [step for step, _ in told[part]] == list(steps)
            losses = [loss for _, loss in told[part]]
            assert losses == pytest.approx([expected[step] for step in steps], rel=tolerance)


@each_move
def test_what_is_loaded_and_saved_again_is_the_same_bit_by_bit(
    move: Move, folder_of: Callable[[Move], Path]
) -> None:
    """Every state of every weight, under the plan that saved it and under the other."""
    folder = folder_of(move)
    source = step_folder(folder / move.name, SAVED_STEPS)
    first, manifest = Reader(source), read_manifest(source)
    states = ("weights", *RULE_STATES[move.job.optimizer])
    assert (manifest.step, manifest.states) == (SAVED_STEPS, states)
    assert manifest.trained == trained_job(move.job)
    count = 0
    for copy in (folder / name / move.name for name in ("same", "other")):
        assert read_manifest(copy) == manifest
        again = Reader(copy)
        for state in states:
            for weight in weights_of(move.model):
                key = state_key(state, weight)
                one, two = first.read(key), again.read(key)
                assert one.dtype == two.dtype == torch.float32
                assert torch.equal(one, two), key
                count += int(one.any())
    # Zeros could not be told from states that were never read.
    assert count > len(states) * len(weights_of(move.model))
    # One checkpoint stays where one is kept.
    later = folder / "later" / move.name
    assert last_checkpoint(later) == step_folder(later, STEPS)
    assert [each.name for each in later.iterdir()] == [f"step-{STEPS:08d}"]
