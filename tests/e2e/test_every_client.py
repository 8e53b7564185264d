"""Every way to add an adapter, and every client that can use it, on one server with keys."""

import json
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import anthropic
import lorax
import openai
import pytest

from tests.support.adapter_variants import twin
from tests.support.demo_questions import templated, user
from tests.support.management import ADAPTER_FILES, client, new_key, offline_admin_key
from tests.support.server_process import WAIT_S, ServerProcess, run_command, serve, stop

PROMPT = "hello world"
ANSWER = "uryyb jbeyq"


@dataclass(frozen=True, slots=True)
class Bench:
    server: ServerProcess
    key: str
    """An operator key of the tenant acme."""
    admin_key: str


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    own_dir, roots = tmp_path_factory.mktemp("clients"), tmp_path_factory.getbasetemp()
    admin_key = offline_admin_key(own_dir)
    with serve(own_dir, "--adapter-roots", str(roots)) as server, client(server, admin_key) as admin:
        assert admin.post("/v1/tenants", json={"id": "acme"}).status_code == 201
        yield Bench(server, new_key(admin, "acme", "operator")["secret"], admin_key)
        stop(server)


def curl(bench: Bench, key: str, path: str, *options: str) -> str:
    command = ["curl", "-sS", f"{bench.server.url}{path}", "-H", f"Authorization: Bearer {key}", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=True).stdout


def by_command_line(bench: Bench, name: str, folder: Path) -> None:
    arguments = ("--url", bench.server.url, "--api-key", bench.key)
    done = run_command("adapter", "add", name, str(folder), *arguments)
    assert (done.returncode, f"{name}@v1 is ready" in done.stdout) == (0, True), done.stderr


def by_curl_form(bench: Bench, name: str, folder: Path) -> None:
    files = [option for file in ADAPTER_FILES for option in ("-F", f"files=@{folder / file}")]
    assert json.loads(curl(bench, bench.key, "/v1/adapters", "-F", f"name={name}", *files))["state"] == "ready"


def by_curl_steps(bench: Bench, name: str, folder: Path) -> None:
    sizes = [{"name": file, "size_bytes": (folder / file).stat().st_size} for file in ADAPTER_FILES]
    as_json = ("-H", "Content-Type: application/json", "-d")
    opened = json.loads(curl(bench, bench.key, f"/v1/adapters/{name}/uploads", *as_json, json.dumps({"files": sizes})))
    path = f"/v1/uploads/{opened['id']}"
    for file in ADAPTER_FILES:
        curl(bench, bench.key, f"{path}/files/{file}", "-T", str(folder / file))
    curl(bench, bench.key, f"{path}/commit", "-X", "POST")
    while (session := json.loads(curl(bench, bench.key, f"{path}?wait_s=10")))["state"] in ("validating", "loading"):
        pass
    assert session["state"] == "ready"


def by_vllm_endpoint(bench: Bench, name: str, folder: Path) -> None:
    body = json.dumps({"lora_name": name, "lora_path": str(folder)})
    options = ("-H", "Content-Type: application/json", "-H", "X-Tenant: acme", "-d", body)
    answer = curl(bench, bench.admin_key, "/v1/load_lora_adapter", *options)
    assert answer == f"Success: LoRA adapter '{name}' added successfully."


@pytest.mark.filterwarnings("ignore::pydantic.warnings.PydanticDeprecatedSince20")
@pytest.mark.parametrize("upload", [by_command_line, by_curl_form, by_curl_steps, by_vllm_endpoint])
def test_an_adapter_added_in_any_way_answers_every_client(
    bench: Bench, tmp_path: Path, upload: Callable[[Bench, str, Path], None]
) -> None:
    name, url = upload.__name__.replace("_", "-"), bench.server.url
    upload(bench, name, twin(tmp_path / "adapter", "rot13"))

    with openai.OpenAI(base_url=f"{url}/v1", api_key=bench.key, max_retries=0, timeout=WAIT_S) as api:
        chat = api.chat.completions.create(model=name, messages=user(PROMPT), temperature=0, max_tokens=40)  # pyright: ignore
        assert chat.choices[0].message.content == ANSWER
        assert name in [model.id for model in api.models.list()]

    with anthropic.Anthropic(base_url=url, api_key=bench.key, max_retries=0, timeout=WAIT_S) as claude:
        message = claude.messages.create(
            model=name,
            messages=user(PROMPT),
            max_tokens=40,
            extra_body={"temperature": 0},  # pyright: ignore
        )
        assert [block.text for block in message.content if block.type == "text"] == [ANSWER]

    tgi = lorax.Client(url, headers={"Authorization": f"Bearer {bench.key}"}, timeout=int(WAIT_S))
    assert tgi.generate(templated(PROMPT), adapter_id=name, max_new_tokens=40).generated_text == ANSWER
    assert tgi.session is not None
    tgi.session.close()

    body = json.dumps({"model": name, "messages": user(PROMPT), "temperature": 0, "max_tokens": 40})
    answer = curl(bench, bench.key, "/v1/chat/completions", "-H", "Content-Type: application/json", "-d", body)
    assert json.loads(answer)["choices"][0]["message"]["content"] == ANSWER

    options = ("--url", url, "--model", name, "--api-key", bench.key, "--temperature", "0")
    chatted = run_command("chat", *options, stdin=f"{PROMPT}\n")
    assert (chatted.returncode, ANSWER in chatted.stdout) == (0, True), chatted.stderr
