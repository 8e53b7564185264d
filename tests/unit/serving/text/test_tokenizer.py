import asyncio
import re
import threading
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, normalizers, processors
from transformers import PreTrainedTokenizerFast

from loraserve.serving.errors import ErrorCode, ServingError
from loraserve.serving.text.chat_template import ChatTemplate
from loraserve.serving.text.conversation import ChatMessage, Conversation
from loraserve.serving.text.named_template import NamedChatTemplate
from loraserve.serving.text.tokenizer import Join, TextTokenizer
from tests.support.fake_engine_client import CHAT_TEMPLATE, make_model, make_tokenizer

TOKENIZER = make_tokenizer()
THEIRS = PreTrainedTokenizerFast(tokenizer_object=TOKENIZER, bos_token="<|bos|>", eos_token="<|eos|>")
OURS = TextTokenizer(make_model(TOKENIZER))


@given(st.text(alphabet=st.one_of(st.characters(codec="utf-8"), st.sampled_from("<|user>end \n")), max_size=60))
def test_completion_ids_equal_autotokenizers(text: str) -> None:
    assert asyncio.run(OURS.encode(text, add_special_tokens=True)) == THEIRS(text)["input_ids"]
    assert (
        asyncio.run(OURS.encode(text, add_special_tokens=False)) == THEIRS(text, add_special_tokens=False)["input_ids"]
    )


@given(st.text(alphabet=st.characters(codec="utf-8"), max_size=40))
def test_chat_ids_equal_autotokenizers(text: str) -> None:
    theirs = THEIRS.apply_chat_template(
        [{"role": "user", "content": text}],
        chat_template=CHAT_TEMPLATE,
        add_generation_prompt=True,
        return_dict=False,
    )
    ours = asyncio.run(OURS.encode_chat(Conversation([ChatMessage("user", text)]), add_special_tokens=False))
    assert ours == theirs


def test_long_texts_give_the_same_ids_in_a_thread() -> None:
    text = "The quick brown fox 🙂 " * 500
    assert asyncio.run(OURS.encode(text, add_special_tokens=True)) == THEIRS(text)["input_ids"]
    token_ids = THEIRS(text)["input_ids"]
    assert asyncio.run(OURS.decode(token_ids, skip_special_tokens=True)) == text
    assert asyncio.run(OURS.decode(token_ids[:5], skip_special_tokens=False)).startswith("<|bos|>")


@given(*2 * [st.text(alphabet=st.characters(codec="utf-8"), min_size=1, max_size=30)])
def test_pair_ids_equal_autotokenizers(first: str, second: str) -> None:
    for tokenizer in (TOKENIZER, changed(of_pairs)):
        theirs = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
        for add_special_tokens in (True, False):
            (found,) = encode_pairs(tokenizer, [(first, second)], add_special_tokens=add_special_tokens)
            assert found == theirs(first, second, add_special_tokens=add_special_tokens)["input_ids"]


def encode_pairs(
    tokenizer: Tokenizer,
    pairs: list[tuple[str, str]],
    join: Join | None = None,
    *,
    add_special_tokens: bool = True,
    longest: int | None = None,
) -> list[list[int]]:
    encoded = ours_of(tokenizer).encode_pairs(pairs, join, add_special_tokens=add_special_tokens, longest=longest)
    return asyncio.run(asyncio.wait_for(encoded, 60))


@cache
def ours_of(tokenizer: Tokenizer) -> TextTokenizer:
    return TextTokenizer(make_model(tokenizer))


@cache
def changed(change: Callable[[Tokenizer], Tokenizer]) -> Tokenizer:
    return change(make_tokenizer())


def of_pairs(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A", pair="<|bos|> $A <|bos|> $B", special_tokens=[("<|bos|>", 0)]
    )
    return tokenizer


def trimming(tokenizer: Tokenizer) -> Tokenizer:
    """Like GPT-NeoX's: the offsets of spaces are where they end."""
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    return tokenizer


def collapsing(tokenizer: Tokenizer) -> Tokenizer:
    """Like T5's: several spaces become one."""
    tokenizer.normalizer = normalizers.Replace(Regex(" {2,}"), " ")
    return tokenizer


def lowering(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase(), normalizers.Strip()])
    return tokenizer


ODD_TEXT = st.text(alphabet=st.one_of(st.characters(codec="utf-8"), st.sampled_from("helo  🙂éﷺİ")), max_size=30).map(
    lambda text: text + " " * (len(text) % 5)
)


@pytest.mark.parametrize("change", [of_pairs, trimming, collapsing, lowering])
@pytest.mark.parametrize("join", [None, "q: {} d: {} <|end|>".format, lambda query, document: f"{document}|{query}"])
@settings(deadline=None, max_examples=60)
@given(ODD_TEXT, ODD_TEXT, st.data())
def test_pairs_are_truncated_at_the_end_of_the_second_text(
    change: Callable[[Tokenizer], Tokenizer], join: Join | None, first: str, second: str, data: st.DataObject
) -> None:
    tokenizer = changed(change)
    (bare,), (whole,) = (encode_pairs(tokenizer, [(first, text)], join) for text in ("", second))
    longest = data.draw(st.integers(len(bare) + 1, max(len(whole), len(bare)) + 2))
    (found,) = encode_pairs(tokenizer, [(first, second)], join, longest=longest)
    assert len(found) <= longest
    if len(whole) <= longest:
        assert found == whole
    elif len(found) > len(bare):
        bare_second = second.lstrip()  # as the tokenizer may strip it
        beginnings = [text[:end] for text in (second, bare_second) for end in range(len(text) + 1)]
        assert found in encode_pairs(tokenizer, [(first, beginning) for beginning in beginnings], join)


