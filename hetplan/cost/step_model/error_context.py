"""What was asked of a predictor when it had no answer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from hetplan.errors import InputError


@contextmanager
def asking(what: str) -> Iterator[None]:
    """Faults of a predictor inside, each with what was asked in front: the predictor says which
    figure it lacks, only its caller says for what.
    """
    try:
        yield
    except InputError as error:
        faults = (replace(each, message=f"{what}: {each.message}") for each in error.faults)
        raise InputError(*faults) from error
