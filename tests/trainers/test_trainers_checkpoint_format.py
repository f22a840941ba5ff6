"""README and launch of FlagScale agree on the format of its checkpoints."""

from __future__ import annotations

from trainer_plans import flagscale, random_results, ranks_of

from hetplan.plans.formats import needs_meshes, reshardable
from hetplan.schedulers.launch import EmissionOptions
from hetplan.schedulers.rank_layout import libraries
from hetplan.trainers.flagscale.meshes import meshes_of
from hetplan.trainers.flagscale.write import TRAINER
from hetplan.trainers.readme import readme_text


def test_plans_need_meshes_where_the_launch_has_them():
    seen = set()
    for found in random_results(flagscale, seed=1, count=60):
        sheet = ranks_of(found)
        several = len(libraries(sheet.agents)) > 1
        hetero = meshes_of(found.plan, sheet).hetero
        assert needs_meshes(found.plan, several_libraries=several) is hetero
        seen.add(hetero)
    assert seen == {True, False}


def test_the_readme_names_the_format_that_the_launch_writes():
    seen = set()
    for found in random_results(flagscale, seed=2, count=12):
        sheet = ranks_of(found)
        options = EmissionOptions(save="/checkpoints")
        launch = TRAINER.launch(found, sheet, options)
        ((_, written),) = [each for each in launch.arguments if each[0] == "--ckpt-format"]
        readme = readme_text(found, sheet, launch, options)
        (line,) = [each for each in readme.splitlines() if "Checkpoints under another plan" in each]
        several = len(libraries(sheet.agents)) > 1
        kept = reshardable("flagscale", found.plan, several_libraries=several)
        assert kept.format.name == written
        assert kept.reason.replace("`", "'") in line
        seen.add(written)
    assert seen == {"torch", "torch_dist"}
