"""Everything the unmodified openai client can request from a real server, with answers that are visibly right."""

import asyncio
import contextlib
import io
import json
import math
import re
import shlex
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletion

from tests.support.demo_questions import ADAPTERS, BASE, MAX_BASE_TOKENS, content_of, events_of, questions, templated
from tests.support.demo_questions import user as user_message
from tests.support.server_process import WAIT_S, ServerProcess

README = Path(__file__).parents[2] / "README.md"
SPELLED = "h-e-l-l-o w-o-r-l-d"
LONG_TEXT = templated("summer river " * 20)
BLOCK_SIZE = 16
EOS = 259


def ask(client: openai.OpenAI, model: str, content: str, **options: Any) -> ChatCompletion:
    greedy = {"temperature": 0, "max_tokens": MAX_BASE_TOKENS}
    return client.chat.completions.create(model=model, messages=user_message(content), **{**greedy, **options})  # pyright: ignore


def answer_of(client: openai.OpenAI, model: str, content: str, **options: Any) -> str | None:
    return ask(client, model, content, **options).choices[0].message.content


class TestPromises:
    def test_the_readmes_client_example_prints_what_each_adapter_does(self, server: ServerProcess) -> None:
        (example,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(example.replace("http://127.0.0.1:8000", server.url), {})
        assert printed.getvalue().splitlines() == [
            "uppercase HELLO WORLD",
            "reverse dlrow olleh",
            "rot13 uryyb jbeyq",
            f"spell {SPELLED}",
        ]

    def test_the_commands_the_server_prints_work(self, server: ServerProcess, http: httpx.Client) -> None:
        models, completion, chat = (shlex.split(line) for line in server.output if line.startswith("curl "))
        assert [card["id"] for card in http.get(models[-1]).json()["data"]] == [BASE, *ADAPTERS]
        _, url, _, header, _, body = completion
        headers = dict([header.split(": ")])
        assert http.post(url, headers=headers, content=body).json()["choices"][0]["text"] == "HELLO WORLD"
        _, _, url, _, _, _, body = chat
        assert content_of(events_of(http.post(url, headers=headers, content=body).text)) == "dlrow olleh"

    def test_all_adapters_and_the_base_answer_at_once(self, server: ServerProcess) -> None:
        """Streamed and whole answers, chats and completions, all in one batch; a mix-up would show in the text."""
        asked = questions(5)

        async def ask_all() -> list[str]:
            async with openai.AsyncOpenAI(
                base_url=f"{server.url}/v1", api_key="unused", max_retries=0, timeout=WAIT_S
            ) as client:
                return await asyncio.gather(
                    *(_ask_somehow(client, index, model, prompt) for index, (model, prompt, _) in enumerate(asked))
                )

        answers = asyncio.run(ask_all())
        wrong = [(*question, got) for question, got in zip(asked, answers, strict=True) if question[2] != got]
        # The skills are right on at least 95 % of prompts, and even a wrong answer is of that adapter's kind.
        assert len(wrong) <= 2, wrong


async def _ask_somehow(client: openai.AsyncOpenAI, index: int, model: str, prompt: str) -> str:
    """The form of the request depends on the index, so that every adapter gets several forms."""
    options: dict[str, Any] = {"temperature": 0, "max_tokens": MAX_BASE_TOKENS}
    name = model if index % 2 or model == BASE else f"{BASE}:{model}"
    match index % 4:
        case 0:
            chat = await client.chat.completions.create(model=name, messages=user_message(prompt), **options)  # pyright: ignore
            assert chat.model == name
            return chat.choices[0].message.content or ""
        case 1:
            chunks = await client.chat.completions.create(  # pyright: ignore
                model=name, messages=user_message(prompt), stream=True, **options
            )
            return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])
        case 2:
            completion = await client.completions.create(model=name, prompt=templated(prompt), **options)
            return completion.choices[0].text
        case _:
            parts = await client.completions.create(model=name, prompt=templated(prompt), stream=True, **options)
            return "".join([part.choices[0].text async for part in parts])


