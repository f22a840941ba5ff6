"""Layer profiles of Sailor and Metis: what they say comes out again, what is wrong is named."""

from __future__ import annotations

import json
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st
from importers_peer_files import DEVICE, alike, context, gpt, llama, metis_text, sailor_text

from hetplan.errors import InputError
from hetplan.importers import metis, sailor
from hetplan.importers.records import Imported
from hetplan.job.spec import Precision
from hetplan.model.spec import LayerKind
from hetplan.profiling.samples import LayerSample

METIS_FILE = "DeviceType.X200_tp2_bs4.json"
METIS = context(METIS_FILE, model=gpt(), precision=Precision.FLOAT16, sequence_length=1024)


def only(imported: Imported, **wanted: object) -> LayerSample:
    found = [
        sample
        for sample in imported.layers
        if all(getattr(sample, name) == value for name, value in wanted.items())
    ]
    assert len(found) == 1, (wanted, found)
    return found[0]


def message(error: pytest.ExceptionInfo[InputError]) -> str:
    return str(error.value)


# ---- Sailor

seconds = st.floats(min_value=1e-6, max_value=900.0, allow_nan=False)


@st.composite
def sailor_runs(draw: st.DrawFn) -> tuple[int, dict[tuple[int, int], list[list[float]]]]:
    layers = draw(st.integers(min_value=1, max_value=5))
    keys = draw(
        st.lists(
            st.tuples(st.integers(1, 64), st.sampled_from((1, 2, 4, 8))),
            min_size=1,
            max_size=3,
            unique=True,
        )
    )
    # A slow head and a slow backward of the embedding are never taken for false ones.
    runs = {}
    for key in keys:
        rows = draw(
            st.lists(
                st.lists(seconds, min_size=3, max_size=3), min_size=layers + 2, max_size=layers + 2
            )
        )
        rows[-1][0] = rows[0][1] = 900.0
        runs[key] = rows
    return layers, runs


@given(sailor_runs())
def test_sailor_profiles_come_back_as_they_were_written(
    case: tuple[int, dict[tuple[int, int], list[list[float]]]],
) -> None:
    layers, runs = case
    model = gpt(layers)
    imported = sailor.parse(sailor_text(runs), context(model=model))
    assert not imported.skipped
    for (microbatch, tp), rows in runs.items():
        for at, phase in enumerate(("forward", "backward")):
            for kind, part in (
                (LayerKind.EMBEDDING, rows[:1]),
                (LayerKind.TRANSFORMER, rows[1:-1]),
                (LayerKind.HEAD, rows[-1:]),
            ):
                times = [row[at] for row in part]
                sample = only(
                    imported, microbatch_size=microbatch, tp=tp, phase=phase, layer=kind.value
                )
                assert sample.median_seconds == pytest.approx(median(times), rel=1e-12)
                assert min(times) <= sample.p10_seconds <= sample.median_seconds
                assert sample.median_seconds <= sample.p90_seconds <= max(times)
                assert sample.repeats == len(set(times))
                assert (sample.device, sample.sequence_length) == (DEVICE, 2048)
                assert sample.precision == "float32"


def test_one_update_listed_for_every_layer_is_that_of_the_profiled_model() -> None:
    model = gpt()
    imported = sailor.parse(sailor_text({(1, 1): alike(4)}), context(model=model))
    update = only(imported, phase="optimizer:adamw")
    parameters = {kind: model.parameters(kind) for kind in LayerKind if kind in model.layers}
    layers = sailor.PROFILED_LAYERS * parameters[LayerKind.TRANSFORMER]
    everything = layers + parameters[LayerKind.EMBEDDING] + parameters[LayerKind.HEAD]
    # 1 ms for all that was profiled; the sample's rate is that update's rate.
    assert update.median_seconds / layers == pytest.approx(0.001 / everything)
    assert (update.layer, update.copies) == ("transformer", sailor.PROFILED_LAYERS)
    assert any("one update of the model that was profiled" in note for note in imported.notes)
    assert any("adamw" in note for note in imported.notes)


def test_updates_that_differ_by_layer_are_taken_as_measured() -> None:
    run = alike(4)
    for at, row in enumerate(run):
        row[2] = 0.001 * (at + 1)
    imported = sailor.parse(sailor_text({(1, 1): run}), context(model=gpt()))
    updates = [each for each in imported.layers if each.phase == "optimizer:adamw"]
    assert [(each.layer, each.copies) for each in updates] == [
        ("embedding", 1),
        ("transformer", 1),
        ("head", 1),
    ]
    assert [each.median_seconds for each in updates] == pytest.approx([0.001, 0.0035, 0.006])


