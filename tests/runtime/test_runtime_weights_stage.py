"""A checkpoint of the reference trainer loads under any plan, whatever plan saved it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from four_ranks_run import run_four_ranks
from hypothesis import given, settings
from hypothesis import strategies as st
from runtime_cases import GPT, LLAMA, ODD_GPT
from torch import Tensor
from weights_cases import single_process, whole
from weights_plans import MODEL, PLANS, SEED, TIED

from hetplan.errors import InputError
from hetplan.model.spec import ModelSpec
from hetplan.plans.plan import LayerRange
from hetplan.profiling.layers import build_layer
from hetplan.runtime.weights.native import MANIFEST
from hetplan.runtime.weights.slices import slices_of
from hetplan.runtime.weights.stage import (
    StagePart,
    finish_save,
    load_stage,
    save_stage,
    stage_tensors,
)
from hetplan.runtime.weights.tensors import weights_of

# One process group saves all checkpoints: keep its tests in one process of pytest-xdist too.
pytestmark = pytest.mark.xdist_group("runtime_weights")


def slices(model: ModelSpec, part: StagePart, seed: int) -> dict[str, Tensor]:
    """What a rank starts from with this seed, or is to hold after loading."""
    found = {}
    for position in range(part.layers.start, part.layers.stop):
        layer = build_layer(
            model,
            position,
            tp=part.tp,
            tp_rank=part.tp_index,
            group=None,
            seed=seed,
            dtype=torch.float32,
            device="cpu",
        )
        for name, parameter in layer.named_parameters():
            found[f"layers.{position}.{name}"] = parameter.detach()
    return found


def save_whole(folder: Path, model: ModelSpec, seed: int = SEED) -> None:
    part = whole(model)
    tensors = stage_tensors(single_process(model, seed), part.layers)
    save_stage(folder, model, part, {"weights": tensors}, group=None)
    finish_save(folder, model, step=4, states=("weights",), group=None)


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints that four processes saved together, one per plan."""
    folder = tmp_path_factory.mktemp("ranks")
    script = Path(__file__).with_name("weights_ranks.py")
    run_four_ranks(script, folder)
    return folder


@pytest.mark.parametrize("name", PLANS)
def test_what_four_ranks_saved_loads_in_one_and_under_other_plans(
    name: str, four_ranks: Path
) -> None:
    model = TIED if "tied" in name else MODEL
    for tp, layers in ((1, (0, 6)), (2, (2, 6)), (4, (0, 3)), (4, (5, 6))):
        for tp_index in range(tp):
            part = StagePart(
                layers=LayerRange(start=layers[0], stop=layers[1]),
                tp=tp,
                tp_index=tp_index,
                dp_index=1,
            )
            wanted = slices(model, part, SEED)
            states = {
                state: {key: torch.full_like(each, 9.0) for key, each in wanted.items()}
                for state in ("weights", "exp_avg")
            }
            manifest = load_stage(four_ranks / name, model, part, states)
            assert (manifest.step, manifest.states) == (7, ("weights", "exp_avg"))
            for key, tensor in wanted.items():
                assert torch.equal(states["weights"][key], tensor), key
                assert torch.equal(states["exp_avg"][key], tensor * 2), key


def test_no_two_ranks_write_the_same(four_ranks: Path) -> None:
    """The ranks' files together are little more than the weights and their state."""
    for name in PLANS:
        model = TIED if "tied" in name else MODEL
        size = sum(file.stat().st_size for file in (four_ranks / name).glob("*.distcp"))
        elements = model.parameter_count
        # torch.save puts about 1.1 kB around every chunk.
        chunks = 2 * 4 * len(weights_of(model))
        assert 8 * elements < size < 8 * elements + 1600 * chunks


@given(
    tp=st.sampled_from([1, 2, 4]),
    model=st.sampled_from([LLAMA, MODEL, GPT, ODD_GPT, TIED]),
)
@settings(deadline=None, max_examples=20)
def test_first_slices_tile_every_weight_once(tp: int, model: ModelSpec) -> None:
    counts = {weight.key: torch.zeros(weight.shape) for weight in weights_of(model)}
    for tp_index in range(tp):
        part = replace(whole(model), tp=tp, tp_index=tp_index)
        for piece in slices_of(model, part.layers, tp=tp, tp_index=tp_index):
            if piece.first and 0 not in piece.shape:
                place = tuple(
                    slice(start, start + length)
                    for start, length in zip(piece.offsets, piece.shape, strict=True)
                )
                counts[piece.weight.key][place] += 1
    for key, count in counts.items():
        assert (count == 1).all(), key


def test_a_lower_precision_rounds(tmp_path: Path) -> None:
    save_whole(tmp_path / "a", MODEL)
    part = replace(whole(MODEL), tp=2, tp_index=1)
    wanted = slices(MODEL, part, SEED)
    found = {key: torch.empty_like(each, dtype=torch.bfloat16) for key, each in wanted.items()}
    load_stage(tmp_path / "a", MODEL, part, {"weights": found})
    for key, tensor in wanted.items():
        assert torch.equal(found[key], tensor.bfloat16())


def test_faults_of_saving_and_loading(tmp_path: Path) -> None:
    save_whole(tmp_path / "a", MODEL)
    with pytest.raises(InputError, match="never replaced"):
        save_whole(tmp_path / "a", MODEL)
    part = whole(MODEL)
    tensors = slices(MODEL, part, SEED)
    with pytest.raises(InputError, match="it lacks exp_avg"):
        load_stage(tmp_path / "a", MODEL, part, {"exp_avg": tensors})
    with pytest.raises(InputError, match="whose shape is not that of"):
        load_stage(tmp_path / "a", TIED, whole(TIED), {"weights": tensors})
    wrong = tensors | {"layers.2.up_weight": torch.zeros(3)}
    with pytest.raises(InputError, match=r"layers\.2\.up_weight has shape \(3,\)"):
        load_stage(tmp_path / "a", MODEL, part, {"weights": wrong})
    with pytest.raises(InputError, match=r"layers\.2\.up_weight has shape \(3,\)"):
        save_stage(tmp_path / "b", MODEL, part, {"weights": wrong}, group=None)
    with pytest.raises(InputError, match=r"hetplan-checkpoint\.json"):
        load_stage(tmp_path / "nowhere", MODEL, part, {"weights": tensors})


def test_a_save_without_its_other_half_is_no_checkpoint(tmp_path: Path) -> None:
    """The half that holds layers 3 and on was not saved, so nothing gets the name."""
    layers = LayerRange(start=0, stop=3)
    part = replace(whole(MODEL), layers=layers)
    save_stage(tmp_path / "a", MODEL, part, {"weights": slices(MODEL, part, SEED)}, group=None)
    assert not (tmp_path / "a").exists()
    with pytest.raises(InputError, match=r"missing tensors: layers\.3\."):
        finish_save(tmp_path / "a", MODEL, step=1, states=("weights",), group=None)
    assert not (tmp_path / "a").exists()
    # What is left over does not hinder the next save.
    save_whole(tmp_path / "a", MODEL)
    assert (tmp_path / "a" / MANIFEST).is_file()
    assert [each.name for each in tmp_path.iterdir()] == ["a"]
