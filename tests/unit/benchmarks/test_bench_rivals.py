from pathlib import Path

import pytest
from arm_list import Rivals, all_arms
from arms import Arm
from bench_rivals import selected
from goals import GOALS

ALL = Rivals(Path("vllm/bin/python"), Path("plain/bin/python"), Path("node_modules"))


@pytest.fixture
def arms(tmp_path: Path) -> list[Arm]:
    return all_arms(tmp_path, ALL, num_requests=16)


def names(arms: list[Arm]) -> list[str]:
    return [arm.name for arm in arms]


def test_every_figure_of_a_goal_is_measured_by_an_arm(arms: list[Arm]) -> None:
    figures = {figure for arm in arms for figure in arm.figures}
    assert {figure for goal in GOALS for pair in goal.pairs for figure in pair} <= figures


def test_all_arms_run_by_default(arms: list[Arm]) -> None:
    assert selected([], arms) == arms


def test_goals_and_arms_can_be_selected_together(arms: list[Arm]) -> None:
    found = names(selected(["own-base", "zipf", "PEFT, 16 adapters"], arms))
    assert found == [
        "PEFT, 16 adapters",
        "in process, 16 adapters",
        "HTTP, 16 adapters",
        "HTTP, Zipf mix",
        "in process, Zipf mix",
        "HTTP, base",
        "in process, base",
    ]


def test_an_arm_with_two_figures_runs_once(arms: list[Arm]) -> None:
    assert names(selected(["ttft"], arms)) == ["TTFT"]


def test_unknown_or_uninstalled_selections_are_refused(tmp_path: Path, arms: list[Arm]) -> None:
    with pytest.raises(SystemExit, match="no such goal or arm"):
        selected(["peft", "nothing"], arms)
    with pytest.raises(SystemExit, match="--vllm-python"):
        selected(["vllm"], all_arms(tmp_path, Rivals(), num_requests=16))
