"""A process that imports what `serve_fake` does, then forks a server for every job: its arguments as JSON.

Measured: a server that imports everything itself is ready after 1.2 s of one core, a forked one after 0.2 s.
"""

import ctypes
import importlib
import json
import os
import sys

from loraserve.cli.serve import command as _options  # noqa: F401  with what follows, all that a server imports until it is ready
from loraserve.cli.serve import server as _server  # noqa: F401
from loraserve.cli.serve.server_start import HTTP_MODULES
from loraserve.control.ingest.fork_server import serve
from tests.support import serve_fake


def main() -> int:
    """A server that first prints its process id, and then writes its stdout to its stderr."""
    arguments: list[str] = json.loads(sys.stdin.buffer.readline())
    print(os.getpid(), flush=True)
    os.dup2(2, 1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    try:
        serve_fake.serve(arguments)
    except SystemExit as end:
        # Unlike the `os._exit` of other fork servers' children, this waits for running threads, as a real server does.
        ctypes.pythonapi.Py_Exit(end.code)
    return 1


if __name__ == "__main__":
    for module in HTTP_MODULES:
        importlib.import_module(module)
    serve(main)
