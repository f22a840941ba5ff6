"""check.py, as it is emitted, says what a host lacks."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hetplan.trainers.folder import Checks, check_text

PYTHON = """#!/bin/sh
echo '{"python": "3.11.1", "torch": "2.9", "nccl": "2.27", "devices": [["A100", 70e9, 80e9]]}'
"""


def host(name: str, **more: object) -> Checks:
    return {
        "name": name,
        "address": "127.0.0.1",
        "vendor": "nvidia",
        "device_kind": "nvidia-a100-80gb-sxm",
        "devices": (0,),
        "memory_bytes": 60e9,
        "interface": "lo",
        "fabric_devices": (),
        "reads_data": False,
        "container": False,
    } | more


def emitted(folder: Path, *hosts: Checks, **more: object) -> Path:
    """A folder with check.py; the interpreter of the plan tells of one A100 with 70 GB free."""
    python = folder / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    checks = {
        "port": port,
        "hosts": hosts,
        "python": str(python),
        "trainer_folder": str(folder),
        "program": "",
        "data": (),
        "save": "",
        "load": "",
        "checkpoint_bytes": 1e3,
    }
    (folder / "check.py").write_text(check_text(checks | more, ()))
    return folder / "check.py"


def command(script: Path, *words: str) -> subprocess.Popen[str]:
    environment = {name: text for name, text in os.environ.items() if "HETPLAN" not in name}
    return subprocess.Popen(
        [sys.executable, str(script), *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
    )


def checked(script: Path, *words: str) -> tuple[int, str]:
    running = command(script, *words)
    text, _ = running.communicate()
    return running.returncode, text


def test_a_host_that_has_everything_is_ready(tmp_path: Path) -> None:
    (tmp_path / "pretrain_gpt.py").touch()
    script = emitted(tmp_path, host("a"), program="pretrain_gpt.py", save=str(tmp_path / "new"))
    code, text = checked(script, "--host", "a")
    assert (code, text.splitlines()[-1]) == (0, "ready"), text
    assert "python 3.11.1, torch 2.9, nccl 2.27" in text


@pytest.mark.parametrize(
    ("of_host", "of_plan", "says"),
    [
        ({"interface": "eth9"}, {}, "FAIL  interface: eth9 is not there"),
        ({"fabric_devices": ("mlx5_9",)}, {}, "FAIL  fabric: no mlx5_9"),
        ({"address": "no.such.host.invalid"}, {}, "FAIL  name: no.such.host.invalid"),
        ({"devices": (0, 1)}, {}, "FAIL  devices: 1 devices are seen"),
        ({"memory_bytes": 75e9}, {}, "FAIL  devices: device 0 (A100) has 65.2 of 74.5 GiB free"),
        ({}, {"program": "pretrain_gpt.py"}, "FAIL  trainer: "),
        ({"reads_data": True}, {"data": ("0.3", "/no/data")}, "FAIL  data: /no/data"),
        ({}, {"load": "/no/checkpoint"}, "FAIL  checkpoint: /no/checkpoint"),
        ({}, {"save": "/tmp", "checkpoint_bytes": 1e18}, "FAIL  save: /tmp has "),
        ({}, {"python": "/no/python"}, "FAIL  torch: /no/python"),
    ],
)
def test_what_a_host_lacks_is_named(
    tmp_path: Path, of_host: dict[str, object], of_plan: dict[str, object], says: str
) -> None:
    code, text = checked(emitted(tmp_path, host("a", **of_host), **of_plan), "--host=a")
    assert code == 1
    assert says in text
    assert text.splitlines()[-1] == "correct what FAIL names"


def test_hosts_meet_at_the_rendezvous_port(tmp_path: Path) -> None:
    script = emitted(tmp_path, host("a"), host("b"))
    running = [command(script, "--host", name, "--wait=30") for name in ("b", "a")]
    texts = [each.communicate()[0] for each in running]
    assert [each.returncode for each in running] == [0, 0], texts
    assert "every host reaches port" in texts[1]


def port_of(script: Path) -> int:
    return int(json.loads(script.read_text().rpartition("\n# ")[2])["checks"]["port"])


def called(place: tuple[str, int], words: bytes) -> bytes:
    """What the port answers to these words, after what it says first."""
    end = time.monotonic() + 20
    while True:
        try:
            with socket.create_connection(place, timeout=5) as guest:
                assert len(guest.recv(512)) == 33
                guest.sendall(words)
                return guest.recv(512)
        except ConnectionError:
            assert time.monotonic() < end
            time.sleep(0.05)


def test_only_hosts_with_the_folder_count(tmp_path: Path) -> None:
    """The port is open on the rendezvous address alone, and a name alone is no proof."""
    script = emitted(tmp_path, host("a"), host("b"))
    waits = command(script, "--host=a", "--wait=30")
    place = ("127.0.0.1", port_of(script))
    assert called(place, b"b\n") == b""
    assert called(place, b"b " + b"0" * 64 + b"\n") == b""
    assert called(place, "b \u00e9\x1b[2J\n".encode()) == b""
    # Every address of 127/8 is this machine: only the rendezvous one is listened on.
    with pytest.raises(ConnectionError), socket.create_connection(("127.0.0.2", place[1])):
        pass
    code, text = checked(script, "--host=b", "--wait=20")
    assert code == 0, text
    said, _ = waits.communicate()
    assert waits.returncode == 0, said
    assert "note  port: 3 who called did not know this folder" in said
    assert "\x1b" not in said


def test_a_stranger_at_the_port_is_not_taken_for_the_first_host(tmp_path: Path) -> None:
    script = emitted(tmp_path, host("a"), host("b"))
    other = tmp_path / "other"
    other.mkdir()
    older = emitted(other, host("a"), host("b"), port=port_of(script), save=str(tmp_path))
    waits = command(older, "--host=a", "--wait=20")
    code, text = checked(script, "--host=b", "--wait=2")
    waits.kill()
    waits.communicate()
    assert code == 1
    assert "something answers that does not know this folder" in text
