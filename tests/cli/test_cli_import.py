"""`hetplan import`: what it stores and writes, and that a fault leaves everything as it was."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from command_line import Outcome
from typer.testing import CliRunner

from hetplan.cli.main import app, load_command
from hetplan.profiling.store import read_store

EXAMPLES = Path(__file__).resolve().parents[2] / "docs" / "examples"
LINK = ("samples", "all_reduce.txt", "--link", "fast", "--measured-on", "2026-11-20")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for path in EXAMPLES.iterdir():
        shutil.copy(path, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    return tmp_path


def import_(*arguments: str, stdin: str | None = None) -> Outcome:
    result = CliRunner().invoke(app, ["import", *arguments], input=stdin)
    return Outcome(exit_code=result.exit_code, stdout=result.stdout, stderr=result.stderr)


def refused(*arguments: str) -> str:
    outcome = import_(*arguments)
    assert outcome.exit_code == 2, outcome.stderr + outcome.stdout
    assert "Traceback" not in outcome.stderr
    assert not outcome.stdout
    return outcome.stderr


def test_every_sub_command_shows_at_most_twelve_options() -> None:
    commands = load_command("import").commands
    assert list(commands) == ["samples", "links", "topology", "log", "launch"]
    for name, command in commands.items():
        options = [each for each in command.params if each.param_type_name == "option"]
        shown = [each.name for each in options if not each.hidden and each.name != "as_json"]
        assert len(shown) <= 12, name


def test_samples_reach_the_users_own_store_once(folder: Path) -> None:
    assert import_(*LINK, "--driver", "570.1").exit_code == 0
    assert "6 were there already" in import_(*LINK, "--driver", "570.1").stderr
    found = read_store(folder / "data" / "hetplan" / "profiles")
    assert len(found.links) == 6
    assert {each.link for each in found.links} == {"fast"}
    (provenance,) = found.provenance
    assert provenance.measured_on == "2026-11-20"
    assert provenance.device == "nvidia-a100-80gb-sxm"  # by the name in the log
    assert provenance.driver == "570.1"
    assert "nccl-tests" in provenance.tool
    assert import_(*LINK, "--driver", "570.1", "--again").exit_code == 0
    assert len(read_store(folder / "data" / "hetplan" / "profiles").links) == 12


def test_dry_run_stores_nothing(folder: Path) -> None:
    assert import_(*LINK, "--dry-run").exit_code == 0
    assert not (folder / "data").exists()


def test_an_unknown_device_of_a_link_is_asked_for(folder: Path) -> None:
    log = folder / "all_reduce.txt"
    log.write_text(log.read_text().replace("NVIDIA A100-SXM4-80GB", "Unheard-of X1"))
    assert "--device" in refused(*LINK)
    assert not (folder / "data").exists()
    assert import_(*LINK, "--device", "x1").exit_code == 0


def test_a_file_of_another_command_is_named() -> None:
    assert "`hetplan import topology` reads" in refused("links", "topo.txt")
    assert "looks like iperf3" in refused("topology", "north-south.json", "--kind", "nvidia-topo")
    assert "nvidia-topo" in refused("topology", "topo.txt", "--kind", "nvidia_topo")


def test_faults_of_all_files_come_together_and_nothing_is_stored(folder: Path) -> None:
    whole = (folder / "all_reduce.txt").read_text()
    (folder / "cut.txt").write_text(whole[: whole.index("8266.4")])
    (folder / "bytes.txt").write_bytes(b"\xff\xfe\x00")
    (folder / "empty.txt").write_text("")
    files = ("all_reduce.txt", "cut.txt", "bytes.txt", "empty.txt", "missing.txt")
    text = refused("samples", *files, "--link", "fast")
    for name in files[1:]:
        assert f"{name}:" in text
    assert "all_reduce.txt:" not in text
    assert not (folder / "data").exists()


def test_standard_input_and_json() -> None:
    outcome = import_("topology", "-", "--json", stdin=(EXAMPLES / "topo.txt").read_text())
    data = json.loads(outcome.stdout)
    assert data["schema"] == "hetplan.import/5"
    assert len(data["topology"]["devices"]) == 8
    both = import_("links", "write_bw.txt", "write_lat.txt", "--json", "--out", "both.json")
    assert [len(each["paths"]) for each in json.loads(both.stdout)] == [3, 2]
    assert json.loads(Path("both.json").read_text()) == json.loads(both.stdout)
    assert "there already" in refused("links", "write_bw.txt", "--out", "both.json")
    assert "twice" in refused("links", "-", "-")


def test_a_log_of_a_trainer_is_shown() -> None:
    line = (
        " iteration {} / 20 | consumed samples: 8 | elapsed time per iteration (ms): 500.0 | "
        "global batch size: 8 | lm loss: 1.0E+00 |\n"
    )
    Path("run.log").write_text("".join(line.format(at) for at in range(1, 6)))
    assert "500 ms" in import_("log", "run.log").stdout
    data = json.loads(import_("log", "run.log", "--json").stdout)
    assert (data["trainer"], len(data["steps"])) == ("megatron", 5)
