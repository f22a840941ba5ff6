"""Removes an emulation when the process that uses it is killed.

The program `guard NAME` (`hetplan.emulation.tools.program`) reads its stdin until the process that
holds the other end ends. If that process has not reported that it removed the
emulation itself, this one does.
"""

from __future__ import annotations

import os
import signal

from hetplan.emulation import making

OWNED, REMOVED = b"o", b"r"
"""What the process says: that the emulation of this name is its own; that it has removed it."""


def main(arguments: list[str]) -> None:
    """As the module says."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    message = b""
    while data := os.read(0, 16):
        message += data
    if OWNED in message and REMOVED not in message:
        making.remove(arguments[0])