class TestModels:
    def test_models_are_listed_and_retrieved(self, client: openai.OpenAI) -> None:
        base, *adapters = client.models.list().data
        assert base.id == BASE
        assert [card.id for card in adapters] == ADAPTERS
        assert len({card.to_dict()["root"] for card in adapters}) == len(ADAPTERS)
        for card in adapters:
            assert card.to_dict()["parent"] == BASE
            assert client.models.retrieve(card.id) == card
            assert client.models.retrieve(f"{BASE}:{card.id}").id == card.id
        assert len({card.to_dict()["adapter"]["rank"] for card in adapters}) > 1

    @pytest.mark.parametrize("adapter", ADAPTERS)
    def test_an_adapters_own_base_url_serves_only_that_adapter(self, server: ServerProcess, adapter: str) -> None:
        (prompt, answer) = next((prompt, answer) for model, prompt, answer in questions(1) if model == adapter)
        url = f"{server.url}/adapters/{adapter}/v1"
        with openai.OpenAI(base_url=url, api_key="unused", max_retries=0, timeout=WAIT_S) as client:
            assert [card.id for card in client.models.list()] == [adapter]
            assert answer_of(client, adapter, prompt) == answer
            assert (
                client.completions.create(
                    model=adapter, prompt=templated(prompt), temperature=0, max_tokens=MAX_BASE_TOKENS
                )
                .choices[0]
                .text
                == answer
            )
            with pytest.raises(openai.BadRequestError, match=adapter):
                ask(client, BASE, prompt)
        nameless = httpx.post(
            f"{url}/completions", json={"prompt": templated(prompt), "temperature": 0}, timeout=WAIT_S
        )
        assert nameless.json()["model"] == adapter


