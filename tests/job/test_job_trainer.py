from dataclasses import fields, replace

import pytest

from hetplan.cluster.load import load_cluster
from hetplan.errors import InputError
from hetplan.files.shipped import shipped_folder
from hetplan.job.check import check_job_against
from hetplan.job.load import load_job
from hetplan.job.spec import Job, Optimizer, Precision, TrainerOptions
from hetplan.job.trainer import TRAINER_DEFAULTS, trainer_faults, trainer_settings
from hetplan.model.load import load_model
from hetplan.model.operators import DEFAULT_KERNELS, Kernels
from hetplan.model.spec import LayerKind
from hetplan.plans.targets import TARGETS

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


def test_every_target_says_what_its_trainer_does():
    assert [name for name, _ in TRAINER_DEFAULTS] == sorted(TARGETS, key=list(TARGETS).index)
    for _, found in TRAINER_DEFAULTS:
        missing = [
            each.name for each in fields(TrainerOptions) if getattr(found.own, each.name) is None
        ]
        assert missing in ([], ["gradient_precision"])
        assert set(found.choices) <= {each.name for each in fields(TrainerOptions)}


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


def test_older_forms_have_no_trainer(tmp_path):
    old = TEXT.replace("hetplan.job/3", "hetplan.job/2")
    assert load_job(write(tmp_path, old[: old.index("trainer:")])).trainer == TrainerOptions()


@pytest.mark.parametrize(
    ("change", "line", "field", "says"),
    [
        (("fused_attention: false", "fused_attention: 0"), 9, "trainer.fused_attention", "true or"),
        (("fused_attention", "fused_atention"), 9, "trainer.fused_atention", "did you mean"),
        (
            ("precision: float16", "precision: bfloat16"),
            11,
            "trainer.gradient_precision",
            "float16 for bfloat16 parameters; gradients are float32 or as the parameters",
        ),
        (("gradient_precision: float16", "gradient_precision: fp16"), 11,
         "trainer.gradient_precision", "write one of float32"),
    ],
)  # fmt: skip
def test_faults(tmp_path, change, line, field, says):
    assert change[0] in TEXT
    path = write(tmp_path, TEXT.replace(*change, 1))
    with pytest.raises(InputError) as caught:
        load_job(path)
    (fault,) = caught.value.faults
    assert (fault.file, fault.line, fault.field) == (str(path), line, field)
    assert says in fault.message


def test_the_native_trainer_has_no_choices(tmp_path):
    path = write(tmp_path, TEXT.replace("megatron", "native"))
    with pytest.raises(InputError) as caught:
        load_job(path)
    assert [(fault.line, fault.field) for fault in caught.value.faults] == [
        (9, "trainer.fused_attention"),
        (10, "trainer.attention_dropout"),
    ]
    assert "target native always has false; leave it out" in str(caught.value)
    wrong = replace(JOB, target="native", trainer=TrainerOptions(scattered_sends=True))
    with pytest.raises(InputError, match=r"trainer\.scattered_sends: true; target native"):
        trainer_settings(wrong)
    same = replace(wrong, trainer=TrainerOptions(fused_attention=True, fused_accumulation=False))
    assert tuple(trainer_faults(same)) == ()


def test_an_unknown_target_is_a_fault_of_others():
    unknown = replace(JOB, target="nobody")
    assert tuple(trainer_faults(unknown)) == ()
    with pytest.raises(InputError, match="unknown target 'nobody'"):
        trainer_settings(unknown)


def test_faults_against_the_inputs(tmp_path):
    model = load_model(CONFIGS / "models" / "llama-2-7b.yaml")
    cluster = load_cluster(CONFIGS / "clusters" / "mixed-768.yaml")
    asked = replace(JOB, trainer=TrainerOptions(blocking_sends=True))
    (fault,) = check_job_against(asked, model, cluster)
    assert fault.field == "trainer.blocking_sends"
    assert "can be priced (hetplan estimate), not searched" in fault.message
    assert check_job_against(asked, model, cluster, searched=False) == ()
    native = replace(asked, target="native")
    (fault,) = check_job_against(native, model, cluster, searched=False)
    assert "target native always has false" in fault.message


def test_a_layer_is_told_only_what_it_has():
    asked = TrainerOptions(
        fused_attention=False, attention_dropout=True, hidden_dropout=True, fused_loss=False
    )
    found = trainer_settings(replace(JOB, trainer=asked))
    assert found.kernels(LayerKind.TRANSFORMER) == Kernels(
        fused_attention=False, attention_dropout=True, hidden_dropout=True
    )
    assert found.kernels(LayerKind.HEAD) == Kernels(fused_loss=False)
    assert found.kernels(LayerKind.EMBEDDING) == Kernels(hidden_dropout=True)
    assert not found.kernels(LayerKind.MULTI_TOKEN_PREDICTION).fused_loss
    assert trainer_settings(JOB).kernels(LayerKind.TRANSFORMER) == DEFAULT_KERNELS
