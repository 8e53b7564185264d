"""Flags ratios that fell since the committed result by more than the repeats spread. `make bench-check` runs it.

Ratios of one run, never times: the machine may be another one. Exits with 1 if any ratio fell.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

from bench_rivals import OUT, RESULT
from goals import Change, changes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fresh", type=Path, help="A result measured before; else measured now, passing options on.")
    args, options = parser.parse_known_args()
    if args.fresh is None:
        args.fresh = OUT / "check.json"
        script = Path(__file__).with_name("bench_rivals.py")
        command = [sys.executable, str(script), "--repeats", "3", "--json", str(args.fresh), *options]
        subprocess.run(command, check=True)
    committed, fresh = (json.loads(path.read_text()) for path in (RESULT, args.fresh))
    found = changes(committed["runs"], fresh["runs"])
    print(f"{'':60}{'committed':>10}{'now':>8}{'loss':>8}{'noise':>8}")
    for change in found:
        print(_line(change))
    sys.exit(any(change.is_loss for change in found))


def _line(change: Change) -> str:
    goal = change.fresh.goal
    figures = f"{change.committed.median:10.3f}{change.fresh.median:8.3f}{change.loss:8.1%}{change.noise:8.1%}"
    return f"{f'{goal.work} / {goal.against}':60}{figures}{'  LOSS' if change.is_loss else ''}"


if __name__ == "__main__":
    main()