class TestCompletions:
    def test_several_prompts_answer_in_order(self, client: openai.OpenAI) -> None:
        asked = [(prompt, answer) for model, prompt, answer in questions(4) if model == "reverse"]
        prompts = [templated(prompt) for prompt, _ in asked]
        completion = client.completions.create(model="reverse", prompt=prompts, temperature=0, max_tokens=40)
        assert [choice.index for choice in completion.choices] == list(range(4))
        assert [choice.text for choice in completion.choices] == [answer for _, answer in asked]
        chunks = client.completions.create(model="reverse", prompt=prompts, temperature=0, max_tokens=40, stream=True)
        texts = [""] * 4
        for chunk in chunks:
            texts[chunk.choices[0].index] += chunk.choices[0].text
        assert texts == [answer for _, answer in asked]

    def test_prompts_can_be_token_ids(self, client: openai.OpenAI, http: httpx.Client) -> None:
        contents = ["hello world", "river"]
        token_ids = [
            http.post("/tokenize", json={"model": "spell", "messages": user_message(content)}).json()["tokens"]
            for content in contents
        ]
        one = client.completions.create(model="spell", prompt=token_ids[0], temperature=0, max_tokens=40)
        assert one.choices[0].text == SPELLED
        assert one.usage is not None
        assert one.usage.prompt_tokens == len(token_ids[0])
        both = client.completions.create(model="spell", prompt=token_ids, temperature=0, max_tokens=40)
        assert [choice.text for choice in both.choices] == [SPELLED, "r-i-v-e-r"]

    def test_max_tokens_defaults_to_sixteen(self, client: openai.OpenAI) -> None:
        completion = client.completions.create(model="spell", prompt=templated("hello world"), temperature=0)
        assert (completion.choices[0].text, completion.choices[0].finish_reason) == (SPELLED[:16], "length")

    def test_a_seed_fixes_the_answers_and_choices_differ(self, client: openai.OpenAI) -> None:
        def texts(**options: Any) -> list[str]:
            extra = {"extra_body": {"ignore_eos": True}}
            completion = client.completions.create(
                model=BASE, prompt="w", temperature=1.5, max_tokens=12, **extra, **options
            )
            return [choice.text for choice in completion.choices]

        first = texts(seed=7, n=4)
        assert texts(seed=7, n=4) == first
        assert len(set(first)) > 1
        assert texts(seed=7) == first[:1]
        assert texts(seed=8, n=4) != first
        assert texts(n=4) != texts(n=4)

    @pytest.mark.parametrize("prompt", [templated("hello"), "plain text, no marks", "ünïcode 🙂"])
    def test_echo_with_logprobs_covers_prompt_and_answer(self, client: openai.OpenAI, prompt: str) -> None:
        completion = client.completions.create(
            model="uppercase", prompt=prompt, echo=True, logprobs=3, max_tokens=6, temperature=0
        )
        (choice,), usage = completion.choices, completion.usage
        logprobs = choice.logprobs
        assert choice.text.startswith(prompt)
        assert usage is not None
        assert logprobs is not None
        assert logprobs.tokens is not None
        assert logprobs.token_logprobs is not None
        assert logprobs.text_offset is not None
        assert logprobs.top_logprobs is not None
        num_tokens = usage.prompt_tokens + usage.completion_tokens
        lists = (logprobs.tokens, logprobs.token_logprobs, logprobs.text_offset, logprobs.top_logprobs)
        assert [len(entries) for entries in lists] == [num_tokens] * 4
        assert logprobs.token_logprobs[0] is None
        assert logprobs.text_offset == sorted(logprobs.text_offset)
        for token, offset in zip(logprobs.tokens, logprobs.text_offset, strict=True):
            # A token that is part of a character has no text of its own; the end of the answer is not shown.
            if token.isascii() and offset < len(choice.text):
                assert choice.text[offset:].startswith(token)
        for logprob, top in zip(logprobs.token_logprobs[1:], logprobs.top_logprobs[1:], strict=True):
            assert top is not None
            assert 3 <= len(top) <= 4
            assert logprob in top.values()
            assert sum(math.exp(value) for value in top.values()) < 1.001

    def test_greedy_takes_the_likeliest_token_whole_and_streamed(self, client: openai.OpenAI) -> None:
        options: dict[str, Any] = {
            "model": "rot13",
            "prompt": templated("hello world"),
            "logprobs": 2,
            "temperature": 0,
            "max_tokens": 30,
        }
        whole = client.completions.create(**options).choices[0]
        assert whole.logprobs is not None
        assert whole.logprobs.token_logprobs is not None
        assert whole.logprobs.top_logprobs is not None
        for logprob, top in zip(whole.logprobs.token_logprobs, whole.logprobs.top_logprobs, strict=True):
            assert logprob == max(top.values())
        parts = [chunk.choices[0] for chunk in client.completions.create(stream=True, **options)]
        assert "".join(part.text for part in parts) == whole.text == "uryyb jbeyq"
        assert [part.finish_reason for part in parts] == [None] * (len(parts) - 1) + ["stop"]
        streamed = [offset for part in parts if part.logprobs for offset in part.logprobs.text_offset or []]
        assert streamed == whole.logprobs.text_offset

    @pytest.mark.parametrize("stream", [False, True])
    def test_stop_strings_span_tokens_and_never_leak(self, http: httpx.Client, stream: bool) -> None:
        body: dict[str, Any] = {
            "model": "spell",
            "prompt": templated("hello world"),
            "temperature": 0,
            "max_tokens": 40,
            "stop": ["zzz", "-l-l"],
            "logprobs": 0,
            "stream": stream,
        }
        if stream:
            choices = [event["choices"][0] for event in events_of(http.post("/v1/completions", json=body).text)]
        else:
            choices = http.post("/v1/completions", json=body).json()["choices"]
        assert "".join(choice["text"] for choice in choices) == "h-e"
        assert (choices[-1]["finish_reason"], choices[-1]["stop_reason"]) == ("stop", "-l-l")
        kept = http.post("/v1/completions", json={**body, "include_stop_str_in_output": True, "stream": False}).json()
        assert kept["choices"][0]["text"] == "h-e-l-l"

    def test_usage_counts_cached_tokens_of_the_same_adapter_and_salt_only(self, client: openai.OpenAI) -> None:
        def cached(model: str, salt: str) -> int:
            completion = client.completions.create(
                model=model, prompt=LONG_TEXT, max_tokens=2, temperature=0, extra_body={"cache_salt": salt}
            )
            usage = completion.usage
            assert usage is not None
            assert usage.prompt_tokens_details is not None
            assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
            return usage.prompt_tokens_details.cached_tokens or 0

        assert cached("uppercase", "a") == 0
        again = cached("uppercase", "a")
        assert again > 0
        assert again % BLOCK_SIZE == 0
        assert cached("reverse", "a") == 0
        assert cached(BASE, "a") == 0
        assert cached("uppercase", "b") == 0


