"""Folders of weights as damage, mistakes and two users at one time leave them."""

from __future__ import annotations

import json
import multiprocessing
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from weights_cases import saved

from hetplan.errors import InputError
from hetplan.runtime.weights.convert import Conversion, Converted, convert
from hetplan.runtime.weights.folders import Format, whole_folder

NORM = "model.norm.weight"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved("llama", tmp_path_factory.mktemp("huggingface") / "llama")


@pytest.fixture
def copy(llama: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(llama, tmp_path / "hf"))


def do(source: Path, out: Path, to: Format = Format.NATIVE, **more: object) -> Converted:
    return convert(Conversion(source=source, out=out, to=to, **more))  # type: ignore[arg-type]


def change_header(file: Path, change: Callable[[dict[str, dict[str, object]]], object]) -> None:
    """Rewrite the header of a safetensors file; the bytes behind it stay."""
    data = file.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    found = change(header)
    text = found if isinstance(found, bytes) else json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


def overlap(header: dict[str, dict[str, object]]) -> None:
    name = "model.layers.1.self_attn.q_proj.weight"
    header[name]["data_offsets"] = header[name.replace("1", "0")]["data_offsets"]


def twice(header: dict[str, dict[str, object]]) -> bytes:
    again = json.dumps({NORM: header["model.layers.0.input_layernorm.weight"]})
    return (json.dumps(header)[:-1] + "," + again[1:]).encode()


