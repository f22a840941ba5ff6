"""The stand-alone measure.py: what it is made of, what it measures, and what comes back from it."""

import argparse
import ast
import dataclasses
import json
import subprocess
import sys

import pytest
import torch
from profiling_models import GPT, LLAMA
from profiling_samples import CLUSTER, LAYER, LINK, NORM, PRODUCT, PROVENANCE, invoke, layer

from hetplan.cluster.load import load_cluster
from hetplan.errors import InputError
from hetplan.files.encoding import to_plain
from hetplan.job.spec import Optimizer
from hetplan.model.numerics import OWN_NORM_EPSILON, OWN_ROTARY_BASE
from hetplan.model.spec import TRAINED_KINDS
from hetplan.profiling import bodies, measure, weights
from hetplan.profiling.backends import CpuBackend
from hetplan.profiling.grid import ShapeOptions
from hetplan.profiling.layers import Head, HeadWithLoss, build_layer
from hetplan.profiling.measure_links import LINK_OPERATIONS
from hetplan.profiling.samples import (
    LayerSample,
    LinkOperation,
    LinkSample,
    OperatorSample,
    header,
    row,
)
from hetplan.profiling.script import MODULES, measuring_task, merge_files, script_text
from hetplan.profiling.store import read_store

SIZES = ("--hidden", "64", "--seq", "16", "--vocab", "32", "--microbatch", "1")
# Nothing but Python's own modules and torch may be imported.
ALONE = """
import runpy, sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("hetplan", "pydantic", "yaml", "typer"):
            raise ImportError(name + " is not there")
sys.meta_path.insert(0, Refuse())
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def start(script, *arguments):
    return subprocess.run(
        [sys.executable, "-I", "-c", ALONE, str(script), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=script.parent,
        check=False,
    )


def test_it_is_python_3_8_and_imports_torch_alone() -> None:
    tree = ast.parse(script_text({}), feature_version=(3, 8))
    imported = {
        (node.module or "").partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
    } | {
        alias.name.partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    assert imported - set(sys.stdlib_module_names) == {"torch"}
    names = [node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    assert len(names) == len(set(names)), "two modules define one name"
    assert MODULES[-1] == "measure"
    called = {
        node.func.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    assert not called & {"exec", "eval", "compile", "__import__"}, "its code is not all in sight"


def test_its_columns_and_constants_are_those_of_hetplan(monkeypatch) -> None:
    types = {"layers": LayerSample, "operators": OperatorSample, "links": LinkSample}
    for what, sample_type in types.items():
        assert ",".join(measure.COLUMNS[what]) == header(sample_type)
    monkeypatch.setattr(measure, "TASK", {"version": "1"})
    options = argparse.Namespace(kind="cpu", threads=1, what="layers")
    names = {field.name for field in dataclasses.fields(PROVENANCE)}
    assert measure._provenance(options, CpuBackend()).keys() == names | {"schema"}
    assert set(LINK_OPERATIONS) == set(LinkOperation)
    assert bodies.NORM_EPSILON == OWN_NORM_EPSILON
    assert bodies.ROTARY_BASE == OWN_ROTARY_BASE
    rule = weights.make_rule(Optimizer.ADAMW, [torch.zeros(1)]).defaults
    assert {name: rule[name] for name in bodies.ADAMW} == bodies.ADAMW
    assert weights.SGD_RATE == 0.1


@pytest.mark.parametrize("model", [GPT, LLAMA])
@pytest.mark.parametrize("tp", [1, 2])
def test_its_layers_compute_what_trained_layers_compute(model, tp) -> None:
    cpu = torch.device("cpu")
    for position, kind in enumerate(model.layers):
        if kind not in TRAINED_KINDS or position == 2:
            continue
        row_ = {
            name: getattr(model, name)
            for name in (
                "hidden_size",
                "ffn_hidden_size",
                "num_attention_heads",
                "num_kv_heads",
                "head_dim",
                "vocab_size",
                "max_sequence_length",
            )
        } | {"architecture": model.architecture.value, "layer": kind.value, "tp": tp}
        row_ |= {"microbatch_size": 2, "sequence_length": 8, "precision": "float32"}
        alone = bodies.LayerSlice(row_, cpu)
        trained = build_layer(
            model,
            position,
            cut=weights.Cut(tp=tp),
            group=None,
            seed=1,
            dtype=torch.float32,
            device=cpu,
        )
        with torch.no_grad():
            for mine, its in zip(alone.parameters(), trained.parameters(), strict=True):
                assert mine.shape == its.shape
                mine.copy_(its)
        if isinstance(trained, Head):
            trained = HeadWithLoss(trained)
        arguments, gradient = alone.inputs(cpu)
        results = []
        for each in (alone, trained):
            for argument in arguments:
                argument.grad = None
            result = each(*arguments)
            result.backward(gradient)
            results.append((result.detach(), *(p.grad for p in each.parameters())))
        for mine, its in zip(*results, strict=True):
            assert torch.equal(mine, its), kind


@pytest.mark.slow  # imports torch
def test_the_program_runs_alone(tmp_path) -> None:
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    out = tmp_path / "measure.py"
    invoke("script", "--cluster", tmp_path / "cluster.yaml", "--out", out, *SIZES)
    done = start(out, "layers", "--device", "cpu", "--out", tmp_path / "layers.csv")
    assert done.returncode == 0, done.stderr
    assert merge_files([tmp_path / "layers.csv"], tmp_path / "store").added == 2 * 3 * 2 + 2 * 4


def test_a_killed_run_goes_on_and_its_file_is_merged(tmp_path, monkeypatch, capsys) -> None:
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    shapes = ShapeOptions(
        hidden_sizes=(64,), sequence_lengths=(16,), vocab_size=32, microbatch_sizes=(1,)
    )
    task = measuring_task(load_cluster(tmp_path / "cluster.yaml"), shapes)
    monkeypatch.setattr(measure, "TASK", task)
    out, store = tmp_path / "layers.csv", tmp_path / "store"
    arguments = ["layers", "--device", "cpu", "--out", str(out)]
    assert measure.main(arguments) == 0
    lines = out.read_text().splitlines()
    samples = [line for line in lines[2:] if not line.startswith("#")]
    assert len(samples) == 2 * 3 * 2 + 2 * 4
    # The process died in the middle of the last line, and once in another unit.
    out.write_text("\n".join(lines[:-3])[:-4])
    capsys.readouterr()
    assert measure.main(arguments) == 0
    assert "1/1," in capsys.readouterr().out
    assert merge_files([out], store).added == len(samples)
    layers = read_store(store).layers
    assert len({sample.shape for sample in layers}) == len(layers) == len(samples)
    assert merge_files([out], store).added == 0


def open_file(path, **values):
    provenance = {"schema": "hetplan.provenance/2", "device": "cpu", "threads": 1, **values}
    return measure.SampleFile(str(path), ("device", "layer"), provenance)


def test_a_unit_in_which_the_process_died_twice_is_left_out(tmp_path) -> None:
    path = tmp_path / "x.csv"
    for _ in range(2):
        file = open_file(path)
        assert not file.left_out
        file.comment("begin head 64")
        file.close()
    file = open_file(path)
    assert set(file.left_out) == {"head 64"}
    file.close()


def results(path, provenance=PROVENANCE, *samples):
    first = json.dumps({"schema": "hetplan.provenance/2", **to_plain(provenance)})
    rows = [row(sample) if not isinstance(sample, str) else sample for sample in samples]
    kind = next(type(sample) for sample in samples if not isinstance(sample, str))
    path.write_text("\n".join((f"# {first}", header(kind), *rows, "")))
    return path


def test_results_of_all_sorts_are_merged_once(tmp_path) -> None:
    store = tmp_path / "store"
    folder = tmp_path / "back"
    folder.mkdir()
    results(
        folder / "a.csv", PROVENANCE, LAYER, layer(microbatch_size=2), "# failed head: a reason"
    )
    results(folder / "b.csv", PROVENANCE, PRODUCT, NORM, dataclasses.replace(NORM, device="gpu"))
    results(folder / "c.csv", PROVENANCE, LINK, "spoilt")
    report = merge_files([folder], store)
    assert (report.files, report.added, report.held) == (3, 5, 0)
    assert [fault.line for fault in report.refused] == [5, 4]
    assert report.failures == ("cpu: head: a reason",)
    assert merge_files([folder], store).held == 5
    held = read_store(store)
    assert (len(held.layers), len(held.operators), len(held.links)) == (2, 2, 1)


def test_hostile_files_are_refused_and_nothing_is_added(tmp_path) -> None:
    store, escape = tmp_path / "store", "\x1b]0;owned\x07"
    evil = dataclasses.replace(PROVENANCE, device_name=escape)
    outside = dataclasses.replace(PROVENANCE, device="../x")
    good = results(tmp_path / "good.csv", PROVENANCE, LAYER, f"# failed x: {escape}")
    assert merge_files([good], tmp_path / "other").failures[0].isprintable()
    for path in (
        results(tmp_path / "evil.csv", evil, LAYER),
        results(tmp_path / "out.csv", outside, layer(device="../x")),
    ):
        with pytest.raises(InputError):
            merge_files([path], store)
    (tmp_path / "binary.csv").write_bytes(b"\x89PNG\r\n\xff")
    with pytest.raises(InputError, match="provenance"):
        merge_files([good, tmp_path / "binary.csv"], store)
    with pytest.raises(InputError, match="no such file"):
        merge_files([tmp_path / "none"], store)
    assert not store.exists() or not read_store(store).layers


def test_no_name_in_a_cluster_file_becomes_code() -> None:
    words = 'x"""; import os #\''
    tree = ast.parse(script_text({"version": words, "kinds": {}, "links": {words: 1}}))
    task = next(
        node for node in tree.body if isinstance(node, ast.AnnAssign) and node.target.id == "TASK"
    )
    assert json.loads(task.value.args[0].value)["version"] == words
