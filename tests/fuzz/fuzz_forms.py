"""Every form that hetplan reads or emits, with texts that it takes: what the fuzzer changes.

`read` gets the path of a file, or of plan and options as they are emitted, and answers with a value
or raises a HetplanError.
"""

from __future__ import annotations

import ast
import gzip
import json
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import tree_sitter
import tree_sitter_bash
import yaml
from importers_golden_inputs import GOLDEN_INPUTS
from launches_handwritten import (
    ARGUMENTS,
    EXPERIMENT,
    GPT3,
    HETERO,
    HOSTS,
    LLAMA,
    MIXTRAL,
    TITAN,
    TOML,
)
from lint_samples import DRAWN as BUNDLES
from lint_samples import Bundle
from model_configs import CONFIGS as MODEL_CONFIGS
from rank_layouts import PLAIN, PODS, SLURM
from test_golden import SCHEMAS
from trainer_models import MODEL
from trainer_plans import (
    ASCEND,
    JOB,
    chosen,
    cluster,
    island,
    random_results,
    result_of,
    two_regions,
)
from trainer_plans import flagscale as flagscale_plan
from trainer_plans import torchtitan as torchtitan_plan
from training_logs_rendered import (
    megatron_arguments,
    megatron_line,
    megatron_timers,
    nemo_line,
    torchtitan_line,
)

from hetplan.cluster.catalogue import load_catalogue
from hetplan.cluster.launch_domains import KindLaunch
from hetplan.cluster.load import load_cluster
from hetplan.comparison.logs import load_runs
from hetplan.drafting.cluster import draft_cluster_text
from hetplan.errors import InputError
from hetplan.files.encoding import encode, to_plain
from hetplan.files.reading import decode, document_of, read_document, read_text
from hetplan.importers.records import IMPORT_SCHEMA, Imported
from hetplan.importers.table import IMPORTERS, Importer, import_file
from hetplan.job.load import load_job
from hetplan.launchers.run_log import RunLog, read_runs
from hetplan.lint.reading import LaunchContext, read_all
from hetplan.lint.registry import findings, judge
from hetplan.machine import devices, host
from hetplan.model.load import load_model
from hetplan.plans.build import plan_of
from hetplan.predict.fit import load_predictor
from hetplan.profiling.pacing import load_pace
from hetplan.profiling.samples import LayerSample, LinkSample, OperatorSample, read_samples
from hetplan.profiling.store import store_state
from hetplan.schedulers import SCHEDULERS
from hetplan.schedulers.launch import EmissionOptions
from hetplan.search.files import SCHEMA as PLAN_SCHEMA
from hetplan.search.files import load_legal_plan, result_text
from hetplan.search.journal import SCHEMA as JOURNAL_SCHEMA
from hetplan.search.journal import Event, Header, read_journal
from hetplan.search.result import SearchResult
from hetplan.trainers import TRAINERS
from hetplan.trainers.emission import emit_plan
from hetplan.trainers.megatron.read_model import launch_model
from hetplan.trainers.read import facts_of, read_launch
from hetplan.trainers.read_log import read_training_log
from hetplan.whatif.sweep import COLUMNS, Row, Table
from hetplan.whatif.sweep_grid import load_sweep

TESTS = Path(__file__).parents[1]
CONFIGS = TESTS.parent / "configs"
GOLDEN = TESTS / "golden"


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """One kind of file that is read, or of folder that is emitted."""

    name: str
    file: str
    """Name of the file that is written, relative to a folder."""
    seeds: Callable[[], tuple[str, ...]]
    read: Callable[[Path], object]
    is_emitted: bool = False
    """The text is JSON of plan and options; changes are edits of its values."""
    encoding: str = "utf-8"
    always: tuple[tuple[str, str], ...] = ()
    """Other files that are there, with their texts."""


def _files(*patterns: str, folder: Path = CONFIGS) -> Callable[[], tuple[str, ...]]:
    return lambda: tuple(
        path.read_text() for pattern in patterns for path in sorted(folder.glob(pattern))
    )


def _golden(type_: type, newest: int = 2) -> Callable[[], tuple[str, ...]]:
    """The newest forms of a type, and its first."""

    def texts() -> tuple[str, ...]:
        paths = sorted(
            GOLDEN.glob(f"{type_.__name__}.v*"), key=lambda path: int(path.name.split(".")[1][1:])
        )
        return tuple(path.read_text() for path in dict.fromkeys((*paths[-newest:], paths[0])))

    return texts


def _decoded(type_: type, path: Path) -> object:
    return decode(read_document(path), type_, schema=SCHEMAS[type_])


# ---- readers with more than one step


