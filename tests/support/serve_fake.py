"""`loraserve serve …` with the fake engine in place of the real one."""

import sys
from pathlib import Path

from loraserve.cli import server_start
from loraserve.cli.main import main
from loraserve.serving import local_engine

local_engine.ENGINE_COMMAND = (sys.executable, "-P", str(Path(__file__).with_name("fake_engine.py")))
server_start.why_absent = lambda *_: None  # its models are nowhere
main(["serve", *sys.argv[1:]], prog_name="loraserve")
