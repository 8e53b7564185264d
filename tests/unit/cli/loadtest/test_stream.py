import json

import pytest

from loraserve.cli.loadtest.stream import has_token, last_events

TEXT = {"choices": [{"index": 0, "text": "x"}], "usage": None}
CHAT_OPENING = {"choices": [{"delta": {"role": "assistant", "content": ""}}]}
CHAT_OPENINGS = (
    CHAT_OPENING,
    {"choices": [{"delta": {"role": "assistant"}}]},
    {"choices": [{"delta": {"role": "assistant", "content": None}}]},
    {"choices": [{"delta": {"role": "assistant", "content": "", "reasoning_content": None, "tool_calls": []}}]},
    {"choices": [{"delta": {"content": "", "role": "assistant"}}]},
    {"choices": [{"delta": {"content": None, "role": "assistant", "function_call": None, "tool_calls": None}}]},
)
CHAT_TEXT = {"choices": [{"delta": {"content": "x"}}]}
BYTES_OF_A_CHARACTER = {"choices": [{"delta": {"content": ""}}]}
THOUGHTS = (
    {"choices": [{"delta": {"reasoning_content": "x", "reasoning": "x"}}]},
    {"choices": [{"delta": {"reasoning": "x"}}]},
    {"choices": [{"delta": {"role": "assistant", "content": None, "reasoning_content": "x"}}]},
    {"choices": [{"delta": {"role": "assistant", "content": "", "reasoning": "x", "tool_calls": None}}]},
    {"choices": [{"delta": {"role": None, "content": None, "reasoning_content": "x", "tool_calls": None}}]},
    {"choices": [{"delta": {"reasoning_content": "x", "content": None, "role": "assistant"}}]},
)
CHAT_END_OF_ALL_FIELDS = {"choices": [{"delta": {"role": None, "content": None, "tool_calls": None}}]}
CHAT_END = {"choices": [{"delta": {}, "finish_reason": "length"}]}
USAGE = {"choices": [], "usage": {"prompt_tokens": 2, "completion_tokens": 3}}
LORAX_CHAT_TEXT = {"choices": [{"delta": {"role": "assistant", "content": "x"}}]}


def compact(*payloads: object) -> bytes:
    """Events as loraserve, vLLM and SGLang write them."""
    return b"".join(b"data: %s\n\n" % json.dumps(payload, separators=(",", ":")).encode() for payload in payloads)


def spaced(*payloads: object) -> bytes:
    """Events of servers that use Python's json and a library that ends lines with \\r\\n."""
    return b"".join(b"data: %s\r\n\r\n" % json.dumps(payload).encode() for payload in payloads)


def tight(*payloads: object) -> bytes:
    """Events as LoRAX writes them."""
    return b"".join(b"data:%s\n\n" % json.dumps(payload, separators=(",", ":")).encode() for payload in payloads)


@pytest.mark.parametrize("write", [compact, spaced, tight])
class TestAnyStyle:
    def test_events_with_output_have_a_token(self, write) -> None:
        for payload in (TEXT, CHAT_TEXT, LORAX_CHAT_TEXT, BYTES_OF_A_CHARACTER, *THOUGHTS):
            assert has_token(write(payload))
        for opening in CHAT_OPENINGS:
            assert has_token(write(opening, CHAT_TEXT))
            assert has_token(write(opening, THOUGHTS[0]))
        assert has_token(write(TEXT, USAGE) + b"data: [DONE]\n\n")

    def test_role_deltas_ends_and_usage_have_no_token(self, write) -> None:
        for payload in (*CHAT_OPENINGS, CHAT_END, CHAT_END_OF_ALL_FIELDS, USAGE):
            assert not has_token(write(payload))
        assert not has_token(write(CHAT_END, USAGE) + b"data: [DONE]\n\n")

    def test_usage_and_errors_are_read_from_the_last_events(self, write) -> None:
        usage, error = last_events(write(TEXT, USAGE, {"error": {"message": "died"}}))[-2:]
        assert usage.usage is not None
        assert (usage.usage.prompt_tokens, usage.usage.completion_tokens) == (2, 3)
        assert error.error == {"message": "died"}


def test_a_text_that_looks_like_events_counts_as_output() -> None:
    text = compact({"choices": [{"text": 'data: [] "choices":[] "delta":{}\ndata: x'}]})
    assert has_token(text)


def test_keep_alive_comments_have_no_token() -> None:
    assert not has_token(b": ping\n\n")


def test_an_event_cut_in_two_is_left_out() -> None:
    assert last_events(compact(USAGE)[6:] + compact(TEXT)[:-10]) == []
