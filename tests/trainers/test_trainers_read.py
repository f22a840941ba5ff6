"""What launches ask for, the trainers' defaults filled in; every fault with its file and line."""

from __future__ import annotations

from pathlib import Path

import pytest
from launches_handwritten import (
    EIGHT_NODES,
    EXPERIMENT,
    GPT3,
    HETERO,
    HOSTS,
    LLAMA,
    MIXTRAL,
    TITAN,
    TOML,
)
from training_logs_rendered import megatron_arguments

from hetplan.errors import InputError
from hetplan.model.layers import Attention, Experts, Mlp, Norm
from hetplan.plans.plan import RecomputeGranularity, RecomputeModule
from hetplan.trainers.launch_values import LaunchFacts, LaunchMesh, LaunchText, flag
from hetplan.trainers.megatron.read_model import launch_model
from hetplan.trainers.read import facts_of, read_launch

NO_GIVEN: tuple[tuple[str, str], ...] = ()


def written(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def read(
    folder: Path,
    trainer: str,
    text: str,
    given: tuple[tuple[str, str], ...] = NO_GIVEN,
    name: str = "run.sh",
) -> LaunchText:
    return read_launch(written(folder, name, text), trainer, given)


def megatron(folder: Path, *flags: str, ranks: int = 8) -> LaunchFacts:
    """Of arguments alone."""
    text = "--micro-batch-size 1 --seq-length 128 --num-layers 8 " + " ".join(flags)
    given = (("WORLD_SIZE", str(ranks)),)
    return facts_of(read(folder, "megatron", text, given, "arguments.txt"))


def experiment(folder: Path, train: str = HETERO) -> Path:
    written(folder, "train/hetero.yaml", train)
    written(folder, "hosts", HOSTS)
    return written(folder, "experiment.yaml", EXPERIMENT)


def test_a_flagscale_plan_overlaps_what_no_job_of_flagscale_asks_for(tmp_path: Path) -> None:
    train = HETERO.replace("  hetero:\n", "  tp_comm_overlap: True\n  hetero:\n")
    facts = facts_of(read_launch(experiment(tmp_path, train), "flagscale"))
    assert facts.overlap.tensor_parallel
    assert facts.options.tp_comm_overlap is None


# ---- Megatron-LM


def test_a_script_for_1024_accelerators(tmp_path: Path) -> None:
    text = read(tmp_path, "megatron", GPT3)
    facts = facts_of(text)
    assert facts.world_size == 1024
    assert facts.meshes == (LaunchMesh(tp=8, cp=1, ep=1, dp=8, pp=16, microbatch_size=1, etp=8),)
    assert facts.layers == ((3, 3),) * 16
    assert facts.schedule == "interleaved-1f1b"
    assert (facts.global_batch_size, facts.num_microbatches) == (1536, 192)
    assert (facts.sequence_length, facts.vocab_size, facts.vocab_multiple) == (2048, 50257, 128)
    assert facts.precision == "bfloat16"
    assert facts.sharded_optimizer
    assert not facts.sequence_parallel
    assert facts.tied_embeddings
    # Dropout is 0.1 where nobody says otherwise.
    assert facts.options.attention_dropout
    assert facts.options.hidden_dropout
    # Sends are overlapped with virtual stages unless told otherwise.
    assert facts.overlap.send
    assert [each.name for each in text.unread] == [
        "data-path",
        "torchrun.node-rank",
        "torchrun.master-addr",
    ]
    layers = flag(text, "num-layers")
    assert layers is not None
    assert (layers.values, layers.line) == (("96",), 23)
    port = text.last("torchrun.master-port")
    assert port is not None
    assert (port.values, port.line) == (("6000",), 19)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            "--tensor-model-parallel-size $TP",
            "'$TP' is known to the host only; give it with --set TP=",
        ),
        ("--tensor-model-parallel-size eight", "a whole number from 1 on"),
        ("--model-parallel-size 2", "it is --tensor-model-parallel-size today"),
    ],
)
def test_settings_that_are_none_are_refused(tmp_path: Path, flags: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        megatron(tmp_path, "\n" + flags)
    assert message in str(caught.value)
    assert [each.line for each in caught.value.faults] == [2]


def test_a_script_that_starts_nothing_or_two_things_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="starts no trainer"):
        read(tmp_path, "megatron", "echo hello\n")
    two = "torchrun pretrain_gpt.py --num-layers 2\ntorchrun pretrain_gpt.py --num-layers 4\n"
    with pytest.raises(InputError, match="several trainers") as caught:
        read(tmp_path, "megatron", two)
    assert caught.value.faults[0].line == 2


# ---- the list of arguments that Megatron-LM prints