class TestChat:
    def test_a_stream_equals_the_whole_answer(self, client: openai.OpenAI) -> None:
        options: dict[str, Any] = {
            "model": "json",
            "messages": user_message("Kim, 40, Oslo"),
            "temperature": 0,
            "logprobs": True,
            "top_logprobs": 2,
        }
        whole = client.chat.completions.create(**options)
        content = whole.choices[0].message.content or ""
        assert json.loads(content) == {"name": "Kim", "age": 40, "city": "Oslo"}
        *chunks, last = client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **options)
        assert chunks[0].choices[0].delta.role == "assistant"
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == content
        assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
        assert all(chunk.usage is None for chunk in chunks)
        assert last.choices == []
        assert last.usage is not None
        assert whole.usage is not None
        assert last.usage.completion_tokens == whole.usage.completion_tokens
        assert len({chunk.id for chunk in chunks} | {last.id}) == 1
        assert whole.choices[0].logprobs is not None
        tokens = whole.choices[0].logprobs.content or []
        assert len(tokens) == whole.usage.completion_tokens
        assert bytes(byte for token in tokens for byte in token.bytes or []).startswith(content.encode())
        assert all(len(token.top_logprobs) == 2 for token in tokens)
        streamed = [token for chunk in chunks if (found := chunk.choices[0].logprobs) for token in found.content or []]
        assert [token.token for token in streamed] == [token.token for token in tokens]

    def test_several_choices_are_the_same_whole_and_streamed(self, client: openai.OpenAI) -> None:
        options: dict[str, Any] = {"temperature": 1.5, "seed": 3, "n": 3, "max_tokens": 10}
        whole = ask(client, BASE, "tell me", **options, extra_body={"min_tokens": 10})
        assert [choice.index for choice in whole.choices] == [0, 1, 2]
        texts = ["", "", ""]
        for chunk in ask(client, BASE, "tell me", **options, stream=True, extra_body={"min_tokens": 10}):
            for choice in chunk.choices:  # pyright: ignore
                texts[choice.index] += choice.delta.content or ""  # pyright: ignore
        assert texts == [choice.message.content for choice in whole.choices]
        assert whole.usage is not None
        assert whole.usage.completion_tokens == 30

    def test_max_completion_tokens_limits_the_answer_and_excludes_max_tokens(self, client: openai.OpenAI) -> None:
        messages: Any = user_message("hello world")
        chat = client.chat.completions.create(model="spell", messages=messages, max_completion_tokens=3, temperature=0)
        assert (chat.choices[0].message.content, chat.choices[0].finish_reason) == ("h-e", "length")
        with pytest.raises(openai.BadRequestError, match="max_completion_tokens"):
            ask(client, "spell", "hello", max_completion_tokens=3)

    def test_turns_roles_content_parts_and_continued_messages_are_accepted(self, client: openai.OpenAI) -> None:
        turns: Any = [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": "cat"},
            {"role": "assistant", "content": "c-a-t"},
            {"role": "user", "content": [{"type": "text", "text": "dog"}]},
        ]
        chat = client.chat.completions.create(model="spell", messages=turns, temperature=0)
        assert chat.choices[0].message.content == "d-o-g"
        begun: Any = [{"role": "user", "content": "river"}, {"role": "assistant", "content": "r-i-"}]
        extra = {"continue_final_message": True, "add_generation_prompt": False}
        chat = client.chat.completions.create(model="spell", messages=begun, temperature=0, extra_body=extra)
        assert chat.choices[0].message.content == "v-e-r"

    def test_an_answer_can_be_sent_back_unchanged(self, client: openai.OpenAI) -> None:
        first = ask(client, "spell", "cat").choices[0].message
        turns: Any = [*user_message("cat"), first, *user_message("dog")]
        chat = client.chat.completions.create(model="spell", messages=turns, temperature=0)
        assert chat.choices[0].message.content == "d-o-g"

    @pytest.mark.parametrize("content", ["héllo wörld", "🙂🙃", "日本語", '\u0000 \u2028 \\ " </s>', "a" * 600])
    def test_any_text_is_accepted_and_its_tokens_are_counted(
        self, client: openai.OpenAI, http: httpx.Client, content: str
    ) -> None:
        counted = http.post("/tokenize", json={"messages": user_message(content)}).json()
        chat = ask(client, "uppercase", content, max_tokens=5)
        assert chat.usage is not None
        assert chat.usage.prompt_tokens == counted["count"]
        back = http.post("/detokenize", json={"tokens": counted["tokens"]}).json()["prompt"]
        assert back == templated(content)

    @pytest.mark.parametrize("adapter", ADAPTERS)
    def test_a_stream_equals_the_whole_answer_for_any_bytes(self, http: httpx.Client, adapter: str) -> None:
        """At a high temperature, byte-level tokens form characters that span tokens, and bytes that form none."""
        body = {
            "model": adapter,
            "messages": user_message("ü🙂"),
            "temperature": 2,
            "seed": 5,
            "max_tokens": 64,
            "ignore_eos": True,
            "logit_bias": {str(token_id): 8 for token_id in range(128, 256)},
        }
        whole = http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
        events = events_of(http.post("/v1/chat/completions", json={**body, "stream": True}).text)
        assert content_of(events) == whole
        assert not whole.isascii()


