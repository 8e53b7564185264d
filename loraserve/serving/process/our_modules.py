"""How to run one of our modules in a child process."""

import os
import sys


def module_command(module: str) -> tuple[str, ...]:
    """-P excludes the working directory, where anyone may have put a `types.py`, from imports."""
    return (sys.executable, "-P", "-m", module)


def python_environment() -> dict[str, str]:
    """The child finds packages where this process does, even if they are not installed.

    PYTHONOPTIMIZE is cleared to keep docstrings: transformers cannot be imported without its own.
    """
    return {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "PYTHONOPTIMIZE": ""}
