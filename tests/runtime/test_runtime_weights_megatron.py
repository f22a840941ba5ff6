"""megatron-core itself loads what is written, and what it saves is read."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from runtime_cases import LLAMA
from safetensors.torch import load_file
from weights_cases import FAMILIES, huggingface_logits, huggingface_model, saved

from hetplan.errors import InputError
from hetplan.model.load import load_model
from hetplan.runtime.weights.convert import Conversion, convert
from hetplan.runtime.weights.distributed import Reader
from hetplan.runtime.weights.folders import Format
from hetplan.runtime.weights.megatron import (
    RELEASE,
    iteration_folder,
    open_megatron,
    read_note,
    write_megatron,
)
from hetplan.runtime.weights.native import open_native
from hetplan.runtime.weights.numerics import megatron_arguments, own_numerics

needs_megatron = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed"
)
pytestmark = pytest.mark.xdist_group("runtime_weights_megatron")


@dataclass(frozen=True)
class Run:
    """A run of megatron-core over some cases."""

    folder: Path
    cases: list[list[Any]]
    models: dict[str, Path]


def converted(base: Path, pieces: int) -> tuple[dict[str, Path], dict[str, Path]]:
    """Hugging Face models, and their Megatron checkpoints in so many slices."""
    models, checkpoints = {}, {}
    for family in FAMILIES:
        models[family] = saved(family, base / family)
        convert(Conversion(source=models[family], out=base / f"n-{family}", to=Format.NATIVE))
        source = open_native(base / f"n-{family}")
        checkpoints[family] = base / f"m-{family}"
        checkpoints[family].mkdir()
        write_megatron(
            checkpoints[family],
            source,
            dtype=None,
            huggingface_config=source.manifest.huggingface_config,
            padded_vocab_size=128,
            arguments=megatron_arguments(source.numerics),
            pieces=pieces,
        )
    return models, checkpoints


def start(folder: Path, ranks: int, cases: list[list[Any]]) -> None:
    (folder / "cases.json").write_text(json.dumps(cases))
    script = Path(__file__).with_name("weights_megatron_ranks.py")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    started = []
    try:
        for rank in range(ranks):
            with (folder / f"{rank}.log").open("wb") as log:
                started.append(
                    subprocess.Popen(
                        [sys.executable, script, str(rank), str(ranks), folder],
                        stdout=log,
                        stderr=log,
                        env=environment,
                    )
                )
        codes = [each.wait(timeout=240) for each in started]
    finally:
        for each in started:
            each.kill()
    logs = "\n".join((folder / f"{rank}.log").read_text()[-3000:] for rank in range(ranks))
    assert codes == [0] * ranks, logs


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("one")
    models, checkpoints = converted(folder, pieces=2)
    # The checkpoints have 128 rows of vocabulary; Megatron-core takes more and fewer.
    cases = [
        [each, str(checkpoints[each] / RELEASE), 1, 1, None, padded]
        for each, padded in zip(FAMILIES, (192, 64, 128), strict=True)
    ]
    start(folder, 1, cases)
    return Run(folder=folder, cases=cases, models=models)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("two")
    models, checkpoints = converted(folder, pieces=1)
    cases = [
        [family, str(checkpoints[family] / RELEASE), tp, pp, layout, 128]
        for family in FAMILIES
        for tp, pp, layout in ((2, 1, None), (1, 2, "Et*3|tL"))
    ]
    start(folder, 2, cases)
    return Run(folder=folder, cases=cases, models=models)


def check_logits(run: Run) -> None:
    for number, (family, *_) in enumerate(run.cases):
        found = torch.load(run.folder / f"logits-{number}.pt", weights_only=True)
        wanted = huggingface_logits(huggingface_model(family))
        assert (found - wanted).abs().max() < 1e-5, run.cases[number]


def check_saved(run: Run, tmp_path: Path) -> None:
    """What megatron-core saved has no note of hetplan's: the config says what it is."""
    for number, (family, *_) in enumerate(run.cases):
        config = run.models[family] / "config.json"
        source = run.folder / f"saved-{number}"
        assert read_note(source) is None
        back = tmp_path / str(number)
        asked = Conversion(source=source, out=back, to=Format.HUGGINGFACE)
        with pytest.raises(InputError, match=r"--model with a config\.json"):
            convert(asked)
        convert(replace(asked, model_file=config))
        one = load_file(run.models[family] / "model.safetensors")
        two = load_file(back / "model.safetensors")
        assert one.keys() == two.keys()
        assert all(torch.equal(one[name], two[name]) for name in one)


