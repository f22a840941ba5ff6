"""The library as people use it: files or values in, a result that answers, errors that name it."""

from __future__ import annotations

import copy
import inspect
import json
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sweep_files import plan_command, sweep_files
from typer.testing import CliRunner

import hetplan
from hetplan.cli.main import app
from hetplan.cluster.load import load_cluster as load_plain
from hetplan.errors import HetplanError, InputError
from hetplan.files.encoding import encode
from hetplan.files.reading import decode, read_document
from hetplan.library.inputs import predictor_of
from hetplan.library.result import Result
from hetplan.plans.layout import Layout
from hetplan.predict.fit import FittedPredictor
from hetplan.reports.summary import summarize
from hetplan.search.files import SCHEMA, result_text
from hetplan.search.files import load_legal_plan as load_search_result
from hetplan.search.result import SearchResult
from hetplan.whatif.limits import Limits

ROOT = Path(__file__).parents[2]
DATASHEETS = FittedPredictor.datasheet_only()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small question, and an empty store: everything is predicted from datasheets."""
    folder = tmp_path_factory.mktemp("library")
    sweep_files(folder)
    (folder / "store").mkdir()
    mixed = (folder / "job.yaml").read_text().replace("target: megatron", "target: flagscale")
    (folder / "mixed.yaml").write_text(mixed)
    return folder


def inputs_in(folder: Path) -> tuple[Path, Path, Path]:
    return folder / "model.yaml", folder / "one.yaml", folder / "job.yaml"


@pytest.fixture(scope="module")
def result(folder: Path) -> hetplan.Result:
    return hetplan.plan(*inputs_in(folder), folder / "store")


def layout(folder: Path, **degrees: Any) -> hetplan.Result:
    """Of a trainer that mixes the two kinds."""
    model, cluster, _ = inputs_in(folder)
    return hetplan.estimate(model, cluster, folder / "mixed.yaml", folder / "store", **degrees)


def test_a_plan_from_files_is_the_file_of_the_command(folder: Path, result: hetplan.Result) -> None:
    assert plan_command(folder).exit_code == 0
    result.save(folder / "saved.json")
    assert (folder / "saved.json").read_bytes() == (folder / "p.json").read_bytes()


def test_a_plan_from_values_is_the_plan_from_files(folder: Path, result: hetplan.Result) -> None:
    model, cluster, job = inputs_in(folder)
    values = hetplan.load_model(model), hetplan.load_cluster(cluster), hetplan.load_job(job)
    found = hetplan.plan(*values, str(folder / "store"))
    assert found.plan == result.plan
    assert found.estimate == result.estimate
    assert [name for name, _ in found.inputs.sha256] == ["predictor"]
    mixed = hetplan.plan(model, values[1], str(job), DATASHEETS)
    assert [name for name, _ in mixed.inputs.sha256] == ["model", "job", "predictor"]


def test_a_loaded_plan_is_the_saved_result(folder: Path, result: hetplan.Result) -> None:
    path = folder / "again.json"
    result.save(path)
    loaded = hetplan.load_plan(path)
    assert isinstance(loaded, hetplan.Result)
    assert loaded == result
    plain = load_search_result(path)
    assert loaded == plain
    assert plain == loaded
    assert hash(loaded) == hash(plain)
    assert loaded != replace(loaded, seed=loaded.seed + 1)
    assert result_text(loaded) == result_text(plain)
    assert pickle.loads(pickle.dumps(result)) == result


def test_figures_are_those_of_the_estimate(result: hetplan.Result) -> None:
    estimate = result.estimate
    assert result.step_seconds == estimate.step_seconds
    assert result.tokens_per_second == estimate.tokens_per_second
    assert result.mfu == estimate.mfu
    assert result.gap == result.certificate.gap <= 0.2
    assert result.fits
    assert result.stages == summarize(result).rows


def test_one_row_per_stage_equals_the_estimate(result: hetplan.Result, folder: Path) -> None:
    for each in (result, layout(folder, pp=2, layers=[1, 3], islands=["a", "b"], dp=1)):
        table = each.to_pandas()
        stages, plan = each.estimate.stages, each.plan.stages
        assert len(table) == len(stages) == len(plan)
        for name in ("forward_seconds", "busy_seconds", "optimizer_seconds"):
            assert list(table[name]) == [getattr(stage, name) for stage in stages]
        for name in ("total_bytes", "available_bytes", "activation_bytes"):
            assert list(table[name]) == [getattr(stage.memory, name) for stage in stages]
        assert list(table["layers"]) == [stage.transformer_layers for stage in stages]
        assert list(table["device"]) == [stage.device for stage in stages]
        assert list(table["tp"]) == [stage.replicas[0].tp for stage in plan]
        assert table["devices"].sum() == sum(r.num_devices for s in plan for r in s.replicas)
        assert table["fits"].all()


def test_a_layout_is_priced_as_the_command_prices_it(folder: Path) -> None:
    model, cluster, _ = inputs_in(folder)
    out = folder / "layout.json"
    job = folder / "mixed.yaml"
    words = [f"--model={model}", f"--cluster={cluster}", f"--job={job}", f"--out={out}"]
    words += [f"--store={folder / 'store'}", "--layers=1,3", "--islands=a,b", "--dp=1"]
    assert CliRunner().invoke(app, ["estimate", *words]).exit_code == 0
    priced = layout(folder, layers=(1, 3), islands=["a", "b"], dp=1)
    assert priced == hetplan.load_plan(out)
    assert priced.certificate is None
    assert priced.gap is None
    one = layout(folder, pp=2, islands="a")
    assert {stage.island for stage in one.estimate.stages} == {"a"}


def test_a_plan_is_priced_as_before(result: hetplan.Result, folder: Path) -> None:
    inputs = result.inputs
    values = (inputs.model, inputs.cluster, inputs.job)
    predictor, _ = predictor_of(folder / "store")
    again = hetplan.estimate(result.plan, *values, predictor)
    assert again == result.estimate
    named = dict(zip(("model", "cluster", "job"), values, strict=True))
    assert hetplan.estimate(plan=result.plan, **named, predictor=predictor) == again
    assert hetplan.estimate(result.plan, *inputs_in(folder), folder / "store") == again


def test_a_plan_that_does_not_fit_is_priced_and_says_so(folder: Path) -> None:
    model, _, job = inputs_in(folder)
    text = (folder / "one.yaml").read_text().replace("192 GB", "1 MB")
    (folder / "small.yaml").write_text(text)
    priced = hetplan.estimate(model, folder / "small.yaml", job, DATASHEETS, islands="b")
    assert not priced.fits
    assert "TOO FULL" in priced.summary()
    assert not priced.to_pandas()["fits"].any()


def test_keywords_of_a_layout_are_its_fields() -> None:
    from hetplan.library.verbs import LayoutKeywords

    assert list(LayoutKeywords.__annotations__) == list(Layout.__dataclass_fields__)


def test_numbers_of_numpy_and_pandas_are_numbers(folder: Path) -> None:
    import numpy as np
    import pandas as pd

    plain = layout(folder, layers=[1, 3], islands=["a", "b"], dp=1)
    layers = pd.Series([1, 3])
    assert layout(folder, layers=layers, islands=["a", "b"], dp=np.int64(1)) == plain


def test_jobs_from_keywords_are_jobs_from_files(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(
        "schema: hetplan.job/7\nname: j\nglobal_batch_size: 8\nsequence_length: 64\n"
        "precision: bfloat16\noptimizer: adamw\ntarget: native\ntotal_tokens: 2000000000000\n"
        "time_limit: 60 s\npin: {tp: 2}\nforbid: {islands: [x]}\n"
    )
    job = hetplan.load_job(tmp_path / "job.yaml")
    for tokens in ("2T", "2000B", 2e12, 2 * 10**12):
        made = hetplan.make_job(
            name="j",
            global_batch_size=8,
            sequence_length=64,
            precision="bf16",
            optimizer="adam",
            target="native",
            total_tokens=tokens,
            time_limit="60 s",
            pin={"tp": 2},
            forbid={"islands": ["x"]},
        )
        assert made == job


SIZES = {"global_batch_size": 8, "sequence_length": 64}
WRONG: tuple[tuple[Callable[[Path], object], str, str], ...] = (
    (lambda at: layout(at, tp=3), "tp", "tp must divide the devices of a node, and nodes have 1"),
    (lambda at: layout(at, layers=[2, 3]), "layers", "hold 5 transformer layers, tiny has 4"),
    (lambda at: layout(at, layers=[2, 2], pp=3), "pp", "3, but layers has 2 stages"),
    (lambda at: layout(at, pp=5), "pp", "5 pipeline stages for 4 transformer layers"),
    (lambda at: layout(at, dp=2, microbatch_size=3), "dp", "global_batch_size 4 is not a multiple"),
    (lambda at: layout(at, tp="8"), "tp", "found the text '8'; write a whole number"),
    (lambda at: layout(at, tp=0), "tp", "0; it must be at least 1"),
    (lambda at: layout(at, tpp=8), "tpp", "unknown key; did you mean tp"),
    (lambda at: layout(at, layers=object()), "layers", "found a value of object"),
    (lambda at: layout(at, overlap=["all"]), "overlap", "'all'; it is none, or of reduction"),
    (lambda at: hetplan.plan({}, at / "one.yaml", at / "job.yaml"), "model", "a value of dict"),
    (lambda at: hetplan.plan(*inputs_in(at), 42), "predictor", "found a value of int"),
    (lambda at: hetplan.make_job(**SIZES, precison="float32"), "precison", "did you mean prec"),
    (lambda at: hetplan.make_job(**SIZES, total_tokens="two"), "total_tokens", "as in 2T"),
    (lambda at: hetplan.make_job(**SIZES, pin={"dp": 3}), "pin.dp", "3 does not divide"),
    (lambda at: hetplan.make_job(**SIZES, time_limit=60), "time_limit", '"60 s"'),
    (lambda at: hetplan.make_job(**SIZES, target="x"), "target", "write one of native, megatron"),
    (lambda at: hetplan.load_model("no-such-70b"), "model no-such-70b", "no shipped model"),
    (lambda at: hetplan.Cluster.from_nodes("4x8 h10"), "nodes '4x8 h10'", "h10"),
    (
        lambda at: hetplan.Cluster.from_nodes("4x8 h100", between="far"),
        "between 'far'",
        "a bandwidth and a round trip",
    ),
    (lambda at: hetplan.load_model(3), "path", "found a value of int; give a file's path"),
    (lambda at: hetplan.load_cluster(None), "path", "found a value of NoneType"),
    (lambda at: hetplan.load_job(1.5), "path", "found a value of float"),
    (lambda at: hetplan.load_plan({}), "path", "found a value of dict"),
    (lambda at: hetplan.compare(3, 4), "logs", "found a value of int"),
    (lambda at: hetplan.emit(3, "megatron", at / "out"), "plan", "found a value of int"),
    (lambda at: hetplan.import_file(None, 3), "path", "found a value of int"),
    (lambda at: hetplan.Cluster.from_nodes(3), "nodes", "found a value of int; give words"),
    (lambda at: hetplan.sweep(models=[object()]), "models[0]", "give paths"),
    (lambda at: hetplan.sweep(models=["m"], clusters=["c"]), "jobs", "is missing"),
)


@pytest.mark.parametrize("case", range(len(WRONG)))
def test_what_is_wrong_is_named(case: int, folder: Path) -> None:
    call, field, words = WRONG[case]
    with pytest.raises(InputError) as caught:
        call(folder)
    (fault,) = caught.value.faults
    assert fault.field == field
    assert words in fault.message
    assert isinstance(caught.value, HetplanError)


def test_faults_of_files_name_file_and_line(folder: Path) -> None:
    text = (folder / "one.yaml").read_text().replace("amd-mi300x", "amd-mi300y")
    (folder / "unknown.yaml").write_text(text)
    with pytest.raises(InputError) as caught:
        hetplan.plan(folder / "nowhere.yaml", folder / "unknown.yaml", folder / "job.yaml")
    model, device = caught.value.faults
    assert Path(model.file).name == "nowhere.yaml"
    assert model.message.startswith("there is no such file")
    assert Path(device.file).name == "unknown.yaml"
    assert device.line
    assert "amd-mi300x" in device.message
    pinned = hetplan.make_job(**SIZES, forbid={"islands": ["nope"]})
    with pytest.raises(InputError, match="no island named nope") as caught:
        hetplan.plan(folder / "model.yaml", folder / "one.yaml", pinned)
    assert caught.value.faults[0].field == "forbid.islands[0]"


def test_a_kind_of_which_nothing_is_known_is_refused_at_once(folder: Path) -> None:
    job = hetplan.make_job(global_batch_size=4, sequence_length=128)
    model, cluster = folder / "model.yaml", hetplan.load_cluster(folder / "one.yaml")
    island = cluster.islands[0]
    bare = replace(island, device=replace(island.device, peak_flops_per_second=()))
    with pytest.raises(InputError, match="has no bfloat16 rate") as caught:
        hetplan.plan(model, cluster.with_island(bare), job, DATASHEETS)
    assert caught.value.faults[0].field == "cluster"


def test_repr_is_short_and_the_summary(result: hetplan.Result, folder: Path) -> None:
    assert repr(result) == result.summary()
    # Islands that take turns: no two neighbouring stages are alike.
    model = (folder / "model.yaml").read_text().replace("num_layers: 4", "num_layers: 40")
    (folder / "deep.yaml").write_text(model)
    cluster = (folder / "one.yaml").read_text().replace("nodes: 1", "nodes: 20")
    (folder / "wide.yaml").write_text(cluster.replace("nodes: 2", "nodes: 20"))
    job = hetplan.make_job(global_batch_size=64, sequence_length=128, target="any")
    priced = hetplan.estimate(
        folder / "deep.yaml", folder / "wide.yaml", job, DATASHEETS, pp=40, islands=["a", "b"] * 20
    )
    lines = repr(priced).splitlines()
    assert len(priced.summary().splitlines()) > 40
    assert len(lines) == 20
    assert lines[-1].endswith("more lines: print(result.summary())")


def test_a_cluster_is_the_plain_cluster_and_shown_in_short(folder: Path) -> None:
    cluster, plain = hetplan.load_cluster(folder / "one.yaml"), load_plain(folder / "one.yaml")
    assert isinstance(cluster, hetplan.Cluster)
    assert cluster == plain
    assert plain == cluster
    assert hash(cluster) == hash(plain)
    assert cluster != replace(plain, name="other")
    assert encode(cluster, schema="x/1") == encode(plain, schema="x/1")
    assert "a in here: 2 x 1 nvidia-a100-80gb-sxm, 80 GiB each" in repr(cluster)
    many = replace(cluster, islands=tuple(
        replace(cluster.islands[0], name=f"i{at}\x1b") for at in range(100)
    ))  # fmt: skip
    assert len(repr(many).splitlines()) == 20
    assert repr(many).endswith("and 82 more lines")
    assert "\x1b" not in repr(many)


def test_a_cluster_in_words_is_the_cluster_of_the_file_that_init_writes(tmp_path: Path) -> None:
    words = ("4x8 h100 @A", "2x8 mi300x @B"), "A B 10Gbit 30ms"
    cluster = hetplan.Cluster.from_nodes(*words[0], between=words[1])
    assert cluster == hetplan.Cluster.from_nodes(*words[0], between=[words[1]])
    nodes = [f"--nodes={each}" for each in words[0]]
    made = CliRunner().invoke(
        app,
        ["init", *nodes, f"--between={words[1]}", "--model=llama-2-7b", f"--out={tmp_path}"],
    )
    assert made.exit_code == 0, made.output
    assert hetplan.load_cluster(tmp_path / "cluster.yaml") == cluster
    assert hetplan.load_model(tmp_path / "model.yaml") == hetplan.load_model("llama-2-7b")


class _Tags(HTMLParser):
    """Names of tags, their attributes and the text between them; an error where one stays open."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: set[str] = set()
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open.append(tag)
        self.tags.append(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def parsed(html: str) -> _Tags:
    tags = _Tags()
    tags.feed(html)
    tags.close()
    assert not tags.open
    return tags


def test_notebooks_show_the_lines_and_the_pipeline(result: hetplan.Result, folder: Path) -> None:
    priced = layout(folder, layers=[1, 3], islands=["a", "b"], dp=1)
    shown = parsed(priced._repr_html_())
    assert repr(priced) in shown.text
    assert shown.tags.count("g") == 2
    assert "stage 1: 3 layers" in shown.text
    assert "a100-80gb-sxm: 1 devices, 1 layers in 1 stage" in shown.text
    assert len(result._repr_html_()) < 20_000


def test_hostile_names_stay_text(folder: Path) -> None:
    priced = layout(folder, layers=[1, 3], islands=["a", "b"], dp=1)
    evil = "<script>alert(1)</script>\"'\x1b[31m"
    text = result_text(priced)
    for at, names in enumerate((("nvidia-a100-80gb-sxm", "a"), ("amd-mi300x", "b"))):
        for name in names:
            text = text.replace(json.dumps(name), json.dumps(f"{evil}{at}"))
    path = folder / "hostile.json"
    path.write_text(text)
    with pytest.raises(InputError, match="printable"):
        hetplan.load_plan(path)
    # What a program makes of such names itself is text all the same.
    hostile = Result.of(decode(read_document(path), SearchResult, schema=SCHEMA))
    shown = parsed(hostile._repr_html_())
    assert "script" not in shown.tags
    assert not {name for name in shown.attributes if name.startswith("on")}
    assert evil.replace("\x1b", "\\x1b") in shown.text.replace("\n", "")
    for text in (repr(hostile), hostile.summary(), shown.text):
        assert "\x1b" not in text


def test_what_limits_the_plan_and_its_timeline(result: hetplan.Result, tmp_path: Path) -> None:
    found = result.limits()
    assert isinstance(found, Limits)
    assert found.step_seconds == pytest.approx(result.step_seconds)
    assert " a step; it would be shorter" in result.explain(progress=False)
    result.trace(tmp_path / "trace.json")
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]