def _imported(kind: str | None, path: Path) -> Imported:
    imported = import_file(kind, path, link="fuzz")
    encode(imported, schema=IMPORT_SCHEMA).encode("utf-8")
    if imported.topology is not None:
        count = len(imported.topology.devices) + len(imported.topology.nics)
        assert len(imported.topology.paths) == count * (count - 1) // 2
    return imported


def _importer_form(importer: Importer) -> Form:
    texts = tuple(each.text for each in GOLDEN_INPUTS if each.importer == importer)
    return Form(
        name=f"import-{importer.kind}",
        file="output.txt",
        seeds=lambda: texts,
        read=partial(_imported, importer.kind),
    )


def _launch(trainer: str | None, path: Path) -> object:
    text = read_launch(path, trainer, (("nnodes", "16"), ("nproc-per-node", "8")))
    facts = facts_of(text, 32)
    assert facts.num_microbatches >= 0
    assert facts.world_size > 0
    assert all(count >= 0 for row in facts.layers for count in row)
    # torchtitan's models are Python.
    return facts if text.trainer == "torchtitan" else launch_model(text, "m")


def _launch_form(name: str, trainer: str, file: str, *texts: str) -> Form:
    return Form(
        name=f"launch-{name}",
        file=file,
        seeds=lambda: texts,
        read=partial(_launch, trainer),
        always=(("train/hetero.yaml", HETERO), ("hosts", HOSTS)),
    )


def _sweep_table(path: Path) -> object:
    """A table is gone on with: also rows that are there are compared with new ones."""
    with Table(path, fresh=False) as table:
        for key in sorted(table.done):
            told = {each.name: "" for each in fields(Row)}
            numbers: dict[str, Any] = {"global_batch_size": 8, "sequence_length": 8}
            table.add(Row(**{**told, **numbers, "key": key, "step_seconds": "1.5"}))
        return table.done


_ROW = (
    "f00,tiny,two,job,native,8,128,north-south 1 GB/s,,optimal,0.5,2048,0.01,0.49,4,tp 1,",
    "f01,tiny,two,job,native,16,128,,,infeasible,,,,,,,no room",
)


def _training_log(path: Path) -> object:
    log = read_training_log([path])
    assert all(step.seconds is None or step.seconds > 0 for step in log.steps)
    return log


_TIMERS = {"forward-backward": (900.5, 1000.25), "optimizer": (10.0, 12.0)}


def _logs() -> tuple[str, ...]:
    megatron = (
        megatron_arguments(micro_batch_size=1, num_layers=4),
        *(megatron_line(10, 1000.0), megatron_timers(_TIMERS)),
        *(megatron_line(20, 990.0), megatron_timers(_TIMERS, "all")),
    )
    return (
        "\n".join(megatron),
        "\n".join(torchtitan_line(step, 9000.0) for step in (1, 2, 3)),
        "\n".join(nemo_line(step, 1.5) for step in (1, 2, 3)),
    )


def _population(path: Path) -> object:
    return store_state(path.parents[2])


def _bundles() -> tuple[str, ...]:
    import tempfile

    texts = []
    for name in BUNDLES:
        with tempfile.TemporaryDirectory() as folder:
            Bundle.draw(1, name).write(Path(folder), name)
            texts += [path.read_text() for path in sorted(Path(folder).rglob("*.*"))]
    return tuple(texts)


def _linted(path: Path) -> object:
    reading = read_all([path], LaunchContext())
    judge(reading.inputs)
    return findings(reading)


def _drafted(path: Path) -> object:
    lines = read_text(path).splitlines()
    nodes = [line[6:] for line in lines if line.startswith("nodes ")]
    between = [line[8:] for line in lines if line.startswith("between ")]
    text = draft_cluster_text(nodes, between).text
    return load_cluster(document_of("cluster.yaml", text.encode()))


def _machine(path: Path) -> object:
    text = path.read_bytes().decode("utf-8", "replace")
    for tool in devices.DRIVER_TOOLS:
        for device in tool.parse(text):
            assert 0 <= device.memory_bytes < 1e30
            assert device.name.isprintable()
    for parse in (host.quota_cores, host.group_limit_bytes, host.port_bits_per_second):
        assert parse(text) >= 0
    return host.port_state(text), host.processor_model(text), devices.parse_torch(text)


def _machine_texts() -> tuple[str, ...]:
    from test_machine_parsers import NPU, QUERY, ROCM

    mark = devices.TORCH_MARK + '{"version": "2.6", "devices": []}'
    return QUERY, ROCM, NPU, mark, "250000 100000", "2.5 Gb/sec (1X SDR)", "4: ACTIVE"


