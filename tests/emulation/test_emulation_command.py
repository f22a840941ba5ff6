"""What `hetplan emulate` refuses and says, and the pace files that it writes."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from emulation_cases import FOUR_HOSTS, ROOT, four_hosts
from typer.testing import CliRunner

from hetplan.cli.main import app
from hetplan.emulation import tools
from hetplan.emulation.pace import least_headroom, slow_downs
from hetplan.errors import InputError
from hetplan.profiling.pacing import load_pace


def emulate(*words: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, ("emulate", *words))
    return done.exit_code, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("lacks", "says"),
    [
        ((os, "geteuid", lambda: 1000), "sudo"),
        ((tools, "TUN", Path("/nowhere")), "modprobe tun"),
        ((tools, "tool", lambda name: name), "ip and tc not found: install iproute2"),
        ((tools, "_has_capabilities", lambda: False), "NET_ADMIN and SYS_ADMIN"),
        ((sys, "platform", "darwin"), "Linux"),
    ],
)
def test_what_the_machine_lacks_is_said(
    monkeypatch: pytest.MonkeyPatch, lacks: tuple[object, str, object], says: str
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(*lacks)
    for words in (("up", str(FOUR_HOSTS)), ("down", "--all"), ("run", "x", "y", "--", "true")):
        code, _, said = emulate(*words)
        assert code == 2, words
        assert says in said


def test_kinds_are_slower_by_the_ratio_of_their_rates() -> None:
    factors = slow_downs(four_hosts(), "float32", {})
    assert factors == {"emulated-fast": 1.0, "emulated-medium": 1.5, "emulated-slow": 3.0}
    # 2 + 1/1.5 + 1/3 = 3 cores' worth of ranks on 45 % of two cores.
    assert least_headroom(four_hosts(), factors, cores=2) == pytest.approx(3 / 0.9)
    assert least_headroom(four_hosts(), factors, cores=64) == 1.0


def test_kinds_are_slower_by_given_factors() -> None:
    given = {"emulated-fast": 2.0, "emulated-medium": 3.0, "emulated-slow": 10.0}
    assert slow_downs(four_hosts(), "bfloat16", given)["emulated-slow"] == 5.0
    with pytest.raises(InputError, match="not given for emulated-medium, emulated-slow"):
        slow_downs(four_hosts(), "float32", {"emulated-fast": 2.0})
    with pytest.raises(InputError, match="no island has device kind other"):
        slow_downs(four_hosts(), "float32", {"other": 2.0})
    with pytest.raises(InputError, match="no peak rate for bfloat16"):
        slow_downs(four_hosts(), "bfloat16", {})


def test_a_pace_file_is_written_and_read_back(tmp_path: Path) -> None:
    out = tmp_path / "pace.json"
    code, stdout, stderr = emulate(
        *("pace", str(FOUR_HOSTS), "--model", str(ROOT / "configs/models/gpt-tiny.yaml")),
        *("--job", str(ROOT / "configs/jobs/gpt-tiny.yaml"), "--store", str(ROOT / "profiles")),
        *("--headroom", "5", "--microbatch", "1,2", "--out", str(out)),
    )
    assert code == 0, stderr
    assert "emulated-slow: 15 times slower than a core of this machine" in stdout
    pace = load_pace(out)
    fast, slow = pace.kind("emulated-fast"), pace.kind("emulated-slow")
    assert slow.entries[0].seconds == pytest.approx(3 * fast.entries[0].seconds)
