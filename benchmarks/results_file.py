"""Results kept in a file: every run with the machine it was measured on, so that single goals can be measured again."""

from collections.abc import Collection, Iterable
from pathlib import Path

import msgspec

Figures = dict[str, list[float]]
"""Figure → its value in every repeat."""
Pair = tuple[str, str]
RESULTS = Path(__file__).parent / "results"


class Machine(msgspec.Struct, frozen=True):
    cpu: str
    cores: int
    capability: str
    """Its widest instructions for vectors or matrices."""
    python: str
    commit: str
    """With a trailing + if tracked files had changed since."""


class Run(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One invocation of `bench_rivals.py`. Divide only figures of the same run by each other."""

    id: str
    date: str
    num_requests: int
    """Of the first workload; the larger ones have half as many."""
    repeats: int
    machine: Machine
    versions: dict[str, str]
    figures: Figures


def result_path(capability: str) -> Path:
    """The file for CPUs of that capability; every other kind of CPU has its own."""
    return RESULTS / f"cpu-{capability.lower()}.json"


def read_runs(path: Path) -> list[Run]:
    """Oldest first; empty if there is no file."""
    return msgspec.json.decode(path.read_bytes(), type=list[Run]) if path.exists() else []


def write_runs(path: Path, runs: list[Run]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(runs), indent=1) + b"\n")


def new_id(date: str, runs: Iterable[Run]) -> str:
    """The date and a number above all of that day's runs. The newest run is always kept, so no id repeats."""
    taken = [int(run.id.rpartition(".")[2]) for run in runs if run.date == date]
    return f"{date}.{max(taken, default=0) + 1}"


def merged(runs: list[Run], run: Run, pairs: Collection[Pair]) -> list[Run]:
    """`runs` with `run` as the newest, replacing one with its id, and without runs that nothing is read from any more.

    A run is kept while it is the newest with some figure, or with both figures of a pair.
    """
    found = [other for other in runs if other.id != run.id] + [run]
    names = {name for each in found for name in each.figures}
    needed = [newest(found, (name,)) for name in names] + [newest(found, pair) for pair in pairs]
    kept = {each.id for each in needed if each is not None}
    return [each for each in found if each.id in kept]


def newest(runs: list[Run], figures: Collection[str]) -> Run | None:
    """The last run that has all of the figures; None if there is none."""
    return next((run for run in reversed(runs) if all(name in run.figures for name in figures)), None)