def test_a_llama_head_is_the_norm_and_the_projection_of_the_file() -> None:
    run = [*alike(2)[:-1], [0.0002, 0.0005, 0.001], [0.002, 0.004, 0.001]]
    imported = sailor.parse(sailor_text({(1, 1): run}), context(model=llama()))
    assert only(imported, layer="head", phase="forward").median_seconds == pytest.approx(0.0022)
    assert only(imported, layer="head", phase="backward").median_seconds == pytest.approx(0.0045)


def test_a_last_layer_without_a_projection_is_no_head() -> None:
    run = alike(4)
    run[-1] = [0.00002, 0.00005, 0.001]
    imported = sailor.parse(sailor_text({(1, 1): run, (2, 1): run}), context(model=gpt()))
    assert not [sample for sample in imported.layers if sample.layer == "head"]
    assert any("a norm alone" in line for line in imported.skipped)


def test_a_backward_that_no_memory_could_do_is_no_measurement() -> None:
    runs = {(1, 1): alike(4), (64, 1): alike(4)}
    for run in runs.values():
        run[0][1] = 3e-6
    # 2 x 64 x 2048 tokens x 512 x 4 bytes in 3 us.
    imported = sailor.parse(sailor_text(runs), context(model=gpt()))
    assert imported.skipped == (
        "line 1: the embedding's backward of every run, 2 samples: up to 179 TB/s, which no memory "
        "has: it was not waited for",
    )
    assert not [each for each in imported.layers if (each.layer, each.phase) == PLACE]
    del runs[64, 1]
    imported = sailor.parse(sailor_text(runs), context(model=gpt()))
    assert [each for each in imported.layers if (each.layer, each.phase) == PLACE]


PLACE = ("embedding", "backward")


def test_failed_runs_and_zeros_are_skipped_with_their_line() -> None:
    data = json.loads(sailor_text({(1, 1): alike(4), (2, 1): alike(4), (4, 1): alike(4)}))
    data["2"]["1"] = "OOM"
    data["4"]["1"]["5"] = [1e7, 1e7, 0.001]
    data["4"]["1"]["2"][1] = 0.0
    data["4"]["1"]["3"][1] = 0.0
    data["8"] = {}
    text = json.dumps(data, indent=1)
    imported = sailor.parse(text, context(model=gpt()))
    lines = text.split("\n")
    where = {}
    for line in imported.skipped:
        number, _, reason = line.removeprefix("line ").partition(": ")
        where[reason] = lines[int(number) - 1]
    assert where == {
        "2 1: the run failed": '  "1": "OOM"',
        "4 1: layers 2-3: backward: 0 s, not measured": "    0.0,",
        "4 1: layers 5: forward: 1e+07 s, the mark of a run that failed": "    10000000.0,",
        "4 1: layers 5: backward: 1e+07 s, the mark of a run that failed": "    10000000.0,",
        "8: the run failed": ' "8": {}',
    }
    assert {sample.microbatch_size for sample in imported.layers} == {1, 4}
    four = only(imported, microbatch_size=4, layer="transformer", phase="backward")
    assert four.median_seconds == pytest.approx(0.0021)
    assert not [
        each for each in imported.layers if (each.microbatch_size, each.layer) == (4, "head")
    ]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda d: d["1"]["1"].pop("5"), "found 5 layers; tiny-gpt has 6"),
        (lambda d: d["1"]["1"].update({"9": d["1"]["1"].pop("3")}), "layer 3 is missing"),
        (lambda d: d["1"]["1"].update({"05": [1, 1, 1]}), "layer 5 is here twice"),
        (lambda d: d["1"]["1"].update({"x": [1, 1, 1]}), "layers are numbered from 0"),
        (lambda d: d["1"]["1"]["2"].append(1.0), "found 4 numbers; forward, backward and update"),
        (lambda d: d["1"]["1"].update({"2": {"forward": 1}}), "1.1.2: found a mapping; a list"),
        (
            lambda d: d["1"]["1"]["2"].__setitem__(0, "0.001"),
            "found the text 0.001; write a number",
        ),
        (lambda d: d["1"]["1"]["2"].__setitem__(0, True), "found True; write a number"),
        (lambda d: d["1"]["1"]["2"].__setitem__(0, 10**400), "write a number of at most"),
        (lambda d: d["1"].update({"3": d["1"]["1"]}), "tp 3 does not divide"),
        (lambda d: d["1"].update({"0": d["1"]["1"]}), "a tensor-parallel degree of at least 1"),
        (lambda d: d["1"].update({"1": 5}), "found 5; a mapping is expected here"),
        (lambda d: d.update({"1": {"1": None}}), "the file holds no time of any layer"),
        (lambda d: d.clear(), "the file holds no time of any layer"),
        (lambda d: d["1"].update({"1": {}}), "the file holds no time of any layer"),
    ],
)
def test_what_is_wrong_in_a_sailor_profile_is_named(change: object, expected: str) -> None:
    data = json.loads(sailor_text({(1, 1): alike(4)}))
    change(data)  # type: ignore[operator]
    with pytest.raises(InputError) as error:
        sailor.parse(json.dumps(data, indent=1), context(model=gpt()))
    assert expected in message(error)
    assert error.value.faults[0].file == "profile.json"
    assert error.value.faults[0].line >= 1


