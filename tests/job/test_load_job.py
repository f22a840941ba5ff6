from contextlib import suppress
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hetplan.cluster.load import load_cluster
from hetplan.errors import InputError
from hetplan.files.shipped import shipped_folder
from hetplan.job.load import TARGET_NAMES, load_job
from hetplan.job.run import KindFailures, Run
from hetplan.job.spec import (
    Forbids,
    LengthShare,
    Objective,
    Optimizer,
    Pins,
    Precision,
    ProductFormat,
)
from hetplan.model.load import load_model
from hetplan.plans.check_job import check_job_against
from hetplan.plans.pinned import with_named_ends
from hetplan.plans.targets import TARGETS

CONFIGS = shipped_folder("configs")

TEXT = """schema: hetplan.job/7
name: small
global_batch_size: 96
sequence_length: 2048
precision: bfloat16
optimizer: adamw
target: megatron
gap: 0.02
time_limit: 2 min
total_tokens: 1000
memory_reserve_fraction: 0.05
seed: 3
pin: {tp: 8, microbatch_size: 2, recompute: true, embedding_on: mi210}
forbid:
  islands: []
  nodes: [a100/17]
"""


def write(tmp_path, text):
    path = tmp_path / "job.yaml"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("word", "precision", "narrow"),
    [
        ("bf16", Precision.BFLOAT16, None),
        ("FP16", Precision.FLOAT16, None),
        ("fp32", Precision.FLOAT32, None),
        ("fp8", Precision.BFLOAT16, ProductFormat.FLOAT8),
        ("mxfp8", Precision.BFLOAT16, ProductFormat.MXFP8),
    ],
)
def test_names_are_read_as_people_type_them(tmp_path, word, precision, narrow):
    text = TEXT.replace("bfloat16", word).replace("adamw", "adam").replace("1000", "2T")
    job = load_job(write(tmp_path, text))
    assert (job.precision, job.trainer.product_format) == (precision, narrow)
    assert (job.optimizer, job.total_tokens) == (Optimizer.ADAMW, 2 * 10**12)
    assert load_job(write(tmp_path, TEXT.replace("mi210}", "MI210}"))).pin.embedding_on == "MI210"


def test_a_precision_and_a_format_that_contradict_each_other_are_refused(tmp_path):
    text = TEXT.replace("bfloat16", "fp8") + "trainer: {product_format: mxfp8}\n"
    with pytest.raises(InputError, match="precision: found the text 'fp8'"):
        load_job(write(tmp_path, text))


def test_the_ends_of_a_pipeline_are_pinned_by_short_names():
    cluster = load_cluster(CONFIGS / "clusters" / "mixed-768.yaml")
    model = load_model(CONFIGS / "models" / "llama-140b.yaml")
    job = load_job(CONFIGS / "jobs" / "llama-140b.yaml")
    for name, kind in (("MI210", "amd-mi210"), ("A100-80GB", "nvidia-a100-80gb-sxm")):
        named = with_named_ends(replace(job, pin=Pins(head_on=name)), cluster)
        assert named.pin == Pins(head_on=kind)
        assert list(check_job_against(named, model, cluster)) == []
    odd = replace(job, pin=Pins(head_on="zzz"))
    assert with_named_ends(odd, cluster) == odd


def test_a_file_becomes_a_job(tmp_path):
    job = load_job(write(tmp_path, TEXT))
    assert job.precision is Precision.BFLOAT16
    assert job.optimizer is Optimizer.ADAMW
    assert job.time_limit_seconds == 120.0
    assert (job.gap, job.seed, job.total_tokens) == (0.02, 3, 1000)
    assert job.memory_reserve_fraction == 0.05
    assert job.pin == Pins(tp=8, microbatch_size=2, recompute=True, embedding_on="mi210")
    assert job.forbid == Forbids(nodes=("a100/17",))


@pytest.mark.parametrize(
    ("change", "line", "field"),
    [
        (("megatron", "megatronn"), 7, "target"),
        (("2 min", "120"), 9, "time_limit"),
        (("gap: 0.02", "gap: 2"), 8, "gap"),
        (("96", "96.0"), 3, "global_batch_size"),
        (("microbatch_size: 2", "microbatch_size: 5"), 13, "pin.microbatch_size"),
        (("tp: 8", "dp: 96"), 13, "pin"),
        (("tp: 8", "pt: 8"), 13, "pin.pt"),
        (("a100/17", "a100-17"), 16, "forbid.nodes[0]"),
        (("precision: bfloat16\n", ""), 1, "precision"),
    ],
)
def test_faults(tmp_path, change, line, field):
    assert change[0] in TEXT
    path = write(tmp_path, TEXT.replace(*change, 1))
    with pytest.raises(InputError) as caught:
        load_job(path)
    (fault,) = caught.value.faults
    assert (fault.file, fault.line, fault.field) == (str(path), line, field)


