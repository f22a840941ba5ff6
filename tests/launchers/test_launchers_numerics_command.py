"""What `hetplan launch --check-numerics` prints, writes and refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from launch_results import result_of
from runtime_cases import CPUS, GPT, cluster, island, job, plan_of
from typer.testing import CliRunner

from hetplan.cli.launch import launch
from hetplan.cli.main import app
from hetplan.errors import InputError, LaunchError
from hetplan.files.reading import decode, read_document
from hetplan.launchers.numerics_values import SCHEMA, Numerics, save_numerics
from hetplan.search.files import save_result

MIXED = cluster(island("a", "cpu", 2), island("b", "acme-one", 2))


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    """Tiny tensors gain nothing from more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def saved(path: Path, machines=CPUS, islands: str = "aa") -> Path:
    plan = plan_of(GPT, job(), (2, 2), machines, islands)
    save_result(result_of(GPT, machines, job(), plan), path)
    return path


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("plans") / "cpus.json")


@pytest.fixture(scope="module")
def mixed_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("plans") / "mixed.json", MIXED, "ab")


def others_answer(path: Path, *, probe_error: float = 0.0) -> None:
    """Turn the file of this machine's cores into one of another machine's kind."""
    found = decode(read_document(path), Numerics, schema=SCHEMA)
    (kind,) = found.kinds
    results = tuple(
        replace(each, probes=tuple(probe + probe_error for probe in each.probes))
        for each in kind.results
    )
    kind = replace(kind, kind="acme-one", device_name="Acme One", results=results)
    save_numerics(replace(found, kinds=(kind,)), path)


def test_people_get_a_table_per_kind_and_the_verdict(
    plan_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    launch(plan_file, check_numerics=True)
    out, err = capsys.readouterr()
    assert out.startswith("tiny-gpt: 1 x 16 tokens, tp 1, seed 3\n")
    assert "formats: layers float32; stage boundaries float32; gradients kept and" in out
    for words in ("matrix product", "fused attention", "optimizer", "transformer layer"):
        assert f"│ {words} " in out
    assert out.endswith("cpu: every result is as exact as its number format allows\n")
    assert "norm: norm, tp 1" in err.splitlines()


def test_answers_of_two_machines_are_put_together(
    mixed_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "answers.json"
    launch(mixed_file, check_numerics=True, numerics_out=file, as_json=True)
    out, err = capsys.readouterr()
    assert out == file.read_text()
    assert json.loads(out)["schema"] == "hetplan.numerics/1"
    assert "no answer of acme-one: run this with --numerics-out FILE where they are" in err
    others_answer(file)
    launch(mixed_file, check_numerics=True, numerics_with=[file])
    out = capsys.readouterr().out
    assert "cpu and acme-one: every result is as exact" in out
    assert "acme-one: Acme One" in out


def test_a_kind_without_an_answer_is_not_passed_over(mixed_file: Path) -> None:
    with pytest.raises(LaunchError, match="no answer of acme-one"):
        launch(mixed_file, check_numerics=True)


def test_unlike_kinds_end_with_exit_code_1_and_are_named(mixed_file: Path, tmp_path: Path) -> None:
    file = tmp_path / "answers.json"
    launch(mixed_file, check_numerics=True, numerics_out=file)
    others_answer(file, probe_error=1e-3)
    words = ["launch", str(mixed_file), "--check-numerics", "--numerics-with", str(file)]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 1
    assert "these kinds must not be mixed" in done.stderr
    assert "cpu and acme-one: norm (norm, tp 1, " in done.stderr


def test_a_machine_without_any_of_the_kinds_says_so(tmp_path: Path) -> None:
    machines = cluster(island("a", "acme-one", 2), island("b", "acme-two", 2))
    path = saved(tmp_path / "foreign.json", machines, "ab")
    with pytest.raises(InputError, match=r"none of the plan's device kinds \(acme-one, acme-two\)"):
        launch(path, check_numerics=True)


def test_options_of_the_check_need_it(plan_file: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="belong to --check-numerics"):
        launch(plan_file, numerics_out=tmp_path / "x.json")
    with pytest.raises(InputError, match="it must be at least 1"):
        launch(plan_file, check_numerics=True, numerics_tokens=0)
    with pytest.raises(InputError, match="its folder does not exist"):
        launch(plan_file, check_numerics=True, numerics_out=tmp_path / "no" / "x.json")


def test_more_memory_than_is_free_is_refused_before_anything_runs(
    plan_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hetplan.launchers import numerics

    monkeypatch.setattr(numerics, "free_memory_bytes", lambda: 1e7)
    with pytest.raises(InputError, match=r"need about .* GiB are free; give fewer"):
        launch(plan_file, check_numerics=True, numerics_tokens=10**6)
    monkeypatch.setattr(numerics, "free_memory_bytes", lambda: 1e4)
    with pytest.raises(InputError, match=r"for weights; run this where more is free"):
        launch(plan_file, check_numerics=True)