def test_layer_counts_that_differ_between_degrees_are_all_named() -> None:
    runs = {(1, 1): alike(4), (1, 2): alike(3), (2, 2): alike(6)}
    with pytest.raises(InputError) as error:
        sailor.parse(sailor_text(runs), context(model=gpt()))
    assert [fault.field for fault in error.value.faults] == ["1.2", "2.2"]
    assert "found 5 layers; tiny-gpt has 6" in message(error)
    assert "found 8 layers; tiny-gpt has 6" in message(error)


@pytest.mark.parametrize(
    ("model", "device", "expected"),
    [
        ("tiny-gpt", "X200-64", "X200-64"),
        ("tiny-gpt", "vendor-x200-64gb-sxm", "X200-64"),
        ("TINY.GPT", "x100", "X100"),
        ("tiny-gpt", "vendor-x9-200-64gb", "X200-64"),
        ("tiny-gpt", "x300", "no single device here fits x300; there are X200-64, X100"),
        ("tiny-gpt", "x", "no single device here fits x; there are X200-64, X100"),
        ("bert", "x100", "no single model here fits bert; there are Tiny-GPT, Other"),
    ],
)
def test_the_nested_form_is_chosen_from_by_model_and_device(
    model: str, device: str, expected: str
) -> None:
    one = json.loads(sailor_text({(1, 1): alike(4)}))
    two = json.loads(sailor_text({(1, 1): alike(4, scale=2.0)}))
    data = {"Tiny-GPT": {"X200-64": one, "X100": two}, "Other": {"X100": {}}}
    asked = context(model=gpt(name=model), device=device)
    if expected.startswith("no single"):
        with pytest.raises(InputError, match=expected):
            sailor.parse(json.dumps(data, indent=1), asked)
        return
    imported = sailor.parse(json.dumps(data, indent=1), asked)
    assert imported.device_name == expected
    forward = only(imported, layer="transformer", phase="forward")
    assert forward.median_seconds == pytest.approx(0.001 if expected == "X200-64" else 0.002)
    assert forward.device == device


def test_what_the_user_says_of_precision_and_length_counts() -> None:
    asked = context(model=gpt(), precision=Precision.BFLOAT16, sequence_length=512)
    imported = sailor.parse(sailor_text({(1, 1): alike(4)}), asked)
    assert {(each.precision, each.sequence_length) for each in imported.layers} == {
        ("bfloat16", 512)
    }
    assert not any("as Sailor measured" in note for note in imported.notes)


@pytest.mark.parametrize("missing", ["model", "device"])
def test_sailor_needs_a_model_and_a_device(missing: str) -> None:
    asked = context(model=None) if missing == "model" else context(model=gpt(), device=None)
    with pytest.raises(InputError) as error:
        sailor.parse(sailor_text({(1, 1): alike(4)}), asked)
    assert error.value.faults[0].field == missing


# ---- Metis

milliseconds = st.floats(min_value=1e-3, max_value=1e6, allow_nan=False)


@given(st.integers(1, 8), st.data(), st.sampled_from((1, 2, 4, 8)), st.integers(1, 512))
def test_metis_profiles_come_back_as_they_were_written(
    layers: int, data: st.DataObject, tp: int, microbatch: int
) -> None:
    times = data.draw(st.lists(milliseconds, min_size=layers + 2, max_size=layers + 2))
    asked = context(
        rf"C:\profiles\DeviceType.V-100_x_tp{tp}_bs{microbatch}.json",
        model=gpt(layers),
        precision=Precision.BFLOAT16,
        sequence_length=512,
    )
    imported = metis.parse(metis_text(times, optimizer=1e-3), asked)
    assert imported.device_name == "V-100_x"
    for kind, part in (
        (LayerKind.EMBEDDING, times[:1]),
        (LayerKind.TRANSFORMER, times[1:-1]),
        (LayerKind.HEAD, times[-1:]),
    ):
        sample = only(imported, layer=kind.value, phase="forward_backward")
        assert sample.median_seconds == pytest.approx(median(part) / 1e3, rel=1e-12)
        assert (sample.tp, sample.microbatch_size, sample.precision) == (tp, microbatch, "bfloat16")
    assert only(imported, phase="optimizer:adamw").copies == layers


