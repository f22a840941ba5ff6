"""FlagScale's experiment: YAML with a train YAML beside it, and a hostfile.

    defaults: [{train: aquila}]      conf/train/aquila.yaml, as Hydra finds it
    experiment.runner.hostfile       hosts with slots= and, for meshes, type=

Interpolations `${a.b}` and `${oc.env:NAME,default}` are followed as OmegaConf does; what only an
environment knows stays unread, but for HETPLAN_FOLDER, the folder of the file.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from hetplan.errors import Fault, InputError
from hetplan.files.reading import Document, read_document, read_text
from hetplan.importers.hostfile import parse
from hetplan.importers.launches.flags import GIVEN_FILE
from hetplan.importers.launches.scripts import Given, last_of
from hetplan.importers.launches.trees import tree_settings
from hetplan.importers.launches.values import LaunchHost, LaunchText, Setting, visible_devices
from hetplan.importers.lines import fault_at, shown, whole_number
from hetplan.importers.records import ImportContext

_INTERPOLATION = re.compile(r"\$\{([^${}]*)\}")
_MAX_ROUNDS = 8
_FOLDER = "HETPLAN_FOLDER"
_MAIN = ("experiment", "train", "defaults")


def flagscale_launch(
    path: Path, given: Given = (), hosts: tuple[LaunchHost, ...] = ()
) -> LaunchText:
    """What an experiment, or a train YAML alone, says; `hosts` count instead of its hostfile.

    An InputError where a file is missing or no YAML.
    """
    document = read_document(path)
    if not isinstance(document.root, dict):
        raise fault_at(str(path), 1, "is no FlagScale experiment: a mapping is expected here")
    if any(key in document.root for key in ("experiment", "defaults", "train")):
        settings = [*tree_settings(document), *_train_settings(document, path)]
    else:
        settings = [*tree_settings(document, "train")]
    settings = [each for each in settings if not each.name.startswith(("defaults", "hydra"))]
    settings += [
        Setting(
            name=name if name.startswith(_MAIN) else f"train.{name}",
            values=tuple(value.strip("[]").split(",")) if "[" in value else (value,),
            file=GIVEN_FILE,
            line=at,
        )
        for at, (name, value) in enumerate(given, start=1)
        if not name.isidentifier()
    ]
    environment = {name: value for name, value in given if name.isidentifier()}
    environment.setdefault(_FOLDER, str(path.parent))
    known, unread = _resolved(settings, environment)
    runner = "experiment.runner."
    hosts = hosts or tuple(_seen(known, host) for host in _hosts(known, path))
    return LaunchText(
        trainer="flagscale",
        settings=known,
        environment=tuple(
            replace(each, name=each.name.rpartition(".")[2])
            for each in known
            if each.name.startswith("experiment.envs.") and each.name.count(".") == 2
        ),
        hosts=hosts,
        nodes=_count(known, f"{runner}nnodes") if not hosts else len(hosts),
        devices_per_node=_count(known, f"{runner}nproc_per_node"),
        unread=unread,
    )


def _train_settings(document: Document, path: Path) -> list[Setting]:
    """Of the train YAML that `defaults` names; none where the experiment holds `train` itself."""
    found: list[Setting] = []
    for at in document.entries(("defaults",)):
        name = document.word(("defaults", at, "train"))
        if name is None:
            continue
        if not re.fullmatch(r"[\w.-]+(?:/[\w.-]+)*", name) or ".." in name:
            message = f"{shown(name)} is no name of a train YAML"
            raise fault_at(str(path), document.line(("defaults", at)), message, "defaults")
        train = path.parent / "train" / f"{name}.yaml"
        if not train.exists():
            message = f"names {shown(str(train))}, which is not there"
            raise fault_at(str(path), document.line(("defaults", at)), message, "defaults")
        found += tree_settings(read_document(train), "train")
    return found


def _resolved(
    settings: list[Setting], environment: dict[str, str]
) -> tuple[tuple[Setting, ...], tuple[Setting, ...]]:
    """Settings with their interpolations followed, and those that only a host can follow."""
    by_name = {each.name: each for each in settings}
    known: list[Setting] = []
    unread: list[Setting] = []
    for each in settings:
        values = tuple(_followed(value, by_name, environment) for value in each.values)
        setting = replace(each, values=values)
        missing = any(_INTERPOLATION.search(value) or value == "???" for value in values)
        (unread if missing else known).append(setting)
    return tuple(known), tuple(unread)


def _followed(value: str, by_name: dict[str, Setting], environment: dict[str, str]) -> str:
    def inner(found: re.Match[str]) -> str:
        name = found.group(1).strip()
        if name.startswith("oc.env:"):
            variable, comma, default = name.removeprefix("oc.env:").partition(",")
            if variable.strip() in environment:
                return environment[variable.strip()]
            return default.strip() if comma else found.group()
        setting = by_name.get(name)
        return setting.values[0] if setting is not None and setting.values else found.group()

    for _ in range(_MAX_ROUNDS):
        after = _INTERPOLATION.sub(inner, value)
        if after == value or len(after) > 10_000:
            break
        value = after
    return value


def _hosts(settings: tuple[Setting, ...], path: Path) -> tuple[LaunchHost, ...]:
    """Hosts of the runner's hostfile, where the file is there."""
    setting = last_of(settings, "experiment.runner.hostfile")
    if setting is None or not setting.values or setting.values[0] in ("null", ""):
        return ()
    try:
        names = (Path(setting.values[0]), path.parent / setting.values[0])
        file = next((each for each in names if each.is_file()), None)
    except (OSError, ValueError):
        file = None
    if file is None:
        return ()
    return hosts_of_file(file)


def _seen(settings: tuple[Setting, ...], host: LaunchHost) -> LaunchHost:
    """The host with its devices, where the environment of the host or its type names them."""
    for place in (f"node_specific.{host.name}.", f"device_type_specific.{host.type}."):
        prefix = f"experiment.envs.{place}"
        for each in reversed(settings):
            name = each.name.removeprefix(prefix)
            if name == each.name or "." in name or not name.endswith("_VISIBLE_DEVICES"):
                continue
            # YAML may hold the numbers as one text or as a list.
            found = visible_devices(",".join(each.values))
            if host.devices is not None and len(found) >= host.devices:
                return replace(host, local_devices=found[: host.devices])
    return host


def hosts_of_file(path: Path) -> tuple[LaunchHost, ...]:
    """Hosts of a hostfile in its order; an InputError where it is none."""
    text = read_text(path)
    imported = parse(text, ImportContext(file=str(path)))
    lines = text.split("\n")
    return tuple(
        LaunchHost(
            name=host.name,
            devices=host.slots,
            type=host.device or "",
            file=str(path),
            line=next((n for n, line in enumerate(lines, 1) if line.split()[:1] == [host.name]), 0),
        )
        for host in imported.hosts
    )


def _count(settings: tuple[Setting, ...], name: str) -> int | None:
    setting = last_of(settings, name)
    if setting is None or not setting.values or setting.values[0] == "null":
        return None
    number = whole_number(setting.values[0])
    if number is None or not 1 <= number <= 1 << 21:
        message = f"{shown(setting.values[0])}; a whole number from 1 on is expected here"
        raise InputError(
            Fault(file=setting.file, line=setting.line, field=setting.name, message=message)
        )
    return number