ARGUMENT_LIST = {
    "world_size": 16,
    "tensor_model_parallel_size": 2,
    "pipeline_model_parallel_size": 2,
    "virtual_pipeline_model_parallel_size": None,
    "overlap_p2p_comm": False,
    "num_layers": 8,
    "encoder_num_layers": 8,
    "hidden_size": 512,
    "num_attention_heads": 8,
    "group_query_attention": False,
    "num_query_groups": 1,
    "seq_length": 128,
    "max_position_embeddings": 128,
    "micro_batch_size": 1,
    "global_batch_size": 64,
    "bf16": True,
    "fp16": False,
    "add_bias_linear": False,
    "swiglu": True,
    "use_distributed_optimizer": True,
    "attention_backend": "AttnBackend.auto",
    "recompute_granularity": "selective",
    "recompute_modules": ["core_attn", "mlp"],
    "hidden_dropout": 0.0,
    "tokenizer_type": "GPT2BPETokenizer",
    "vocab_size": None,
    "vocab_file": "gpt2-vocab.json",
    "microbatch_group_size_per_vp_stage": 2,
}


def test_the_printed_arguments_are_a_launch(tmp_path: Path) -> None:
    """Behind a launcher's labels."""
    lines = f"{megatron_arguments(**ARGUMENT_LIST)}\n------ end of arguments ------\ntraining ..."
    labelled = "".join(f"[default0]:{line}\n" for line in lines.split("\n"))
    path = written(tmp_path, "run.log", labelled)
    text = read_launch(path)
    facts = facts_of(text)
    assert (facts.world_size, facts.meshes[0].dp) == (16, 4)
    assert facts.layers == ((4,), (4,))
    assert facts.stage_recompute[0].modules == (
        RecomputeModule.CORE_ATTENTION,
        RecomputeModule.MLP,
    )
    assert (facts.precision, facts.options.hidden_dropout) == ("bfloat16", None)
    assert facts.options.attention_dropout
    assert facts.refusals == ()
    model = launch_model(text, "m")
    assert (model.vocab_size, model.layer_runs[0].layer.mlp) == (
        50257,
        Mlp(ffn_hidden_size=1344, gated=True),
    )
    assert isinstance(model.layer_runs[0].layer.attention, Attention)
    assert model.layer_runs[0].layer.attention.num_kv_heads == 8
    given = facts_of(read_launch(path, "megatron", (("global_batch_size", "32"),)))
    assert given.global_batch_size == 32
    path.write_text(labelled.partition("  seq_length")[0])
    with pytest.raises(InputError, match="no complete list"):
        read_launch(path)


# ---- FlagScale


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("[2, 1, 1, 4, 1, 4, 1, 1, 2, 2]", "[2, 1, 1, 4]", "4 numbers; each mesh has five"),
        (
            "[2, 1, 1, 4, 1, 4, 1, 1, 2, 2]",
            "[2, 1, 1, 4, 1, 2, 1, 1, 3, 2]",
            "dp 3 of mesh 1 does not",
        ),
        ("[4, 14, 14]", "[4, 14]", "2 numbers for 3 stages"),
        ("- [1, 16, 1]", "- [1, 8, 1, 8, 0]", "treats the microbatches of a stage differently"),
    ],
)
def test_broken_meshes_have_their_line(tmp_path: Path, old: str, new: str, message: str) -> None:
    text = HETERO.replace(old, new)
    assert text != HETERO
    with pytest.raises(InputError) as caught:
        facts_of(read(tmp_path, "flagscale", text, name="hetero.yaml"))
    (fault,) = caught.value.faults
    assert message in fault.message
    assert fault.line > 0


def test_interpolations_are_followed(tmp_path: Path) -> None:
    train = (
        HETERO.replace("global_batch_size: 64", "global_batch_size: ${experiment.batch}")
        .replace("micro_batch_size: 1", "micro_batch_size: ${oc.env:MBS,1}")
        .replace("seq_length: 4096", "seq_length: ${oc.env:SEQ}")
    )
    path = experiment(tmp_path, train)
    path.write_text(EXPERIMENT.replace("  seed: 42", "  seed: 42\n  batch: 64"))
    text = read_launch(path)
    assert [each.name for each in text.unread] == ["train.model.seq_length"]
    with pytest.raises(InputError, match=r"train\.model\.seq_length"):
        facts_of(text)
    given = (("SEQ", "2048"), ("train.model.global_batch_size", "128"))
    facts = facts_of(read_launch(path, None, given))
    assert (facts.sequence_length, facts.global_batch_size) == (2048, 128)


def test_a_train_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    path = written(tmp_path, "experiment.yaml", EXPERIMENT)
    with pytest.raises(InputError, match="which is not there") as caught:
        read_launch(path)
    assert caught.value.faults[0].line == 2
    path.write_text(EXPERIMENT.replace("train: hetero", "train: ../../etc/passwd"))
    with pytest.raises(InputError, match="is no name of a train YAML"):
        read_launch(path)


# ---- torchtitan


