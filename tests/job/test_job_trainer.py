from dataclasses import replace

import pytest

from hetplan.cluster.catalogue import load_catalogue
from hetplan.cluster.load import load_cluster
from hetplan.errors import InputError
from hetplan.files.shipped import shipped_folder
from hetplan.job.load import load_job
from hetplan.job.spec import (
    Forbids,
    Job,
    Optimizer,
    Precision,
    ProductFormat,
    TrainerOptions,
)
from hetplan.job.trainer import trainer_settings
from hetplan.model.load import load_model
from hetplan.model.spec import LayerKind
from hetplan.plans.check_job import check_job_against

CONFIGS = shipped_folder("configs")
JOB = Job(
    name="small",
    global_batch_size=96,
    sequence_length=2048,
    precision=Precision.FLOAT16,
    optimizer=Optimizer.ADAMW,
    target="megatron",
)
TEXT = """schema: hetplan.job/3
name: small
global_batch_size: 96
sequence_length: 2048
precision: float16
optimizer: adamw
target: megatron
trainer:
  fused_attention: false
  attention_dropout: true
  gradient_precision: float16
"""


def write(tmp_path, text):
    path = tmp_path / "job.yaml"
    path.write_text(text)
    return path


def test_options_are_read_and_the_rest_is_the_targets(tmp_path):
    job = load_job(write(tmp_path, TEXT))
    assert job.trainer == TrainerOptions(
        fused_attention=False, attention_dropout=True, gradient_precision=Precision.FLOAT16
    )
    found = trainer_settings(job)
    assert (found.fused_attention, found.attention_dropout) == (False, True)
    assert found.gradient_precision is Precision.FLOAT16
    plain = trainer_settings(JOB)
    assert plain == trainer_settings(load_job(write(tmp_path, TEXT[: TEXT.index("trainer:")])))
    assert plain.gradient_precision is Precision.FLOAT32
    assert plain.fused_accumulation
    assert (plain.scattered_sends, plain.blocking_sends) == (False, False)
    native = trainer_settings(replace(JOB, target="native", precision=Precision.BFLOAT16))
    assert native.gradient_precision is Precision.BFLOAT16


@pytest.mark.parametrize(("change", "line", "field"), [
(("fused_attention: false", "fused_attention: 0"), 9, "trainer.fused_attention"),
(("fused_attention", "fused_atention"), 9, "trainer.fused_atention"),
(("precision: float16", "precision: bfloat16"), 11, "trainer.gradient_precision"),
(("gradient_precision: float16", "gradient_precision: half16"), 11, "trainer.gradient_precision"),
])  # fmt: skip
def test_faults(tmp_path, change, line, field):
    assert change[0] in TEXT
    path = write(tmp_path, TEXT.replace(*change, 1))
    with pytest.raises(InputError) as caught:
        load_job(path)
    (fault,) = caught.value.faults
    assert (fault.file, fault.line, fault.field) == (str(path), line, field)


NARROW = replace(
    JOB,
    precision=Precision.BFLOAT16,
    trainer=TrainerOptions(product_format=ProductFormat.MXFP8),
)


def test_narrow_products_are_of_layers_and_of_bfloat16_parameters(tmp_path):
    text = TEXT[: TEXT.index("trainer:")].replace("float16", "bfloat16")
    text += "trainer:\n  product_format: mxfp8\n"
    job = load_job(write(tmp_path, text))
    assert job == NARROW
    found = trainer_settings(job)
    assert found.kernels(LayerKind.TRANSFORMER).product_format == "mxfp8"
    assert found.kernels(LayerKind.MULTI_TOKEN_PREDICTION).product_format == "mxfp8"
    for kind in (LayerKind.HEAD, LayerKind.EMBEDDING):
        assert found.kernels(kind).product_format == ""
    assert trainer_settings(JOB).kernels(LayerKind.TRANSFORMER).product_format == ""
    for change, line, says in (
        (("bfloat16", "float16"), 9, "mxfp8 with float16 parameters; it goes with bfloat16 ones"),
        (("megatron", "native"), 9, "mxfp8; target native always has bfloat16; leave it out"),
        (("mxfp8", "fp6"), 9, "write one of float8, mxfp8"),
    ):
        with pytest.raises(InputError) as caught:
            load_job(write(tmp_path, text.replace(*change)))
        (fault,) = caught.value.faults
        assert (fault.line, fault.field) == (line, "trainer.product_format")
        assert says in fault.message


def test_devices_must_have_the_rate_of_the_products():
    model = load_model(CONFIGS / "models" / "llama-2-7b.yaml")
    cluster = load_cluster(CONFIGS / "clusters" / "mixed-768.yaml")
    faults = check_job_against(NARROW, model, cluster, searched=False)
    assert {fault.field for fault in faults} == {"trainer.product_format"}
    kinds = dict.fromkeys(island.device.kind for island in cluster.islands)
    assert len(faults) == len(kinds) == 2
    for fault, kind in zip(faults, kinds, strict=True):
        assert f"mxfp8 needs a float8 rate, and {kind} has none" in fault.message
    first, *rest = cluster.islands
    b200 = next(kind for kind in load_catalogue() if kind.kind == "nvidia-b200-180gb-sxm")
    mixed = replace(cluster, islands=(replace(first, device=b200), *rest))
    forbid = Forbids(islands=tuple(island.name for island in rest))
    assert len(check_job_against(NARROW, model, mixed, searched=False)) == 1
    for asked in (ProductFormat.MXFP8, ProductFormat.NVFP4):
        job = replace(NARROW, forbid=forbid, trainer=TrainerOptions(product_format=asked))
        assert check_job_against(job, model, mixed, searched=False) == ()
    h100 = next(kind for kind in load_catalogue() if kind.kind == "nvidia-h100-80gb-sxm")
    mixed = replace(cluster, islands=(replace(first, device=h100), *rest))
    (fault,) = check_job_against(job, model, mixed, searched=False)
    assert "nvfp4 needs a float4 rate, and nvidia-h100-80gb-sxm has none" in fault.message
