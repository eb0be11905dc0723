"""``python -m payload COMMAND``: the registry of commands."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from payload.config import EXIT_BAD_CONFIG, ConfigError

COMMANDS: dict[str, str] = {
    "demo": "payload.demo:main",
    "run": "payload.commands:run_command",
    "render": "payload.commands:render_command",
    "prepare-data": "payload.prepare:main",
    "report": "payload.report:cli",
    "plan": "payload.plan:cli",
    "audit": "payload.audit:cli",
    "bench": "payload.bench:main",
    "bench-table": "payload.bench_table:main",
    "submit": "payload.cluster.submit:submit",
    "status": "payload.cluster.status:status",
    "logs": "payload.cluster.status:logs",
    "results": "payload.cluster.status:results",
    "delete": "payload.cluster.submit:delete",
    "capacity": "payload.cluster.scaling:capacity",
    "node": "payload.cluster.scaling:node",
    "preflight-nodes": "payload.cluster.preflight:preflight",
    "run-state": "payload.cluster.run_state:main",
}
"""Name -> ``module:function``, which takes the arguments after the name and returns the exit code. Imported when
called, so that a command costs only its own imports."""

EXIT_INTERRUPTED = 130
"""As a shell reports SIGINT."""


def main(argv: Sequence[str]) -> int:
    """The exit code: 0, 1 when a run failed, 2 when the user's input was refused (one line a problem on stderr)."""
    name = argv[0] if argv else ""
    if name in ("", "-h", "--help"):
        print(f"usage: python -m payload COMMAND ...\ncommands: {', '.join(COMMANDS)}; each takes --help")
        return 0 if name else EXIT_BAD_CONFIG
    try:
        if name not in COMMANDS:
            raise ConfigError(f"command {name!r}; legal: {', '.join(COMMANDS)}")
        module, _, function = COMMANDS[name].partition(":")
        return int(getattr(importlib.import_module(module), function)(list(argv[1:])))
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_BAD_CONFIG
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return EXIT_INTERRUPTED
