"""What a reader of an emitted folder is told: where stages run, how to start, what to expect."""

from __future__ import annotations

from dataclasses import replace

from trainer_models import MODEL, TIED
from trainer_plans import JOB, chosen, cluster, island, plain_launch, result_of, two_regions

from hetplan.plans.build import plan_of
from hetplan.schedulers.launch import EmissionOptions
from hetplan.schedulers.rank_layout import rank_layout
from hetplan.search.result import SearchResult
from hetplan.trainers.readme import placement_remarks, readme_text


def text_of(result: SearchResult, options: EmissionOptions | None = None, **launch: object) -> str:
    options = options or EmissionOptions()
    sheet = rank_layout(result.plan, result.inputs.cluster)
    sheet = replace(sheet, remarks=(*placement_remarks(result), *sheet.remarks))
    made = replace(plain_launch(result, sheet, options), **launch)
    return readme_text(result, sheet, made, options)


def test_stages_agents_and_figures_are_told() -> None:
    text = text_of(two_regions(TIED))
    assert "| 1 | 5-7 | 8 x 1 x 1 | 1 |  | 8 nvidia-a100-80gb-sxm | north0001 |" in text
    assert "| 2-3 | 16-31 | south0000, south0001 | hosts (hosts) | south, s | 0-7 of 8 |" in text
    assert "90 % interval" in text
    assert "- it is plain" in text
    assert "ATTENTION: tied embedding" in text
    assert "hetplan compare log-*.txt --plan plan.json" in text


def test_a_large_plan_has_a_short_readme() -> None:
    machines = cluster(island("north", "n", nodes=512), island("south", "s", nodes=512))
    stages = chosen(("north", 6), ("south", 6), tp=8, dp=512, microbatches=4, batch=2048)
    plan = plan_of(MODEL, machines, replace(JOB, global_batch_size=2048), stages)
    result = replace(two_regions(), plan=plan)
    text = text_of(replace(result, inputs=replace(result.inputs, cluster=machines)))
    assert "north0000 to north0511 (512)" in text
    assert "| 512-1023 | 4096-8191 |" in text
    assert len(text.splitlines()) < 60


def test_tables_stay_tables_whatever_islands_are_called() -> None:
    machines = cluster(replace(island("a"), name="a|b `c`\u2028<d>", region="e|f"))
    plan = plan_of(MODEL, machines, JOB, chosen(("a|b `c`\u2028<d>", 12), tp=8))
    (row,) = [line for line in text_of(result_of(machines, plan)).splitlines() if "e\\|f" in line]
    assert "a\\|b 'c'?&lt;d>" in row
    assert row.replace("\\|", "").count("|") == 7


def test_what_must_be_there_before_depends_on_the_options() -> None:
    result = two_regions()
    assert "Set `TRAINER_FOLDER` to the folder that holds `train.py`" in text_of(result)
    given = EmissionOptions(trainer_folder="/opt/trainer", data=("/data/x",), save="/ckpt")
    text = text_of(result, given, target="flagscale")
    assert "weights load under any plan that needs no --enable-hetero" in text
    assert "expected in `/opt/trainer`" in text
    assert "Without --data" not in text
    assert "`python3 -m a.b` must work" in text_of(result, program=("-m", "a.b"))
