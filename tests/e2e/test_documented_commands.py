"""The commands in the documents, run in order on a real server, do what the documents say."""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.support.adapter_variants import classifier, twin
from tests.support.console_blocks import console_commands
from tests.support.demo_questions import ADAPTER_DIR
from tests.support.management import offline_admin_key
from tests.support.server_process import (
    START_S,
    WAIT_S,
    ServerProcess,
    command,
    environment,
    serve,
    share_kernels,
    stop,
)

ROOT = Path(__file__).parents[2]
NOT_HERE = ("loraserve serve", "loraserve doctor", "loraserve ui login", "docker", "kubectl", "pip", "make", "export")
"""Commands that are not run here: servers, and those that need another machine, a terminal, a network or a port."""
VARIABLES = re.compile(r"(?:[A-Z_]+=\S+ )*")
"""Variable assignments before a command, for it alone."""
ADAPTERS = {
    "sql-adapter": "uppercase",
    "better-adapter": "reverse",
    "candidate": "rot13",
    "support-adapter": "spell",
    "judge-adapter": "json",
}
ACTIVATED = {"judge-adapter": list(b" judge:")}
"""Activated adapters and their invocations, in the demo's tokens, which are bytes."""
REFUSED = {
    # "A name that is taken is a 400"
    "/v1/load_lora_adapter": "adapter_already_loaded",
    # The command before it has already deleted the version.
    "-X DELETE http://127.0.0.1:8000/v1/adapters/sql/versions/1": "no version 1",
}
"""Parts of the commands that fail in the documents, and the text that their output must contain."""
LEAST = {"README.md": 7, "adapters.md": 52, "tenancy.md": 25, "operations.md": 8}
"""The minimum number of commands; fewer would mean that this test does not find them all."""


@dataclass(slots=True)
class Reader:
    """Runs commands in a shell, with the test's server, folders and ids in place of a document's examples."""

    server: ServerProcess
    folder: Path
    data_dir: Path
    admin_key: str = ""
    upload_id: str = ""
    key_id: str = ""
    failures: list[str] = field(default_factory=list)

    def follow(self, document: Path) -> int:
        """Runs the document's commands and returns their number."""
        commands = [text for text in console_commands(document) if not VARIABLES.sub("", text, 1).startswith(NOT_HERE)]
        for text in commands:
            self._type(text)
        return len(commands)

    def _type(self, text: str) -> None:
        expected = next((said for part, said in REFUSED.items() if part in text), None)
        done = subprocess.run(
            ["bash", "-c", self._own(text)],
            cwd=self.folder,
            env=self._environment(),
            capture_output=True,
            text=True,
            timeout=START_S,
            check=False,
        )
        said = done.stdout + done.stderr
        if (done.returncode == 0) is not (expected is None) or (expected or "") not in said:
            self.failures.append(f"$ {text}\n{said}")
        if found := re.match(r'\{"id":"([0-9a-f]{32})","adapter"', done.stdout):
            self.upload_id = found[1]
        if found := re.search(r"\bls-([a-z2-7]{8})_", done.stdout):
            self.key_id = found[1]

    def _own(self, text: str) -> str:
        for example, own in (
            ("http://127.0.0.1:8000", self.server.url),
            ("http://127.0.0.1:9400", _metrics_url(self.server)),
            ("/var/lib/loraserve", str(self.data_dir)),
            ("--data-dir DIR", "--data-dir new"),
            ('"/path/to', f'"{self.folder}/path/to'),
            ("k3v2m7qa", self.key_id),
        ):
            text = text.replace(example, own)
        text = re.sub(r'"name": "(\S+)", "size_bytes": \d+', self._announced, text)
        return re.sub(r"^curl ", "curl -sS --fail-with-body ", text)

    def _announced(self, file: re.Match[str]) -> str:
        return f'"name": "{file[1]}", "size_bytes": {(self.folder / "sql-adapter" / file[1]).stat().st_size}'

    def _environment(self) -> dict[str, str]:
        return {
            **environment(),
            "PATH": f"{self.folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "HOME": str(self.folder),
            "LORASERVE_URL": self.server.url,
            "LORASERVE_API_KEY": self.admin_key,
            "KEY": self.admin_key,
            "ID": self.upload_id,
        }