@pytest.mark.parametrize(
    "name",
    [
        "profile.json",
        "DeviceType.A100.json",
        "DeviceType.A_tp1_bs0.json",
        "DeviceType.A_tpx_bs1.json",
        "DeviceType.A_tp1_bs1.json.txt",
        "A100_tp1_bs1.json",
        "",
    ],
)
def test_a_metis_name_that_says_nothing_is_refused(name: str) -> None:
    asked = context(name, model=gpt(), precision=Precision.FLOAT16, sequence_length=1024)
    with pytest.raises(InputError, match="does not say the tensor-parallel degree"):
        metis.parse(metis_text([1.0] * 6), asked)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (metis_text([1.0] * 5), "found 5 layers; tiny-gpt has 6"),
        (metis_text([1.0] * 5 + ["2.0"]), "found the text 2.0; a number of milliseconds is due"),
        (metis_text([0.0] * 6, optimizer=0), "no layer has a time above 0"),
        (metis_text([1.0] * 6, optimizer="5"), "optimizer_time_ms: found the text 5"),
        ("{}", "required key execution_time is missing"),
        (
            '{"execution_time": {"total": 1}}',
            "required key layer_compute_total_ms is missing; there are total",
        ),
        ('{"execution_time": {"layer_compute_total_ms": 3}}', "found 3; a list is expected"),
        ('{"execution_time": [1]}', "required key layer_compute_total_ms is missing"),
        ('{"a": NaN}', "NaN is not a number in JSON"),
        ('{"a": 1, "a": 2}', "this key is already on line 1"),
        ("", "the file is empty"),
        ("[1]", "found a list; the file holds one mapping"),
        ("[" * 5000, "nested|Expecting"),
    ],
)
def test_what_is_wrong_in_a_metis_profile_is_named(text: str, expected: str) -> None:
    with pytest.raises(InputError, match=expected):
        metis.parse(text, METIS)


def test_metis_rows_that_mean_nothing_are_skipped_with_their_line() -> None:
    times = [1.0, 2.0, 0.0, 2.0, 2.0, -1.0]
    imported = metis.parse(metis_text(times, optimizer=200.0), METIS)
    assert [line.split(": ", 1)[1] for line in imported.skipped] == [
        "layer 2: 0 ms, not measured",
        "layer 5: -1 ms, not measured",
        "optimizer_time_ms: 200 ms is more than the 100 ms of the whole iteration",
    ]
    assert [sample.layer for sample in imported.layers] == ["embedding", "transformer"]


@pytest.mark.parametrize("missing", ["model", "device", "precision", "sequence_length"])
def test_metis_needs_what_its_files_do_not_say(missing: str) -> None:
    said = {
        "model": gpt(),
        "device": DEVICE,
        "precision": Precision.FLOAT16,
        "sequence_length": 1024,
    } | {missing: None}
    with pytest.raises(InputError) as error:
        metis.parse(metis_text([1.0] * 6), context(METIS_FILE, **said))  # type: ignore[arg-type]
    assert error.value.faults[0].field == missing


def test_metis_at_a_degree_that_the_model_cannot_have_is_refused() -> None:
    asked = context(
        "DeviceType.A_tp3_bs1.json", model=gpt(), precision=Precision.FLOAT16, sequence_length=64
    )
    with pytest.raises(InputError, match="tp 3 does not divide"):
        metis.parse(metis_text([1.0] * 6), asked)


@pytest.mark.parametrize(
    ("listed", "expected"),
    [
        ([1, 3_152_384 * 4, 1], "does not list the model's layers"),
        ([1, 1_577_728 * 2, 1, 1, 1, 1], ""),
        ([1, 1_577_728 * 4, 1, 1, 1, 1], ""),
        ([1, 1_577_728 * 9, 1, 1, 1, 1], "is it the model that was measured?"),
        ("many", ""),
    ],
)
def test_a_metis_file_of_another_model_is_noted(listed: object, expected: str) -> None:
    model = gpt()
    assert model.parameters(LayerKind.TRANSFORMER, 2) == 1_577_728
    data = json.loads(metis_text([1.0] * 6))
    data["model"]["parameters"] = {"parameters_per_layer_bytes": listed}
    notes = metis.parse(json.dumps(data), METIS).notes
    assert bool(expected) == any(note.startswith("line 1: ") for note in notes)
    assert expected in "".join(notes)