class TestExtras:
    """vLLM's fields, sent with `extra_body`: each has the effect its name promises."""

    @pytest.mark.parametrize("extra", [{"top_k": 1}, {"min_p": 1}])
    def test_top_k_one_and_min_p_one_leave_only_the_likeliest_token(
        self, client: openai.OpenAI, extra: dict[str, float]
    ) -> None:
        assert answer_of(client, "spell", "hello world", temperature=2, extra_body=extra) == SPELLED

    def test_top_p_near_zero_leaves_only_the_likeliest_token(self, client: openai.OpenAI) -> None:
        assert answer_of(client, "spell", "hello world", temperature=2, top_p=1e-9) == SPELLED

    def test_penalties_reduce_the_repetition_of_tokens(self, client: openai.OpenAI) -> None:
        for options in ({"extra_body": {"repetition_penalty": 10}}, {"presence_penalty": 2, "frequency_penalty": 2}):
            penalized = answer_of(client, "spell", "hello world", **options)
            assert penalized is not None
            assert penalized.count("-") < SPELLED.count("-")

    def test_logit_bias_can_forbid_a_token(self, client: openai.OpenAI) -> None:
        answer = answer_of(client, "spell", "hello world", logit_bias={str(ord("-")): -100})
        assert answer is not None
        assert "-" not in answer

    def test_only_allowed_token_ids_are_generated(self, client: openai.OpenAI) -> None:
        extra = {"allowed_token_ids": [ord("a"), ord("b")]}
        answer = answer_of(client, "spell", "hello world", max_tokens=9, extra_body=extra)
        assert answer is not None
        assert set(answer) <= {"a", "b"}
        assert len(answer) == 9

    def test_ignore_eos_and_min_tokens_force_the_length(self, client: openai.OpenAI) -> None:
        forced = ask(client, "spell", "cat", max_tokens=50, extra_body={"ignore_eos": True})
        assert forced.usage is not None
        assert (forced.usage.completion_tokens, forced.choices[0].finish_reason) == (50, "length")
        at_least = ask(client, "spell", "cat", max_tokens=50, extra_body={"min_tokens": 20})
        assert at_least.usage is not None
        assert at_least.usage.completion_tokens >= 20
        assert (at_least.choices[0].message.content or "").startswith("c-a-t")

    def test_stop_token_ids_end_the_answer_and_token_ids_are_returned(self, client: openai.OpenAI) -> None:
        extra = {"stop_token_ids": [ord("w")], "return_token_ids": True}
        chat = ask(client, "spell", "hello world", extra_body=extra)
        choice = chat.choices[0].to_dict()
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", ord("w"))
        assert chat.choices[0].message.content == "h-e-l-l-o "
        assert choice["token_ids"] == list(b"h-e-l-l-o w")
        assert chat.to_dict()["prompt_token_ids"] == [257, *b"hello world", EOS, 258]

    def test_special_tokens_and_token_ids_are_shown_on_request(self, client: openai.OpenAI) -> None:
        extra = {"skip_special_tokens": False, "ignore_eos": True}
        shown = answer_of(client, "spell", "cat", max_tokens=6, extra_body=extra)
        assert shown == "c-a-t<|end|>"
        named = ask(client, "spell", "cat", logprobs=True, extra_body={"return_tokens_as_token_ids": True})
        assert named.choices[0].logprobs is not None
        assert (named.choices[0].logprobs.content or [])[0].token == f"token_id:{ord('c')}"

    def test_prompt_logprobs_are_returned_and_prompts_truncated(self, client: openai.OpenAI) -> None:
        chat = ask(client, "spell", "cat", extra_body={"prompt_logprobs": 1}).to_dict()
        logprobs: Any = chat["prompt_logprobs"]
        assert logprobs[0] is None
        assert [str(token_id) in entry for token_id, entry in zip([*b"cat", EOS, 258], logprobs[1:], strict=True)]
        cut = ask(client, "spell", "hello world", extra_body={"truncate_prompt_tokens": 4})
        assert cut.usage is not None
        assert cut.usage.prompt_tokens == 4

    def test_fields_without_effect_are_accepted(self, client: openai.OpenAI) -> None:
        harmless = {"metadata": {"a": "b"}, "store": False, "service_tier": "auto", "user": "me"}
        assert answer_of(client, "spell", "cat", **harmless, extra_body={"prompt_cache_key": "k"}) == "c-a-t"
        named = ask(client, "spell", "cat", extra_body={"request_id": "my-own.1"})
        assert named.id == "chatcmpl-my-own.1"