def _metrics_url(server: ServerProcess) -> str:
    found = re.search(r"metrics without a key: (\S+)/metrics", server.text)
    return found[1] if found else ""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reader's home: `path/to/…`, links without that prefix, a `loraserve` program for PATH, and compiled kernels."""
    folder = tmp_path_factory.mktemp("reader")
    (folder / "path" / "to").mkdir(parents=True)
    (folder / "path" / "to" / "model").symlink_to(ADAPTER_DIR.parent / "model")
    for name, skill in ADAPTERS.items():
        (folder / name).symlink_to(twin(folder / "path" / "to" / name, skill))
    path = classifier(folder / "path" / "to" / "intent-adapter", "arithmetic", ["billing", "login", "other"])
    (folder / "intent-adapter").symlink_to(path)
    classifier(
        folder / "path" / "to" / "ranker-adapter", "reverse", ["relevant"], "query: {query} document: {document}"
    )
    for name, invocation in ACTIVATED.items():
        config = folder / name / "adapter_config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"alora_invocation_tokens": invocation}))
    (folder / "bin").mkdir()
    program = folder / "bin" / "loraserve"
    program.write_text(f'#!/bin/sh\nexec {shlex.join(command())} "$@"\n')
    program.chmod(0o755)
    share_kernels(folder / ".cache" / "loraserve")
    return folder


@pytest.fixture(scope="module")
def open_server(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> Iterator[Reader]:
    data_dir = tmp_path_factory.mktemp("open")
    with serve(data_dir, "--lora-modules", f"support={folder / 'path' / 'to' / 'support-adapter'}") as server:
        yield Reader(server, folder, data_dir)
        stop(server)


@pytest.fixture(scope="module")
def server_with_keys(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> Iterator[Reader]:
    data_dir = tmp_path_factory.mktemp("keyed")
    admin_key = offline_admin_key(data_dir)
    with serve(data_dir, "--metrics-port", "0") as server:
        yield Reader(server, folder, data_dir, admin_key)
        stop(server)


def check(reader: Reader, document: Path) -> None:
    num_commands = reader.follow(document)
    assert not reader.failures, "\n\n".join(reader.failures)
    assert num_commands >= LEAST[document.name]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["docs/adapters.md", "README.md"])
def test_documented_commands_work_on_a_server_that_needs_no_key(open_server: Reader, name: str) -> None:
    check(open_server, ROOT / name)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["docs/tenancy.md", "docs/operations.md"])
def test_documented_commands_work_on_a_server_with_keys(server_with_keys: Reader, name: str) -> None:
    check(server_with_keys, ROOT / name)


def test_the_readmes_python_program_prints_each_adapters_answer(open_server: Reader) -> None:
    (program,) = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)
    own = program.replace("http://127.0.0.1:8000", open_server.server.url)
    done = subprocess.run(
        [sys.executable, "-c", own], capture_output=True, text=True, timeout=WAIT_S, env=environment(), check=False
    )
    answers = ["uppercase HELLO WORLD", "reverse dlrow olleh", "rot13 uryyb jbeyq", "spell h-e-l-l-o w-o-r-l-d"]
    assert done.stdout.splitlines() == answers, done.stderr


def test_a_documented_command_that_fails_would_be_found(open_server: Reader, tmp_path: Path) -> None:
    document = tmp_path / "wrong.md"
    document.write_text(
        "```console\n$ curl http://127.0.0.1:8000/v1/adapters/nobody\n$ loraserve adapter show \\\n    nobody\n"
        "shown\n$ curl http://127.0.0.1:8000/v1/models\n```\n"
    )
    reader = Reader(open_server.server, open_server.folder, open_server.data_dir)
    assert reader.follow(document) == 3
    assert len(reader.failures) == 2
