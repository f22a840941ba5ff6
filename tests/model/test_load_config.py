import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from model_configs import CONFIGS, LATENT, LLAMA, OPT, faults, load

from hetplan.cli.main import load_command
from hetplan.errors import InputError
from hetplan.model.layer_units import own_layer_fault
from hetplan.model.layers import Experts, LatentAttention, Mlp
from hetplan.model.spec import Architecture, LayerKind


def test_llama_and_gpt2_are_hetplans_own_layers(tmp_path):
    llama, gpt = load(tmp_path, LLAMA), load(tmp_path, CONFIGS["gpt2-defaults"])
    assert (llama.architecture, gpt.architecture) == (Architecture.LLAMA, Architecture.GPT)
    assert (llama.num_kv_heads, llama.head_dim, llama.ffn_hidden_size) == (6, 16, 208)
    assert gpt.learned_positions == gpt.max_sequence_length == 1024


@pytest.mark.parametrize("name", ["opt-like", "pythia-like", "qwen3-biased", "mixtral-small"])
def test_other_models_are_not_hetplans_own(tmp_path, name):
    model = load(tmp_path, CONFIGS[name])
    for accessor in ("architecture", "ffn_hidden_size", "head_dim", "num_kv_heads"):
        with pytest.raises(InputError, match="gpt and llama layers only"):
            getattr(model, accessor)


def test_the_advice_for_other_models_names_options_that_there_are(tmp_path):
    said = own_layer_fault(load(tmp_path, CONFIGS["pythia-like"]))
    (command,) = re.findall("`hetplan profile layers (.*)`", said)
    options = {name for param in load_command("profile").commands["layers"].params
               for name in param.opts}  # fmt: skip
    assert set(re.findall(r"--\S+", command)) <= options


def windows(model):
    return [model.layer_at(i).window for i in range(1, model.num_layers + 1)]


def test_windows_are_where_each_family_has_them(tmp_path):
    assert windows(load(tmp_path, CONFIGS["mistral-window"])) == [16] * 3
    assert windows(load(tmp_path, CONFIGS["mistral-null-window"])) == [None] * 3
    assert windows(load(tmp_path, CONFIGS["qwen2-windows-above"])) == [None, None, 16]
    assert windows(load(tmp_path, CONFIGS["gemma2-uneven"])) == [16, None, 16]
    assert windows(load(tmp_path, CONFIGS["gemma3-uneven"])) == [16] * 5 + [None] + [16] * 2
    assert windows(load(tmp_path, CONFIGS["qwen3-biased"])) == [4096, None, None]


def sparse(model):
    layers = [model.layer_at(i).mlp for i in range(1, model.num_layers + 1)]
    return "".join("E" if isinstance(mlp, Experts) else "d" for mlp in layers)


def test_experts_are_where_each_family_has_them(tmp_path):
    assert sparse(load(tmp_path, CONFIGS["mixtral-small"])) == "EEE"
    assert sparse(load(tmp_path, CONFIGS["qwen3-moe-uneven"])) == "dEddd" + "E"
    assert sparse(load(tmp_path, CONFIGS["deepseek-v2-lite-form"])) == "dEEEE"
    every_third = LATENT | {"model_type": "deepseek_v3", "moe_layer_freq": 3}
    assert sparse(load(tmp_path, every_third | {"first_k_dense_replace": 1})) == "dddEd"
    none = LATENT | {"model_type": "deepseek_v3", "n_routed_experts": None}
    assert sparse(load(tmp_path, none)) == "ddddd"
    assert sparse(load(tmp_path, LATENT | {"model_type": "deepseek_v3"})) == "dddEE"


def test_prediction_layers_stand_before_the_head(tmp_path):
    model = load(tmp_path, CONFIGS["deepseek-v3-small-biased"])
    mtp = LayerKind.MULTI_TOKEN_PREDICTION
    assert model.layers[-3:] == (mtp, mtp, LayerKind.HEAD)
    assert len(model.layers) == model.num_layers + 4
    assert isinstance(model.layer_at(6).attention, LatentAttention)
    assert model.parameters_at(7) == model.parameters(mtp) > model.parameters_at(5)