MORE = """sequence_lengths:
  - {length: 2048, share: 0.25}
  - {length: 512, share: 0.75}
packing: true
expert_load_factor: 1.25
gradient_clipping: false
data_loading: 20 ms
checkpoint_interval_steps: 500
"""


def test_what_a_step_also_costs_is_read(tmp_path):
    job = load_job(write(tmp_path, TEXT + MORE))
    assert job.sequence_lengths == (
        LengthShare(length=2048, share=0.25),
        LengthShare(length=512, share=0.75),
    )
    assert (job.packing, job.expert_load_factor, job.gradient_clipping) == (True, 1.25, False)
    assert (job.data_loading_seconds, job.checkpoint_interval_steps) == (0.02, 500)
    plain = load_job(write(tmp_path, TEXT))
    assert (plain.sequence_lengths, plain.packing, plain.expert_load_factor) == ((), False, 1.0)
    assert (plain.gradient_clipping, plain.data_loading_seconds) == (None, 0.0)
    assert plain.checkpoint_interval_steps is None


def test_files_of_older_forms_are_read(tmp_path):
    for number in (1, 2, 3, 4):
        old = write(tmp_path, TEXT.replace("hetplan.job/7", f"hetplan.job/{number}"))
        assert load_job(old).name == "small"
    newer = write(tmp_path, TEXT.replace("hetplan.job/7", "hetplan.job/8"))
    with pytest.raises(InputError, match=r"reads up to hetplan\.job/7"):
        load_job(newer)


@pytest.mark.parametrize(
    ("change", "line", "field"),
    [
        (("0.75", "0.7"), 17, "sequence_lengths"),
        (("0.75", "0.7500005"), 0, ""),
        (("0.25", "1.5"), 18, "sequence_lengths[0].share"),
        (("length: 2048", "length: 2049"), 18, "sequence_lengths[0].length"),
        (("length: 2048", "length: 512"), 19, "sequence_lengths[1].length"),
        (("factor: 1.25", "factor: 0.5"), 21, "expert_load_factor"),
        (("20 ms", "20"), 23, "data_loading"),
    ],
)
def test_faults_of_what_a_step_also_costs(tmp_path, change, line, field):
    assert MORE.count(change[0]) == 1
    path = write(tmp_path, TEXT + MORE.replace(*change))
    if not line:
        assert load_job(path).packing
        return
    with pytest.raises(InputError) as caught:
        load_job(path)
    wanted = [fault for fault in caught.value.faults if fault.field == field]
    assert [(fault.file, fault.line) for fault in wanted[:1]] == [(str(path), line)]


WORDS = (".nan", ".inf", "-.inf", "1e999", "1e308", "-1", "0", "true", "[]", "{}", "''", "~")


@settings(
    deadline=None,
    max_examples=150,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_damaged_files_give_a_job_or_an_input_error(tmp_path, data):
    lines = (TEXT + MORE).splitlines()
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(1, len(lines) - 1))
        head, colon, tail = lines[at].rpartition(": ")
        word = data.draw(st.sampled_from(WORDS))
        lines[at] = f"{head}{colon}{word}{'}' if tail.endswith('}') else ''}"
    path = write(tmp_path, "\n".join(lines) + "\n")
    with suppress(InputError):
        shares = [each.share for each in load_job(path).sequence_lengths]
        assert not shares or sum(shares) == pytest.approx(1.0, abs=2e-6)


def test_target_names_are_the_targets():
    assert set(TARGET_NAMES) == set(TARGETS)


@pytest.fixture(scope="module")
def model():
    return load_model(CONFIGS / "models" / "llama-140b.yaml")


@pytest.fixture(scope="module")
def cluster():
    return load_cluster(CONFIGS / "clusters" / "mixed-768.yaml")


