"""Campaigns of the tests, and running their scripts where hetplan cannot be imported."""

import contextlib
import subprocess
import sys
from pathlib import Path

import typer
from typer.testing import CliRunner

from hetplan.cli.profile import profile

app = typer.Typer()
app.command()(profile)

CLUSTER = """schema: hetplan.cluster/1
name: two-cores
regions:
  - name: here
    islands:
      - name: cores
        device: cpu
        nodes: 1
        devices_per_node: 2
        memory: 2 GiB
        intra_node: {bandwidth: 1 GB/s, latency: 100 us, transport: host-staged, samples: lo}
        inter_node: {bandwidth: 1 GB/s, latency: 100 us, transport: host-staged}
"""
SHAPES = (
    *("--hidden", "64,128", "--seq", "16", "--vocab", "32", "--microbatch", "1,2", "--tp", "1"),
    *("--sizes", "4KiB,16KiB"),
)
SAMPLES = 2 * (2 * 3 * 2 + 4)
"""Two hidden sizes: two microbatches of three layers with two phases, and four updates."""

# Any module of hetplan that the script does not carry is refused, installed or not.
ALONE = """
import runpy, sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("hetplan", "pydantic", "yaml", "typer"):
            raise ImportError(name + " is not carried")
sys.meta_path.insert(0, Refuse())
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def invoke(*arguments, code: int = 0):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result


def make(folder: Path, *shapes: str) -> Path:
    """The folder of a campaign for two cores."""
    cluster = folder / "two-cores.yaml"
    cluster.write_text(CLUSTER)
    invoke("--campaign", cluster, "--out", folder / "campaign", *(shapes or SHAPES))
    return folder / "campaign"


def start(script: Path, *arguments: str, prefix: str = "") -> subprocess.Popen:
    """The script in a process without hetplan; `prefix` is Python that runs before it."""
    return subprocess.Popen(
        [sys.executable, "-I", "-c", prefix + ALONE, str(script), *arguments],
        cwd=script.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": ""},
    )


def finish(job: subprocess.Popen) -> str:
    """What the script printed, once it has ended well."""
    try:
        stdout, stderr = job.communicate(timeout=120)
    finally:
        with contextlib.suppress(ProcessLookupError):
            job.kill()
    assert job.returncode == 0, stdout + stderr
    return stdout
