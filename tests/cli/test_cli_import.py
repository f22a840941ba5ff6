"""`hetplan import`: what it stores and writes, and that a fault leaves everything as it was."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from command_line import Outcome
from typer.testing import CliRunner

from hetplan.cli.main import app
from hetplan.cluster.load import load_cluster
from hetplan.importers.kinds import KINDS
from hetplan.profiling.store import read_store

EXAMPLES = Path(__file__).resolve().parents[2] / "docs" / "examples"
A100 = ("--device", "nvidia-a100-80gb-sxm")
FIGURES = (
    *("--intra-latency", "3 us", "--inter-latency", "5 us"),
    *("--inter-bandwidth", "10 GB/s"),
)


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


def links() -> tuple[str, ...]:
    return ("nccl-tests", "all_reduce.txt", "--link", "fast", "--measured-on", "2026-11-20")


def test_help_lists_every_kind() -> None:
    text = import_("--help").stdout
    for each in KINDS:
        assert f"{each.kind} " in text
        assert each.title in text


def test_samples_reach_the_users_own_store_once(folder: Path) -> None:
    assert import_(*links(), "--driver", "570.1").exit_code == 0
    assert "6 were there already" in import_(*links(), "--driver", "570.1").stderr
    found = read_store(folder / "data" / "hetplan" / "profiles")
    assert len(found.links) == 6
    assert {each.link for each in found.links} == {"fast"}
    (provenance,) = found.provenance
    assert provenance.measured_on == "2026-11-20"
    assert provenance.device == "nvidia-a100-80gb-sxm"  # by the name in the log
    assert provenance.driver == "570.1"
    assert "nccl-tests" in provenance.tool
    assert import_(*links(), "--driver", "570.1", "--again").exit_code == 0
    assert len(read_store(folder / "data" / "hetplan" / "profiles").links) == 12


def test_dry_run_stores_nothing(folder: Path) -> None:
    assert import_(*links(), "--dry-run").exit_code == 0
    assert not (folder / "data").exists()


def test_what_the_output_does_not_say_is_asked_for() -> None:
    assert "--link" in refused("nccl-tests", "all_reduce.txt")


def test_an_unknown_device_of_a_link_is_asked_for(folder: Path) -> None:
    log = folder / "all_reduce.txt"
    log.write_text(log.read_text().replace("NVIDIA A100-SXM4-80GB", "Unheard-of X1"))
    assert "--device" in refused(*links())
    assert not (folder / "data").exists()
    assert import_(*links(), "--device", "x1").exit_code == 0


def test_memory_of_a_kind_that_has_none_is_asked_for() -> None:
    command = ("hostfile", "hostfile", "--draft", "c.yaml", "--device", "cpu", *FIGURES)
    command = (*command, "--intra-bandwidth", "1 GB/s")
    Path("hostfile").write_text("a slots=2\nb slots=2\n")
    assert "--memory" in refused(*command)
    assert import_(*command, "--memory", "2 GiB").exit_code == 0


def test_an_unknown_kind_names_the_nearest() -> None:
    assert "nvidia-topo" in refused("nvidia_topo", "topo.txt")


def test_a_file_of_another_kind_is_named() -> None:
    assert "looks like nvidia-topo" in refused("perftest", "topo.txt")
    assert "looks like iperf3" in refused("nvidia-topo", "north-south.json")


def test_faults_of_all_files_come_together_and_nothing_is_stored(folder: Path) -> None:
    whole = (folder / "all_reduce.txt").read_text()
    (folder / "cut.txt").write_text(whole[: whole.index("8266.4")])
    (folder / "bytes.txt").write_bytes(b"\xff\xfe\x00")
    (folder / "empty.txt").write_text("")
    files = ("all_reduce.txt", "cut.txt", "bytes.txt", "empty.txt", "missing.txt")
    text = refused("nccl-tests", *files, "--link", "fast")
    for name in files[1:]:
        assert f"{name}:" in text
    assert "all_reduce.txt:" not in text
    assert not (folder / "data").exists()


def test_standard_input_and_json() -> None:
    outcome = import_("nvidia-topo", "-", "--json", stdin=(EXAMPLES / "topo.txt").read_text())
    data = json.loads(outcome.stdout)
    assert data["schema"] == "hetplan.import/3"
    assert len(data["topology"]["devices"]) == 8
    both = import_("perftest", "write_bw.txt", "write_lat.txt", "--json", "--out", "both.json")
    assert [len(each["paths"]) for each in json.loads(both.stdout)] == [3, 2]
    assert json.loads(Path("both.json").read_text()) == json.loads(both.stdout)
    assert "there already" in refused("perftest", "write_bw.txt", "--out", "both.json")
    assert "twice" in refused("perftest", "-", "-")


def test_a_draft_is_never_written_over_unasked(folder: Path) -> None:
    command = ("nvidia-topo", "topo.txt", "--draft", "c.yaml", *A100, "--nodes", "2", *FIGURES)
    assert import_(*command).exit_code == 0
    before = (folder / "c.yaml").read_text()
    (folder / "c.yaml").write_text("mine")
    assert "--force" in refused(*command)
    assert (folder / "c.yaml").read_text() == "mine"
    assert import_(*command, "--force").exit_code == 0
    assert (folder / "c.yaml").read_text() == before
    assert import_(*command[:3], "dry.yaml", *command[4:], "--dry-run").exit_code == 0
    assert not (folder / "dry.yaml").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ((), ("--nodes", "--hosts")),
        (("--nodes", "0"), ("--nodes",)),
        (("--nodes", "2", "--device", "a100"), ("nearest", "nvidia-a100-80gb-sxm")),
        (("--nodes", "2", "--device", "amd-mi300x"), ("nvidia", "amd")),
        (("--nodes", "2", "--devices-per-node", "4"), ("8 devices", "4 --devices-per-node")),
        (("--nodes", "2", "--hosts", "nodes.txt"), ("16 hosts", "2")),
        (("--nodes", "2", "--intra-latency", "3 us"), ("--intra-latency", "2 of them")),
        (("--nodes", "2", "--nic-bandwidth", "3 GB"), ("--nic-bandwidth", "unit of memory")),
        (("--nodes", "2", "--memory", "80"), ("--memory", "unit")),
        (("--nodes", "2", "--memory", "x=80 GiB"), ("--memory", "'x'")),
        (("--nodes", "2", "--intra-samples", "no"), ("--intra-samples", "loopback")),
        (("--nodes", "2", "--inter-node", "topo.txt"), ("looks like nvidia-topo", "--inter-node")),
        (("--nodes", "2", "--inter-node", "no.txt"), ("no.txt", "--inter-node")),
        (("--nodes", "2", "--nics-per-node", "4"), ("--nic-bandwidth",)),
        (("--nodes", "2", "--across-latency", "1 ms"), ("one island",)),
        (("--nodes", "2", "--type", "A=b"), ("--hosts",)),
        (("--nodes", "2", "--name", "no good"), ("--name",)),
        (("--nodes", "2", "--region", "a: b"), ("--region",)),
    ],
)
def test_a_wrong_option_of_a_draft_is_named(
    folder: Path, options: tuple[str, ...], words: tuple[str, ...]
) -> None:
    command = ("nvidia-topo", "topo.txt", "--draft", "c.yaml", *A100, *FIGURES)
    text = refused(*command, *options)
    for word in words:
        assert word in text, text
    assert not (folder / "c.yaml").exists()


def test_options_of_a_draft_need_one_and_a_draft_needs_nodes() -> None:
    assert "--nodes" in refused("nvidia-topo", "topo.txt", "--nodes", "2")
    assert "says nothing of nodes" in refused("perftest", "write_bw.txt", "--draft", "c.yaml")
    text = refused("nvidia-topo", "topo.txt", "topo.txt", "--draft", "c.yaml", *A100)
    assert "one FILE" in text


def test_types_must_be_said_and_hosts_alike(folder: Path) -> None:
    base = ("hostfile", "hostfile", "--draft", "c.yaml")
    assert "--type A100=" in refused(*base)
    assert "A100, MI300X" in refused(*base, *A100)
    assert "MI300X too" in refused(*base, "--type", "A100=nvidia-a100-80gb-sxm")
    (folder / "hostfile").write_text("a slots=8\nb slots=4\n")
    assert "4 and 8 slots" in refused(*base, *A100)


def test_islands_of_one_region_share_a_default_link(folder: Path) -> None:
    outcome = import_(
        *("hostfile", "hostfile", "--draft", "c.yaml", "--type", "A100=nvidia-a100-80gb-sxm"),
        *("--type", "MI300X=amd-mi300x", "--intra-bandwidth", "64 GB/s", *FIGURES),
        *("--across-bandwidth", "1 GB/s", "--across-shared", "4 GB/s", "--across-latency", "1 ms"),
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
    for nodes in ("1", "3"):
        for devices in ("1", "2"):
            (folder / "h").write_text("".join(f"n{at}\n" for at in range(int(nodes))))
            outcome = import_(
                *("hostfile", "h", "--draft", f"c{nodes}{devices}.yaml", *A100, *FIGURES),
                *("--intra-bandwidth", "1 GB/s", "--devices-per-node", devices),
            )
            assert outcome.exit_code == 0, outcome.stderr
            cluster = load_cluster(folder / f"c{nodes}{devices}.yaml")
            assert cluster.num_devices == int(nodes) * int(devices)
