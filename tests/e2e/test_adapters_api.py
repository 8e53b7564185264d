"""vLLM's adapter endpoints on a running server: loaded adapters answer, unloaded ones do not, bad ones are refused.

Every test uses its own content and leaves the six demo adapters alone.
"""

import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch

from tests.support.adapter_variants import Tensors, twin, variant
from tests.support.demo_questions import ADAPTER_DIR, ADAPTERS, BASE, templated, user
from tests.support.server_process import ServerProcess, wait_until

QUERY_A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
QUERY_B = QUERY_A.replace("lora_A", "lora_B")
NUM_LONG_TOKENS = 900


def load(http: httpx.Client, name: str, folder: Path | str, **options: Any) -> httpx.Response:
    return http.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": str(folder), **options})


def unload(http: httpx.Client, name: str) -> httpx.Response:
    return http.post("/v1/unload_lora_adapter", json={"lora_name": name})


def names(client: openai.OpenAI) -> list[str]:
    return [card.id for card in client.models.list()]


def answer(client: openai.OpenAI, model: str, content: str = "hello world") -> str:
    return (
        client.completions.create(model=model, prompt=templated(content), temperature=0, max_tokens=40).choices[0].text
    )


@contextmanager
def loaded(http: httpx.Client, name: str, folder: Path) -> Iterator[None]:
    response = load(http, name, folder)
    assert response.status_code == 200, response.text
    try:
        yield
    finally:
        unload(http, name)


@contextmanager
def long_stream(client: openai.OpenAI, model: str) -> Iterator[Callable[[], tuple[str, str | None]]]:
    """A stream that has started; the yielded function reads the rest and returns the whole text and finish reason."""
    with client.completions.create(
        model=model,
        prompt=templated("hello world"),
        temperature=0,
        max_tokens=NUM_LONG_TOKENS,
        extra_body={"ignore_eos": True},
        stream=True,
    ) as stream:
        first = next(stream)

        def read_rest() -> tuple[str, str | None]:
            chunks = [first, *stream]
            return "".join(chunk.choices[0].text for chunk in chunks), chunks[-1].choices[0].finish_reason

        yield read_rest


class TestContract:
    def test_loading_and_unloading_return_vllms_texts_and_statuses(
        self, http: httpx.Client, client: openai.OpenAI, tmp_path: Path
    ) -> None:
        folder = twin(tmp_path / "spell", "spell")
        added = load(http, "guest", folder)
        assert (added.status_code, added.text) == (200, "Success: LoRA adapter 'guest' added successfully.")
        assert added.headers["content-type"].startswith("text/plain")
        assert names(client) == [BASE, *sorted([*ADAPTERS, "guest"])]
        again = load(http, "guest", folder)
        assert again.status_code == 400
        assert "already been loaded" in again.json()["error"]["message"]
        removed = unload(http, "guest")
        assert (removed.status_code, removed.text) == (200, "Success: LoRA adapter 'guest' removed successfully.")
        assert names(client) == [BASE, *ADAPTERS]
        missing = unload(http, "guest")
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "adapter_not_found")

    @pytest.mark.parametrize(
        ("name", "folder", "status", "param"),
        [
            ("", ADAPTER_DIR / "spell", 400, "lora_name"),
            ("a b", ADAPTER_DIR / "spell", 400, "lora_name"),
            ("a:b", ADAPTER_DIR / "spell", 400, "lora_name"),
            ("../x", ADAPTER_DIR / "spell", 400, "lora_name"),
            ("n" * 65, ADAPTER_DIR / "spell", 400, "lora_name"),
            (BASE, ADAPTER_DIR / "spell", 400, "lora_name"),
            ("guest", "", 400, "lora_path"),
            ("guest", "with\0null", 400, "lora_path"),
            ("guest", "/does/not/exist", 404, "lora_path"),
            ("guest", "/etc/passwd", 404, "lora_path"),
            ("guest", "/" + "x" * 5000, 404, "lora_path"),
        ],
    )
    def test_bad_names_and_paths_are_refused(
        self, http: httpx.Client, name: str, folder: Path | str, status: int, param: str
    ) -> None:
        response = load(http, name, folder)
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (status, param)

    def test_the_base_model_cannot_be_unloaded(self, http: httpx.Client, client: openai.OpenAI) -> None:
        assert unload(http, BASE).status_code == 404
        assert answer(client, BASE) == "You said: hello world"


