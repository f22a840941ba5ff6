"""The short closed loop on emulated hosts: it predicts, a kill leaves nothing, and it goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from evaluation.closed_loop.cgroup import PREFIX
from hetplan.emulation import namespaces, state
from hetplan.emulation.tools import missing
from hetplan.emulation.values import NAMESPACE_PREFIX, key_of

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
INVALID_EXIT = 5
GATES = {"mape": 0.10, "spearman": 0.9, "regret": 0.05}
"""What four measured steps of six plans can say, on a machine that is not busy."""

pytestmark = [
    pytest.mark.skipif(bool(missing()), reason=f"cannot emulate here: {'; '.join(missing())}"),
    pytest.mark.alone,
    pytest.mark.slow,
    pytest.mark.xdist_group("emulation"),
]


def start(out: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        (
            *(sys.executable, "-m", "evaluation", "closed-loop", "--short", "--json"),
            *("--out", str(out)),
        ),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
        start_new_session=True,
    )


def lines_until(process: subprocess.Popen[str], begin: str) -> Iterator[str]:
    """What it says, until a line that begins so."""
    assert process.stderr is not None
    for line in process.stderr:
        yield line
        if line.startswith(begin):
            return


def left_of(process: int) -> list[str]:
    """What there still is of the loop that ran in this process."""
    name = f"closed-loop-{process}"
    key = key_of(name)
    found = [each for each in namespaces.names() if each.startswith(f"{NAMESPACE_PREFIX}{key}")]
    found += [str(state.FOLDER / key)] * (state.FOLDER / key).exists()
    found += map(str, Path("/sys/fs/cgroup").glob(f"**/{PREFIX}{process}"))
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            words = Path(f"/proc/{entry}/cmdline").read_bytes().decode(errors="replace")
            session = os.getsid(int(entry))
        except (OSError, ProcessLookupError):
            continue
        if name in words or key in words or session == process:
            found.append(words.replace("\0", " "))
    return found


def nothing_left(process: int, seconds: float = 30.0) -> list[str]:
    limit = time.monotonic() + seconds
    while (found := left_of(process)) and time.monotonic() < limit:
        time.sleep(0.1)
    return found


def test_killed_while_it_trains_it_goes_on_and_predicts(tmp_path: Path) -> None:
    out = tmp_path / "loop"
    process = start(out)
    try:
        said = list(lines_until(process, "plain 2/"))
        assert said[-1].startswith("plain 2/"), said
        assert any(each.startswith(NAMESPACE_PREFIX) for each in left_of(process.pid))
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
    assert nothing_left(process.pid) == []
    kept = {path: path.read_bytes() for path in (out / "trained-plain").glob("*.json")}
    assert len(kept) == 2
    process = start(out)
    try:
        result, said_again = process.communicate(timeout=240)
    finally:
        process.kill()
    assert process.returncode in (0, INVALID_EXIT), said_again
    assert nothing_left(process.pid) == []
    assert "profile" not in said_again, "it measured again what it had measured"
    assert {path: path.read_bytes() for path in kept} == kept
    judge(json.loads(result))


def judge(found: dict[str, Any]) -> None:
    (only,) = found["passes"]
    assert len(only["rows"]) == found["spec"]["plans"] == 6
    for row in only["rows"]:
        assert row["trained"]["losses"][0] == pytest.approx(
            only["rows"][0]["trained"]["losses"][0], rel=1e-4
        ), "plans of one job begin with one loss"
    across = [row["trained"] for row in only["rows"] if row["trained"]["counted_long_bytes"]]
    for trained in across:
        # Nothing that the trainer sent between the regions went another way.
        assert trained["carried_long_bytes"] >= (
            trained["all_steps"] * trained["counted_long_bytes"]
        )
    if only["verdict"] == "INVALID":
        pytest.skip(f"the machine is too busy to compare times: {'; '.join(only['reasons'])}")
    totals = only["totals"]
    assert totals["mape"] <= GATES["mape"], totals
    assert totals["spearman"] >= GATES["spearman"], totals
    assert totals["regret"] <= GATES["regret"], totals
