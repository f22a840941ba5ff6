"""What can be refused before a search is refused by `check` and by `plan`, alike and at once: with
file and line, what was found and what to do."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from command_line import run

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
MODELS = CONFIGS / "models"
SECONDS = 1.0
"""Of CPU after imports, of either command."""
V100, MINE = "nvidia-v100-32gb-sxm", "our-accelerator"
OWN_KIND = {
    "kind": MINE, "vendor": "amd", "memory": "64 GB", "memory_bandwidth": "2 TB/s",
    "peak": {"bfloat16": "300 TFLOP/s"}, "provenance": "datasheet", "source": "made up",
}  # fmt: skip
QWEN = {
    "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944,
    "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
    "vocab_size": 152064, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6,
    "hidden_act": "silu", "rope_theta": 1e6, "tie_word_embeddings": False,
    "use_sliding_window": False,
}  # fmt: skip
"""Biases on queries, keys and values."""


def write(folder: Path, name: str, data: dict[str, Any]) -> Path:
    path = folder / name
    path.write_text(yaml.safe_dump(data, sort_keys=False))
    return path


def two_regions(folder: Path, name: str, own: dict[str, Any] | None = None) -> Path:
    """A100 in one region, this kind in another; `own`: its entry, where it is the user's."""
    text = (CONFIGS / "clusters" / "two-regions.yaml").read_text().replace("amd-mi300x", name)
    data = yaml.safe_load(text.replace("448 GB/s", "60 GB/s"))
    return write(folder, "cluster.yaml", data | ({"devices": [own]} if own else {}))


def question(folder: Path, model: Path, cluster: Path, **changes: Any) -> tuple[Path, Path, Path]:
    job = yaml.safe_load((CONFIGS / "jobs" / "llama-2-7b.yaml").read_text()) | changes
    return model, cluster, write(folder, "job.yaml", job)


Make = Callable[[Path], tuple[Path, Path, Path]]


def case(model: str, kind: str, **changes: Any) -> Make:
    return lambda folder: question(folder, MODELS / model, two_regions(folder, kind), **changes)


def qwen(target: str) -> Make:
    def made(folder: Path) -> tuple[Path, Path, Path]:
        model = folder / "qwen.json"
        model.write_text(json.dumps(QWEN))
        return question(folder, model, two_regions(folder, "amd-mi300x"), target=target)

    return made


def own_kind(**changes: Any) -> Make:
    own = {key: value for key, value in (OWN_KIND | changes).items() if value is not None}

    def made(folder: Path) -> tuple[Path, Path, Path]:
        return question(folder, MODELS / "llama-2-7b.yaml", two_regions(folder, MINE, own))

    return made


LLAMA, MIXTRAL, MI300X = "llama-2-7b.yaml", "mixtral-8x7b.yaml", "amd-mi300x"
CASES: dict[str, tuple[Make, str, tuple[str, ...]]] = {
    # what is asked, the file that is named, words of the message
    "bf16-on-v100": (case(LLAMA, V100), "job.yaml", ("precision: ", "use float16", "forbid")),
    "fp16-of-torchtitan": (
        case(LLAMA, V100, precision="float16", target="torchtitan"),
        "job.yaml",
        ("precision: float16", "no loss scaling", "bfloat16 or float32"),
    ),
    "qwen-native": (qwen("native"), "job.yaml", ("target: native", "attention biases", "megatron")),
    "qwen-torchtitan": (
        qwen("torchtitan"),
        "job.yaml",
        ("target: ", "biases in the attention", "use target megatron"),
    ),
    "no-rate": (
        own_kind(peak={"float32": "80 TFLOP/s"}),
        "cluster.yaml",
        ("device: ", "no bfloat16 rate", "hetplan profile", "forbid"),
    ),
    "no-bandwidth": (
        own_kind(memory_bandwidth=None),
        "cluster.yaml",
        ("device: ", "no memory bandwidth", "hetplan profile"),
    ),
    "no-memory": (own_kind(memory=None), "cluster.yaml", ("memory: required", 'memory: "8 GiB"')),
    "cp-without-kernel": (
        case(LLAMA, V100, precision="float16", pin={"cp": 2}),
        "job.yaml",
        ("pin.cp", "context parallelism", "forbid"),
    ),
    "cp-of-flagscale": (
        case(LLAMA, MI300X, target="flagscale", pin={"cp": 2}),
        "job.yaml",
        ("pin.cp", "no context parallelism", "megatron"),
    ),
    "virtual-stages-of-flagscale": (
        case(LLAMA, MI300X, target="flagscale", pin={"virtual_stages": 2}),
        "job.yaml",
        ("pin.virtual_stages", "no interleaved stages"),
    ),
    "pipelines-of-megatron": (
        case(LLAMA, MI300X, pin={"pipelines": 2}),
        "job.yaml",
        ("pin.pipelines", "native"),
    ),
    "experts-of-flagscale": (
        case(MIXTRAL, MI300X, target="flagscale", pin={"ep": 2}),
        "job.yaml",
        ("pin.ep", "no expert parallelism", "megatron"),
    ),
    "prediction-layer-of-native": (
        case("deepseek-v3.yaml", MI300X, target="native"),
        "job.yaml",
        ("target: native", "multi-token prediction", "megatron"),
    ),
    "two-libraries": (
        case(LLAMA, MI300X, pin={"embedding_on": "a100", "head_on": "mi300x"}),
        "job.yaml",
        ("pin.head_on", "nccl, rccl", "flagscale or native", "mixed_libraries"),
    ),
}


@pytest.fixture(scope="module", autouse=True)
def imported(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Both commands once, so that everything is imported and every shipped table is read."""
    make, _, _ = CASES["no-rate"]
    model, cluster, job = make(tmp_path_factory.mktemp("first"))
    run("check", str(model), str(cluster), str(job))
    run("plan", "--model", str(model), "--cluster", str(cluster), "--job", str(job))


@pytest.mark.parametrize("name", CASES)
def test_check_and_plan_refuse_it_at_once(name: str, tmp_path: Path) -> None:
    make, file, words = CASES[name]
    model, cluster, job = map(str, make(tmp_path))
    out = tmp_path / "plan.json"
    asked = ("--model", model, "--cluster", cluster, "--job", job, "--out", str(out))
    for command in (("check", model, cluster, job), ("plan", *asked)):
        began = time.process_time()
        done = run(*command)
        assert time.process_time() - began < SECONDS
        said = " ".join((done.stdout + done.stderr).replace("\n", " ").split())
        assert done.exit_code == 2, said
        assert file in said
        place = "(line " if command[0] == "check" else f"{file}:"
        assert place in said
        for word in words:
            assert word in said, said
    assert not out.exists()
