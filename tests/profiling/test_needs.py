"""What a job still needs measured, and `hetplan profile list`."""

import json

from profiling_samples import CLUSTER, JOB, LAYER, LINK, MODEL, PROVENANCE, invoke

from hetplan.profiling.store import LayerWriter, LinkWriter


def test_a_list_shows_damage_and_what_is_missing(tmp_path) -> None:
    for name, text in (("m.yaml", MODEL), ("j.yaml", JOB), ("c.yaml", CLUSTER)):
        (tmp_path / name).write_text(text)
    store = tmp_path / "store"
    writer = LayerWriter(store, PROVENANCE)
    writer.append(LAYER)
    path = writer.folder / "layers.csv"
    path.write_text(path.read_text() + "spoilt\n")
    LinkWriter(store, "lo", PROVENANCE).append(LINK)
    job = ("--model", tmp_path / "m.yaml", "--job", tmp_path / "j.yaml")
    shown = invoke("list", "--store", store, *job, "--cluster", tmp_path / "c.yaml").stdout
    assert f"damage: {path}:3" in shown
    assert "Still to measure, cheapest first" in shown
    assert f"here: hetplan profile layers --model {tmp_path / 'm.yaml'}" in shown
    assert "--nproc-per-node 2 -m hetplan profile links lo" in shown
    listed = json.loads(
        invoke("list", "--store", store, *job, "--cluster", tmp_path / "c.yaml", "--json").stdout
    )
    assert listed["schema"] == "hetplan.store/1"
    assert [each["layer_rows"] for each in listed["populations"]] == [1, 0]
    assert listed["populations"][0]["damage"][0]["line"] == 3
    seconds = [need["seconds"] for need in listed["needs"]]
    assert seconds == sorted(seconds, key=lambda each: float("inf") if each is None else each)
    by_name = {need["name"]: need for need in listed["needs"]}
    assert by_name["cpu"]["missing_samples"] == by_name["cpu"]["needed_samples"] - 1
    assert by_name["lo"]["here"] is True
    alone = json.loads(invoke("list", "--store", tmp_path / "none", *job, "--json").stdout)
    assert alone["populations"] == []
    assert alone["needs"]
    refused = invoke("list", "--store", store, "--cluster", tmp_path / "c.yaml", code=2)
    assert "add --model and --job" in refused.stderr
    assert "no such folder" in invoke("list", "--store", tmp_path / "none", code=2).stderr


def test_what_the_command_of_the_list_measures_is_then_not_missing(tmp_path) -> None:
    shapes = ("--microbatch", "1", "--tp", "1")
    (tmp_path / "m.yaml").write_text(MODEL)
    (tmp_path / "j.yaml").write_text(JOB)
    job = ("--model", tmp_path / "m.yaml", "--job", tmp_path / "j.yaml", *shapes)
    invoke("layers", "--store", tmp_path / "store", "--device", "cpu", *job)
    listed = json.loads(invoke("list", "--store", tmp_path / "store", *job, "--json").stdout)
    assert {need["name"]: need["missing_samples"] for need in listed["needs"]}["cpu"] == 0
