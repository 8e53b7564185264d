"""The options and variables that the command line knows, to check files that call it."""

import re

import rich_click as click

from loraserve.cli.main import main

FLAG = re.compile(r"--[a-z][a-z-]+")
ENVIRONMENT = re.compile(r"LORASERVE_[A-Z_]+")


def options_of(*command: str) -> set[str]:
    found: click.Command = main
    for name in command:
        found = _subcommand(found, name)
    return {flag for parameter in found.params for flag in [*parameter.opts, *parameter.secondary_opts]}


def serve_variables() -> set[str]:
    names: set[str] = set()
    for parameter in _subcommand(main, "serve").params:
        envvar = parameter.envvar or []
        names |= {envvar} if isinstance(envvar, str) else set(envvar)
    return names


def _subcommand(group: click.Command, name: str) -> click.Command:
    assert isinstance(group, click.Group)
    found = group.get_command(click.Context(group), name)
    assert found is not None, f"there is no command {name}"
    return found
