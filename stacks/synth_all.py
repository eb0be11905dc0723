"""Synthesizes every profile as the CDK command line does, one process each: ``python -m stacks.synth_all``."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from stacks import config

ROOT = Path(__file__).parents[1]
LIMIT_S = 15.0
"""What one synthesis may take on two idle cores."""
_SYNTH = "import json, sys; from aws_cdk import App; from stacks.application import build; "
_SYNTH += "app = App(context=json.loads(sys.argv[1]), outdir=sys.argv[2]); build(app); app.synth()"


def synthesize(name: str, outdir: Path) -> float:
    """Seconds that one profile took. Raises CalledProcessError, after showing what the synthesis said."""
    context = {**json.loads((ROOT / "cdk.json").read_text())["context"], "profile": name}
    command = [sys.executable, "-c", _SYNTH, json.dumps(context), str(outdir)]
    start = time.monotonic()
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, check=False)
    if done.returncode:
        sys.stderr.write(done.stdout + done.stderr)
        done.check_returncode()
    return time.monotonic() - start


def main() -> int:
    """One line a profile; 1 when one cannot be synthesized. A slow one is pointed out, as the machine may be busy."""
    for name in config.names():
        with tempfile.TemporaryDirectory() as folder:
            try:
                took = synthesize(name, Path(folder))
            except subprocess.CalledProcessError:
                sys.stderr.write(f"{name}: cannot be synthesized\n")
                return 1
            num = len(list(Path(folder).glob("*.template.json")))
        slow = "" if took <= LIMIT_S else f", more than {LIMIT_S:g} s"
        sys.stdout.write(f"{name:<20}{num} templates  {took:5.1f} s{slow}\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