def test_shipped_jobs_fit_their_models_and_clusters(model, cluster):
    big = load_job(CONFIGS / "jobs" / "llama-140b.yaml")
    assert (big.global_batch_size, big.sequence_length, big.gap) == (1536, 4096, 0.01)
    assert check_job_against(big, model, cluster) == ()
    tiny = load_job(CONFIGS / "jobs" / "gpt-tiny.yaml")
    assert (tiny.target, tiny.precision) == ("native", Precision.FLOAT32)
    machine = load_cluster(CONFIGS / "clusters" / "this-machine.yaml")
    assert check_job_against(tiny, load_model(CONFIGS / "models" / "gpt-tiny.yaml"), machine) == ()
    seven = load_job(CONFIGS / "jobs" / "llama-2-7b.yaml")
    two = load_cluster(CONFIGS / "clusters" / "two-regions.yaml")
    llama = load_model(CONFIGS / "models" / "llama-2-7b.yaml")
    assert check_job_against(seven, llama, two) == ()


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"sequence_length": 8192}, "sequence_length"),
        ({"pin": Pins(tp=7)}, "pin.tp"),
        ({"pin": Pins(tp=8, dp=16, pp=12)}, "pin"),
        ({"pin": Pins(embedding_on="mi21")}, "pin.embedding_on"),
        ({"pin": Pins(head_on="a100"), "forbid": Forbids(islands=("a100",))}, "pin.head_on"),
        ({"expert_load_factor": 1.5}, "expert_load_factor"),
        ({"forbid": Forbids(islands=("a100", "mi210"))}, "forbid.islands"),
        ({"forbid": Forbids(nodes=("a100/79", "a100/80"))}, "forbid.nodes[1]"),
    ],
)
def test_jobs_that_do_not_fit(model, cluster, change, field):
    job = replace(load_job(CONFIGS / "jobs" / "llama-140b.yaml"), **change)
    found = check_job_against(job, model, cluster)
    assert field in [fault.field for fault in found]


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ("{device_failures: 1.0}", "run.device_failures: found 1.0; it must be less than 1.0"),
        ("{host_failures: -0.1}", "run.host_failures: found -0.1; it must be at least 0.0"),
        ("{nic_failures: .nan}", "run.nic_failures"),
        ("{link_failures: 30}", "run.link_failures"),
        ("{kept_bandwidth: 1.5}", "run.kept_bandwidth"),
        ("{storage: 0 GB/s}", "run.storage"),
        ("{detection: 10}", "run.detection: found 10 without a unit"),
        ("{repair: 400 d}", "repair_seconds"),
        ("{failures: 0.1}", "run.failures"),
        ("{kind_failures: [{kind: h100, probability: 2}]}", r"run.kind_failures\[0\].probability"),
        (
            "{kind_failures: [{kind: a, probability: 0}, {kind: a, probability: 0}]}",
            "kind_failures names a twice",
        ),
    ],
)
def test_a_run_that_cannot_be_is_refused_in_one_line(tmp_path, block, message):
    with pytest.raises(InputError, match=message) as refused:
        load_job(write(tmp_path, f"{TEXT}run: {block}\n"))
    (fault,) = refused.value.faults
    assert (fault.file, fault.line) == (str(tmp_path / "job.yaml"), TEXT.count("\n") + 1)
    assert "\n" not in str(fault)


def test_a_run_is_read_in_si_units_and_left_out_in_older_files(tmp_path):
    text = TEXT + "run: {storage: 2 GB/s, repair: 1 d, failover: true, device_failures: 0.25}\n"
    run = load_job(write(tmp_path, text)).run
    assert (run.storage_bytes_per_second, run.repair_seconds) == (2e9, 86400.0)
    assert (run.failover, run.device_failures, run.host_failures) == (True, 0.25, None)
    old = write(tmp_path, TEXT.replace("hetplan.job/7", "hetplan.job/5"))
    assert load_job(old).run == Run()


def test_kinds_of_failures_are_named_as_people_type_them_and_must_exist():
    cluster = load_cluster(CONFIGS / "clusters" / "mixed-768.yaml")
    asked = load_job(CONFIGS / "jobs" / "llama-140b.yaml")
    model = load_model(CONFIGS / "models" / "llama-140b.yaml")

    def of(kind):
        rates = (KindFailures(kind=kind, probability=0.1),)
        return with_named_ends(replace(asked, run=Run(kind_failures=rates)), cluster)

    assert of("MI210").run.kind_failures[0].kind == "amd-mi210"
    assert check_job_against(of("MI210"), model, cluster) == ()
    (fault,) = check_job_against(of("mi2100"), model, cluster)
    assert fault.field == "run.kind_failures[0].kind"
    assert "mi2100 is no device kind; nearest: " in fault.message


def test_days_are_no_aim_of_a_run_of_unknown_length():
    cluster = load_cluster(CONFIGS / "clusters" / "mixed-768.yaml")
    asked = load_job(CONFIGS / "jobs" / "llama-140b.yaml")
    model = load_model(CONFIGS / "models" / "llama-140b.yaml")
    endless = replace(asked, objective=Objective.DAYS, total_tokens=None)
    (fault,) = check_job_against(endless, model, cluster)
    assert (fault.field, "total_tokens: 2T" in fault.message) == ("objective", True)