@needs_megatron
def test_megatron_core_computes_the_logits_of_transformers(one_rank: Run) -> None:
    check_logits(one_rank)


@needs_megatron
def test_what_megatron_core_saves_is_read_back_bit_by_bit(one_rank: Run, tmp_path: Path) -> None:
    check_saved(one_rank, tmp_path)


@needs_megatron
@pytest.mark.slow
def test_tensor_and_pipeline_parallel_ranks_compute_the_same(
    two_ranks: Run, tmp_path: Path
) -> None:
    check_logits(two_ranks)
    check_saved(two_ranks, tmp_path)


def test_common_state_needs_no_code(tmp_path: Path) -> None:
    """The one pickle that Megatron's format asks for."""
    _, checkpoints = converted(tmp_path, pieces=1)
    common = torch.load(checkpoints["llama"] / RELEASE / "common.pt", weights_only=True)
    assert common == {
        "checkpoint_version": 3.0,
        "iteration": 0,
        "content_metadata": {"singleton_local_shards": False},
    }
    note = read_note(checkpoints["gpt2"])
    assert note is not None
    assert note.padded_vocab_size == 128
    assert "--no-bias-gelu-fusion" in note.arguments


def test_pieces_are_those_of_the_plan(tmp_path: Path) -> None:
    _, checkpoints = converted(tmp_path, pieces=2)
    tensors = Reader(checkpoints["llama"] / RELEASE).tensors
    qkv = tensors["decoder.layers.self_attention.linear_qkv.weight"]
    assert tuple(qkv.size) == (4, 64, 32)
    assert {tuple(each.sizes) for each in qkv.chunks} == {(1, 32, 32)}
    gates = tensors["decoder.layers.mlp.linear_fc1.weight"]
    # Half of the gate, half of up: what one rank of two holds.
    assert {tuple(each.sizes) for each in gates.chunks} == {(1, 24, 32)}
    rows = tensors["decoder.layers.mlp.linear_fc2.weight"]
    assert {tuple(each.sizes) for each in rows.chunks} == {(1, 32, 24)}
    norm = tensors["decoder.final_layernorm.weight"]
    assert {tuple(each.sizes) for each in norm.chunks} == {(32,)}


def test_queries_keys_and_values_stand_group_by_group(tmp_path: Path) -> None:
    """Two groups of two query heads each, heads of 8: q q k v q q k v."""
    from hetplan.runtime.weights.megatron_names import tensors_of

    fused = next(each for each in tensors_of(LLAMA, 64) if each.key.endswith("linear_qkv.weight"))
    query = torch.arange(32.0).reshape(32, 1).expand(32, 32)
    key, value = 100 + query[:16], 200 + query[:16]
    rows = fused.join([query, key, value])[:, 0].reshape(8, 8)[:, 0].tolist()
    assert rows == [0.0, 8.0, 100.0, 200.0, 16.0, 24.0, 108.0, 208.0]
    back = fused.split(fused.join([query, key, value]))
    assert all(torch.equal(one, two) for one, two in zip(back, (query, key, value), strict=True))


def test_faults_of_a_checkpoint(tmp_path: Path) -> None:
    models, checkpoints = converted(tmp_path, pieces=1)
    model = load_model(models["llama"] / "config.json")
    numerics = own_numerics(model)
    folder = checkpoints["llama"]
    deeper = load_model(saved("llama", tmp_path / "deep", num_hidden_layers=6) / "config.json")
    with pytest.raises(InputError, match=r"has shape \(4, 32\); the model's is \(6, 32\)"):
        open_megatron(folder, deeper, numerics)
    with pytest.raises(InputError, match=r"missing tensors: .*layer_norm_bias") as caught:
        open_megatron(folder, load_model(models["gpt2"] / "config.json"), numerics)
    assert "unknown tensors: output_layer.weight" in str(caught.value)
    with pytest.raises(InputError, match="128 rows; the model's vocabulary is 1,000"):
        open_megatron(folder, replace(model, vocab_size=1000), numerics)
    (folder / RELEASE / "metadata.json").write_text('{"sharded_backend": "zarr"}')
    with pytest.raises(InputError, match="the format is 'zarr'"):
        open_megatron(folder, model, numerics)
    (folder / RELEASE / "metadata.json").unlink()
    with pytest.raises(InputError, match="was not finished"):
        iteration_folder(folder)
    (folder / "latest_checkpointed_iteration.txt").write_text("../../etc")
    with pytest.raises(InputError, match="expected release or a number"):
        iteration_folder(folder)
