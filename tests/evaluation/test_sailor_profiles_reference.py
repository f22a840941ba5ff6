"""Every real file of Sailor: it loads, what is in it comes out, and its known traps are handled."""

from __future__ import annotations

import json
import re
from functools import lru_cache
from pathlib import Path
from statistics import median

import pytest
from importers_peer_files import context

from hetplan.errors import InputError
from hetplan.importers import galvatron, sailor, sailor_network
from hetplan.importers.records import Imported
from hetplan.model.spec import Architecture, ModelSpec, plain_model

SAILOR = Path(__file__).resolve().parents[3] / "shared" / "reference" / "sailor"
needs_reference = pytest.mark.skipif(
    not SAILOR.is_dir(), reason="Sailor's published measurements are not here"
)
PROFILES = sorted(SAILOR.glob("layer_profiles/*/*/profile.json"))
ALL_MODELS = SAILOR / "layer_profiles" / "all_models_profiles_tmp.json"


def published(name: str, layers: int, hidden: int, heads: int) -> ModelSpec:
    """GPT-like models with Megatron's padded vocabulary, which llm_info.json's counts fit."""
    return plain_model(
        name=name,
        architecture=Architecture.GPT,
        num_layers=layers,
        hidden_size=hidden,
        ffn_hidden_size=4 * hidden,
        num_attention_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        vocab_size=50304,
        max_sequence_length=2048,
    )


MODELS = {
    "OPT-350": published("opt-350m", 24, 1024, 16),
    "GPT-Neo-2.7": published("gpt-neo-2.7b", 32, 2560, 20),
    "OPT-30": published("opt-30b", 48, 7168, 56),
    "LLAMA-3-8": plain_model(
        name="llama-3-8b",
        architecture=Architecture.LLAMA,
        num_layers=32,
        hidden_size=4096,
        ffn_hidden_size=14336,
        num_attention_heads=32,
        num_kv_heads=8,
        head_dim=128,
        vocab_size=128256,
        max_sequence_length=8192,
    ),
}
UNTIMED = {
    ("GPT-Neo-2.7", "A100-80"),
    ("LLAMA-3-8", "A100-40"),
    ("LLAMA-3-8", "V100-16"),
    ("OPT-30", "A100-40"),
    ("OPT-30", "V100-16"),
    ("OPT-350", "A100-80"),
}
"""Model and GPU whose update times and embedding's backward are all zero."""


@lru_cache
def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def read(path: Path) -> tuple[str, str, Imported]:
    model, gpu = path.parts[-3:-1]
    return model, gpu, sailor.parse(text_of(path), context(model=MODELS[model], device=gpu))


@needs_reference
def test_there_are_sixteen_profiles() -> None:
    assert len(PROFILES) == 16


@pytest.mark.parametrize("path", PROFILES, ids=lambda path: "-".join(path.parts[-3:-1]))
def test_a_real_profile_gives_every_run_and_nothing_else(path: Path) -> None:
    model, gpu, imported = read(path)
    data = json.loads(text_of(path))
    runs = {
        (int(microbatch), int(tp)): layers
        for microbatch, by_tp in data.items()
        for tp, layers in by_tp.items()
    }
    untimed, headless = (model, gpu) in UNTIMED, model == "GPT-Neo-2.7"
    # Forward and backward of three kinds, and the update; no embedding's backward is a real one.
    per_run = 6 + 1 - 1 - untimed - 2 * headless
    assert len(imported.layers) == per_run * len(runs)
    assert len(imported.skipped) == (2 * len(runs) if untimed else 1) + headless
    for sample in imported.layers:
        if sample.layer == "transformer" and not sample.phase.startswith("optimizer"):
            layers = runs[sample.microbatch_size, sample.tp]
            at = ("forward", "backward").index(sample.phase)
            times = [layers[str(number)][at] for number in range(1, MODELS[model].num_layers + 1)]
            assert sample.median_seconds == pytest.approx(median(times))
            # The first layer was timed, warm-up included; the others are copies of one time.
            assert sample.repeats <= 2
            assert sample.median_seconds == pytest.approx(times[1])
        assert 0 < sample.p10_seconds <= sample.median_seconds <= sample.p90_seconds < 60


@pytest.mark.parametrize("path", PROFILES, ids=lambda path: "-".join(path.parts[-3:-1]))
def test_only_gpt_neos_last_layer_is_no_head(path: Path) -> None:
    model, _, imported = read(path)
    found = [line for line in imported.skipped if "a norm alone" in line]
    assert bool(found) == (model == "GPT-Neo-2.7")
    if found:
        times = int(re.findall(r"(\d+) times as fast", found[0])[0])
        assert times > 2 * sailor._NO_PROJECTION


@needs_reference
def test_the_file_of_all_models_is_read_by_name() -> None:
    rows = {}
    for name, model in MODELS.items():
        imported = sailor.parse(
            text_of(ALL_MODELS), context(model=model, device="nvidia-a100-40gb-sxm")
        )
        assert imported.device_name == "A100-40"
        rows[name] = len(imported.layers)
    assert rows == {"OPT-350": 72, "GPT-Neo-2.7": 48, "OPT-30": 48, "LLAMA-3-8": 18}


@needs_reference
def test_a_profile_of_another_model_is_refused_with_both_counts() -> None:
    path = SAILOR / "layer_profiles" / "OPT-30" / "A100-40" / "profile.json"
    with pytest.raises(InputError, match="found 50 layers; opt-350m has 26"):
        sailor.parse(text_of(path), context(model=MODELS["OPT-350"]))


@needs_reference
@pytest.mark.parametrize(
    ("name", "figures", "skipped"),
    [
        ("gcp_intra_node_bandwidths.json", 124, 19),
        ("intra_node_bandwidths.json", 124, 19),
        ("multizone_bandwidths.json", 1609, 164),
        ("multizone_bandwidths_het.json", 8033, 673),
        ("network_coeffs_all_homo.json", 300, 41),
    ],
)
def test_the_real_network_files_load(name: str, figures: int, skipped: int) -> None:
    imported = sailor_network.parse(text_of(SAILOR / "network" / name), context(name))
    assert (len(imported.paths), len(imported.skipped)) == (figures, skipped)
    assert all(path.bandwidth_bytes_per_second for path in imported.paths)


@needs_reference
def test_the_copy_of_a100_40_as_a100_80_is_noted() -> None:
    name = "intra_node_bandwidths.json"
    imported = sailor_network.parse(text_of(SAILOR / "network" / name), context(name))
    notes = [note for note in imported.notes if "A100-40 2" in note and "A100-80 2" in note]
    assert len(notes) == 1
    assert "one is a copy" in notes[0]


@needs_reference
@pytest.mark.parametrize(
    "name", ["gcp_communication_cost_usd_per_GB.json", "overlap_coe_dicts.json"]
)
def test_files_beside_them_are_no_network_files(name: str) -> None:
    with pytest.raises(InputError, match=r"a fit .* is expected here"):
        sailor_network.parse(text_of(SAILOR / "network" / name), context(name))


@needs_reference
def test_the_galvatron_files_among_them_load() -> None:
    name = "allreduce_bandwidth_16nodes_1gpus_per_node.json"
    imported = galvatron.parse(text_of(SAILOR / "network" / name), context(name))
    assert len(imported.paths) == 7
    name = "overlap_coefficient.json"
    assert galvatron.parse(text_of(SAILOR / "network" / name), context(name)).notes
