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


def test_tables_stay_tables_whatever_islands_are_called() -> None:
    machines = cluster(replace(island("a"), name="a|b `c`\u2028<d>", region="e|f"))
    plan = plan_of(MODEL, machines, JOB, chosen(("a|b `c`\u2028<d>", 12), tp=8))
    (row,) = [line for line in text_of(result_of(machines, plan)).splitlines() if "e\\|f" in line]
    assert "a\\|b 'c'?&lt;d>" in row
    assert row.replace("\\|", "").count("|") == 7
