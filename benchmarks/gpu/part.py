"""What `gpu_suite.py` requires of the scripts it runs: two options, and a results file that is complete at any time."""

import argparse
import json
from pathlib import Path
from typing import Any


def argument_parser(description: str | None, budget_s: float) -> argparse.ArgumentParser:
    """For `json` (a path or None) and `budget_s`."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    parser.add_argument("--budget-s", type=float, default=budget_s, help="start no measurement after this many seconds")
    return parser


def write_json(path: Path, content: Any) -> None:
    """Atomic: a process that is killed while it writes leaves the file as it was."""
    path.parent.mkdir(parents=True, exist_ok=True)
    written = path.with_name(f"{path.name}.new")
    written.write_text(json.dumps(content, indent=1) + "\n")
    written.replace(path)
