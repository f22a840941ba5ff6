"""`hetplan launch --check` enters every host, puts the answers together and names who gave none."""

from __future__ import annotations

import json
import os
import stat
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "emitters"))
from preflight_cases import sheet_for, two_host_result

from hetplan.cli.launch import launch
from hetplan.emitters.preflight import SCHEMA, CheckSheet
from hetplan.emitters.trainer_launch import EmitOptions
from hetplan.errors import InputError, LaunchError
from hetplan.files.encoding import encode
from hetplan.launchers import preflight as preflight_module
from hetplan.launchers.preflight import (
    PreflightReport,
    command_of,
    is_here,
    preflight,
    sheet_of_folder,
    sheet_of_plan,
)
from hetplan.search.files import save_result

SSH = """\
#!/bin/sh
# An ssh that stays here: what stands after the address is a command for a shell.
echo "$@" >> "{log}"
while [ "$1" != -- ]; do shift; done
if [ "$2" != 127.0.0.2 ]; then
  echo "ssh: connect to host $2 port 22: No route to host" >&2; exit 255
fi
exec sh -c "$3"
"""


@pytest.fixture
def ssh_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The calls of ssh, which runs its commands here."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "ssh").write_text(SSH.format(log=tmp_path / "ssh.log"))
    (folder / "ssh").chmod(stat.S_IRWXU)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setenv("TMPDIR", str(scratch))
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    return tmp_path / "ssh.log"


def quick_sheet() -> CheckSheet:
    """The interpreter of the hosts is this one; only its torch is not asked for."""
    sheet = sheet_for(two_host_result(), EmitOptions(python=sys.executable))
    hosts = tuple(replace(host, container=True) for host in sheet.hosts)
    return replace(sheet, hosts=hosts)


def only_one_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight_module, "is_here", lambda host: host.name == "one")


def statuses(report: PreflightReport) -> dict[tuple[str, str], str]:
    return {(each.host, each.check): each.status for each in report.findings}


