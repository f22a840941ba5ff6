"""README and launch of FlagScale agree on the format of its checkpoints."""

from __future__ import annotations

from flagscale_plans import random_result

from hetplan.emitters.flagscale.meshes import meshes_of
from hetplan.emitters.flagscale.trainer import TRAINER
from hetplan.emitters.readme import readme_text
from hetplan.emitters.trainer_launch import EmitOptions
from hetplan.emitters.vendors import libraries
from hetplan.plans.formats import needs_meshes, reshardable


def test_plans_need_meshes_where_the_launch_has_them():
    seen = set()
    for seed in range(60):
        found, sheet = random_result(seed)
        several = len(libraries(sheet.agents)) > 1
        hetero = meshes_of(found.plan, sheet).hetero
        assert needs_meshes(found.plan, several_libraries=several) is hetero
        seen.add(hetero)
    assert seen == {True, False}


def test_the_readme_names_the_format_that_the_launch_writes():
    seen = set()
    for seed in range(12):
        found, sheet = random_result(seed)
        options = EmitOptions(save="/checkpoints")
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