class TestUse:
    def test_cycles_of_loading_and_unloading_leave_nothing_behind(
        self, server: ServerProcess, http: httpx.Client, client: openai.OpenAI, tmp_path: Path
    ) -> None:
        folder = twin(tmp_path / "reverse", "reverse")
        before = {name: server.metrics()[f"loraserve_{name}"] for name in ("arena_used_bytes", "adapters_registered")}
        for _ in range(5):
            with loaded(http, "guest", folder):
                assert answer(client, "guest") == "dlrow olleh"
                assert answer(client, f"{BASE}:guest") == "dlrow olleh"
            with pytest.raises(openai.NotFoundError):
                answer(client, "guest")
            assert http.get("/adapters/guest/v1/models").status_code == 404
        assert {name: server.metrics()[f"loraserve_{name}"] for name in before} == before
        wait_until(server.is_idle, "nothing runs")

    def test_two_names_of_the_same_content_are_independent(
        self, http: httpx.Client, client: openai.OpenAI, tmp_path: Path
    ) -> None:
        folder = twin(tmp_path / "rot13", "rot13")
        with loaded(http, "second", folder):
            with loaded(http, "first", folder):
                first, second = (client.models.retrieve(name).to_dict()["adapter"] for name in ("first", "second"))
                assert first == second
                assert answer(client, "first") == answer(client, "second") == "uryyb jbeyq"
            with pytest.raises(openai.NotFoundError):
                answer(client, "first")
            assert answer(client, "second") == "uryyb jbeyq"

    def test_only_one_of_many_concurrent_loads_of_a_name_succeeds(self, http: httpx.Client, tmp_path: Path) -> None:
        folder = twin(tmp_path / "spell", "spell")
        statuses: list[int] = []
        threads = [
            threading.Thread(target=lambda: statuses.append(load(http, "guest", folder).status_code)) for _ in range(6)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(statuses) == [200] + [400] * 5
        assert unload(http, "guest").status_code == 200

    def test_unloading_lets_running_requests_finish_and_refuses_new_ones(
        self, server: ServerProcess, http: httpx.Client, client: openai.OpenAI, tmp_path: Path
    ) -> None:
        folder = twin(tmp_path / "spell", "spell")
        used_bytes = server.metrics()["loraserve_arena_used_bytes"]
        assert load(http, "guest", folder).status_code == 200
        answers: list[httpx.Response] = []
        with long_stream(client, "guest") as read_rest:
            unloading = threading.Thread(target=lambda: answers.append(unload(http, "guest")))
            unloading.start()
            wait_until(lambda: "guest" not in names(client), "the adapter is out of the list")
            with pytest.raises(openai.NotFoundError):
                answer(client, "guest")
            text, finish_reason = read_rest()
        unloading.join()
        assert text.startswith("h-e-l-l-o w-o-r-l-d")
        assert finish_reason == "length"
        assert answers[0].status_code == 200
        assert server.metrics()["loraserve_arena_used_bytes"] == used_bytes

    def test_an_adapter_can_be_reloaded_while_its_old_streams_still_run(
        self, http: httpx.Client, client: openai.OpenAI, tmp_path: Path
    ) -> None:
        folder = twin(tmp_path / "spell", "spell")
        assert load(http, "guest", folder).status_code == 200
        with long_stream(client, "guest") as read_rest:
            unloading = threading.Thread(target=unload, args=(http, "guest"))
            unloading.start()
            wait_until(lambda: "guest" not in names(client), "the adapter is out of the list")
            with loaded(http, "guest", folder):
                assert answer(client, "guest") == "h-e-l-l-o w-o-r-l-d"
                text, finish_reason = read_rest()
                assert (text[:19], finish_reason) == ("h-e-l-l-o w-o-r-l-d", "length")
                unloading.join()
                assert answer(client, "guest") == "h-e-l-l-o w-o-r-l-d"

    def test_running_requests_keep_the_old_content_during_a_replacement_in_place(
        self, http: httpx.Client, client: openai.OpenAI, tmp_path: Path
    ) -> None:
        old, new = twin(tmp_path / "spell", "spell"), twin(tmp_path / "reverse", "reverse")
        with loaded(http, "guest", old), long_stream(client, "guest") as read_rest:
            replacing = threading.Thread(target=load, args=(http, "guest", new), kwargs={"load_inplace": True})
            replacing.start()
            wait_until(lambda: answer(client, "guest") == "dlrow olleh", "the new content answers")
            text, finish_reason = read_rest()
            replacing.join()
            assert (text[:19], finish_reason) == ("h-e-l-l-o w-o-r-l-d", "length")
            assert answer(client, "guest") == "dlrow olleh"

    def test_cached_prefixes_do_not_outlive_the_content(
        self, http: httpx.Client, client: openai.OpenAI, tmp_path: Path
    ) -> None:
        """The same name and the same long prompt, but different content: the old content's cache is not used."""
        prompt = user("red apple " * 20)
        cached: list[int | None] = []
        for skill in ("spell", "reverse"):
            with loaded(http, "guest", twin(tmp_path / skill, skill)):
                for _ in range(2):
                    chat = client.chat.completions.create(model="guest", messages=prompt, max_tokens=2)  # pyright: ignore
                    assert chat.usage is not None
                    assert chat.usage.prompt_tokens_details is not None
                    cached.append(chat.usage.prompt_tokens_details.cached_tokens)
        assert [bool(count) for count in cached] == [False, True, False, True]


def _with_nan(tensors: Tensors) -> None:
    tensors[QUERY_A] = tensors[QUERY_A].clone().index_fill_(1, torch.tensor(3), float("nan"))


def _with_infinity(tensors: Tensors) -> None:
    tensors[QUERY_B] = torch.full_like(tensors[QUERY_B], float("inf"))


REFUSED: dict[str, tuple[Callable[[dict[str, Any]], object], Callable[[Tensors], object], str]] = {
    "NaN": (lambda c: None, _with_nan, QUERY_A),
    "infinity": (lambda c: None, _with_infinity, QUERY_B),
    "no B": (lambda c: None, lambda t: t.pop(QUERY_B), QUERY_B),
    "no A": (lambda c: None, lambda t: t.pop(QUERY_A), QUERY_A),
    "another r": (lambda c: c.update(r=c["r"] * 2), lambda t: None, QUERY_A),
    "a shape": (lambda c: None, lambda t: t.update({QUERY_B: torch.zeros(7, 7)}), QUERY_B),
    "a layer too many": (
        lambda c: None,
        lambda t: t.update({key.replace("layers.0", "layers.9"): t[key].clone() for key in (QUERY_A, QUERY_B)}),
        "layers.9",
    ),
    "a stray tensor": (lambda c: None, lambda t: t.update({"foo.bar": torch.zeros(2, 2)}), "foo.bar"),
    "QA-LoRA": (lambda c: c.update(use_qalora=True), lambda t: None, "use_qalora"),
    "DoRA without magnitudes": (lambda c: c.update(use_dora=True), lambda t: None, "lora_magnitude_vector"),
    "biases": (lambda c: c.update(bias="lora_only"), lambda t: None, "bias"),
    "modules to save": (lambda c: c.update(modules_to_save=["norm"]), lambda t: None, "modules_to_save"),
    "another method": (lambda c: c.update(peft_type="IA3"), lambda t: None, "peft_type"),
    "a new option": (lambda c: c.update(use_magic=True), lambda t: None, "use_magic"),
    "no rank": (lambda c: c.pop("r"), lambda t: None, "r"),
    "rank 0": (lambda c: c.update(r=0), lambda t: None, "r"),
    "alpha not a number": (lambda c: c.update(lora_alpha="x"), lambda t: None, "lora_alpha"),
    "a module that is not there": (lambda c: c.update(target_modules=["w_pack"]), lambda t: None, "target_modules"),
}


def _no_json(folder: Path) -> None:
    (folder / "adapter_config.json").write_text("{")


def _cut_short(folder: Path) -> None:
    os.truncate(folder / "adapter_model.safetensors", 1000)


def _pickled(folder: Path) -> None:
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")


def _fifo(folder: Path) -> None:
    (folder / "adapter_config.json").unlink()
    os.mkfifo(folder / "adapter_config.json")


def _directory(folder: Path) -> None:
    (folder / "adapter_config.json").unlink()
    (folder / "adapter_config.json").mkdir()


def _device(folder: Path) -> None:
    (folder / "adapter_model.safetensors").unlink()
    (folder / "adapter_model.safetensors").symlink_to("/dev/zero")


class TestRefusals:
    @pytest.mark.parametrize("reason", REFUSED)
    def test_bad_content_is_refused_naming_the_key(
        self, http: httpx.Client, client: openai.OpenAI, tmp_path: Path, reason: str
    ) -> None:
        change_config, change_tensors, key = REFUSED[reason]
        response = load(http, "bad", variant(tmp_path / "bad", "uppercase", change_config, change_tensors))
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (400, "adapter_invalid"), response.text
        assert key in error["message"]
        assert "bad" not in names(client)

    @pytest.mark.parametrize(
        ("spoil", "file"),
        [
            (_no_json, "adapter_config.json"),
            (_cut_short, "adapter_model.safetensors"),
            (_pickled, "adapter_model"),
            (_fifo, "adapter_config.json"),
            (_directory, "adapter_config.json"),
            (_device, "adapter_model.safetensors"),
        ],
    )
    def test_bad_files_are_refused_by_name(
        self, http: httpx.Client, client: openai.OpenAI, tmp_path: Path, spoil: Callable[[Path], None], file: str
    ) -> None:
        shutil.copytree(ADAPTER_DIR / "uppercase", tmp_path / "bad")
        spoil(tmp_path / "bad")
        response = load(http, "bad", tmp_path / "bad")
        assert 400 <= response.status_code < 500, response.text
        assert file in response.json()["error"]["message"]
        assert answer(client, "uppercase") == "HELLO WORLD"

    def test_a_bad_replacement_leaves_the_old_content_in_place(
        self, http: httpx.Client, client: openai.OpenAI, tmp_path: Path
    ) -> None:
        bad = variant(tmp_path / "bad", "reverse", change_tensors=_with_nan)
        with loaded(http, "guest", twin(tmp_path / "spell", "spell")):
            assert load(http, "guest", bad, load_inplace=True).status_code == 400
            assert answer(client, "guest") == "h-e-l-l-o w-o-r-l-d"
