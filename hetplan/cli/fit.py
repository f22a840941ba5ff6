"""`hetplan fit`: measurements to a predictor, and its errors on sizes that it has not seen."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hetplan.cli.options import (
    AsJson,
    Stores,
    Verbose,
    check_replaceable,
    emit,
    say,
    stores_to_read,
)

Out = Annotated[
    Path | None,
    typer.Option(
        "--out",
        metavar="FILE",
        help="File for the predictor (JSON), for --predictor of other commands.",
    ),
]


def fit(
    out: Out = None, store: Stores = None, verbose: Verbose = False, as_json: AsJson = False
) -> None:
    """Fit a predictor to the measurements of a profile store.

    Prints, per device kind and link, the error on whole sizes that the fit did not see, and the
    90 % interval that follows; --verbose: of each law.
    """
    from hetplan.errors import InputError
    from hetplan.predict.fit import SCHEMA, fit_stores, predictor_text, save_predictor

    replacing = "" if out is None else check_replaceable(out, SCHEMA, "predictor")
    folders = stores_to_read(store)
    predictor, digest = fit_stores(*folders)
    laws = predictor.laws
    if not laws.layers and not laws.links and not laws.operators:
        where = ", ".join(str(folder) for folder in folders) or "your own or the shipped store"
        raise InputError(
            f"there are no samples in {where}; measure some with `hetplan profile`, or plan "
            "without a fit, which uses datasheet figures"
        )
    if as_json:
        emit(predictor_text(predictor))
    else:
        from hetplan.reports.predictor import print_fit, print_laws

        (print_laws if verbose else print_fit)(laws)
    if out is not None:
        save_predictor(predictor, out)
        say(f"wrote {out} (sha256 {digest[:12]}){replacing}")