def test_all_hosts_are_checked_at_one_time(
    ssh_log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    only_one_is_here(monkeypatch)
    report = preflight(quick_sheet(), wait_seconds=60, rate_seconds=0.3)
    assert (report.hosts, report.missing) == (("one", "two"), ())
    found = statuses(report)
    assert found["two", "rendezvous"] == "ok"
    assert found["one to two", "network"] == "note"  # the loopback is faster than planned
    assert not report.failed
    assert "ready" in report.text
    assert json.loads(report.json)["pairs"][0]["receiver"] == "two"
    (call,) = ssh_log.read_text().splitlines()
    assert call.startswith("-o BatchMode=yes -o ConnectTimeout=20 -- 127.0.0.2 ")
    assert "--host two" in call
    # The program was on the host while it ran, and is not any more.
    assert list((tmp_path / "scratch").iterdir()) == []


def test_a_host_that_ssh_cannot_enter_is_named(
    ssh_log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    only_one_is_here(monkeypatch)
    sheet = quick_sheet()
    lost = replace(sheet.hosts[1], address="127.0.0.9")
    report = preflight(replace(sheet, hosts=(sheet.hosts[0], lost)), wait_seconds=0.5)
    assert report.missing == ("two",)
    assert report.failed
    (why,) = (each for each in report.findings if each.host == "two")
    assert why.found == ("ended with 255: ssh: connect to host 127.0.0.9 port 22: No route to host")
    assert "MEND two" in report.text


def test_without_the_first_host_the_others_tell_of_themselves(
    ssh_log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight_module, "is_here", lambda host: host.name == "two")
    sheet = quick_sheet()
    lost = replace(sheet.hosts[0], address="127.0.0.9")
    report = preflight(replace(sheet, hosts=(lost, sheet.hosts[1])), wait_seconds=0.5)
    assert (report.hosts, report.missing) == (("two",), ("one",))
    found = statuses(report)
    assert (found["one", "host"], found["two", "first host"]) == ("fail", "fail")
    assert found["two", "ports"] == "ok"


def test_hosts_of_a_scheduler_are_not_entered(monkeypatch: pytest.MonkeyPatch) -> None:
    sheet = quick_sheet()
    monkeypatch.setattr(preflight_module, "is_here", lambda host: host.name == "one")
    slurm = replace(sheet.hosts[1], scheduler="slurm")
    report = preflight(replace(sheet, hosts=(sheet.hosts[0], slurm)), wait_seconds=0.5)
    (note,) = (each for each in report.findings if each.host == "two")
    assert note.status == "note"
    assert note.found == "not checked: slurm starts it"
    assert note.mend.endswith("there srun -w two")
    assert not report.failed
    first = replace(sheet.hosts[0], scheduler="slurm")
    monkeypatch.setattr(preflight_module, "is_here", lambda host: host.name == "two")
    report = preflight(replace(sheet, hosts=(first, sheet.hosts[1])), wait_seconds=0.5)
    assert statuses(report)["one", "host"] == "note"
    assert ("two", "first host") not in statuses(report)  # it was asked of itself only


def test_a_check_that_leaves_hosts_out_is_not_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(preflight_module, "is_here", lambda host: False)
    sheet = quick_sheet()
    hosts = tuple(
        replace(host, scheduler=scheduler)
        for host, scheduler in zip(sheet.hosts, ("slurm", "kubernetes"), strict=True)
    )
    (tmp_path / "check.json").write_text(encode(replace(sheet, hosts=hosts), schema=SCHEMA))
    with pytest.raises(LaunchError, match=r"0 of 2 hosts checked, not one, two.*all.sh --check"):
        launch(tmp_path, check=True)
    out = capsys.readouterr().out
    assert "ready" not in out
    assert out.splitlines()[-1] == "0 of 2 hosts checked"


def test_words_for_another_hosts_shell_are_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight_module, "is_here", lambda host: False)
    monkeypatch.setenv("TRAINER_FOLDER", "/opt/a b; touch x")
    monkeypatch.delenv("HETPLAN_PYTHON", raising=False)
    host = replace(
        quick_sheet().hosts[1], name="n$(id)", address="10.0.0.2", ssh_user="me", ssh_port=2222
    )
    words = command_of(host, "/usr/bin/python 3", ("--json",))
    assert words[5:11] == ("-p", "2222", "-l", "me", "--", "10.0.0.2")
    assert words[11] == (
        "env 'TRAINER_FOLDER=/opt/a b; touch x' '/usr/bin/python 3' - --host 'n$(id)' --json"
    )
    monkeypatch.setenv("HETPLAN_PYTHON", "/opt/p y")
    last = command_of(host, "python3", ())[-1]
    assert last.startswith("env 'TRAINER_FOLDER=/opt/a b; touch x' 'HETPLAN_PYTHON=/opt/p y' ")


def test_this_machine_is_known_by_its_addresses() -> None:
    host = quick_sheet().hosts[0]
    assert is_here(replace(host, address="127.0.0.1"))
    assert is_here(replace(host, address="localhost"))
    assert not is_here(replace(host, address="no-such-host.invalid"))
    assert not is_here(replace(host, address="192.0.2.1"))  # RFC 5737: nobody's


def test_a_folder_or_a_plan_may_be_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sheet = quick_sheet()
    (tmp_path / "check.json").write_text(encode(sheet, schema=SCHEMA))
    assert sheet_of_folder(tmp_path) == sheet
    with pytest.raises(InputError, match=r"no check.json; name a plan file or an emitted folder"):
        sheet_of_folder(tmp_path / "bin")
    result = two_host_result()
    assert [host.name for host in sheet_of_plan(result).hosts] == ["one", "two"]
    report = PreflightReport(hosts=(), missing=(), findings=(), text="ready", json="{}")
    asked = []
    monkeypatch.setattr(
        preflight_module, "preflight", lambda given, **options: asked.append(given) or report
    )
    launch(tmp_path, check=True)
    save_result(result, tmp_path / "plan.json")
    launch(tmp_path / "plan.json", check=True, as_json=True)
    assert asked == [sheet, sheet_of_plan(result)]
    out, err = capsys.readouterr()
    assert out.split() == ["ready", "{}"]
    assert "checking 2 hosts, 1 links" in err


def test_a_check_that_fails_is_a_launch_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "check.json").write_text(encode(quick_sheet(), schema=SCHEMA))
    bad = preflight_module.HostFinding(host="one", check="x", status="fail", found="", mend="")
    report = PreflightReport(hosts=(), missing=(), findings=(bad,), text="", json="{}")
    monkeypatch.setattr(preflight_module, "preflight", lambda given, **options: report)
    with pytest.raises(LaunchError, match="1 of the checks failed"):
        launch(tmp_path, check=True)
