"""AIConfigurator's tables: into a store, through the fit, to a kind that counts as measured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hetplan.cluster.catalogue import load_catalogue
from hetplan.errors import InputError
from hetplan.importers.records import ImportContext
from hetplan.importers.storing import import_provenance, store_imported
from hetplan.importers.table import import_file, import_text
from hetplan.job.spec import Precision
from hetplan.model.load import load_model
from hetplan.model.spec import LayerKind
from hetplan.predict.datasheet import known_kinds
from hetplan.predict.fit import fit_stores, with_shipped
from hetplan.predict.operator.values import sample_operator
from hetplan.predict.predictor import MEASURED, LayerQuery
from hetplan.profiling.store import read_populations

HEADER = "framework,version,device,op_name,kernel_source,gemm_dtype,m,n,k,latency\n"
SIZES = [(m, n, k) for m in (1024, 4096, 8192) for n in (2048, 8192) for k in (2048, 8192)]


def row(m: int, n: int, k: int, dtype: str = "bfloat16", version: str = "1.2", **more: str) -> str:
    # 2 us for a launch, and 500 TFLOP/s (1,000 in FP8).
    rate = 1e15 if dtype == "fp8" else 5e14
    latency = more.get("latency") or f"{(2e-6 + 2.0 * m * n * k / rate) * 1e3:.9f}"
    return f"SGLang,{version},NVIDIA H100 80GB HBM3,gemm,torch,{dtype},{m},{n},{k},{latency}\n"


def test_a_table_makes_its_kind_a_measured_one(tmp_path: Path) -> None:
    table = tmp_path / "gemm_perf.txt"
    table.write_text(
        HEADER
        + "".join(row(*sizes) for sizes in SIZES)
        + "".join(row(*sizes, dtype="fp8") for sizes in SIZES)
        + row(1024, 2048, 2048, version="1.10", latency="0.05")
        + row(1024, 2048, 2048, dtype="int8")
    )
    imported = import_file(None, table)
    assert imported.skipped == ("1 rows: gemm_dtype 'int8', of which no plan makes use",)
    assert any("1 rows of older versions" in note for note in imported.notes)
    assert any("bursts" in note for note in imported.notes)
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
        (HEADER.replace(",k,", ",z,") + row(1, 2, 3), 1, "k", "the column is missing"),
        (HEADER.replace("gemm_dtype", "mla_dtype") + row(1, 2, 3), 1, "", "leave this table out"),
        # 2 * 8192^3 operations in 0.5 ms are 2,199 TFLOP/s; an H100's peak is 989.
        (HEADER + row(8192, 8192, 8192, latency="0.5"), 2, "latency", "2.22 times the peak"),
    ],
)
def test_what_cannot_be_read_is_refused(text: str, line: int, field: str, words: str) -> None:
    with pytest.raises(InputError) as error:
        import_text(text, "gemm_perf.txt")
    fault = error.value.faults[0]
    assert (fault.line, fault.field) == (line, field)
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
    samples = import_text(text, "t").operator_samples
    assert [each.median_seconds for each in samples] == pytest.approx(
        [k * 7e-8 for k in range(1024, 9216, 1024)]
    )
    assert all(each.repeats * each.median_seconds >= 0.5 for each in samples)


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
