"""What the command line knows, for files that call it."""

import re

from loraserve.cli.main import main

FLAG = re.compile(r"--[a-z][a-z-]+")
ENVIRONMENT = re.compile(r"LORASERVE_[A-Z_]+")


def options_of(*command: str) -> set[str]:
    found = main
    for name in command:
        found = found.get_command(None, name)  # type: ignore[attr-defined]
    return {flag for parameter in found.params for flag in [*parameter.opts, *parameter.secondary_opts]}


def serve_variables() -> set[str]:
    serve = main.get_command(None, "serve")  # type: ignore[attr-defined]
    names: set[str] = set()
    for parameter in serve.params:
        envvar = parameter.envvar or []
        names |= {envvar} if isinstance(envvar, str) else set(envvar)
    return names
