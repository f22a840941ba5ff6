"""Interrupt `make` or `remove` at a moment, in a process of its own, many times; what is left?

Run as a program: NAME HOW MOMENT..., where HOW is `kill` or `int` at the step of this number, or
`kill-after`, `kill-remove` after so many seconds. Prints one JSON line per moment. One process
forks for each, because starting Python takes longer than bringing an emulation up.
"""

from __future__ import annotations

import json
import os
import signal
import sys

from emulation_cases import four_hosts, traces

from hetplan.cluster.spec import Cluster
from hetplan.emulation import making


def kill_after(seconds: float) -> None:
    """End this process as a kill -9 does: without a chance to do anything."""
    # SIGALRM's own action ends a process at once; no Python code runs.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, seconds)


def victim(cluster: Cluster, name: str, how: str, moment: float) -> None:
    seen = 0

    def on_step(step: str) -> None:
        nonlocal seen
        if seen == moment and how in ("kill", "int"):
            os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGINT)
        seen += 1

    if how == "kill-after":
        kill_after(moment)
    making.make(cluster, name=name, on_step=on_step)
    if how == "kill-remove":
        kill_after(moment)
        making.remove(name)


def main(name: str, how: str, moments: list[float]) -> None:
    cluster, before = four_hosts(), traces(name)
    for moment in moments:
        child = os.fork()
        if child == 0:
            code = 0
            try:
                victim(cluster, name, how, moment)
            except KeyboardInterrupt:
                code = 130
            finally:
                sys.stdout.flush()
                os._exit(code)
        _, status = os.waitpid(child, 0)
        left = traces(name)
        removed = making.remove(name)
        after = traces(name)
        result = {
            "moment": moment,
            "status": os.waitstatus_to_exitcode(status),
            "left_namespaces": len(left.namespaces),
            "left_processes": len(left.processes),
            "left_folder": left.folder,
            "removed": len(removed),
            "clean": after == before,
            "after": "" if after == before else repr(after),
        }
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], [float(word) for word in sys.argv[3:]])