def test_torchtitans_script(tmp_path: Path) -> None:
    facts = facts_of(read(tmp_path, "torchtitan", TITAN), 32)
    assert facts.meshes == (LaunchMesh(tp=2, cp=1, ep=1, dp=2, pp=2, microbatch_size=1),)
    # 32 layers and one for each end: 17 and 17.
    assert facts.layers == ((16,), (16,))
    assert (facts.num_microbatches, facts.global_batch_size) == (8, 16)
    assert facts.sequence_parallel
    assert facts.sharded_optimizer
    assert facts.stage_recompute[0].granularity is RecomputeGranularity.FULL
    assert not facts.refusals


def test_torchtitans_toml(tmp_path: Path) -> None:
    given = (("nnodes", "2"), ("nproc-per-node", "8"))
    text = read(tmp_path, "torchtitan", TOML, given, "train.toml")
    facts = facts_of(text, 32)
    assert facts.meshes == (LaunchMesh(tp=4, cp=1, ep=1, dp=4, pp=1, microbatch_size=4),)
    assert (facts.num_microbatches, facts.global_batch_size) == (2, 32)
    assert facts.layers == ((32,),)
    tp = flag(text, "tensor-parallel-degree")
    assert tp is not None
    assert (tp.name, tp.line) == ("parallelism.tensor_parallel_degree", 17)


def test_what_torchtitan_does_and_plans_do_not(tmp_path: Path) -> None:
    text = TITAN.replace("activation_checkpoint:full", "activation_checkpoint:selective").replace(
        "--training.local_batch_size 8",
        "--training.local_batch_size 8 --training.global_batch_size 64 "
        "--parallelism.pipeline_parallel_schedule LoopedBFS",
    )
    found = facts_of(read(tmp_path, "torchtitan", text), 32).refusals
    assert [each.message.split(";")[0] for each in found] == [
        "'LoopedBFS' has no price here",
        "4 steps of gradient accumulation, each of which fills and drains the pipeline",
        "activation_checkpoint selective keeps chosen operations, which plans do not have",
    ]
    toml = TOML.replace('fsdp_reshard_after_forward = "never"\n', "")
    given = (("nnodes", "1"), ("nproc-per-node", "8"))
    facts = facts_of(read(tmp_path, "torchtitan", toml, given, "t.toml"), 32)
    assert facts.sharded_parameters
    assert not facts.refusals
    stages = text.replace("LoopedBFS", "1F1B --parallelism.fsdp_reshard_after_forward always")
    assert "frees the parameters after forward passes alone" in str(
        [each.message for each in facts_of(read(tmp_path, "torchtitan", stages), 32).refusals]
    )


# ---- which it is


# ---- the model


def test_the_model_of_a_launch(tmp_path: Path) -> None:
    model = launch_model(read(tmp_path, "megatron", LLAMA), "llama")
    assert model.num_layers == 32
    layer = model.layer_runs[0].layer
    assert layer.attention == Attention(num_heads=32, num_kv_heads=8, head_dim=128)
    assert layer.mlp == Mlp(ffn_hidden_size=14336, gated=True)
    assert (layer.norm, model.final_norm) == (Norm.RMS_NORM, Norm.RMS_NORM)
    # Llama 3 8B as everybody counts it.
    assert model.parameter_count == 8_030_261_248
    gpt = launch_model(read(tmp_path, "megatron", GPT3), "gpt")
    assert gpt.tied_embeddings
    assert gpt.learned_positions == 2048
    assert gpt.layer_runs[0].layer.mlp == Mlp(ffn_hidden_size=49152, gated=False, bias=True)
    assert gpt.parameter_count == 174_604_259_328
    mixtral = launch_model(read(tmp_path, "megatron", MIXTRAL, EIGHT_NODES), "m")
    assert isinstance(mixtral.layer_runs[0].layer.mlp, Experts)
    assert mixtral.parameter_count == 46_702_792_704


def test_the_model_of_arguments_with_patterns(tmp_path: Path) -> None:
    text = (
        "--num-layers 6 --hidden-size 512 --num-attention-heads 8 --vocab-size 1000 --swiglu "
        "--normalization RMSNorm --disable-bias-linear --position-embedding-type rope "
        "--num-experts 16 --moe-router-topk 4 --moe-ffn-hidden-size 128 --seq-length 256 "
        "--moe-layer-freq ([0]*1+[1]*5)"
    )
    model = launch_model(read(tmp_path, "megatron", text, name="a.txt"), "m")
    assert [run.count for run in model.layer_runs] == [1, 5]
    for wrong in ("([0]*2+[1]*5)", "[2]*6", "__import__('os')", "([1]*999999)*999999"):
        changed = text.replace("([0]*1+[1]*5)", wrong)
        with pytest.raises(InputError):
            launch_model(read(tmp_path, "megatron", changed, name="a.txt"), "m")
