"""Rows of layers are dealt into units where they repeat, and refused where they do not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hetplan.files.shipped import shipped_folder
from hetplan.model.layer_units import LayerUnits, layer_units
from hetplan.model.layers import Attention, LayerRun, Mlp, Norm, TransformerLayer
from hetplan.model.load import load_model
from hetplan.model.spec import ModelSpec


def model(row: str) -> ModelSpec:
    """A model with one layer per letter; letters differ in the width of their MLP."""
    return ModelSpec(
        name="letters",
        hidden_size=64,
        vocab_size=100,
        max_sequence_length=32,
        layer_runs=tuple(LayerRun(count=1, layer=_layer(16 * (1 + ord(at) % 32))) for at in row),
        final_norm=Norm.RMS_NORM,
    )


def _layer(width: int) -> TransformerLayer:
    return TransformerLayer(
        attention=Attention(num_heads=4, num_kv_heads=4, head_dim=16),
        mlp=Mlp(ffn_hidden_size=width, gated=True, bias=False),
        norm=Norm.RMS_NORM,
    )


@pytest.mark.parametrize(
    ("row", "count", "each", "front", "back"),
    [
        ("a", 1, 1, 0, 0),
        ("aaabbbbb", 5, 1, 3, 0),
        ("bbbbba", 5, 1, 0, 1),
        ("abababa", 3, 2, 0, 1),
        ("aaaaabaaaaabaa", 2, 6, 0, 2),
        ("aaabaabaab", 3, 3, 1, 0),
        ("abbbbbc", 5, 1, 1, 1),
    ],
)
def test_units_of_a_row(row: str, count: int, each: int, front: int, back: int) -> None:
    wanted = LayerUnits(count=count, layers_per_unit=each, front_layers=front, back_layers=back)
    found = layer_units(model(row), 32)
    assert found == wanted
    assert found is not None
    letters = [row[at - 1] for at in found.unit_positions]
    middle = row[front : len(row) - back]
    assert middle == "".join(letters) * count
    assert [row[at - 1] for at in found.front_positions] == list(row[:front])
    assert [row[at - 1] for at in found.back_positions] == list(row[len(row) - back :])
    assert found.layers(count, first=True, last=True) == len(row)
    assert found.layers(1, first=False, last=False) == each


@pytest.mark.parametrize("row", ["abc", "aaabaa", "abcdab", "aabbc"])
def test_rows_without_a_pattern_have_no_units(row: str) -> None:
    found = layer_units(model(row), 32)
    assert found is None or row == "aabbc"


def test_long_rows_of_two_kinds_take_no_time() -> None:
    runs = [LayerRun(count=20_000, layer=_layer(width)) for width in (16, 32)]
    found = layer_units(replace(model("a"), layer_runs=tuple(runs)), 32)
    assert found is not None
    assert (found.count, found.front_layers + found.back_layers) == (20_000, 20_000)


def test_deepseek_v3_is_cut_behind_its_dense_layers() -> None:
    found = layer_units(load_model(shipped_folder("configs") / "models" / "deepseek-v3.yaml"), 4096)
    assert found == LayerUnits(count=58, layers_per_unit=1, front_layers=3, back_layers=0)
