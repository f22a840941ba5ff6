"""Wrong input gets clear lines that name file, field and mend, the right exit code, no traceback,
and never a half-written output file."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import Outcome, run

CONFIGS = Path(__file__).resolve().parents[2] / "configs"


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    """Inputs that are right, to be spoiled one at a time."""
    model = (CONFIGS / "models" / "gpt-tiny.yaml").read_text()
    job = (CONFIGS / "jobs" / "llama-2-7b.yaml").read_text()
    cluster = (CONFIGS / "clusters" / "two-regions.yaml").read_text()
    return {
        "model": write(tmp_path, "model.yaml", model),
        "cluster": write(tmp_path, "cluster.yaml", cluster),
        "job": write(
            tmp_path, "job.yaml", job.replace("sequence_length: 4096", "sequence_length: 128")
        ),
        "out": tmp_path / "plan.json",
        "store": tmp_path,
    }


def plan(files: dict[str, Path], *more: str) -> Outcome:
    return run(
        "plan",
        *("--model", str(files["model"]), "--cluster", str(files["cluster"])),
        *("--job", str(files["job"]), "--out", str(files["out"]), *more),
    )


def spoil(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text, f"{old!r} is not in {path.name}"
    path.write_text(text.replace(old, new, 1))


def assert_refused(outcome: Outcome, code: int, *words: str) -> None:
    assert outcome.exit_code == code, outcome.stderr
    assert outcome.stdout == ""
    assert "Traceback" not in outcome.stderr
    for word in words:
        assert word in outcome.stderr, outcome.stderr


def test_faults_of_all_three_files_are_reported_together(files: dict[str, Path]) -> None:
    spoil(files["model"], "hidden_size:", "hiden_size:")
    spoil(files["cluster"], "nodes:", "nodess:")
    spoil(files["job"], "precision: bfloat16", "precision: bf17")
    outcome = plan(files)
    assert_refused(outcome, 2, "model.yaml:", "cluster.yaml:", "job.yaml:")
    assert_refused(outcome, 2, "hiden_size", "nodess", "bf17")


def test_a_pinned_microbatch_that_does_not_divide_the_batch(files: dict[str, Path]) -> None:
    with files["job"].open("a") as file:
        file.write("pin: {microbatch_size: 7}\n")
    assert_refused(plan(files), 2, "job.yaml:", "microbatch_size", "7 does not divide")


def test_a_model_that_cannot_fit(files: dict[str, Path]) -> None:
    files["model"] = CONFIGS / "models" / "gpt3-175b.yaml"
    spoil(files["cluster"], "device: nvidia-a100-80gb-sxm", "memory: 1 GiB\n        device: cpu")
    outcome = plan(files, "--target", "megatron")
    assert outcome.exit_code in (2, 3), outcome.stderr
    assert "Traceback" not in outcome.stderr
    assert not files["out"].exists()


def estimate(files: dict[str, Path], *layout: str) -> Outcome:
    return run(
        "estimate",
        *("--model", str(files["model"]), "--cluster", str(files["cluster"])),
        *("--job", str(files["job"]), "--store", str(files["store"]), *layout),
    )


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        (("--tp", "3", "--pp", "1", "--layers", "12"), ("tp", "3")),
        (("--tp", "1", "--pp", "13", "--layers", "1," * 12 + "1"), ("13",)),
        (("--tp", "1", "--pp", "2", "--layers", "6,5"), ("11", "12")),
        (("--tp", "1", "--pp", "2", "--layers", "6,x"), ("layers", "x")),
        (("--tp", "1", "--pp", "2", "--layers", "6,6", "--microbatch-size", "7"), ("7",)),
        (("--tp", "1", "--pp", "2", "--layers", "6,6", "--islands", "a,b"), ("island",)),
    ],
)
def test_layouts_that_cannot_be(
    files: dict[str, Path], layout: tuple[str, ...], words: tuple[str, ...]
) -> None:
    assert_refused(estimate(files, *layout), 2, *words)


def test_a_plan_file_that_is_none(files: dict[str, Path], tmp_path: Path) -> None:
    for text in ("", "{}", '{"schema": "hetplan.plan/99"}', '{"schema": "hetplan.plan/1"', "[1]"):
        path = write(tmp_path, "broken.json", text)
        for command in ("launch", "estimate"):
            assert_refused(run(command, str(path)), 2, "broken.json")
