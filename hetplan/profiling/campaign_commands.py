"""The page for a person with the machines: what to run where, how long, what to send back."""

from __future__ import annotations

from hetplan.profiling.campaign_values import Campaign, CampaignKind, CampaignLink
from hetplan.units import format_about, format_bytes

# torchrun's own default, written out so that both ends agree and a firewall can be opened for it.
_PORT = 29500


def commands_text(campaign: Campaign) -> str:
    """COMMANDS.md of the campaign."""
    parts = [
        f"# Measurement campaign {campaign.campaign}\n\n",
        f"For cluster {campaign.cluster}"
        + (f", model {campaign.model}, job {campaign.job}" if campaign.model else "")
        + ".\n\n",
        "Each script needs Python 3.8 or later and torch 2.1 or later, as a vendor's own image has "
        "them: no internet, no installation. Copy the script of a device kind to a machine that "
        "has it and run the commands below inside the vendor's image, on devices that nobody else "
        "uses meanwhile. Every row is on disk before the next is measured: after a kill, the same "
        "command goes on. A shape that does not fit in memory is noted and passed over.\n\n",
        "The results name devices, drivers, versions and clocks. They name no machine, no user and "
        "no address.\n\n",
    ]
    for kind in campaign.kinds:
        parts.append(_kind_text(kind))
    if campaign.links:
        parts.append("## Links\n\n")
        parts += [_link_text(campaign, link) for link in campaign.links]
    parts.append(
        "## Send back\n\n"
        "Every `results-*.jsonl` that the scripts wrote, complete or not. Whoever made this "
        "campaign adds them with\n\n"
        "```\nhetplan profile --merge FOLDER_WITH_THIS_FILE_AND_THE_RESULTS --store DIR\n```\n\n"
        "which also says what is still missing.\n"
    )
    return "".join(parts)


def layers_command(kind: CampaignKind) -> str:
    """The command that measures the layers of a kind."""
    return f"python3 {kind.script} layers"


def link_commands(campaign: Campaign, link: CampaignLink) -> tuple[str, ...]:
    """The command of every node of a link, node 0 first."""
    scripts = []
    for name in link.kinds:
        kind = campaign.kind(name)
        scripts.append(kind.script if kind is not None else f"measure_{name}.py")
    if link.nodes == 1:
        return (
            f"torchrun --standalone --nproc-per-node {link.processes_per_node} {scripts[0]} "
            f"links --link {link.name}",
        )
    return tuple(
        f"torchrun --nnodes {link.nodes} --node-rank {rank} --nproc-per-node "
        f"{link.processes_per_node} --master-addr ADDRESS --master-port {_PORT} "
        f"{scripts[min(rank, 1)]} links --link {link.name}"
        for rank in range(link.nodes)
    )


def _kind_text(kind: CampaignKind) -> str:
    samples = sum(len(unit) for unit in kind.units)
    lasts = f"about {format_about(kind.seconds)}" if kind.seconds is not None else "minutes"
    return (
        f"## Layers on {kind.kind}\n\n"
        f"One device; {samples} samples, {lasts}.\n\n"
        f"```\n{layers_command(kind)}\n```\n\n"
        f"Writes `results-{kind.kind}-layers.jsonl`.\n\n"
    )


def _link_text(campaign: Campaign, link: CampaignLink) -> str:
    commands = link_commands(campaign, link)
    sizes = [size for _, _, size in link.cases]
    groups = sorted({group for _, group, _ in link.cases})
    lines = [
        f"### {link.name}: {link.where}\n\n",
        f"{len(link.cases)} samples, messages of {format_bytes(min(sizes))} to "
        f"{format_bytes(max(sizes))}, groups of {', '.join(map(str, groups))}; about "
        f"{format_about(link.seconds)}.\n\n",
    ]
    if len(commands) == 1:
        lines.append(f"```\n{commands[0]}\n```\n\n")
    else:
        lines.append(
            "Start both at about the same time; ADDRESS is an address of the first node that the "
            f"second can reach, with port {_PORT} open.\n\n"
        )
        for rank, command in enumerate(commands):
            where = "first" if rank == 0 else "second"
            lines.append(f"On the {where} node ({link.kinds[rank]}):\n\n```\n{command}\n```\n\n")
    name = "" if link.is_named else f" Then write `samples: {link.name}` at it in the cluster file."
    lines.append(
        f"The first node writes `results-{link.kinds[0]}-link-{link.name}.jsonl`.{name}\n\n"
    )
    return "".join(lines)
