"""`--set KEY=VALUE`: the reader of the job file reads the command line too."""

from __future__ import annotations

from pathlib import Path

import pytest

from hetplan.errors import InputError
from hetplan.files.reading import read_document
from hetplan.files.settings import parse_setting, with_settings
from hetplan.job.load import job_keys, load_job, read_job
from hetplan.job.spec import Job

FILE = Path(__file__).parents[2] / "configs" / "jobs" / "llama-2-7b.yaml"


def job(*settings: str, file: Path = FILE) -> Job:
    return read_job(with_settings(read_document(file), [parse_setting(text) for text in settings]))


def test_a_setting_is_the_same_value_in_the_file(tmp_path: Path) -> None:
    lines = "pin: {tp: 4}\nforbid:\n  islands: [a, b]\nseed: 9\ngradient_clipping: true\n"
    file = tmp_path / "job.yaml"
    text = FILE.read_text()
    assert "pin:" not in text
    file.write_text(text + lines)
    given = ("pin.tp=4", "forbid.islands=[a, b]", "seed=9", "gradient_clipping=true")
    assert job(*given) == load_job(file)
    assert job("pin.tp=2", "pin.tp=4").pin.tp == 4
    assert job("pin.tp=", file=file).pin.tp is None


def test_every_key_of_a_job_is_taken() -> None:
    assert {"gap", "quantile", "pin.tp", "trainer.fused_loss", "forbid.nodes"} <= set(job_keys())
    for key in job_keys():
        with pytest.raises(InputError) as error:
            job(f"{key}={{wrong: value}}")
        assert f"--set {key}: " in str(error.value), key
        assert "unknown key; did you mean" not in str(error.value).split("\n")[0]


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("pin.tpp=8", r"^--set pin.tpp: unknown key; did you mean tp"),
        ("gap=3", r"^--set gap: found 3; it must be less than 1"),
        ("pin.microbatch_size=7", r"^--set pin.microbatch_size: 7 does not divide"),
        ("time_limit=5 GB", r"^--set time_limit: '5 GB'"),
        ("seed", r"--set 'seed': write KEY=VALUE"),
        ("pin..tp=8", r"write KEY=VALUE"),
    ],
)
def test_faults_name_the_option(setting: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        job(setting)
