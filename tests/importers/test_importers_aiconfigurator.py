"""AIConfigurator's tables: into a store, through the fit, to a kind that counts as measured."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from hetplan.cluster.catalogue import load_catalogue
from hetplan.cost.terms import notes
from hetplan.errors import InputError
from hetplan.importers.records import ImportContext
from hetplan.importers.storing import import_provenance, store_imported
from hetplan.importers.table import import_file, import_text
from hetplan.job.spec import Precision
from hetplan.model.load import load_model
from hetplan.model.spec import LayerKind
from hetplan.predict.datasheet import known_kinds
from hetplan.predict.fit import FittedPredictor, fit_stores, with_shipped
from hetplan.predict.operator.answer import DERIVED_LOG_HALFWIDTH, LOOKED_UP_LOG_HALFWIDTH
from hetplan.predict.operator.values import sample_operator
from hetplan.predict.predictor import BY_OTHERS, MEASURED, LayerQuery, Prediction
from hetplan.profiling.bursts import BY_OTHERS_LOG_HALFWIDTH
from hetplan.profiling.store import read_populations

HEADER = "framework,version,device,op_name,kernel_source,gemm_dtype,m,n,k,latency\n"
WITH_POWER = HEADER.replace("\n", ",power\n")
SIZES = [(m, n, k) for m in (1024, 4096, 8192) for n in (2048, 8192) for k in (2048, 8192)]


def row(m: int, n: int, k: int, dtype: str = "bfloat16", version: str = "1.2", **more: str) -> str:
    # 2 us for a launch, and 500 TFLOP/s (1,000 in FP8).
    rate = 1e15 if dtype == "fp8" else 5e14
    latency = more.get("latency") or f"{(2e-6 + 2.0 * m * n * k / rate) * 1e3:.9f}"
    power = f",{more['power']}" if "power" in more else ""
    device = more.get("device", "NVIDIA H100 80GB HBM3")
    return f"SGLang,{version},{device},gemm,torch,{dtype},{m},{n},{k},{latency}{power}\n"


def fitted(table: Path, store: Path) -> FittedPredictor:
    """The predictor of a table alone."""
    imported = import_file(None, table)
    store_imported(imported, store, import_provenance(table, imported, measured_on="2026-01-02"))
    return fit_stores(store)[0]


def layer(predictor: FittedPredictor, *, backward: bool = False, narrow: str = "") -> Prediction:
    """A layer of Llama 2 7B on an H100."""
    asked = LayerQuery(
        model=load_model(Path("configs/models/llama-2-7b.yaml")),
        layer=LayerKind.TRANSFORMER,
        microbatch_size=1,
        sequence_length=4096,
        tp=1,
        precision=Precision.BFLOAT16,
        is_backward=backward,
    )
    asked = replace(asked, kernels=replace(asked.kernels, product_format=narrow))
    return with_shipped(predictor).layer(known_kinds()["nvidia-h100-80gb-sxm"], asked)


def test_a_table_makes_its_kind_a_measured_one(tmp_path: Path) -> None:
    table = tmp_path / "gemm_perf.txt"
    table.write_text(
        WITH_POWER
        + "".join(row(*sizes, power="650") for sizes in SIZES)
        + "".join(row(*sizes, dtype="fp8", power="650") for sizes in SIZES)
        + row(1024, 2048, 2048, version="1.10", latency="0.05", power="650")
        + row(1024, 2048, 2048, dtype="int8", power="650")
    )
    imported = import_file(None, table)
    assert set(imported.skipped) == {
        "1 rows: gemm_dtype 'int8', of which no plan makes use",
        "1 rows: of an older version, or measured twice; --version chooses",
    }
    assert not imported.notes
    provenance = import_provenance(table, imported, measured_on="2026-01-02")
    assert provenance.device == "nvidia-h100-80gb-sxm"
    stored = store_imported(imported, tmp_path / "store", provenance)
    assert stored.added == 2 * len(SIZES)
    assert store_imported(imported, tmp_path / "store", provenance).already_there == stored.added
    (population,) = read_populations(tmp_path / "store")
    # 1.10 is newer than 1.2.
    assert {each.median_seconds for each in population.operators if each.m * each.n < 3e6} == {
        5e-5,
        *(
            each.median_seconds
            for each in imported.operator_samples
            if each.m == 1024 and each.n == 2048 and (each.k > 2048 or each.precision != "bfloat16")
        ),
    }
    predictor, _ = fit_stores(tmp_path / "store")
    kind = next(each for each in load_catalogue() if each.kind == provenance.device)
    laws = {law.precision: law for law in predictor.laws.operators}
    assert set(laws) == {"bfloat16", "float8"}
    large = replace(imported.operator_samples[0], m=16384, n=8192, k=8192)
    for name, rate in (("bfloat16", 5e14), ("float8", 1e15)):
        seconds = laws[name].seconds(sample_operator(large))
        assert seconds == pytest.approx(2.0 * 16384 * 8192 * 8192 / rate, rel=0.1)
    assert kind.peak("float8") > kind.peak("bfloat16")


def test_a_kind_that_nobody_measured_is_measured_by_a_table(tmp_path: Path) -> None:
    kind = "amd-mi300x"
    table = tmp_path / "gemm_perf.txt"
    table.write_text(HEADER + "".join(row(*sizes) for sizes in SIZES))
    imported = import_file(None, table, device=kind)
    provenance = import_provenance(table, imported, device=kind, measured_on="2026-01-02")
    store_imported(imported, tmp_path / "store", provenance)
    predictor, _ = fit_stores(tmp_path / "store")
    asked = LayerQuery(
        model=load_model(Path("configs/models/llama-2-7b.yaml")),
        layer=LayerKind.TRANSFORMER,
        microbatch_size=1,
        sequence_length=4096,
        tp=1,
        precision=Precision.BFLOAT16,
    )
    found = with_shipped(predictor).layer(known_kinds()[kind], asked)
    assert found.source == MEASURED


@pytest.mark.parametrize(
    ("text", "line", "field", "words"),
    [
        (HEADER + row(1024, 2048, 2048, latency="0"), 2, "latency", "above 0"),
        (HEADER + row(1024, 2048, 2048, latency="nan"), 2, "latency", "milliseconds"),
        (HEADER + row(1024, 2048, 2048) + row(0, 2048, 2048), 3, "m", "at least 1"),
        (HEADER + "a,b\n", 2, "", "2 columns where the header has 10"),
        (HEADER, 1, "", "at least one row"),
        ("version https://git-lfs.github.com/spec/v1\noid sha256:0\n", 1, "", "git lfs pull"),
        (
            HEADER + row(1024, 2048, 2048) + row(1, 2, 3).replace("H100 80GB HBM3", "L40S"),
            3,
            "device",
            "several devices",
        ),
        (
            HEADER + row(1024, 2048, 2048) + row(1, 2, 3).replace("SGLang", "VLLM"),
            3,
            "framework",
            "choose one with --framework",
        ),
        (
            HEADER.replace("k,latency", "z,latency(ms)") + row(1, 2, 3),
            1,
            "",
            "no column k, latency: found 'framework, version, device, op_name, kernel_source, "
            "gemm_dtype, m, n, z, latency(ms)'; gemm_perf.txt needs gemm_dtype, m, n, k, latency",
        ),
        (HEADER.replace("gemm_dtype", "mla_dtype") + row(1, 2, 3), 1, "", "leave this table out"),
        (HEADER.replace("gemm_dtype", "quant_mode"), 1, "", "wrote it in August 2026, commit 095f"),
        (HEADER.replace("k,", "m,") + row(1, 2, 3), 1, "m", "2 columns have this name"),
        (WITH_POWER + row(1024, 256, 256, power="abc"), 2, "power", "found 'abc'; write watts"),
        (WITH_POWER + row(1024, 256, 256, power="-5"), 2, "power", "found '-5'"),
        (WITH_POWER + row(1024, 256, 256, power="nan"), 2, "power", "found 'nan'"),
        # 2 * 8192^3 operations in 0.5 ms are 2,199 TFLOP/s; an H100's peak is 989.
        (HEADER + row(8192, 8192, 8192, latency="0.5"), 2, "latency", "2.22 times the peak"),
    ],
)
def test_what_cannot_be_read_is_refused(text: str, line: int, field: str, words: str) -> None:
    with pytest.raises(InputError) as error:
        import_text(text, "gemm_perf.txt")
    (fault,) = error.value.faults
    assert (fault.file, fault.line, fault.field) == ("gemm_perf.txt", line, field)
    assert words in fault.message


def test_messages_of_collectives_are_elements() -> None:
    text = "nccl_dtype,num_gpus,message_size,op_name,latency\nhalf,8,1024,all_gather,0.5\n"
    (sample,) = import_text(text, "nccl.txt", link="node").links
    assert (sample.message_bytes, sample.group_size, sample.median_seconds) == (2048, 8, 5e-4)


def test_what_a_user_says_chooses_rows_and_kind() -> None:
    def seconds(text: str, **said: str) -> list[float]:
        read = import_text(text, "t", said=ImportContext(file="", **said))
        return [each.median_seconds for each in read.operator_samples]

    text = HEADER + "".join(
        row(1024, 2048, 2048, version=version, latency=latency)
        for version, latency in (("1.3.0rc4", "0.04"), ("1.3.0", "0.05"), ("1.3.0rc15", "0.06"))
    )
    assert seconds(text) == [5e-5]  # a release is newer than its candidates
    assert seconds(text, version="1.3.0rc15") == [6e-5]
    assert seconds(text + row(1, 2, 3).replace("SGL", "X"), framework="sglang") == [5e-5]
    with pytest.raises(InputError, match=r"there are .1\.3\.0"):
        seconds(text, version="9")
    fast = HEADER + row(8192, 8192, 8192, latency="0.5")
    said = ImportContext(file="", device="nvidia-b200-180gb-sxm")
    read = import_text(fast, "t", said=said)
    assert read.operator_samples[0].device == said.device
    assert any("'NVIDIA H100 80GB HBM3'" in note for note in read.notes)


def test_long_runs_come_before_bursts_and_count_as_long() -> None:
    header = HEADER.replace("latency", "latency,power,power_limit")
    text = header + "".join(
        row(8192, 2048, k, version=version, latency=latency).replace("\n", f",{power},700\n")
        for k in range(1024, 9216, 1024)
        for version, latency, power in (
            ("1", f"{k * 7e-5:.6f}", "650"),
            ("2", f"{k * 6e-5:.6f}", "0"),
        )
    )
    imported = import_text(text, "t")
    samples = imported.operator_samples
    assert [each.median_seconds for each in samples] == pytest.approx(
        [k * 7e-8 for k in range(1024, 9216, 1024)]
    )
    assert all(each.repeats * each.median_seconds >= 0.5 for each in samples)
    assert all(each.p10_seconds == each.median_seconds == each.p90_seconds for each in samples)
    assert imported.skipped == ("8 rows: burst; a sustained row of the same shape is kept",)
    assert not imported.notes


# Products of 8.6e9, 1.4e11, 1.1e12 and 8.8e12 operations.
BURSTS = ((1024, 2048, 2048), (4096, 2048, 8192), (8192, 8192, 8192), (65536, 8192, 8192))


@pytest.mark.parametrize(
    ("dtype", "device", "factors"),
    [
        ("bfloat16", "NVIDIA H100 80GB HBM3", (1.0, 1.17, 1.155, 1.075)),
        ("float16", "NVIDIA H100 80GB HBM3", (1.0, 1.17, 1.155, 1.075)),
        ("fp8", "NVIDIA H100 80GB HBM3", (1.0, 1.02, 1.12, 1.11)),
        ("bfloat16", "NVIDIA A100-SXM4-80GB", (1.0, 1.0, 1.0, 1.0)),
    ],
)
@pytest.mark.parametrize("power", [None, "", "0"])
def test_bursts_are_slowed_to_what_is_kept_up(
    dtype: str, device: str, factors: tuple[float, ...], power: str | None
) -> None:
    more = {} if power is None else {"power": power}
    rows = (row(*sizes, dtype=dtype, device=device, latency="40", **more) for sizes in BURSTS)
    imported = import_text((HEADER if power is None else WITH_POWER) + "".join(rows), "t")
    for sample, factor in zip(imported.operator_samples, factors, strict=True):
        assert sample.median_seconds == pytest.approx(0.04 * factor)
        assert sample.p10_seconds < sample.median_seconds < sample.p90_seconds
    (note,) = imported.notes
    assert note.startswith("4 of 4 rows are bursts (no power)")
    words = f"made 1 to {max(factors):g} times as long" if max(factors) > 1 else "not slowed"
    assert words in note
    assert "p10 and p90 (-17%, +21%)" in note


def test_the_error_of_bursts_is_in_their_law(tmp_path: Path) -> None:
    """Exact rows, of which leaving sizes out shows no error."""
    sizes = list(product((1024, 4096, 8192), (2048, 4096, 8192), (2048, 4096, 8192)))
    for name, power in (("bursts", "0"), ("sustained", "650")):
        (tmp_path / name).write_text(
            WITH_POWER + "".join(row(*each, power=power) for each in sizes)
        )
    bursts, sustained = (
        fitted(tmp_path / name, tmp_path / f"{name}-store") for name in ("bursts", "sustained")
    )
    (burst_law,), (sustained_law,) = bursts.laws.operators, sustained.laws.operators
    assert sustained_law.log_halfwidth < LOOKED_UP_LOG_HALFWIDTH
    assert sustained_law.shapes
    assert burst_law.large_seconds > 0
    assert burst_law.log_halfwidth >= BY_OTHERS_LOG_HALFWIDTH
    assert burst_law.large_log_halfwidth >= BY_OTHERS_LOG_HALFWIDTH
    assert not burst_law.shapes
    assert any("27% together" in note for note in burst_law.notes)
    for backward in (False, True):
        parts = {each.name: each for each in layer(bursts, backward=backward).parts}
        assert parts["matrix_product"].log_halfwidth >= BY_OTHERS_LOG_HALFWIDTH
    # Gradients are derived from forward products, and are no surer than that.
    forward, backward_ = (
        next(
            each.log_halfwidth
            for each in layer(sustained, backward=backward).parts
            if each.name == "matrix_product"
        )
        for backward in (False, True)
    )
    assert forward < DERIVED_LOG_HALFWIDTH
    assert backward_ == pytest.approx(DERIVED_LOG_HALFWIDTH)


def test_few_sustained_rows_leave_bursts_their_error(tmp_path: Path) -> None:
    table = tmp_path / "gemm_perf.txt"
    rows = [row(*sizes, power="650" if at < 3 else "") for at, sizes in enumerate(SIZES)]
    table.write_text(WITH_POWER + "".join(rows))
    (law,) = fitted(table, tmp_path / "store").laws.operators
    # Three rows of twelve have no error of their own.
    assert law.log_halfwidth >= 0.75 * BY_OTHERS_LOG_HALFWIDTH
    assert len(law.shapes) == 3
    assert law.residual is None


@pytest.mark.parametrize(("dtype", "narrow"), [("bfloat16", ""), ("fp8", "float8")])
def test_a_layer_of_own_and_others_operators_names_both(
    tmp_path: Path, dtype: str, narrow: str
) -> None:
    table = tmp_path / "gemm_perf.txt"
    table.write_text(HEADER + "".join(row(*sizes, dtype=dtype) for sizes in SIZES))
    predictor = fitted(table, tmp_path / "store")
    found = layer(predictor, narrow=narrow)
    by = {each.name: each.source for each in found.parts}
    assert (by["matrix_product"], by["fused_attention"]) == (MEASURED, BY_OTHERS)
    assert found.sources == (MEASURED, BY_OTHERS)
    text = " ".join(notes("layer", "kind", found))
    assert "layer: fused attention predicted from operators that others measured" in text
    # With products in the other format nothing of the layer was measured here.
    other = layer(predictor, narrow="" if narrow else "float8")
    assert other.sources == (BY_OTHERS,)
    assert (
        "kind: predicted from operators that others measured" in notes("layer", "kind", other)[-1]
    )


@pytest.mark.parametrize("kind", ["nvidia-h100", "h100-sxm", "nvidia-h100-80gb-smx"])
def test_a_kind_that_is_cut_short_or_misspelt_is_refused(kind: str) -> None:
    said = ImportContext(file="", device=kind)
    with pytest.raises(InputError, match="nearest: nvidia-h100-80gb-sxm") as error:
        import_text(HEADER + row(1024, 2048, 2048), "t", said=said)
    (fault,) = error.value.faults
    assert fault.field == "--device"


def test_a_kind_of_a_cluster_file_is_kept() -> None:
    said = ImportContext(file="", device="acme-one-80gb")
    read = import_text(HEADER + row(1024, 2048, 2048), "t", said=said)
    assert read.operator_samples[0].device == "acme-one-80gb"


def test_rows_that_give_no_sample_are_counted_and_named() -> None:
    text = (
        "framework,version,device,op_name,kernel_source,nccl_dtype,num_gpus,message_size,latency\n"
        "x,2,NVIDIA H200,all_gather,NCCL,half,8,512,0.5\n"
        "x,2,NVIDIA H200,all_gather,NCCL,int8,8,1024,0.6\n"
        "x,2,NVIDIA H200,all_gather,NCCL,half,1,512,0.5\n"
        "x,2,NVIDIA H200,all_gather,oneCCL,half,8,256,0.5\n"
    )
    read = import_text(text, "t", link="node")
    assert [each.median_seconds for each in read.links] == [5e-4]
    assert len(read.skipped) == 3
    moe = import_text("moe_dtype,num_tokens,latency\nbfloat16,1,0.5\n", "t")
    assert not moe.operator_samples
    assert moe.skipped[0].startswith("1 rows: permutation")


def test_parquet_is_read_or_says_what_reads_it(tmp_path: Path) -> None:
    table = tmp_path / "gemm_perf.parquet"
    table.write_bytes(b"PAR1 and no more")
    try:
        import pyarrow  # noqa: F401
    except ImportError:
        words = "pip install pyarrow"
    else:
        words = "fetch it again"
    with pytest.raises(InputError, match=words):
        import_file(None, table)