def test_a_report_is_one_page(result: hetplan.Result, folder: Path, tmp_path: Path) -> None:
    result.report(tmp_path / "one.html")
    page = (tmp_path / "one.html").read_text()
    assert "tiny on one" in page
    assert not re.search(r'(?:src|href)="(?!#|data:)', page)
    result.report(tmp_path / "two.html", layout(folder, islands="b"))
    assert "plan 2" in (tmp_path / "two.html").read_text()


class _Kernel:
    """Of IPython as much as a line of progress needs: what is displayed, and then replaced."""

    def __init__(self) -> None:
        self.kernel: object = self
        self.display = SimpleNamespace(display=self)
        self.shown: list[str] = []
        self.replaced: list[str] = []

    def get_ipython(self) -> _Kernel:
        return self

    def __call__(self, data: dict[str, str], *, raw: bool, display_id: bool) -> _Kernel:
        assert raw
        assert display_id
        self.shown.append(data["text/plain"])
        return self

    def update(self, data: dict[str, str], *, raw: bool) -> None:
        assert raw
        self.replaced.append(data["text/plain"])


def test_progress_in_a_notebook_is_one_line_that_goes(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kernel = _Kernel()
    monkeypatch.setitem(sys.modules, "IPython", kernel)
    hetplan.plan(*inputs_in(folder), DATASHEETS)
    assert len(kernel.shown) == 1
    assert kernel.shown[0].startswith("closing candidates of megatron")
    assert kernel.replaced[-1] == ""
    hetplan.plan(*inputs_in(folder), DATASHEETS, progress=False)
    assert len(kernel.shown) == 1
    assert capsys.readouterr() == ("", "")


def test_progress_elsewhere_is_shown_where_it_is_asked_for(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hetplan.reports.progress._QUIET_SECONDS", 0.0)
    hetplan.plan(*inputs_in(folder), DATASHEETS)
    assert capsys.readouterr() == ("", "")
    hetplan.plan(*inputs_in(folder), DATASHEETS, progress=True)
    assert "closing candidates" in capsys.readouterr().err


def test_in_a_notebook_the_text_has_its_table(
    result: hetplan.Result, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = result.summary()
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    assert result.summary() == before


def test_another_predictor_than_the_plans_is_noticed(
    result: hetplan.Result, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hetplan.library import inputs

    monkeypatch.setattr(inputs, "default_stores", lambda: (ROOT / "profiles" / "cpu",))
    path = folder / "elsewhere.json"
    result.save(path)
    loaded = hetplan.load_plan(path)
    with pytest.warns(UserWarning, match="made with another predictor"):
        loaded.limits()
    assert loaded.limits(folder / "store") == result.limits()


def test_a_sweep_is_a_table(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    grid: dict[str, Any] = {
        "models": ["model.yaml"],
        "clusters": [folder / "one.yaml"],
        "jobs": ["job.yaml"],
        "global_batch_size": [2, 4],
        "forbid": None,
        "workers": 1,
    }
    table = hetplan.sweep(predictor=DATASHEETS, **grid)
    assert sorted(table["global_batch_size"]) == [2, 4]
    assert (table["step_seconds"] > 0).all()
    assert set(table["status"]) == {"optimal"}
    assert list(table["reason"]) == ["", ""]
    infeasible = hetplan.sweep(predictor=DATASHEETS, **{**grid, "global_batch_size": [3]})
    assert infeasible["step_seconds"].isna().all() == bool(infeasible["reason"].any())
    from_file = hetplan.sweep("sweep.yaml", predictor=DATASHEETS, table="rows.csv")
    assert len(from_file) == 8
    assert hetplan.sweep("sweep.yaml", predictor=DATASHEETS, table="rows.csv").equals(from_file)
    with pytest.raises(InputError, match="leave the keywords out"):
        hetplan.sweep("sweep.yaml", workers=1)


def test_import_is_cheap_and_lazy() -> None:
    code = (
        "import sys, hetplan\n"
        "heavy = ('numpy', 'pandas', 'scipy', 'pydantic', 'ortools', 'torch', 'rich', 'yaml')\n"
        "found = [name for name in heavy if name in sys.modules]\n"
        "print(found, set(hetplan.__all__) - {*dir(hetplan)})\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout == "[] set()\n"


def test_everything_public_is_documented() -> None:
    for name in hetplan.__all__:
        value = getattr(hetplan, name)
        if name != "__version__":
            assert inspect.getdoc(value), name
    for name, value in vars(hetplan.Result).items():
        if not name.startswith("_"):
            assert inspect.getdoc(value), name
    assert (ROOT / "hetplan" / "py.typed").exists()


USER_SCRIPT = """
import hetplan

def main() -> None:
    job: hetplan.Job = hetplan.make_job(global_batch_size=64, sequence_length=4096)
    model: hetplan.ModelSpec = hetplan.load_model("config.json")
    cluster: hetplan.Cluster = hetplan.load_cluster("cluster.yaml")
    result: hetplan.Result = hetplan.plan(model, cluster, job, progress=False)
    seconds: float = result.step_seconds
    mfu: float | None = result.mfu
    priced: hetplan.Result = hetplan.estimate(model, "cluster.yaml", job, tp=8, layers=[4, 4])
    hetplan.estimate(priced.plan, model, cluster, job).step_seconds
    print(result.to_pandas()["layers"], hetplan.sweep("sweep.yaml"), seconds, mfu)
"""
WRONG_LINE = "\ndef wrong() -> None:\n    hetplan.estimate('m', 'c', 'j', tp='8')\n"


@pytest.mark.slow
def test_scripts_of_users_are_checked_by_mypy(tmp_path: Path) -> None:
    def mypy(text: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "script.py").write_text(text)
        words = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml")]
        return subprocess.run(
            [*words, str(tmp_path / "script.py")],
            capture_output=True, text=True, check=False, cwd=ROOT,
        )  # fmt: skip

    right = mypy(USER_SCRIPT)
    assert right.returncode == 0, right.stdout
    wrong = mypy(USER_SCRIPT + WRONG_LINE)
    assert "estimate" in wrong.stdout
    assert wrong.returncode == 1


def test_copies_ask_the_same_predictor(folder: Path) -> None:
    known = hetplan.estimate(*inputs_in(folder), DATASHEETS, tp=1)
    for same in (copy.copy(known), copy.deepcopy(known), pickle.loads(pickle.dumps(known))):
        assert same == known
        assert same._known().laws == DATASHEETS.laws
        assert same.limits() == known.limits()


def test_places_that_cannot_be_written_and_no_stages_are_input_errors(folder: Path) -> None:
    with pytest.raises(InputError, match="0 entries"):
        layout(folder, layers=[])
    with pytest.raises(InputError, match="Is a directory"):
        hetplan.sweep(folder / "sweep.yaml", predictor=DATASHEETS, table=folder)
    with pytest.raises(InputError, match="cannot be made"):
        hetplan.sweep(
            folder / "sweep.yaml", predictor=DATASHEETS, table=folder / "t.csv", plans="/dev/null"
        )
