"""Any text in any field of an emission: refused, or one word of the script as bash reads it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from fuzz_forms import emitted_seeds
from hypothesis import Phase, given, seed, settings
from hypothesis import strategies as st
from random_cases import seeds
from rank_layouts import clean_environment
from test_schedulers_quoting import HOSTILE

from hetplan.errors import InputError
from hetplan.files.reading import decode, document_of
from hetplan.schedulers.launch import EmissionOptions
from hetplan.search.files import SCHEMA
from hetplan.search.result import SearchResult
from hetplan.trainers.emission import emit_plan
from hetplan.trainers.folder import write_folder

SHELLCHECK = shutil.which("shellcheck", path=str(Path(sys.executable).parent)) or shutil.which(
    "shellcheck"
)
FIELDS = ("tokenizer", "save", "load", "data", "extra")
TEXT = st.one_of(
    st.sampled_from(HOSTILE),
    st.text(max_size=20),
    st.binary(max_size=20).map(lambda data: data.decode("utf-8", "surrogateescape")),
)
# Stands for the interpreter: says what it was started with.
PYTHON = """#!{python}
import json, os, sys
os.write(1, (json.dumps(sys.argv[1:]) + chr(10)).encode())
"""


def result_of(trainer: str, scheduler: str) -> SearchResult:
    plan = json.loads(emitted_seeds(trainer, scheduler)[0])["plan"]
    return decode(document_of("a.json", json.dumps(plan).encode()), SearchResult, schema=SCHEMA)


def options_of(texts: dict[str, str], place: Path, scheduler: str) -> EmissionOptions:
    return EmissionOptions(
        trainer_folder=str(place),
        tokenizer=texts["tokenizer"],
        save=texts["save"],
        load=texts["load"],
        data=(texts["data"],),
        extra_arguments=("--note", texts["extra"]),
        learning_rate=1e-4,
        scheduler=scheduler,
    )


def emitted(texts: dict[str, str], folder: Path, trainer: str, scheduler: str) -> Path | None:
    """The written folder; None: refused."""
    place = folder / "the trainer's $(touch pwned)"
    place.mkdir()
    options = options_of(texts, place, scheduler)
    try:
        emission = emit_plan(result_of(trainer, scheduler), trainer, options)
        write_folder(folder / "a launch", emission.files)
    except InputError as error:
        str(error).encode()
        return None
    return folder / "a launch"


def heard(folder: Path, host: str) -> list[str]:
    """The words that the interpreter of the host is started with."""
    python = folder.parent / "python"
    python.write_text(PYTHON.format(python=sys.executable))
    python.chmod(0o755)
    done = subprocess.run(
        ["bash", folder / "launch.sh", host],
        env=clean_environment(HETPLAN_PYTHON=str(python)),
        cwd=folder.parent,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [word for line in done.stdout.splitlines() for word in json.loads(line)]


def check_shell(script: Path) -> None:
    """Bash reads it whole, and shellcheck warns of nothing but unused variables."""
    subprocess.run(["bash", "-n", script], check=True, timeout=60)
    if SHELLCHECK:
        done = subprocess.run(
            [SHELLCHECK, "--shell=bash", "--severity=warning", "--exclude=SC2034", script],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("number", seeds(12))
def test_any_text_is_refused_or_one_word_of_the_script(number: int) -> None:
    @seed(number)
    @settings(max_examples=4, database=None, phases=(Phase.generate,))
    @given(
        drawn=st.fixed_dictionaries(dict.fromkeys(FIELDS, TEXT)),
        # Mostly one field: a refusal of one hides what the others do.
        fields=st.one_of(st.sampled_from(FIELDS).map(lambda name: (name,)), st.just(FIELDS)),
    )
    def case(drawn: dict[str, str], fields: tuple[str, ...]) -> None:
        texts = {name: drawn[name] if name in fields else f"/{name}" for name in FIELDS}
        with tempfile.TemporaryDirectory() as made:
            folder = emitted(texts, Path(made), "megatron", "torchrun")
            if folder is None:
                return
            words = heard(folder, "north0000")
            for name, text in texts.items():
                assert text.replace("{folder}", str(folder)) in words, (name, text)
            assert not list(Path(made).rglob("pwned"))
            check_shell(folder / "launch.sh")

    case()


@pytest.mark.parametrize("scheduler", ["torchrun", "slurm"])
@pytest.mark.parametrize("trainer", ["megatron", "flagscale", "torchtitan", "mindspeed"])
@pytest.mark.parametrize("text", [pytest.param(each, marks=pytest.mark.slow) for each in HOSTILE])
def test_every_script_of_hostile_texts_is_whole(
    trainer: str, scheduler: str, text: str, tmp_path: Path
) -> None:
    folder = emitted(dict.fromkeys(FIELDS, text), tmp_path, trainer, scheduler)
    if folder is None:
        pytest.skip("refused")
    scripts = [each for each in folder.iterdir() if each.suffix in (".sh", ".sbatch")]
    assert scripts
    for script in scripts:
        check_shell(script)


@pytest.mark.skipif(SHELLCHECK is None, reason="shellcheck is not installed")
def test_shellcheck_reads_the_scripts(tmp_path: Path) -> None:
    """So that a run without it is seen to be one."""
    folder = emitted(dict.fromkeys(FIELDS, "/a b"), tmp_path, "megatron", "torchrun")
    assert folder is not None
    check_shell(folder / "launch.sh")
