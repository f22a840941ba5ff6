"""Where `hetplan` and `python -m hetplan` begin; the latter is how torchrun starts a profile."""

import os
import sys


def main() -> None:
    """Run the command line; a Ctrl-C while it is still being imported is no traceback either."""
    _open_streams()
    try:
        from hetplan.cli.main import main as run

        run()
    except KeyboardInterrupt:
        sys.stderr.write("hetplan: interrupted\n")
        sys.exit(130)  # 128 + SIGINT, as shells have it


def _open_streams() -> None:
    """Standard streams that the caller has closed (`2>&-`) lead nowhere: no file that is opened
    later may get their numbers, and with them what was meant for a person.
    """
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            # The lowest free number is that of the stream.
            mode = "r" if name == "stdin" else "w"
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - as long as the process


if __name__ == "__main__":
    main()