def test_leading_spaces_that_a_tokenizer_strips_are_dropped() -> None:
    tokenizer, second = changed(lowering), " " * 3000 + "hello world " * 50
    (found,) = encode_pairs(tokenizer, [("hi", second)], "q: {} d: {} <|end|>".format, longest=40)
    assert 30 < len(found) <= 40
    (beginning,) = asyncio.run(ours_of(tokenizer).beginnings([second], 10))
    assert len(beginning) < 60


def test_trailing_spaces_are_cut_in_reasonable_time() -> None:
    for change in (trimming, collapsing):
        tokenizer = changed(change)
        (whole,) = encode_pairs(tokenizer, [("q", "ab" + "  " * 500)])
        (found,) = encode_pairs(tokenizer, [("q", "ab" + "  " * 500)], longest=len(whole) - 1)
        assert len(found) < len(whole)


@given(st.text(alphabet=st.one_of(st.characters(codec="utf-8"), st.sampled_from("helo 🙂é")), max_size=30), st.data())
def test_a_beginning_has_the_given_number_of_tokens_without_partial_characters(text: str, data: st.DataObject) -> None:
    token_ids = asyncio.run(OURS.encode(text, add_special_tokens=False))
    number = data.draw(st.integers(0, len(token_ids) + 1))
    (beginning,) = asyncio.run(OURS.beginnings([text], number))
    assert text.startswith(beginning)
    decoded = TOKENIZER.decode(token_ids[:number], skip_special_tokens=False)
    assert decoded.rstrip("\ufffd") in (beginning, beginning.rstrip("\ufffd"))
    assert (beginning == text) == (number >= len(token_ids))


def test_many_messages_are_rendered_off_the_event_loop_even_if_they_are_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []
    render = ChatTemplate.render

    def rendering(*args: Any) -> str:
        threads.append(threading.current_thread())
        return render(*args)

    monkeypatch.setattr(ChatTemplate, "render", rendering)
    for count in (1, 4096):
        chat = Conversation([ChatMessage("user", "")] * count)
        asyncio.run(OURS.encode_chat(chat, add_special_tokens=False))
    assert [thread is threading.main_thread() for thread in threads] == [True, False]


def test_many_texts_are_encoded_off_the_event_loop_even_if_they_are_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []
    encode = TextTokenizer._encode

    def encoding(*args: Any) -> list[int]:
        threads.append(threading.current_thread())
        return encode(*args)

    monkeypatch.setattr(TextTokenizer, "_encode", encoding)
    for count in (1, 2048):
        asyncio.run(OURS.encode_all([""] * count, add_special_tokens=True))
    assert [thread is threading.main_thread() for thread in threads] == [True] + [False] * 2048


def test_truncation_and_padding_in_the_tokenizer_file_are_disabled() -> None:
    tokenizer = make_tokenizer()
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=50)
    ours = TextTokenizer(make_model(tokenizer))
    text = "hello world, hello adapters"
    assert asyncio.run(ours.encode(text, add_special_tokens=True)) == THEIRS(text)["input_ids"]


def test_chats_use_the_template_that_the_adapter_names() -> None:
    templates = [
        NamedChatTemplate(name="plain", source="{{ eos_token }}{{ messages[0].content }}"),
        NamedChatTemplate(name="turns", source="{{ messages[0].content }}", stop_tokens=["<|end|>", "<|user|>"]),
    ]
    ends = TOKENIZER.token_to_id("<|end|>"), TOKENIZER.token_to_id("<|user|>")
    turn_end_ids = dict(zip(("<|end|>", "<|user|>"), ends, strict=True))
    for chat_template in (CHAT_TEMPLATE, None):
        ours = TextTokenizer(make_model(TOKENIZER, chat_template=chat_template, turn_end_ids=turn_end_ids), templates)
        chat = Conversation([ChatMessage("user", "hello")])
        token_ids = asyncio.run(ours.encode_chat(chat, add_special_tokens=False, template_name="plain"))
        assert token_ids == [1, *TOKENIZER.encode("hello", add_special_tokens=False).ids]
        with pytest.raises(ServingError, match="'other' is not available on this server") as caught:
            asyncio.run(ours.encode_chat(chat, add_special_tokens=False, template_name="other"))
        assert caught.value.code is ErrorCode.ADAPTER_TEMPLATE_MISSING
        named = [ours.turn_ends(name) for name in ("turns", "plain", "other", None)]
        assert named == [ends, (), (), ()]


def test_errors_about_tools_name_the_template_in_use() -> None:
    ours = TextTokenizer(make_model(TOKENIZER), [NamedChatTemplate(name="plain", source="{{ messages[0].content }}")])
    for name, called, flag in (
        (
            "plain",
            "the adapter's chat template 'plain' does not support tools",
            "one of that name that does (--adapter-chat-",
        ),
        (None, "the model's chat template does not support tools", "a --chat-template that does."),
    ):
        chat = Conversation([ChatMessage("user", "x")], tools=[{"type": "function", "function": {"name": "add"}}])
        with pytest.raises(ServingError, match=re.escape(called)) as caught:
            asyncio.run(ours.encode_chat(chat, add_special_tokens=False, template_name=name))
        assert f"Start the server with {flag}" in caught.value.message


def test_chats_are_refused_if_the_model_has_no_template() -> None:
    ours = TextTokenizer(make_model(TOKENIZER, chat_template=None))
    chat = Conversation([ChatMessage("user", "x")], param="input")
    with pytest.raises(ServingError, match="no chat template") as caught:
        asyncio.run(ours.encode_chat(chat, add_special_tokens=False))
    assert caught.value.param == "input"