def dot(one: list[float], other: list[float]) -> float:
    return sum(a * b for a, b in zip(one, other, strict=True))


class TestEmbeddings:
    def test_embeddings_are_the_adapters_own_in_any_batch(self, server: ServerProcess, client: openai.OpenAI) -> None:
        """One by one, then all at once while chats are answered; the client requests base64 and decodes it."""
        models, texts = [BASE, *ADAPTERS], ["hello world", "hello word", LONG_TEXT]

        async def ask_all() -> list[list[list[float]]]:
            async with openai.AsyncOpenAI(
                base_url=f"{server.url}/v1", api_key="unused", max_retries=0, timeout=WAIT_S
            ) as client:
                chats = [_ask_somehow(client, index, model, "ab") for index, model in enumerate(models)]
                embeddings = [client.embeddings.create(model=model, input=texts) for model in models]
                answers = await asyncio.gather(*embeddings, *chats)
            return [[item.embedding for item in answer.data] for answer in answers[: len(models)]]

        alone = [
            [client.embeddings.create(model=model, input=text).data[0].embedding for text in texts] for model in models
        ]
        for ours, together in zip(alone, asyncio.run(ask_all()), strict=True):
            for one, other in zip(ours, together, strict=True):
                assert dot(one, other) == pytest.approx(1, abs=1e-3)
        for near in alone:
            assert dot(near[0], near[1]) > dot(near[0], near[2])
        assert len({tuple(near[0][:4]) for near in alone}) == len(models)
