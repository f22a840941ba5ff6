"""The reader of a reference folder's unit data: what becomes a sample, and what is not used."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
from evaluation_tables import (
    COLLECTIVE_HEADER,
    EFFICIENCY_HEADER,
    LAYER_HEADER,
    SHAPES,
    collective_row,
    layer_row,
    write_profile,
    write_table,
)

from evaluation.accuracy import unit_links
from evaluation.accuracy.left_out import UnitData, read_unit
from evaluation.accuracy.unit_data import Notes, read_rows
from hetplan.errors import InputError
from hetplan.profiling.samples import LayerSample, LinkSample, OperatorSample

A100 = "nvidia-a100-40gb-sxm"


def operators(found: UnitData) -> list[OperatorSample]:
    return [each for population in found.populations for each in population.operators]


def links(found: UnitData) -> list[LinkSample]:
    return [each for population in found.populations for each in population.links]


def layers(found: UnitData) -> list[LayerSample]:
    return [each for population in found.populations for each in population.layers]


def has_note(found: UnitData, *words: str) -> bool:
    return any(all(word in note for word in words) for note in found.notes)


def of_rows(folder: Path, *rows: str) -> UnitData:
    write_table(folder, "layer_times.csv", LAYER_HEADER, *rows)
    return read_unit(folder)


def sizes(samples: Iterable[OperatorSample]) -> set[tuple[str, str, int, int, int, int]]:
    return {(each.operator, each.phase, each.batch, each.m, each.n, each.k) for each in samples}


def test_operators_of_a_layer_have_their_shapes(tmp_path: Path) -> None:
    # OPT-350: hidden 1024, 16 heads, vocabulary 50272; sequences of 2048.
    found = of_rows(
        tmp_path,
        layer_row("enc-attention-qkv", 200, 180, mbs=2, tp=1),
        layer_row("enc-attention-dense", 90, 80, mbs=2, tp=1),
        layer_row("enc-MLP-GEMM-1", 90, 80, mbs=2, tp=1),
        layer_row("enc-MLP-GEMM-2", 90, 80, mbs=2, tp=1),
        layer_row("enc-attention-score", 300, 250, mbs=2, tp=2),
        layer_row("enc-attention-context", 150, 300, mbs=2, tp=2),
        layer_row("enc-attention-softmax", 150, 300, mbs=2, tp=2),
        layer_row("enc-attention-dropout", 150, 300, mbs=2, tp=2),
        layer_row("enc-1st-layernorm", 80, 140, mbs=2, tp=2),
        layer_row("enc-MLP-gelu", 60, 130, mbs=2, tp=2),
        layer_row("enc-post-MLP-dropout", 110, 100, mbs=2, tp=2),
        layer_row("encoder-embedding", 110, 100, mbs=2, tp=1),
        layer_row("gpt-post-process", 2000, 1500, mbs=2, tp=1),
    )
    assert sizes(operators(found)) == {
        ("matrix_product", "forward", 1, 4096, 1024, 1024),
        ("matrix_product", "input_gradient", 1, 4096, 1024, 1024),
        ("matrix_product", "forward", 1, 4096, 4096, 1024),
        ("matrix_product", "input_gradient", 1, 4096, 1024, 4096),
        ("matrix_product", "forward", 1, 4096, 1024, 4096),
        ("matrix_product", "input_gradient", 1, 4096, 4096, 1024),
        ("attention_score", "forward", 16, 2048, 2048, 64),
        ("attention_score", "backward", 16, 2048, 2048, 64),
        ("attention_context", "forward", 16, 2048, 64, 2048),
        ("attention_context", "backward", 16, 2048, 64, 2048),
        ("softmax", "forward", 1, 16 * 2048, 2048, 0),
        ("softmax", "backward", 1, 16 * 2048, 2048, 0),
        ("attention_dropout", "forward", 1, 16 * 2048, 2048, 0),
        ("attention_dropout", "backward", 1, 16 * 2048, 2048, 0),
        ("norm", "forward", 1, 4096, 1024, 0),
        ("norm", "backward", 1, 4096, 1024, 0),
        ("activation", "forward", 1, 4096, 2048, 2048),
        ("activation", "backward", 1, 4096, 2048, 2048),
        ("addition", "forward", 1, 4096, 1024, 3),
        ("addition", "backward", 1, 4096, 1024, 3),
        ("embedding", "forward", 1, 4096, 1024, 50272),
        ("embedding", "backward", 1, 4096, 1024, 50272),
        ("loss", "forward", 1, 4096, 50272, 1024),
        ("loss", "input_gradient", 1, 4096, 50272, 1024),
    }
    (population,) = found.populations
    assert population.provenance[0].device == A100
    assert population.provenance[0].tool.startswith("Aceso")
    score = next(each for each in operators(found) if each.operator == "attention_score")
    assert score.median_seconds == pytest.approx(300e-6)
    assert (score.precision, score.output_precision) == ("float16", "float16")
    loss = next(each for each in operators(found) if each.operator == "loss")
    assert loss.output_precision == "float32"


@pytest.mark.parametrize(
    ("trap", "phases", "reason"),
    [
        (layer_row("enc-attention-qkv", 9, 8), set(), "copies of its result"),
        (layer_row("enc-MLP-GEMM-1", 9, 8, tp=2), {"forward"}, "tp > 1"),
        (layer_row("enc-attention-dense", 9, 8, tp=2), {"input_gradient"}, "tp > 1"),
        (layer_row("encoder-embedding", 9, 8, tp=2), {"backward"}, "tp > 1"),
        (layer_row("gpt-post-process", 9, 8, tp=2), set(), "tp > 1"),
        (layer_row("enc-1st-layernorm", 9, 1e7), {"forward"}, "out of memory"),
        (layer_row("enc-1st-layernorm", 0, 8), {"backward"}, "no time"),
        (layer_row("enc-attention-qkv", 9, 8, algo=1), set(), "algo 1"),
        (layer_row("final-layernorm", 9, 8), set(), "transposition"),
    ],
)
def test_a_trap_is_not_a_sample_and_is_counted(
    tmp_path: Path, trap: str, phases: set[str], reason: str
) -> None:
    found = of_rows(tmp_path, trap)
    assert {each.phase for each in operators(found)} == phases
    assert has_note(found, "not used", reason)


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        (layer_row("enc-new", 9, 8), "found operator 'enc-new'"),
        (layer_row("enc-MLP-gelu", "x", 8), "found 'x'; write a number"),
        (layer_row("enc-MLP-gelu", 9, 8, tp=3), "found 3; it does not divide the 16 heads"),
    ],
)
def test_a_wrong_row_is_an_error_with_its_line(tmp_path: Path, wrong: str, expected: str) -> None:
    with pytest.raises(InputError, match=expected) as caught:
        of_rows(tmp_path, layer_row("enc-MLP-gelu", 9, 8), wrong)
    assert caught.value.faults[0].line == 3
    assert caught.value.faults[0].file.endswith("layer_times.csv")


def test_what_is_no_table_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00\x81")
    (tmp_path / "folder.csv").mkdir()
    for name, message in (("binary", "no table of measurements"), ("folder", "cannot be read")):
        with pytest.raises(InputError, match=message):
            read_rows(tmp_path / f"{name}.csv", Notes(), words=("operator",))


def test_collectives_of_every_source_and_their_traps(tmp_path: Path) -> None:
    one, other = SHAPES.format("OPT-30"), SHAPES.format("OPT-350")
    p2p = '"Sailor Aceso profiler A100-40 p2p (unit as stored, GB/s or Gb/s not labelled)"'
    strided = "Galvatron allreduce_bandwidth_2nodes_8gpus_per_node (consec=0)"
    consecutive = "Galvatron allreduce_bandwidth_2nodes_8gpus_per_node (consec=1)"
    cards = "A100-class (not labelled)"
    write_table(
        tmp_path,
        "collectives.csv",
        COLLECTIVE_HEADER,
        collective_row("vTrain trace/a100 (LUT)", "all_reduce", 8, 1048576, 92.15, 19.91, "A100"),
        collective_row(one, "all_gather", 4, 1000, 50, 15),
        collective_row(other, "all_gather", 4, 1000, 50, 15),
        collective_row(other, "all_gather", 4, 1000, 55, 14),
        collective_row(one, "all_to_all", 4, 7516192768, 1e12, 0),
        collective_row(one, "all_to_all", 4, 2113929216, 1e9, 0),
        collective_row(p2p, "p2p", 2, 1048576, "", 10),
        collective_row(p2p, "p2p", 2, 1048576, "", 2, scope="inter"),
        collective_row(p2p, "p2p", 2, "", "", 2),
        collective_row(strided, "all_reduce", 4, "", "", 16.22, cards, "2x8"),
        collective_row(consecutive, "all_reduce", 16, "", "", 44.7, cards, "2x8"),
        collective_row(consecutive, "all_reduce", 4, "", "", 158.0, cards, "2x8"),
        collective_row("Galvatron p2p_bandwidth_2nodes", "p2p", 4, "", "", 8, cards, "2x8"),
        collective_row("Galvatron sp_time_1nodes", "all2all", 8, 1048576, 112, 8, cards, "1x8"),
        collective_row("SimAI ratio", "all_to_all", "2Node-16GPU(NIC )", 16777216, "", 0.4, "?"),
        collective_row("somebody", "all_reduce", 2, 1024, 10, 1, "?"),
    )
    found = read_unit(tmp_path)
    rows = {
        (each.link, each.operation, each.group_size, each.nodes, each.message_bytes): each
        for each in links(found)
    }
    assert rows[unit_links.VTRAIN_A100_NODE, "all_reduce", 8, 1, 1048576].median_seconds == 92.15e-6
    node = unit_links.node_link(A100)
    gathered = [each for each in links(found) if each.operation == "all_gather"]
    assert sorted(each.median_seconds for each in gathered) == pytest.approx([50e-6, 55e-6])
    # The table has what each rank gives; a message is what all have in the end.
    assert {each.message_bytes for each in gathered} == {4 * 1000}
    assert has_note(found, "1 row not used", "the same measurement under another model")
    assert rows[node, "send_recv", 2, 1, 1048576].median_seconds == pytest.approx(1048576 / 10e9)
    between = rows[unit_links.SAILOR_A100_NODES, "send_recv", 2, 2, 1048576]
    assert between.median_seconds == pytest.approx(1048576 / 2e9)
    assert has_note(found, "fitted polynomial")
    middle = 64 << 20
    crossing = rows[unit_links.GALVATRON_NODES, "all_reduce", 4, 2, middle]
    assert crossing.median_seconds == pytest.approx(1.5 * middle / 16.22e9)
    assert (unit_links.GALVATRON_NODES, "all_reduce", 16, 2, middle) in rows
    # Four consecutive ranks of eight to a node never leave it.
    assert (unit_links.GALVATRON_NODE, "all_reduce", 4, 1, middle) in rows
    assert (unit_links.GALVATRON_NODE, "all_to_all", 8, 1, 1048576) in rows
    for reason in (
        "1e12 us",
        "1e9 us",
        "no size",
        "SimAI",
        "chains of sends",
        "not known",
    ):
        assert has_note(found, "not used", reason), reason
    assert len(links(found)) == 9


def test_communication_is_taken_out_of_sliced_layers(tmp_path: Path) -> None:
    size = 1 * 2048 * 1024 * 4  # microbatch, sequence, hidden, float32
    write_table(
        tmp_path,
        "collectives.csv",
        COLLECTIVE_HEADER,
        collective_row(SHAPES.format("OPT-350"), "all_reduce", 2, size, 1000, 1),
        collective_row(SHAPES.format("OPT-350"), "all_reduce", 2, size, 1200, 1),
    )
    write_profile(
        tmp_path, "OPT-350", "A100-40",
        {(1, 1): (0.004, 0.016, 0.05), (1, 2): (0.003, 0.010, 0.03), (1, 4): (0.1, 0.1, 0.1)},
    )  # fmt: skip
    found = read_unit(tmp_path)
    rows = {(each.layer, each.phase, each.tp): each for each in layers(found)}
    whole = rows["transformer", "forward", 1]
    assert whole.median_seconds == 0.016
    sliced = rows["transformer", "forward", 2]
    assert sliced.median_seconds == pytest.approx(0.010 - 2 * 1.1e-3)
    assert sliced.p10_seconds == pytest.approx(0.010 - 2 * 1.2e-3)
    assert sliced.p90_seconds == pytest.approx(0.010 - 2 * 1.0e-3)
    assert rows["embedding", "forward", 2].median_seconds == pytest.approx(0.003 - 1.1e-3)
    assert rows["head", "forward", 2].median_seconds == 0.03
    assert rows["head", "backward", 2].median_seconds == pytest.approx(0.06 - 1.1e-3)
    # No all_reduce among four was measured, so what is in those times cannot be told.
    assert {key for key in rows if key[2] == 4 and key[0] != "head"} <= {
        ("transformer", "optimizer:adamw", 4),
        ("embedding", "backward", 4),
    }
    assert ("head", "forward", 4) in rows
    assert has_note(found, "not used", "no all_reduce of this size was measured")


def test_what_no_device_can_do_is_left_out(tmp_path: Path) -> None:
    # The mark of a failed run and a time of 0 are no times; the embedding's backward is never one.
    write_profile(tmp_path, "OPT-350", "A100-40", {(1, 1): (0.0, 0.001, 1e4)})
    write_profile(tmp_path, "OPT-350", "V100-16", {(1, 1): (0.001, 0.001, 0.01)})
    write_profile(tmp_path, "OPT-30", "A100-40", {(1, 1): (0.001, 0.001, 0.01)})
    found = read_unit(tmp_path)
    assert {(each.device, each.layer, each.phase) for each in layers(found)} == {
        (A100, "transformer", "forward"),
        (A100, "transformer", "backward"),
        (A100, "transformer", "optimizer:adamw"),
        *(
            ("nvidia-v100-16gb-sxm", layer, phase)
            for layer in ("embedding", "transformer", "head")
            for phase in ("forward", "backward")
            if (layer, phase) != ("embedding", "backward")
        ),
        ("nvidia-v100-16gb-sxm", "transformer", "optimizer:adamw"),
    }
    assert has_note(found, "4 rows not used", "not measured")
    assert has_note(found, "OPT-30 on A100-40 is not read: float32 itself")


PEAK_TFLOPS, EFFICIENCY = 312, 0.5
SQUARE = "batch=2, seq_len=4096, head_num=8, kv_head_num=2, qk_head_dim=192, v_head_dim=128"
PRODUCT = "b=3, m=4096, k=512, n=1024, layout={}, accumulate=False, out_dtype=bf16"
GROUPED = "ng=40, M=616, N=3072, K=5120, dtype=bf16, out_dtype=bf16, main_grad_dtype=fp32, stage={}"


def efficiencies(folder: Path, *rows: tuple[str, str, float]) -> UnitData:
    lines = (
        f'made-up,a100_pcie,{operation},{PEAK_TFLOPS},0.5,"{shape}",{efficiency}'
        for operation, shape, efficiency in rows
    )
    write_table(folder, "gemm_efficiency.csv", EFFICIENCY_HEADER, *lines)
    return read_unit(folder)


@pytest.mark.parametrize(
    ("operation", "shape", "expected", "operations"),
    [
        # Batches of one product's rows meet the same weights, or are summed over.
        ("matmul", PRODUCT.format("TN"), ("forward", 1, 3 * 4096, 1024, 512), 6 * 4096 * 2**19),
        ("matmul", PRODUCT.format("NN"), ("input_gradient", 1, 3 * 4096, 1024, 512), 6 * 2**31),
        ("matmul", PRODUCT.format("NT"), ("weight_gradient", 1, 4096, 1024, 1536), 6 * 2**31),
        # Stages of a grouped product name the sizes of the forward one.
        ("group_matmul", GROUPED.format("fwd"), ("forward", 40, 616, 3072, 5120), None),
        ("group_matmul", GROUPED.format("bwd_grad_act"), ("input_gradient", 40, 616, 5120, 3072),
         None),
        ("group_matmul", GROUPED.format("bwd_grad_w"), ("weight_gradient", 40, 3072, 5120, 616),
         None),
        # Two products of a square, one over 192 and one over 128; backward five.
        ("sdp_fwd", SQUARE, ("forward", 16, 4096, 4096, 160), 2 * 16 * 4096**2 * 320),
        ("sdp_bwd", SQUARE, ("backward", 16, 4096, 4096, 160), 5 * 16 * 4096**2 * 320),
    ],
)  # fmt: skip
def test_an_efficiency_is_the_time_of_the_operator_that_ran(
    tmp_path: Path, operation: str, shape: str, expected: tuple[object, ...], operations: int | None
) -> None:
    (found,) = operators(efficiencies(tmp_path, (operation, shape, EFFICIENCY)))
    assert (found.phase, found.batch, found.m, found.n, found.k) == expected
    counted = operations or 2 * 40 * 616 * 3072 * 5120
    assert found.median_seconds == pytest.approx(counted / (EFFICIENCY * PEAK_TFLOPS * 1e12))
    is_sum = operation == "group_matmul" and found.phase == "weight_gradient"
    assert found.output_precision == ("float32" if is_sum else "bfloat16")


def test_an_efficiency_that_is_no_time_says_why(tmp_path: Path) -> None:
    found = efficiencies(
        tmp_path,
        ("fp8_matmul", PRODUCT.format("TN"), 0.5),
        ("matmul", PRODUCT.format("TT"), 0.5),
        ("matmul", PRODUCT.format("TN"), 1.26),
        ("sdp_fwd", SQUARE, 2.01),
    )
    assert operators(found) == []
    for reason in ("no operator of a layer", "cannot be read", "(at most 1.25)", "(at most 2)"):
        assert has_note(found, "1 row not used", reason)
