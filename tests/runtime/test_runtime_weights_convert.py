"""Conversions: equal logits, equal bits after a round trip, every tensor accounted for."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import weights_cases
from safetensors.torch import load_file, save_file
from weights_cases import FAMILIES, huggingface_logits, huggingface_model, native_logits, saved

from hetplan.errors import InputError
from hetplan.model.load import load_model
from hetplan.model.numerics import OWN_NORM_EPSILON, RotaryScaling, RotaryScalingKind
from hetplan.model.spec import ModelSpec
from hetplan.runtime.weights import huggingface
from hetplan.runtime.weights import native as native_module
from hetplan.runtime.weights.convert import Conversion, Converted, convert
from hetplan.runtime.weights.folders import Format, format_of
from hetplan.runtime.weights.huggingface import open_huggingface, write_huggingface
from hetplan.runtime.weights.numerics import (
    Llama3Scaling,
    Numerics,
    megatron_arguments,
    megatron_differences,
    numerics_of_model,
    own_numerics,
)
from hetplan.runtime.weights.tensors import unlike_parts


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("huggingface")
    return {family: saved(family, base / family) for family in FAMILIES}


def do(source: Path, out: Path, to: Format, **more: object) -> Converted:
    return convert(Conversion(source=source, out=out, to=to, **more))  # type: ignore[arg-type]


def hf_tensors(folder: Path) -> dict[str, torch.Tensor]:
    found = {}
    for file in folder.glob("*.safetensors"):
        found.update(load_file(file))
    return found


def assert_same(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> None:
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        assert tensor.dtype == two[name].dtype
        assert torch.equal(tensor, two[name]), name


@pytest.mark.parametrize("family", FAMILIES)
def test_native_weights_give_the_logits_of_transformers(
    family: str, models: dict[str, Path], tmp_path: Path
) -> None:
    done = do(models[family], tmp_path / "native", Format.NATIVE)
    model = load_model(models[family] / "config.json")
    wanted = huggingface_logits(huggingface_model(family))
    found = native_logits(tmp_path / "native", model)
    assert (found - wanted).abs().max() < 1e-5
    assert wanted.std() > 0.1  # else any two would agree
    assert done.parameter_count == model.parameter_count
    assert done.dtypes == ("float32",)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("way", [Format.NATIVE, Format.MEGATRON])
def test_a_round_trip_changes_no_bit(
    family: str, way: Format, models: dict[str, Path], tmp_path: Path
) -> None:
    do(models[family], tmp_path / "there", way)
    assert format_of(tmp_path / "there") is way
    do(tmp_path / "there", tmp_path / "back", Format.HUGGINGFACE)
    assert_same(hf_tensors(models[family]), hf_tensors(tmp_path / "back"))
    config = (models[family] / "config.json").read_text()
    assert (tmp_path / "back" / "config.json").read_text() == config


def test_the_long_way_round_and_bfloat16(models: dict[str, Path], tmp_path: Path) -> None:
    do(models["llama"], tmp_path / "a", Format.MEGATRON, dtype="bfloat16", iteration=12)
    assert (tmp_path / "a" / "iter_0000012" / "metadata.json").is_file()
    assert (tmp_path / "a" / "latest_checkpointed_iteration.txt").read_text() == "12"
    do(tmp_path / "a", tmp_path / "b", Format.NATIVE)
    done = do(tmp_path / "b", tmp_path / "c", Format.HUGGINGFACE)
    assert done.dtypes == ("bfloat16",)
    wanted = {name: tensor.bfloat16() for name, tensor in hf_tensors(models["llama"]).items()}
    assert_same(wanted, hf_tensors(tmp_path / "c"))


def test_transformers_reads_what_is_written_in_shards(
    models: dict[str, Path], tmp_path: Path
) -> None:
    """Also with a config that is made from the model instead of kept."""
    from transformers import AutoModelForCausalLM

    for family in FAMILIES:
        source = open_huggingface(models[family])
        out = tmp_path / family
        out.mkdir()
        write_huggingface(out, source, dtype=None, huggingface_config=None, most_shard_bytes=20_000)
        assert len(list(out.glob("*.safetensors"))) > 3
        again = open_huggingface(out)
        assert replace(again.model, name=source.model.name) == source.model
        assert again.numerics == source.numerics
        read = AutoModelForCausalLM.from_pretrained(out).eval()
        wanted = huggingface_logits(huggingface_model(family))
        assert torch.equal(huggingface_logits(read), wanted)


@pytest.mark.parametrize(
    ("family", "changes", "word"),
    [
        ("llama", {"rms_norm_eps": 1e-6}, "epsilon"),
        ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, "rotary base"),
        ("gpt2", {"activation_function": "gelu_new"}, "gelu_tanh"),
    ],
)
def test_what_would_compute_otherwise_is_refused(
    family: str, changes: dict[str, object], word: str, tmp_path: Path
) -> None:
    source = saved(family, tmp_path / "hf", **changes)
    with pytest.raises(InputError, match=word):
        do(source, tmp_path / "out", Format.NATIVE)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["hf"]
    done = do(source, tmp_path / "out", Format.NATIVE, inexact=True)
    assert word in done.differences[0]
    # The logits do differ, so the refusal is no formality.
    model = load_model(source / "config.json")
    wanted = huggingface_logits(huggingface_model(family, **changes))
    assert (native_logits(tmp_path / "out", model) - wanted).abs().max() > 1e-6


def test_megatron_is_told_the_constants() -> None:
    model = load_model_of("llama")
    usual = own_numerics(model)
    stretched = replace(
        usual,
        rotary_base=500000.0,
        rotary_scaling=Llama3Scaling(
            factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_length=8192
        ),
    )
    arguments = megatron_arguments(stretched)
    assert "--rotary-base 500000" in arguments
    assert "--rope-scaling-factor 8" in arguments
    assert megatron_differences(stretched) == ()
    told = stretched.rotary_scaling
    assert told is not None
    # pretrain_gpt.py passes over --rope-scaling-factor, and has no arguments for the others.
    for odd in (replace(told, factor=32.0), replace(told, low_freq_factor=2.0)):
        assert megatron_differences(replace(stretched, rotary_scaling=odd))


def test_a_model_file_says_the_constants_that_it_has() -> None:
    bare = load_model_of("llama")
    assert numerics_of_model(bare) == own_numerics(bare)
    llama3 = RotaryScaling(kind=RotaryScalingKind.LLAMA3, factor=32.0)
    said = replace(bare, norm_epsilon=1e-6, rotary_base=5e5, rotary_scaling=llama3)
    found = numerics_of_model(said)
    assert (found.norm_epsilon, found.rotary_base, found.activation) == (1e-6, 5e5, "silu")
    assert found.rotary_scaling == Llama3Scaling(
        factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_length=8192
    )
    for odd in (
        replace(bare, rotary_fraction=0.5),
        replace(bare, rotary_scaling=RotaryScaling(kind=RotaryScalingKind.YARN, factor=4.0)),
    ):
        with pytest.raises(InputError, match="rotary"):
            numerics_of_model(odd)


def test_a_plan_whose_model_says_no_constants_fits_the_weights() -> None:
    bare = load_model_of("llama")
    said = replace(bare, name="other", norm_epsilon=1e-6)
    assert unlike_parts(bare, said) == ()
    assert unlike_parts(replace(bare, norm_epsilon=1e-5), said) == ("norm_epsilon",)
    assert unlike_parts(replace(bare, vocab_size=bare.vocab_size + 1), said) == ("shape",)


def load_model_of(family: str) -> ModelSpec:
    from runtime_cases import LLAMA

    assert family == "llama"
    return LLAMA


def changed(source: Path, out: Path, edit: str) -> Path:
    """A copy of the folder whose tensors are spoilt in one way."""
    shutil.copytree(source, out)
    tensors = load_file(out / "model.safetensors")
    if edit == "missing":
        del tensors["model.layers.2.mlp.up_proj.weight"]
    elif edit == "unknown":
        tensors["model.layers.2.mlp.experts.weight"] = torch.zeros(3)
    elif edit == "shape":
        tensors["model.norm.weight"] = torch.zeros(31)
    save_file(tensors, out / "model.safetensors")
    return out


@pytest.mark.parametrize(
    ("edit", "name"),
    [
        ("missing", "missing tensors: model.layers.2.mlp.up_proj.weight"),
        ("unknown", "unknown tensors: model.layers.2.mlp.experts.weight"),
        ("shape", r"model.norm.weight: has shape \(31,\); the model's is \(32,\)"),
    ],
)
def test_every_tensor_is_accounted_for(
    edit: str, name: str, models: dict[str, Path], tmp_path: Path
) -> None:
    source = changed(models["llama"], tmp_path / "hf", edit)
    with pytest.raises(InputError, match=name):
        do(source, tmp_path / "out", Format.NATIVE)
    assert not (tmp_path / "out").exists()


def test_a_tied_head_that_is_written_out_must_be_the_embedding(
    models: dict[str, Path], tmp_path: Path
) -> None:
    out = tmp_path / "hf"
    shutil.copytree(models["llama-tied"], out)
    tensors = load_file(out / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, out / "model.safetensors")
    do(out, tmp_path / "ok", Format.NATIVE)
    tensors["lm_head.weight"][3, 3] += 1
    save_file(tensors, out / "model.safetensors")
    with pytest.raises(InputError, match=r"lm_head.weight: differs from the embedding"):
        do(out, tmp_path / "no", Format.NATIVE)


def test_gpt2_without_its_prefix_and_with_old_buffers(
    models: dict[str, Path], tmp_path: Path
) -> None:
    out = tmp_path / "gpt2"
    shutil.copytree(models["gpt2"], out)
    tensors = {
        name.removeprefix("transformer."): tensor
        for name, tensor in load_file(out / "model.safetensors").items()
    }
    tensors["h.0.attn.bias"] = torch.ones(1, 1, 16, 16)
    save_file(tensors, out / "model.safetensors")
    do(out, tmp_path / "native", Format.NATIVE)
    do(tmp_path / "native", tmp_path / "back", Format.HUGGINGFACE)
    assert_same(hf_tensors(models["gpt2"]), hf_tensors(tmp_path / "back"))


def test_an_interrupted_conversion_leaves_nothing(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = 0
    read = huggingface.HuggingFaceSource.read

    def interrupted(self: object, weight: object) -> torch.Tensor:
        nonlocal done
        done += 1
        if done == 20:
            raise KeyboardInterrupt
        return read(self, weight)  # type: ignore[arg-type]

    monkeypatch.setattr(huggingface.HuggingFaceSource, "read", interrupted)
    for to in Format:
        done = 0
        with pytest.raises(KeyboardInterrupt):
            do(models["llama"], tmp_path / "out", to)
        assert done == 20
        assert list(tmp_path.iterdir()) == []


def test_what_is_there_stays(models: dict[str, Path], tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    notes.mkdir()
    (notes / "diary.txt").write_text("mine")
    with pytest.raises(InputError, match="exists; nothing was changed"):
        do(models["llama"], notes, Format.NATIVE)
    with pytest.raises(InputError, match="holds no weights"):
        do(models["llama"], notes, Format.NATIVE, force=True)
    assert [each.name for each in notes.iterdir()] == ["diary.txt"]
    out = tmp_path / "out"
    do(models["llama"], out, Format.NATIVE)
    before = sorted((each.name, each.stat().st_mtime_ns) for each in out.iterdir())
    with pytest.raises(InputError, match="--force"):
        do(models["gpt2"], out, Format.MEGATRON)
    assert sorted((each.name, each.stat().st_mtime_ns) for each in out.iterdir()) == before
    do(models["gpt2"], out, Format.MEGATRON, force=True)
    assert format_of(out) is Format.MEGATRON
    assert sorted(each.name for each in tmp_path.iterdir()) == ["notes", "out"]
    with pytest.raises(InputError, match="is what is read"):
        do(out, out, Format.NATIVE, force=True)
    with pytest.raises(InputError, match="parent folder does not exist"):
        do(out, tmp_path / "no" / "where", Format.NATIVE)


def test_foreign_formats_are_refused_with_the_reason(
    models: dict[str, Path], tmp_path: Path
) -> None:
    legacy = tmp_path / "legacy"
    (legacy / "iter_0000010" / "mp_rank_00_001").mkdir(parents=True)
    (legacy / "latest_checkpointed_iteration.txt").write_text("10")
    with pytest.raises(InputError, match="one pickle per rank"):
        do(legacy, tmp_path / "out", Format.NATIVE)
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    (pickled / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(InputError, match="is a pickle, which can run code"):
        do(pickled, tmp_path / "out", Format.NATIVE)
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="holds no weights that are known"):
        do(tmp_path / "empty", tmp_path / "out", Format.NATIVE)
    with pytest.raises(InputError, match="no such folder"):
        do(tmp_path / "nowhere", tmp_path / "out", Format.NATIVE)
    other = tmp_path / "qwen"
    shutil.copytree(models["llama"], other)
    config = json.loads((other / "config.json").read_text()) | {"model_type": "qwen2"}
    (other / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match="weights are converted of llama, mistral, gpt2"):
        do(other, tmp_path / "out", Format.NATIVE)


@pytest.mark.parametrize(
    ("spoil", "word"),
    [
        (lambda data: data[:-10], "other"),
        (lambda data: b"\xff" * 8 + data[8:], "header length"),
        (lambda data: data[:8] + b"x" * 20 + data[28:], "no JSON"),
        (lambda data: data.replace(b'"F32"', b'"F99"', 1), "F99"),
    ],
)
def test_damaged_files_are_named(
    spoil: object, word: str, models: dict[str, Path], tmp_path: Path
) -> None:
    shutil.copytree(models["llama"], tmp_path / "hf")
    file = tmp_path / "hf" / "model.safetensors"
    file.write_bytes(spoil(file.read_bytes()))  # type: ignore[operator]
    with pytest.raises(InputError, match=word) as caught:
        do(tmp_path / "hf", tmp_path / "out", Format.NATIVE)
    assert caught.value.faults[0].file == str(file)


def test_a_native_checkpoint_of_another_model_is_refused(
    models: dict[str, Path], tmp_path: Path
) -> None:
    do(models["llama"], tmp_path / "native", Format.NATIVE)
    text = (tmp_path / "native" / native_module.MANIFEST).read_text()
    (tmp_path / "native" / native_module.MANIFEST).write_text(
        text.replace('"ffn_hidden_size": 48', '"ffn_hidden_size": 64')
    )
    with pytest.raises(InputError, match=r"gate_weight: has shape \(48, 32\)"):
        do(tmp_path / "native", tmp_path / "out", Format.HUGGINGFACE)


def test_numerics_of_a_config_without_keys_are_its_class_defaults(tmp_path: Path) -> None:
    """As transformers' own configuration classes have them."""
    from transformers import GPT2Config, LlamaConfig

    from hetplan.files.reading import read_document
    from hetplan.runtime.weights.numerics import numerics_of_config

    def bare(name: str) -> Numerics:
        file = tmp_path / f"{name}.json"
        file.write_text(json.dumps({"model_type": name}))
        return numerics_of_config(read_document(file))

    llama, gpt = LlamaConfig(), GPT2Config()
    assert bare("llama").norm_epsilon == llama.rms_norm_eps
    assert bare("llama").rotary_base == llama.rope_parameters["rope_theta"]
    assert bare("gpt2").norm_epsilon == gpt.layer_norm_epsilon
    assert gpt.activation_function == "gelu_new"
    assert bare("gpt2").activation == "gelu_tanh"
    assert weights_cases.LLAMA["rms_norm_eps"] == OWN_NORM_EPSILON
