"""`loraserve serve …` that waits longer for an answer from Redis, because a busy machine is not an outage."""

import sys
from functools import partial

from loraserve.cli.main import main
from loraserve.cli.serve import control_start
from loraserve.control.declared import ControlSettings

REDIS_TIMEOUT_S = 3.0
"""Not much longer than usual: some tests wait for a Redis that is suspended."""


def serve(arguments: list[str]) -> None:
    """Ends with `SystemExit`, as every command does."""
    control_start.ControlSettings = partial(ControlSettings, redis_timeout_s=REDIS_TIMEOUT_S)
    main(["serve", *arguments], prog_name="loraserve")


if __name__ == "__main__":
    serve(sys.argv[1:])
