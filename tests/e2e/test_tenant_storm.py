"""Two tenants whose adapters have the same names, under concurrent load, while adapters change."""

import contextlib
import itertools
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.support.adapter_variants import variant
from tests.support.demo_questions import ADAPTER_DIR, ADAPTERS, BASE, content_of, events_of, user
from tests.support.management import add_adapter, client, new_key, offline_admin_key
from tests.support.server_process import ServerProcess, serve, stop

SKILLS = {"acme": ("uppercase", "reverse", "rot13"), "globex": ("reverse", "rot13", "spell")}
"""The skills of each tenant's adapters `first`, `second` and `third`."""
NAMES = ("first", "second", "third")
PROMPT = "hello world"
ANSWERS = {
    "uppercase": "HELLO WORLD",
    "reverse": "dlrow olleh",
    "rot13": "uryyb jbeyq",
    "spell": "h-e-l-l-o w-o-r-l-d",
    BASE: "You said: hello world",
}


@dataclass(frozen=True, slots=True)
class Asked:
    tenant: str
    model: str
    version: str | None
    text: str
    num_cached: int


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ServerProcess, str]]:
    own_dir = tmp_path_factory.mktemp("storm")
    key = offline_admin_key(own_dir)
    with serve(own_dir) as server:
        yield server, key
        stop(server)


@pytest.fixture(scope="module")
def tenants(server: tuple[ServerProcess, str]) -> Iterator[dict[str, httpx.Client]]:
    """A client for each tenant, which has its three adapters."""
    process, admin_key = server
    with client(process, admin_key) as admin, contextlib.ExitStack() as stack:
        found = {}
        for tenant, skills in SKILLS.items():
            assert admin.post("/v1/tenants", json={"id": tenant}).status_code == 201
            key = new_key(admin, tenant, "operator")["secret"]
            found[tenant] = stack.enter_context(client(process, key))
            for name, skill in zip(NAMES, skills, strict=True):
                add_adapter(found[tenant], name, ADAPTER_DIR / skill)
        yield found


def ask(tenant: str, http: httpx.Client, model: str, *, stream: bool = False, content: str = PROMPT) -> Asked:
    body = {"model": model, "messages": user(content), "temperature": 0, "max_tokens": 40}
    if stream:
        response = http.post("/v1/chat/completions", json={**body, "stream": True})
        assert response.status_code == 200, response.text
        text, num_cached = content_of(events_of(response.text)), 0
    else:
        response = http.post("/v1/chat/completions", json=body)
        assert response.status_code == 200, response.text
        answer = response.json()
        text = answer["choices"][0]["message"]["content"]
        num_cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return Asked(tenant, model, response.headers.get("x-adapter-version"), text, num_cached)


def test_every_answer_comes_from_the_tenants_own_adapter(tenants: dict[str, httpx.Client]) -> None:
    """The same prompt to the same names: only the tenant determines which content answers."""
    models = (*NAMES, "spell", BASE)
    work = [
        (tenant, model, stream)
        for _, tenant, model, stream in itertools.product(range(30), SKILLS, models, (False, True))
    ]
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda job: ask(job[0], tenants[job[0]], job[1], stream=job[2]), work))
    assert len(answers) == 600
    for answer in answers:
        own: dict[str, str] = dict(zip(NAMES, SKILLS[answer.tenant], strict=True))
        assert answer.text == ANSWERS[own.get(answer.model, answer.model)], answer


def test_every_answer_comes_from_the_version_that_its_header_names(
    tenants: dict[str, httpx.Client], tmp_path: Path
) -> None:
    """Both tenants repeatedly publish new content under one name meanwhile."""
    http_of, stop_asking = tenants, threading.Event()
    skills: dict[str, list[str]] = {tenant: [] for tenant in SKILLS}
    answers: list[Asked] = []

    def keep_asking(tenant: str) -> None:
        while not stop_asking.is_set():
            answers.append(ask(tenant, http_of[tenant], "moving"))

    def publish(tenant: str, number: int) -> None:
        skill = [skill for skill in ADAPTERS if skill in ANSWERS][(number + (tenant == "acme")) % 4]
        folder = tmp_path / f"{tenant}-{number}"
        skills[tenant].append(skill)
        result = add_adapter(http_of[tenant], "moving", twin_of(folder, skill, number))["result"]
        assert result == {"version": number + 1, "digest": result["digest"], "created": True}

    for tenant in SKILLS:
        publish(tenant, 0)
    threads = [threading.Thread(target=keep_asking, args=(tenant,)) for tenant in SKILLS for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for number in range(1, 6):
            for tenant in SKILLS:
                publish(tenant, number)
                answer = ask(tenant, http_of[tenant], "moving")
                assert (answer.version, answer.text) == (str(number + 1), ANSWERS[skills[tenant][-1]])
    finally:
        stop_asking.set()
        for thread in threads:
            thread.join()
    assert {answer.version for answer in answers} >= {"1", "6"}
    for answer in answers:
        assert answer.version is not None
        assert answer.text == ANSWERS[skills[answer.tenant][int(answer.version) - 1]], answer


def test_new_content_does_not_use_the_cache_of_the_old_content(
    tenants: dict[str, httpx.Client], tmp_path: Path
) -> None:
    """The same name, the same long prompt, with the old content's blocks certainly cached."""
    http, content = tenants["acme"], "green tree " * 20
    cached = []
    for number, skill in enumerate(("uppercase", "reverse")):
        add_adapter(http, "renewed", twin_of(tmp_path / skill, skill, number))
        cached += [ask("acme", http, "renewed", content=content).num_cached for _ in range(2)]
        assert ask("acme", http, "renewed").text == ANSWERS[skill]
    assert [bool(count) for count in cached] == [False, True, False, True]
    assert cached[2] == 0
    rolled_back = http.post("/v1/adapters/renewed/rollback", json={})
    assert rolled_back.status_code == 200
    assert ask("acme", http, "renewed").text == ANSWERS["uppercase"]


def twin_of(folder: Path, skill: str, number: int) -> Path:
    """A variant with different content for each number."""
    factor = 1 + 0.001 * (number + 1)
    return variant(folder, skill, lambda config: config.update(lora_alpha=config["lora_alpha"] * factor))
