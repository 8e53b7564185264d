"""Fork servers whose children run a test's script."""

import os
import sys
from pathlib import Path

import psutil

_PROGRAM = """
import os, sys
from loraserve.control.ingest.fork_server import serve

{before}

def main():
    exec({script!r}, {{}})
    return 0

serve(main)
"""


def fork_server_of(script: str, before: str = "") -> tuple[str, ...]:
    """A command for `ForkedJobs`: each child runs the script. before: code that runs once, in the fork server."""
    return sys.executable, "-c", _PROGRAM.format(script=script, before=before)


def children_of(pid: int) -> list[int]:
    """Process ids, found in microseconds; empty if the process is gone."""
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []


def our_fork_servers(module: str) -> list[int]:
    """This process's fork servers that run `module`. Right after a start, the module's name is not known yet."""
    return [pid for pid in children_of(os.getpid()) if module in _command_of(pid)]


def _command_of(pid: int) -> str:
    try:
        return " ".join(psutil.Process(pid).cmdline())
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return ""
