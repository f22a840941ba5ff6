"""`hetplan import`: what it stores and writes, and that a fault leaves everything as it was."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from command_line import Outcome
from typer.testing import CliRunner

from hetplan.cli.main import app, load_command
from hetplan.cluster.load import load_cluster
from hetplan.profiling.store import read_store

EXAMPLES = Path(__file__).resolve().parents[2] / "docs" / "examples"
LINK = ("samples", "all_reduce.txt", "--link", "fast", "--measured-on", "2026-11-20")
KIND = ("--device", "nvidia-a100-80gb-sxm")
LINKS = ("--intra", "3 us", "--inter", "5 us", "--inter", "10 GB/s")
DRAFT = ("cluster-draft", "c.yaml")


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
    assert list(commands) == ["samples", "links", "topology", "log", "launch", "cluster-draft"]
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


def test_memory_of_a_kind_that_has_none_is_asked_for() -> None:
    Path("hosts").write_text("a slots=2\nb slots=2\n")
    command = (*DRAFT, "--hosts", "hosts", "--device", "cpu", *LINKS, "--intra", "1 GB/s")
    assert "--memory" in refused(*command)
    assert import_(*command, "--memory", "2 GiB").exit_code == 0


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


def test_a_draft_is_never_written_over_unasked(folder: Path) -> None:
    command = (*DRAFT, "--topology", "topo.txt", *KIND, "--nodes", "2", *LINKS)
    assert import_(*command).exit_code == 0
    before = (folder / "c.yaml").read_text()
    (folder / "c.yaml").write_text("mine")
    assert "--force" in refused(*command)
    assert (folder / "c.yaml").read_text() == "mine"
    assert import_(*command, "--force").exit_code == 0
    assert (folder / "c.yaml").read_text() == before


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ((), ("--nodes", "--hosts")),
        (("--nodes", "0"), ("--nodes", "16x8")),
        (("--nodes", "2", "--device", "a10o"), ("nearest", "nvidia-a10-24gb-pcie")),
        (("--nodes", "2x4"), ("8 devices", "4 devices by --nodes")),
        (("--nodes", "2", "--hosts", "nodes.txt"), ("16 hosts", "2")),
        (("--nodes", "2", "--nics", "3 GB"), ("--nics", "unit of memory")),
        (("--nodes", "2", "--nics", "4"), ("bandwidth of one card",)),
        (("--nodes", "2", "--memory", "80"), ("--memory", "unit")),
        (("--nodes", "2", "--memory", "x=80 GiB"), ("--memory", "'x'")),
        (("--nodes", "2", "--intra", "no"), ("--intra", "loopback")),
        (("--nodes", "2", "--intra", "3 GB"), ("--intra", "unit of memory")),
        (("--nodes", "2", "--inter", "topo.txt"), ("this is nvidia-topo", "--inter")),
        (("--nodes", "2", "--across", "1 ms"), ("one island",)),
        (("--nodes", "2", "--region", "a: b"), ("--region",)),
        (("--nodes", "2", "--topology", "topo.txt"), ("2 of them fit",)),
    ],
)
def test_a_wrong_option_of_a_draft_is_named(
    folder: Path, options: tuple[str, ...], words: tuple[str, ...]
) -> None:
    device = () if "--device" in options else KIND
    text = refused(*DRAFT, "--topology", "topo.txt", *device, *LINKS, *options)
    for word in words:
        assert word in text, text
    assert not (folder / "c.yaml").exists()


def test_types_of_hosts_need_a_kind_each_and_hosts_are_alike(folder: Path) -> None:
    hosts = (*DRAFT, "--hosts", "hostfile")
    assert "A100, MI300X" in refused(*hosts, *KIND)
    twice = ("--device", "A100=nvidia-a100-80gb-sxm", "--device", "A100=cpu")
    assert "once for each type" in refused(*hosts, *twice)
    (folder / "hostfile").write_text("a slots=8\nb slots=4\n")
    assert "4 and 8 slots" in refused(*hosts, *KIND)


def test_islands_of_one_region_share_a_default_link(folder: Path) -> None:
    outcome = import_(
        *(*DRAFT, "--hosts", "hostfile", "--device", "A100=nvidia-a100-80gb-sxm"),
        *("--device", "MI300X=amd-mi300x", "--intra", "64 GB/s", *LINKS),
        *("--across", "1 GB/s", "--across", "4 GB/s shared", "--across", "1 ms"),
        *("--memory", "MI300X=100 GiB"),
    )
    assert outcome.exit_code == 0, outcome.stderr
    cluster = load_cluster(folder / "c.yaml")
    assert [island.name for island in cluster.islands] == ["A100", "MI300X"]
    assert cluster.islands[1].memory_bytes == 100 * 2**30
    between = cluster.link_between("A100", "MI300X")
    assert between.bandwidth_bytes_per_second == 1e9
    assert between.shared_bandwidth_bytes_per_second == 4e9


def test_a_single_device_and_a_single_node_are_clusters_too(folder: Path) -> None:
    for nodes in (1, 3):
        for devices in (1, 2):
            out = f"c{nodes}{devices}.yaml"
            command = ("cluster-draft", out, *KIND, *LINKS, "--intra", "1 GB/s")
            outcome = import_(*command, "--nodes", f"{nodes}x{devices}")
            assert outcome.exit_code == 0, outcome.stderr
            assert load_cluster(folder / out).num_devices == nodes * devices