@pytest.mark.parametrize(
    ("change", "words"), [(overlap, "leaves a hole"), (twice, "stands there twice")]
)
def test_a_header_whose_tensors_share_bytes_or_names(
    change: Callable[[dict[str, dict[str, object]]], object],
    words: str,
    copy: Path,
    tmp_path: Path,
) -> None:
    change_header(copy / "model.safetensors", change)
    with pytest.raises(InputError, match=words):
        do(copy, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_bytes_behind_the_last_tensor(copy: Path, tmp_path: Path) -> None:
    with (copy / "model.safetensors").open("ab") as stream:
        stream.write(b"more")
    with pytest.raises(InputError, match="holds 4 bytes behind its last tensor"):
        do(copy, tmp_path / "out")


def test_a_name_that_would_move_the_cursor(copy: Path, tmp_path: Path) -> None:
    tensors = load_file(copy / "model.safetensors")
    save_file(tensors | {"\x1b[2J": torch.zeros(1)}, copy / "model.safetensors")
    with pytest.raises(InputError, match="unknown tensors: ") as caught:
        do(copy, tmp_path / "out")
    assert str(caught.value).replace("\n", "").isprintable()


def sharded(folder: Path) -> dict[str, object]:
    """Cut the file into a.safetensors and b.safetensors; the index of the two."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    placed = {name: "ab"[at % 2] + ".safetensors" for at, name in enumerate(names)}
    for file in ("a.safetensors", "b.safetensors"):
        save_file({name: tensors[name] for name in names if placed[name] == file}, folder / file)
    return {"metadata": {}, "weight_map": placed}


def write_index(folder: Path, index: object) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def test_the_index_says_which_of_two_tensors_counts(copy: Path, tmp_path: Path) -> None:
    index = sharded(copy)
    placed: dict[str, str] = index["weight_map"]  # type: ignore[assignment]
    right = placed[NORM]
    other = "b.safetensors" if right == "a.safetensors" else "a.safetensors"
    stale = load_file(copy / other) | {NORM: torch.zeros(32)}
    save_file(stale, copy / other)
    write_index(copy, index)
    for name in ("one", "two"):
        do(copy, tmp_path / name)
        do(tmp_path / name, tmp_path / f"{name}-back", Format.HUGGINGFACE)
        back = load_file(tmp_path / f"{name}-back" / "model.safetensors")
        assert torch.equal(back[NORM], torch.zeros(32)) == (name == "two")
        placed[NORM] = other
        write_index(copy, index)


def test_an_index_that_names_the_wrong_file(copy: Path, tmp_path: Path) -> None:
    index = sharded(copy)
    placed: dict[str, str] = index["weight_map"]  # type: ignore[assignment]
    placed[NORM] = "b.safetensors" if placed[NORM] == "a.safetensors" else "a.safetensors"
    write_index(copy, index)
    with pytest.raises(InputError, match=f"{NORM}: another file holds that"):
        do(copy, tmp_path / "out")
    for name in ("../../x.safetensors", "x" * 5000, "a.safetensors\0", "..", "", "\n"):
        placed[NORM] = name
        write_index(copy, index)
        with pytest.raises(InputError, match=r"is no file of this folder|is not there"):
            do(copy, tmp_path / "out")


def test_links_that_lead_nowhere(copy: Path, tmp_path: Path) -> None:
    file = copy / "model.safetensors"
    for target in (tmp_path / "nowhere", file):
        file.unlink()
        file.symlink_to(target)
        with pytest.raises(InputError, match=r"cannot be read|holds no weights"):
            do(copy, tmp_path / "out")


def test_codes_of_a_quantized_model_are_no_weights(copy: Path, tmp_path: Path) -> None:
    tensors = load_file(copy / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj.weight"
    save_file(tensors | {name: tensors[name].to(torch.int8)}, copy / "model.safetensors")
    for to in Format:
        with pytest.raises(InputError, match=r"int8 is no format .*layers.1.query_weight"):
            do(copy, tmp_path / "out", to)


def test_values_that_are_no_numbers_or_too_large(copy: Path, tmp_path: Path) -> None:
    tensors = load_file(copy / "model.safetensors")
    tensors[NORM][3] = 1e30
    save_file(tensors, copy / "model.safetensors")
    assert do(copy, tmp_path / "fits", dtype="bfloat16").not_finite == ()
    with pytest.raises(InputError, match=r"layers.5.norm_weight: holds 1e\+30, .* as float16"):
        do(copy, tmp_path / "out", dtype="float16")
    for value in (float("nan"), float("-inf")):
        tensors[NORM][3] = value
        save_file(tensors, copy / "model.safetensors")
        done = do(copy, tmp_path / f"odd{value}", dtype="float16")
        assert done.not_finite == ("layers.5.norm_weight",)


def test_force_loses_no_foreign_file(llama: Path, tmp_path: Path) -> None:
    for to in Format:
        out = tmp_path / f"out-{to}"
        do(llama, out, to)
        do(llama, out, to, force=True)
        for name in ("diary.txt", "iter_0000100/common.pt", "other/model.safetensors"):
            mine = out / name
            mine.parent.mkdir(exist_ok=True)
            mine.write_text("mine")
            with pytest.raises(InputError, match="--force would lose it") as caught:
                do(llama, out, to, force=True)
            assert name.partition("/")[0] in str(caught.value)
            assert mine.read_text() == "mine"
            mine.unlink()
            if mine.parent != out:
                mine.parent.rmdir()
        do(llama, out, to, force=True)
    # A training run of Megatron-LM has the same files, and no note of hetplan's.
    (tmp_path / "out-megatron" / "hetplan-weights.json").unlink()
    with pytest.raises(InputError, match="release/"):
        do(llama, tmp_path / "out-megatron", Format.MEGATRON, force=True)


def _convert(source: Path, out: Path, force: bool, answers: multiprocessing.Queue[str]) -> None:
    try:
        do(source, out, force=force)
        answers.put("done")
    except InputError as error:
        answers.put(str(error))


def test_the_first_of_two_conversions_stays(llama: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"

    def second() -> None:
        with whole_folder(out, force=False):
            do(llama, out)

    with pytest.raises(InputError, match="exists; nothing was changed"):
        second()
    assert do(out, tmp_path / "back", Format.HUGGINGFACE).num_weights > 0
    assert sorted(each.name for each in tmp_path.iterdir()) == ["back", "out"]


@pytest.mark.slow
@pytest.mark.parametrize("force", [False, True])
def test_conversions_at_one_time_leave_one_whole_folder(
    llama: Path, tmp_path: Path, force: bool
) -> None:
    out = tmp_path / "out"
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    members = [context.Process(target=_convert, args=(llama, out, force, answers)) for _ in "abcd"]
    for each in members:
        each.start()
    found = [answers.get(timeout=120) for _ in members]
    for each in members:
        each.join()
    assert found.count("done") == (4 if force else 1)
    assert do(out, tmp_path / "back", Format.HUGGINGFACE).num_weights > 0
    assert sorted(each.name for each in tmp_path.iterdir()) == ["back", "out"]
