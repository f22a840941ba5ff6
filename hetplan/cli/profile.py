"""`hetplan profile`: measure layers on this device, or, under torchrun, a link between devices.

What it does is in the modules beside this one: `profile_layers`, `profile_links`, `profile_list`
(what a store has and lacks) and `profile_campaign` (measuring where hetplan cannot be installed).
Here are the options.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hetplan.cli.options import INTERRUPTED, AsJson, say

if TYPE_CHECKING:
    from hetplan.cli.profile_request import ProfileRequest


def profile(
    paths: Annotated[
        list[Path] | None,
        typer.Argument(
            help="`operators`: measure the layers' operators, each alone. With --merge: files or "
            "folders that came back.",
            show_default=False,
        ),
    ] = None,
    store: Annotated[
        Path | None, typer.Option(help="Profile store to add to. Default: your own.")
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(help="cpu, cuda (ROCm too), npu, mlu, ... Default: cuda where there is one."),
    ] = None,
    kind: Annotated[
        str | None, typer.Option(help="Device kind of the samples. Default: from the device.")
    ] = None,
    model: Annotated[Path | None, typer.Option(help="Model file; with --job.")] = None,
    job: Annotated[
        Path | None, typer.Option(help="Job file: measure the shapes its plans can use.")
    ] = None,
    architecture: Annotated[str, typer.Option(help="gpt or llama, without a model file.")] = "gpt",
    hidden: Annotated[
        str | None, typer.Option(help="Hidden sizes without a model file, as in 256,384.")
    ] = None,
    seq: Annotated[str | None, typer.Option(help="Sequence lengths, as in 1024,2048.")] = None,
    vocab: Annotated[int | None, typer.Option(help="Vocabulary without a model file.")] = None,
    microbatch: Annotated[str | None, typer.Option(help="Microbatch sizes, as in 1,2,4.")] = None,
    tp: Annotated[str | None, typer.Option(help="Tensor-parallel degrees, as in 1,2.")] = None,
    precision: Annotated[
        str | None, typer.Option(help="float32, bfloat16, float16; several with commas.")
    ] = None,
    threads: Annotated[int, typer.Option(help="CPU threads; one rank of a plan is one core.")] = 1,
    budget: Annotated[
        str | None,
        typer.Option(
            help="Time to spend, as in 10min, 90s, 1h or plain seconds; the cheapest shapes go "
            "first, with --for the most useful ones (default there: 10min)."
        ),
    ] = None,
    for_: Annotated[
        Path | None,
        typer.Option(
            "--for",
            help="Job file, with --model and --cluster: search its best plans and measure what "
            "shrinks their interval most, first. With --list only say what, and in which order.",
        ),
    ] = None,
    pace: Annotated[
        Path | None, typer.Option(help="Pace file: play the device --kind, on this CPU.")
    ] = None,
    link: Annotated[
        str | None, typer.Option(help="Under torchrun: name of the link that is measured.")
    ] = None,
    sizes: Annotated[
        str | None, typer.Option(help="Message sizes of a link, as in 4KiB,1MiB.")
    ] = None,
    groups: Annotated[str | None, typer.Option(help="Group sizes of a link, as in 2,4.")] = None,
    again: Annotated[
        bool, typer.Option("--again", help="Measure what the store already has, and keep both.")
    ] = False,
    list_: Annotated[
        bool,
        typer.Option(
            "--list",
            help="List what the store holds; with --model and --job, and --cluster, also what they "
            "still need measured. Measures nothing.",
        ),
    ] = False,
    cluster: Annotated[
        Path | None, typer.Option(help="Cluster file; with --list or --for.")
    ] = None,
    campaign: Annotated[
        Path | None,
        typer.Option(
            help="Cluster file: write scripts that measure its devices and links without hetplan."
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the campaign; default: campaign-NAME.")
    ] = None,
    merge: Annotated[
        bool, typer.Option("--merge", help="Add what came back from a campaign to the store.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Measure layers, or their operators, on this device; under torchrun with --link, a link.

    Can be interrupted: what was measured stays, and the same command goes on from there.
    --list, --campaign and --merge measure nothing here: docs/measuring.md, docs/campaign.md.
    """
    from hetplan.cli.profile_request import (
        OPERATORS,
        ProfileRequest,
        budget_seconds,
        check_for,
        check_modes,
    )

    operators = not merge and [str(path) for path in paths or []] == [OPERATORS]
    if operators:
        paths = None
    if for_ is not None:
        check_for(
            model=model,
            cluster=cluster,
            job=job,
            campaign=campaign,
            merge=merge,
            operators=operators,
        )
    check_modes(
        list_=list_,
        campaign=campaign,
        merge=merge,
        paths=paths,
        cluster=None if for_ is not None else cluster,
        out=out,
        operators=operators,
    )

    request = ProfileRequest(
        store=store,
        device=device,
        kind=kind,
        model=model,
        job=job if for_ is None else for_,
        architecture=architecture,
        hidden=hidden,
        seq=seq,
        vocab=vocab,
        microbatch=microbatch,
        tp=tp,
        precision=precision,
        threads=threads,
        budget=budget_seconds(budget),
        pace=pace,
        link=link,
        sizes=sizes,
        groups=groups,
        again=again,
        as_json=as_json,
    )
    try:
        if for_ is not None:
            from hetplan.cli.profile_for import profile_for

            profile_for(request, cluster, only_list=list_)
        elif merge:
            from hetplan.cli.profile_campaign import merge_results

            merge_results(request, paths or [])
        elif campaign is not None:
            from hetplan.cli.profile_campaign import make_campaign

            make_campaign(request, campaign, out)
        elif list_:
            from hetplan.cli.profile_list import list_store

            list_store(request, cluster)
        elif operators:
            from hetplan.cli.profile_operators import profile_operators

            profile_operators(request)
        else:
            _measure(request)
    except KeyboardInterrupt:
        say("hetplan: interrupted; what was measured is kept, the same command goes on from there")
        raise typer.Exit(INTERRUPTED) from None


def _measure(request: ProfileRequest) -> None:
    if request.link is not None and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        from hetplan.cli.profile_links import profile_links

        profile_links(request)
    else:
        from hetplan.cli.profile_layers import profile_layers

        profile_layers(request)
