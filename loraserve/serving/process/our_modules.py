"""How processes of ours run a module of ours."""

import os
import sys


def module_command(module: str) -> tuple[str, ...]:
    """-P keeps the working directory, where anybody may have put a `types.py`, out of what is imported."""
    return (sys.executable, "-P", "-m", module)


def python_environment() -> dict[str, str]:
    """The child finds our packages where we did, also when they are not installed.

    Its docstrings are kept whatever PYTHONOPTIMIZE says: transformers does not import without its own.
    """
    return {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "PYTHONOPTIMIZE": ""}
