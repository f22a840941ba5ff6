"""Any text in any field of an emission: refused, or one word of the script as bash reads it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import pytest
import yaml
from fuzz_forms import emitted_seeds
from hypothesis import Phase, example, given, seed, settings
from hypothesis import strategies as st
from random_cases import seeds
from rank_layouts import clean_environment, host, layout
from rank_layouts import emitted as emitted_launch
from test_schedulers_quoting import HOSTILE

from hetplan.errors import InputError
from hetplan.files.reading import decode, document_of
from hetplan.schedulers.launch import EmissionOptions
from hetplan.search.files import SCHEMA
from hetplan.search.result import SearchResult
from hetplan.trainers.emission import Emission, emit_plan
from hetplan.trainers.folder import write_folder

SHELLCHECK = shutil.which("shellcheck", path=str(Path(sys.executable).parent)) or shutil.which(
    "shellcheck"
)
FIELDS = ("tokenizer", "save", "load", "data", "extra")
PLAIN_TEXTS = {name: f"/{name}" for name in FIELDS}
TEXT = st.one_of(
    st.sampled_from(HOSTILE),
    st.text(max_size=20),
    st.binary(max_size=20).map(lambda data: data.decode("utf-8", "surrogateescape")),
)
# Stands for the interpreter: says what it was started with.
PYTHON = """#!{python}
import json, os, sys
read = [each + "=" + os.environ[each] for each in "{read}".split() if each in os.environ]
os.write(1, (json.dumps(sys.argv[1:] + read) + chr(10)).encode())
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


def heard(folder: Path, host: str, read: str = "") -> list[str]:
    """The words that the interpreter of the host is started with, and an environment variable."""
    python = folder.parent / "python"
    python.write_text(PYTHON.format(python=sys.executable, read=read))
    python.chmod(0o755)
    done = subprocess.run(
        ["bash", folder / "launch.sh", host],
        env=clean_environment(HETPLAN_PYTHON=str(python), TRAINER_FOLDER=str(folder.parent)),
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


# ---- what a cluster file names: nodes, addresses, images, interfaces, accounts

NAMED = {
    "torchrun": ("node_names", "addresses", "interface", "fabric_devices", "ssh_user"),
    "slurm": ("node_names", "image", "interface", "partition", "account", "resource"),
    "kubernetes": ("node_names", "addresses", "image", "namespace", "fabric_devices", "resource"),
}
NAME = st.one_of(TEXT, st.from_regex(r"[a-z0-9][A-Za-z0-9./_:@#+-]{0,12}", fullmatch=True))


def emitted_named(scheduler: str, field: str, text: str) -> Emission | None:
    """The emission of a cluster that has this text there; None: refused."""
    plan = json.loads(emitted_seeds("megatron", scheduler)[0])["plan"]
    machines = plan["inputs"]["cluster"]
    (domain,), island = machines["launch_domains"], machines["islands"][0]
    if field == "node_names":
        island[field] = [f"{text}[0000-0001]"]
    elif field == "resource":
        domain["kinds"] = [{"device": island["device"]["kind"], field: text}]
    else:
        nodes = island["node_names"][0].replace("[0000-0001]", "0000")
        values = {"addresses": [[nodes, text]], "fabric_devices": [text]}
        domain[field] = values.get(field, text)
    try:
        document = document_of("a.json", json.dumps(plan).encode("utf-8", "surrogatepass"))
        result = decode(document, SearchResult, schema=SCHEMA)
        return emit_plan(result, "megatron", options_of(PLAIN_TEXTS, Path("/"), scheduler))
    except InputError as error:
        str(error).encode()
        return None


@pytest.mark.parametrize("scheduler", NAMED)
def test_any_name_of_a_cluster_is_refused_or_itself_in_every_script(scheduler: str) -> None:
    taken = Counter[str]()

    @seed(1)
    @settings(max_examples=60, database=None, phases=(Phase.generate,), deadline=None)
    @given(field=st.sampled_from(NAMED[scheduler]), text=NAME)
    @example("node_names", "-n")
    def case(field: str, text: str) -> None:
        emission = emitted_named(scheduler, field, text)
        if emission is None or not text:
            return
        taken[field] += 1
        # What is taken means nothing to a shell, to YAML or to Slurm: it is written as it is.
        assert re.fullmatch(r"[A-Za-z0-9_/][A-Za-z0-9./_:@#+-]*", text), (field, text)
        with tempfile.TemporaryDirectory() as made:
            folder = Path(made) / "a launch"
            write_folder(folder, emission.files)
            for each in emission.files:
                if each.path.endswith((".sh", ".sbatch")):
                    check_shell(folder / each.path)
                elif each.path.endswith(".yaml"):
                    found = json.dumps(list(yaml.safe_load_all(each.text)))
                    is_whole = json.dumps(text) in found
                    assert is_whole or field not in ("image", "namespace", "resource")
            if scheduler == "torchrun":
                heard(folder, f"{text}0000" if field == "node_names" else "north0000")
            assert not list(Path(made).rglob("pwned"))

    case()
    # Neither is everything refused, nor is one field's every text.
    assert len(taken) >= len(NAMED[scheduler]) - 2, taken


@pytest.mark.parametrize("number", seeds(2))
def test_any_value_of_an_environment_variable_is_what_a_rank_reads(number: int) -> None:
    @seed(number)
    @settings(max_examples=10, database=None, phases=(Phase.generate,), deadline=None)
    @given(name=st.one_of(st.just("HETPLAN_NOTE"), TEXT), text=TEXT)
    def case(name: str, text: str) -> None:
        with tempfile.TemporaryDirectory() as made:
            (Path(made) / "a launch").mkdir()
            try:
                folder = emitted_launch(
                    Path(made) / "a launch",
                    layout((host("oak"), (0,))),
                    environment=((name, text),),
                )
            except InputError:
                return
            assert re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name, re.ASCII)
            assert f"{name}={text}".replace("{folder}", str(folder)) in heard(folder, "oak", name)
            check_shell(folder / "launch.sh")
            assert not list(Path(made).rglob("pwned"))

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
