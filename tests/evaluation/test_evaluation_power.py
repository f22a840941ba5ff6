"""The power law's fit: it finds the law that made a table, and says what is wrong with one."""

from __future__ import annotations

from pathlib import Path

import pytest

from evaluation.power import power_answer, read_power
from hetplan.errors import InputError

_HEAD = "source,org,system,benchmark,nodes_measured,run_seconds,mean_node_w\n"
_STEPS = "source,model,gpu,gpus,global_batch,step_time_s\n"


def tables(folder: Path, level: float = 1.25, watts: str = "") -> tuple[Path, Path]:
    """Two makers' nodes by a law of 900 and 400 W: 50 s of each run do not train, a node needs 4 s
    for a sequence alone and 5 s among others.
    """
    (folder / "runs").mkdir()
    steps = "".join(f"r,llama2-70B,h100,{8 * n},{8},{s}\n" for n, s in ((1, 32.0), (8, 5.0)))
    (folder / "runs" / "mlperf_v4.csv").write_text(_STEPS + steps)
    rows = [("many-ac-power", "one", 1, 4050.0, 1.0), ("many-ac-power", "eight", 8, 675.0, 1.0)]
    rows += [("many-ac-power", "more", 8, 200.0, 1.0), ("few", "other", 8, 300.0, level)]
    text = _HEAD
    for org, system, nodes, seconds, factor in rows:
        load = (1.0 if nodes == 1 else 0.8) * (1.0 - 50.0 / seconds)
        node = 8 * factor * (900.0 * load + 400.0 * (1.0 - load))
        text += f"r,{org},{system},lora,{nodes},{seconds},{watts or node}\n"
    text += "r,many-dc-power,one,lora,1,4050.0,1.0\n"
    (folder / "mlperf_power_v4.csv").write_text(text)
    return folder, folder


def test_the_law_that_made_the_table_is_found_and_no_left_out_system_is_off(tmp_path: Path) -> None:
    answer = power_answer(*tables(tmp_path))
    found = answer.values
    assert found["maker_level"] == pytest.approx(1.25, rel=1e-6)
    assert found["computing_watts"] == pytest.approx(900.0 * 1.25**0.5)
    assert found["communicating_watts"] == pytest.approx(400.0 * 1.25**0.5)
    frame = answer.sections[0].frame
    assert list(frame["system"]) == ["one", "eight", "more", "other"]
    assert frame["left_out"].dropna().abs().max() < 1e-6
    assert list(frame["other_maker"]) == pytest.approx([0.25, 0.25, 0.25, -0.2])
    assert "maker unknown: mean error 23.7%, largest 25.0%; the goal is missed" in answer.lines[1]


@pytest.mark.parametrize("watts", ["nan", "-3", "a"])
def test_watts_that_are_none_are_told_with_their_file(tmp_path: Path, watts: str) -> None:
    tables(tmp_path, watts=watts)
    with pytest.raises(InputError, match=r"mlperf_power_v4\.csv: is no table of power"):
        read_power(tmp_path / "mlperf_power_v4.csv")
