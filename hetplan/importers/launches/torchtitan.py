"""torchtitan's TOML, by which versions of 2025 and before were configured, as a launch.

Its command line is a script like any other (`hetplan.importers.launches.scripts`).
"""

from __future__ import annotations

from hetplan.importers.launches.flags import GIVEN_FILE
from hetplan.importers.launches.scripts import Given, last_of
from hetplan.importers.launches.trees import toml_settings
from hetplan.importers.launches.values import LaunchHost, LaunchText, Setting
from hetplan.importers.lines import fault_at, shown, whole_number


def toml_launch(
    file: str, text: str, given: Given = (), hosts: tuple[LaunchHost, ...] = ()
) -> LaunchText:
    """What a TOML says; how many ranks start it `given` or `hosts` say: nnodes, nproc-per-node."""
    settings = [*toml_settings(file, text)]
    for at, (name, value) in enumerate(given, start=1):
        settings.append(Setting(name=name, values=(value,), file=GIVEN_FILE, line=at))
    every = tuple(settings)
    return LaunchText(
        trainer="torchtitan",
        settings=every,
        hosts=hosts,
        nodes=_count(every, "nnodes"),
        devices_per_node=_count(every, "nproc-per-node"),
    )


def _count(settings: tuple[Setting, ...], name: str) -> int | None:
    setting = last_of(settings, name)
    if setting is None:
        return None
    number = whole_number(setting.values[0])
    if number is None or not 1 <= number <= 1 << 21:
        message = f"{shown(setting.values[0])}; a whole number from 1 on is expected here"
        raise fault_at(setting.file, setting.line, message, name)
    return number