# ---- what is emitted


_NPU = KindLaunch(device=ASCEND, resource="huawei.com/Ascend910")
_DOMAINS = {"torchrun": PLAIN, "slurm": SLURM, "kubernetes": PODS}


@cache
def _planned(target: str) -> SearchResult:
    """A legal plan that the trainer can run."""
    if target == "mindspeed":
        machines = cluster(island("a", kind=ASCEND), island("b", kind=ASCEND))
        stages = chosen(("a", 6), ("b", 6), tp=8)
        return result_of(machines, plan_of(MODEL, machines, JOB, stages))
    draws = {"flagscale": flagscale_plan, "torchtitan": torchtitan_plan}
    if target not in draws:
        return two_regions()
    (found,) = random_results(draws[target], 3, 1)
    inputs = found.inputs
    return result_of(inputs.cluster, found.plan, inputs.model, inputs.job)


@cache
def emitted_seeds(target: str, scheduler: str) -> tuple[str, ...]:
    """Plan and options, as JSON."""
    result = _planned(target)
    machines = result.inputs.cluster
    names = tuple(each.name for each in machines.islands)
    kinds = (_NPU,) if target == "mindspeed" and scheduler == "kubernetes" else ()
    domain = replace(_DOMAINS[scheduler], islands=names, interface="eth0", kinds=kinds)
    inputs = replace(result.inputs, cluster=replace(machines, launch_domains=(domain,)))
    options = {
        "trainer_folder": "/opt/trainer",
        "python": "python3",
        "data": ["/data/corpus"],
        "tokenizer": "/data/tokenizer.model",
        "save": "/save",
        "load": "/load",
        "steps": 50,
        "learning_rate": 1e-4,
        "extra_arguments": ["--log-interval", "1"],
        "scheduler": scheduler,
    }
    result = replace(result, inputs=inputs, schema=PLAN_SCHEMA)
    return (json.dumps({"plan": json.loads(result_text(result)), "options": options}),)


def _emitted(target: str, path: Path) -> object:
    data = json.loads(path.read_text())
    given = data.get("options")
    plan = document_of("plan.json", json.dumps(data.get("plan")).encode())
    result = decode(plan, SearchResult, schema=PLAN_SCHEMA)
    sealed = path.with_name("plan.json")
    sealed.write_text(result_text(result))
    options = decode(
        document_of("options.json", json.dumps({"schema": "fuzz/1", **given}).encode())
        if isinstance(given, dict)
        else document_of("options.json", b"[]"),
        EmissionOptions,
        schema="fuzz/1",
    )
    if options.scheduler not in SCHEDULERS:
        raise InputError("no such scheduler")  # what the command line says
    emission = emit_plan(load_legal_plan(sealed), target, options)
    for each in emission.files:
        check_text(each.path, each.text)
    return emission


def check_text(name: str, text: str) -> None:
    """Whether an emitted file is what its name says; a wrong one raises."""
    text.encode("utf-8")
    suffix = name.rpartition(".")[2]
    if suffix in ("sh", "sbatch"):
        assert not _bash().parse(text.encode()).root_node.has_error, f"{name} is no bash"
    elif suffix == "yaml":
        assert list(yaml.safe_load_all(text))
    elif suffix == "json":
        json.loads(text)
    elif suffix == "toml":
        tomllib.loads(text)
    elif suffix == "py":
        ast.parse(text)


@cache
def _bash() -> tree_sitter.Parser:
    return tree_sitter.Parser(tree_sitter.Language(tree_sitter_bash.language()))


def _emitted_forms() -> Iterator[Form]:
    for target in TRAINERS:
        for scheduler in SCHEDULERS:
            yield Form(
                name=f"emit-{target}-{scheduler}",
                file="case.json",
                seeds=partial(emitted_seeds, target, scheduler),
                read=partial(_emitted, target),
                is_emitted=True,
            )


# ---- the table


