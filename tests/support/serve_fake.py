"""`serve_patient` with the fake engine in place of the real one."""

import sys
from pathlib import Path

from loraserve.cli.serve import server_start
from loraserve.serving.process import local_engine
from tests.support import serve_patient


def serve(arguments: list[str]) -> None:
    """Ends with `SystemExit`, as every command does."""
    local_engine.ENGINE_COMMAND = (sys.executable, "-P", str(Path(__file__).with_name("fake_engine.py")))
    server_start.why_absent = lambda *_: None  # its models do not exist
    serve_patient.serve(arguments)


if __name__ == "__main__":
    serve(sys.argv[1:])
