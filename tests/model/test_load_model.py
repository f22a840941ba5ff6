import re

import pytest

from hetplan.errors import InputError
from hetplan.files.shipped import shipped_folder
from hetplan.model.load import load_model

MODELS = shipped_folder("configs") / "models"

TEXT = """schema: hetplan.model/1
name: small
architecture: llama
num_layers: 4
hidden_size: 64
ffn_hidden_size: 128
num_attention_heads: 8
vocab_size: 100
max_sequence_length: 32
"""


def write(tmp_path, text):
    path = tmp_path / "model.yaml"
    path.write_text(text)
    return path


def faults(path):
    with pytest.raises(InputError) as caught:
        load_model(path)
    assert {fault.file for fault in caught.value.faults} == {str(path)}
    return [(fault.line, fault.field, fault.message) for fault in caught.value.faults]


# Llama: the sums of the published checkpoints' tensors. GPT-3: V h + s h + L (12 h^2 + 13 h) + 2 h
# with h = 12288, L = 96, V = 50257, s = 2048, tied (arXiv 2104.04473, equation 2, plus biases).
KNOWN = {
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3-405b": 405_853_388_800,
    "mixtral-8x7b": 46_702_792_704,
    "gpt3-175b": 50257 * 12288 + 2048 * 12288 + 96 * (12 * 12288**2 + 13 * 12288) + 2 * 12288,
}


@pytest.mark.parametrize(("name", "count"), KNOWN.items())
def test_known_parameter_counts(name, count):
    assert load_model(MODELS / f"{name}.yaml").parameter_count == count


@pytest.mark.parametrize("path", sorted(MODELS.glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_models_state_their_parameter_count(path):
    model = load_model(path)
    stated = re.findall(r"parameter_count: ([\d,]+)", path.read_text())
    assert stated == [f"{model.parameter_count:,}"]
    assert model.name == path.stem


@pytest.mark.parametrize(
    ("change", "line", "field", "says"),
    [
        (("llama", "lama"), 3, "architecture", "did you mean llama?"),
        (("name: small", "name: 7"), 2, "name", 'in quotes if it looks like a number: "7"'),
        (("hidden_size: 64", "hidden_size: 60"), 5, "hidden_size", "not a multiple of"),
        (("32\n", "32\nnum_kv_heads: 3\n"), 10, "num_kv_heads", "3 does not divide"),
    ],
)
def test_faults(tmp_path, change, line, field, says):
    found = faults(write(tmp_path, TEXT.replace(*change, 1)))
    assert (line, field) in [entry[:2] for entry in found]
    assert any(says in message for _, _, message in found), found
