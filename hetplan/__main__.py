"""Where `hetplan` and `python -m hetplan` begin; the latter is how torchrun starts a profile."""

import sys


def main() -> None:
    """Run the command line; a Ctrl-C while it is still being imported is no traceback either."""
    try:
        from hetplan.cli.main import main as run

        run()
    except KeyboardInterrupt:
        sys.stderr.write("hetplan: interrupted\n")
        sys.exit(130)  # 128 + SIGINT, as shells have it


if __name__ == "__main__":
    main()
