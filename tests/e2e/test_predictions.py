"""Predicted outputs and drafts on the real server: faster, with the same answers."""

import re
from typing import Any

import httpx
import openai
import pytest

from tests.support.demo_questions import questions, user

QUESTIONS = questions(2)


def drafted(http: httpx.Client) -> tuple[float, float]:
    """Tokens (drafted, accepted) so far."""
    text = http.get("/metrics").text
    found = [
        re.search(rf"vllm:spec_decode_num_{what}_tokens_total{{.*}} (\S+)", text) for what in ("draft", "accepted")
    ]
    first, second = (float(match[1]) for match in found if match)
    return first, second


@pytest.mark.parametrize("stream", [False, True])
def test_a_right_prediction_is_accepted_and_a_wrong_one_changes_nothing(client: openai.OpenAI, stream: bool) -> None:
    num_accepted = 0
    for model, prompt, expected in QUESTIONS:
        for predicted in (expected, expected[::-1]):
            asked: dict[str, Any] = {
                "model": model,
                "messages": user(prompt),
                "temperature": 0,
                "max_tokens": 60,
                "prediction": {"type": "content", "content": predicted},
            }
            if stream:
                options = {"include_usage": True}
                chunks = [*client.chat.completions.create(**asked, stream=True, stream_options=options)]
                text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
                usage = chunks[-1].usage
            else:
                answer = client.chat.completions.create(**asked)
                text, usage = answer.choices[0].message.content or "", answer.usage
            assert text == expected
            details = usage.completion_tokens_details
            assert details.accepted_prediction_tokens < usage.completion_tokens
            if predicted == expected:
                num_accepted += details.accepted_prediction_tokens
    assert num_accepted > 5 * len(QUESTIONS)


def test_a_right_prediction_after_a_stop_string_is_not_part_of_the_answer(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="uppercase",
        messages=user("hello world"),
        temperature=0,
        stop=["E"],
        prediction={"type": "content", "content": "HELLO WORLD"},
    )
    assert answer.choices[0].message.content == "H"
    usage = answer.usage
    assert usage is not None
    assert usage.completion_tokens_details is not None
    assert usage.completion_tokens_details.accepted_prediction_tokens is not None
    assert 0 < usage.completion_tokens_details.accepted_prediction_tokens <= usage.completion_tokens == 2


def test_repeated_text_is_drafted(client: openai.OpenAI, http: httpx.Client) -> None:
    before = drafted(http)
    asked = {"model": "uppercase", "messages": user("abc abc abc abc"), "max_tokens": 60, "temperature": 0}
    client.chat.completions.create(**asked)
    num_drafted, num_accepted = (now - then for now, then in zip(drafted(http), before, strict=True))
    assert num_drafted >= num_accepted > 0