def _of_files() -> Iterator[Form]:
    models = lambda: tuple(json.dumps(each) for each in MODEL_CONFIGS.values())  # noqa: E731
    yield Form(name="cluster", file="a.yaml", seeds=_files("clusters/*"), read=load_cluster)
    yield Form(name="model", file="a.yaml", seeds=_files("models/*"), read=load_model)
    yield Form(name="config-json", file="config.json", seeds=models, read=load_model)
    yield Form(name="job", file="a.yaml", seeds=_files("jobs/*"), read=load_job)
    yield Form(
        name="devices", file="a.yaml", seeds=_files("devices/[ac]*"),
        read=lambda path: load_catalogue(path.parent),
    )  # fmt: skip
    yield Form(
        name="sweep", file="sweeps/a.yaml", seeds=_files("sweeps/*"), read=load_sweep,
        always=tuple(
            (f"{folder}/{path.name}", path.read_text())
            for folder in ("clusters", "models", "jobs")
            for path in (CONFIGS / folder).iterdir()
        ),
    )  # fmt: skip
    yield Form(
        name="sweep-table", file="sweep.csv", read=_sweep_table,
        seeds=lambda: ("\n".join([",".join(COLUMNS), *_ROW, ""]),),
    )  # fmt: skip
    yield Form(
        name="plan", file="a.json", read=load_legal_plan,
        seeds=lambda: (*_golden(SearchResult, 1)(), result_text(_planned("megatron"))),
    )  # fmt: skip
    readers: dict[str, Callable[[Path], object]] = {
        "FittedLaws": load_predictor, "Pace": load_pace,
    }  # fmt: skip
    for type_ in SCHEMAS:
        if type_ not in (SearchResult, RunLog):
            read = readers.get(type_.__name__, partial(_decoded, type_))
            name = f"json-{type_.__name__}"
            yield Form(name=name, file="a.json", seeds=_golden(type_), read=read)
    for sample in (LayerSample, LinkSample, OperatorSample):
        yield Form(
            name=f"csv-{sample.__name__}", file="a.csv", seeds=_golden(sample),
            read=partial(read_samples, sample_type=sample),
        )  # fmt: skip
    yield Form(
        name="store", file="store/cpu/mine/layers.csv", seeds=_golden(LayerSample),
        read=_population,
        always=(("store/cpu/mine/provenance.json", (GOLDEN / "Provenance.v2.json").read_text()),),
    )  # fmt: skip
    yield Form(name="run-log", file="a.jsonl", seeds=_run_logs, read=read_runs)
    runs = '{"schema": "hetplan.runs/1", "runs": [{"log": ["a.log", "b"], "plan": "p.json"}]}'
    yield Form(name="runs-list", file="runs.json", seeds=lambda: (runs,), read=load_runs)
    yield Form(name="journal", file="a.jsonl", seeds=_journals, read=read_journal)


@cache
def _journals() -> tuple[str, ...]:
    plan = chosen(("north", 7), ("south", 5), tp=8)
    asked = (("model", "0" * 64), ("cluster", "1" * 64), ("job", "2" * 64))
    lines = (
        Header(schema=JOURNAL_SCHEMA, hetplan_version="0", inputs=asked, gap=0.01),
        Event(event="offer", solver=0, family="1F1B", seconds=1.5, chosen=plan),
        Event(event="bound", elapsed_seconds=0.6, solver=0, what="program", seconds=1.25),
        Event(event="step", elapsed_seconds=0.7, solver=0, what="prove", replays=7, listed=3),
        Event(event="end", elapsed_seconds=0.8, what="optimal"),
    )
    return ("".join(json.dumps(to_plain(line)) + "\n" for line in lines),)


def _run_logs() -> tuple[str, ...]:
    """One line per run."""
    return tuple(f"{json.dumps(json.loads(text))}\n" for text in _golden(RunLog)())


def _of_others() -> Iterator[Form]:
    yield from map(_importer_form, IMPORTERS)
    yield Form(
        name="import-detected", file="output.txt", read=partial(_imported, None),
        seeds=lambda: tuple(each.text for each in GOLDEN_INPUTS),
    )  # fmt: skip
    yield Form(name="training-log", file="a.log", seeds=_logs, read=_training_log)
    yield Form(
        name="training-log-gz", file="a.log.gz", read=_training_log, encoding="latin-1",
        seeds=lambda: tuple(
            gzip.compress(text.encode(), mtime=0).decode("latin-1") for text in _logs()
        ),
    )  # fmt: skip
    yield _launch_form("megatron", "megatron", "a.sh", GPT3, LLAMA, MIXTRAL, ARGUMENTS)
    yield _launch_form("flagscale", "flagscale", "e.yaml", HETERO, EXPERIMENT)
    yield _launch_form("torchtitan", "torchtitan", "g.sh", TITAN)
    yield _launch_form("torchtitan-toml", "torchtitan", "h.toml", TOML)
    yield Form(name="check", file="a.json", seeds=_bundles, read=_linted)
    nodes = "nodes 4x8 h100 @A\nnodes 8x8 mi300x @B 2x200Gbit\nbetween A B 100Gbit 2ms\n"
    yield Form(name="init-words", file="words", seeds=lambda: (nodes,), read=_drafted)
    yield Form(name="machine", file="words", seeds=_machine_texts, read=_machine)


FORMS = (*_of_files(), *_of_others(), *_emitted_forms())