def test_the_language_part_of_a_model_that_sees(tmp_path):
    text = {key: value for key, value in CONFIGS["gemma3-uneven"].items() if key != "model_type"}
    whole = {"model_type": "gemma3", "text_config": text, "vision_config": {"hidden_size": 9}}
    seen, alone = load(tmp_path, whole), load(tmp_path, CONFIGS["gemma3-uneven"])
    assert seen.layer_runs == alone.layer_runs
    assert seen.parameter_count == alone.parameter_count
    found = faults(tmp_path, {"model_type": "gemma3", "hidden_size": 9})
    assert "text_config, which is missing" in found[0][2]
    whole["text_config"] = text | {"hidden_size": -3}
    ((line, field, message),) = faults(tmp_path, whole)
    assert (field, message) == ("text_config.hidden_size", "found -3; it must be at least 1")
    assert line > 3


def test_files_without_model_type_go_by_their_class(tmp_path):
    config = {key: value for key, value in OPT.items() if key != "model_type"}
    model = load(tmp_path, config | {"architectures": ["OPTForCausalLM"]})
    assert model.learned_positions == 130
    ((_, field, message),) = faults(tmp_path, config | {"architectures": ["OptForever"]})
    assert field == "architectures"
    assert "known: gpt2, gpt_neox, opt" in message


def test_unknown_models_get_the_nearest_and_the_known(tmp_path):
    ((line, field, message),) = faults(tmp_path, {"model_type": "qwen3_mo"})
    assert (line, field) == (2, "model_type")
    assert "nearest: qwen3_moe" in message
    assert "deepseek_v3" in message


@pytest.mark.parametrize(
    ("config", "length"),
    [
        # Llama 3.1: max_position_embeddings is stretched already.
        (LLAMA | {"rope_scaling": {"factor": 2.0, "original_max_position_embeddings": 32}}, 128),
        # Qwen2.5's advice: it is the original length.
        (LLAMA | {"rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 128}}, 512),
        (LLAMA | {"rope_scaling": {"factor": "x", "original_max_position_embeddings": []}}, 128),
    ],
)
def test_the_longest_sequence(tmp_path, config, length):
    assert load(tmp_path, config).max_sequence_length == length


HUGE = int("9" * 400)


@pytest.mark.parametrize(
    ("config", "field", "says"),
    [
        (LLAMA | {"hidden_size": "96"}, "hidden_size", "found the text '96'; write a whole"),
        (LLAMA | {"hidden_size": HUGE}, "hidden_size", "more than 18 digits; it must be at most"),
        (LLAMA | {"num_attention_heads": 7}, "num_attention_heads", "7 does not divide hidden"),
        (LLAMA | {"use_bidirectional_attention": True}, "use_bidirectional_attention", "causal"),
        (
            CONFIGS["gemma2-uneven"] | {"layer_types": ["full_attention"]},
            "layer_types",
            "has 1 entries for 3 layers",
        ),
        (CONFIGS["mixtral-small"] | {"num_experts_per_tok": 6}, "num_experts_per_tok", "more than"),
        (CONFIGS["mixtral-small"] | {"num_experts": 6}, "num_experts", "both mean the same"),
        ({"model_type": None, "architectures": None}, "architectures", "does not know"),
    ],
)
def test_impossible_values_are_named_with_their_line(tmp_path, config, field, says):
    found = faults(tmp_path, config)
    assert field in [entry[1] for entry in found]
    assert any(says in message for _, name, message in found if name == field), found
    keys = list(config)
    if field in keys:
        # json.dumps with an indent puts one key on a line, lists further ones below it.
        assert all(line >= 2 + keys.index(name) for line, name, _ in found if name in keys)


GARBAGE = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**30), 10**30),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=4),
    st.lists(st.integers(-3, 9) | st.text(max_size=2), max_size=4),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)


@settings(derandomize=True, deadline=None, max_examples=150)
@given(data=st.data())
def test_changed_configurations_load_or_say_why(tmp_path_factory, data):
    folder = tmp_path_factory.getbasetemp()
    config = dict(data.draw(st.sampled_from(list(CONFIGS.values()))))
    for key in data.draw(st.lists(st.sampled_from(sorted(config)), max_size=3)):
        config[key] = data.draw(GARBAGE)
    if isinstance(config.get("num_hidden_layers"), int):
        config["num_hidden_layers"] = min(config["num_hidden_layers"], 50)
    found = attempt(folder, config)
    if isinstance(found, InputError):
        assert all(fault.file and fault.message for fault in found.faults)
    else:
        assert found.parameter_count > 0
        assert isinstance(found.layer_at(1).mlp, Mlp | Experts)


def attempt(folder, config):
    try:
        return load(folder, config)
    except InputError as error:
        return error
