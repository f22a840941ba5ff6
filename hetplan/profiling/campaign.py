"""A measurement campaign: one script per device kind for people who cannot install anything.

A folder with `measure_<kind>.py` (carries hetplan's own measuring modules, needs Python 3.8 and
torch 2.1 and nothing else), `COMMANDS.md` (what to run where, and what to send back) and
`campaign.json` (what was asked for, so that the merge can say what is missing).

File: schema `hetplan.campaign/1`, fields as in `Campaign`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hetplan.errors import InputError
from hetplan.files.encoding import encode
from hetplan.files.reading import decode, read_document
from hetplan.files.writing import write_atomically
from hetplan.profiling.campaign_bundle import as_source, carried_sources, script_text
from hetplan.profiling.campaign_commands import commands_text
from hetplan.profiling.campaign_runner import LinkTask, Task
from hetplan.profiling.campaign_values import Campaign, CampaignKind, CampaignLink
from hetplan.profiling.missing import LayerNeed, LinkNeed, unit_shapes

SCHEMA = "hetplan.campaign/1"
CAMPAIGN_FILE = "campaign.json"
COMMANDS_FILE = "COMMANDS.md"


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenCampaign:
    """The files of a campaign."""

    folder: Path
    scripts: tuple[str, ...]
    campaign: Campaign


def write_campaign(
    folder: Path,
    *,
    cluster: str,
    model: str,
    job: str,
    layers: Sequence[LayerNeed],
    links: Sequence[LinkNeed],
) -> WrittenCampaign:
    """Write the folder. The same needs give the same scripts, so results stay mergeable.

    An InputError where the folder holds another campaign.
    """
    digest = _digest(layers, links)
    kinds = tuple(
        CampaignKind(
            kind=need.kind,
            script=_script_name(need.kind),
            units=unit_shapes(need.units),
            seconds=need.seconds,
        )
        for need in layers
    )
    campaign = Campaign(
        campaign=digest,
        cluster=cluster,
        model=model,
        job=job,
        kinds=kinds,
        links=tuple(_link(need) for need in links),
    )
    _check_folder(folder, campaign)
    sources = carried_sources()
    for need in layers:
        script = _script(digest, need, links, sources)
        write_atomically(folder / _script_name(need.kind), script)
    write_atomically(folder / COMMANDS_FILE, commands_text(campaign))
    # Last: a folder with this file is complete.
    write_atomically(folder / CAMPAIGN_FILE, encode(campaign, schema=SCHEMA))
    return WrittenCampaign(
        folder=folder, scripts=tuple(kind.script for kind in kinds), campaign=campaign
    )


def load_campaign(path: Path) -> Campaign:
    """The campaign of a `campaign.json`; an InputError where it is none."""
    return decode(read_document(path), Campaign, schema=SCHEMA)


def _check_folder(folder: Path, campaign: Campaign) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{folder}: cannot be made ({error.strerror}); name another") from error
    path = folder / CAMPAIGN_FILE
    if path.exists() and load_campaign(path).campaign != campaign.campaign:
        raise InputError(f"{folder} holds another campaign; name a folder of its own with --out")


def _digest(layers: Sequence[LayerNeed], links: Sequence[LinkNeed]) -> str:
    """Name of what is measured: 64 bits, as few campaigns are ever merged together."""
    texts = [f"{need.kind} {as_source(need.units, set())}" for need in layers]
    texts += [f"{need.place.name} {as_source(need.cases, set())}" for need in links]
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16]


def _script_name(kind: str) -> str:
    return f"measure_{re.sub(r'[^A-Za-z0-9.-]', '_', kind)}.py"


def _link(need: LinkNeed) -> CampaignLink:
    place = need.place
    return CampaignLink(
        name=place.name,
        is_named=place.is_named,
        where=place.words,
        kinds=place.kinds,
        nodes=place.nodes,
        processes_per_node=place.processes_per_node,
        cases=tuple(case.key for case in need.cases),
        seconds=need.seconds,
    )


def _script(
    digest: str,
    need: LayerNeed,
    links: Sequence[LinkNeed],
    sources: tuple[tuple[str, str], ...],
) -> str:
    tasks = tuple(
        LinkTask(name=each.place.name, host_staged=each.place.is_host_staged, cases=each.cases)
        for each in links
        if need.kind in each.place.kinds
    )
    docstring = (
        f'"""Measures device kind {need.kind} for hetplan campaign {digest}.\n\n'
        "Needs Python 3.8 or later and torch 2.1 or later (a vendor's own torch will do), and\n"
        "nothing else: hetplan's measuring modules are carried below as text. It writes one file\n"
        "of results in the current folder and sends nothing anywhere. See COMMANDS.md, or --help.\n"
        '"""'
    )
    return script_text(docstring=docstring, sources=sources, work=_work(digest, need, tasks))


def _work(digest: str, need: LayerNeed, links: tuple[LinkTask, ...]) -> str:
    """The last lines of a script: what it measures, one unit and one case per line."""
    imports: set[tuple[str, str]] = {
        (Task.__module__, "Task"),
        (Task.__module__, "run"),
    }
    models = list(dict.fromkeys(unit.point.model for unit in need.units))
    model_lines = [f"        {as_source(model, imports)},\n" for model in models]
    unit_lines = []
    for unit in need.units:
        text = as_source(unit, imports)
        model = as_source(unit.point.model, imports)
        unit_lines.append(
            f"        {text.replace(model, f'models[{models.index(unit.point.model)}]')},\n"
        )
    link_lines = [f"        {as_source(link, imports)},\n" for link in links]
    modules: dict[str, list[str]] = {}
    for module, name in sorted(imports):
        modules.setdefault(module, []).append(name)
    import_lines = [
        f"    from {module} import {', '.join(names)}\n" for module, names in modules.items()
    ]
    return (
        "\ndef main():\n"
        '    """Measure what is listed here."""\n'
        "    lack = lacking()\n"
        "    if lack:\n"
        '        sys.exit("{}\\n\\nerror: {}".format(__doc__.strip(), lack))\n'
        "    carry(SOURCES)\n"
        f"{''.join(import_lines)}\n"
        f"    models = (\n{''.join(model_lines)}    )\n"
        f"    units = (\n{''.join(unit_lines)}    )\n"
        f"    links = (\n{''.join(link_lines)}    )\n"
        f"    task = Task(campaign={digest!r}, kind={need.kind!r}, units=units, links=links)\n"
        "    return run(task, sys.argv[1:])\n\n\n"
        'if __name__ == "__main__":\n'
        "    sys.exit(main())\n"
    )
