import asyncio
import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, processors
from transformers import PreTrainedTokenizerFast

from loraserve.serving.errors import ServingError
from loraserve.serving.text.chat_template import ChatTemplate
from loraserve.serving.text.conversation import ChatMessage, Conversation
from loraserve.serving.text.tokenizer import TextTokenizer
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
def test_pairs_are_autotokenizers(first: str, second: str) -> None:
    for tokenizer in (TOKENIZER, tokenizer_of_pairs()):
        ours = TextTokenizer(make_model(tokenizer))
        theirs = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
        for add_special_tokens in (True, False):
            (found,) = asyncio.run(ours.encode_pairs([(first, second)], add_special_tokens=add_special_tokens))
            assert found == theirs(first, second, add_special_tokens=add_special_tokens)["input_ids"]


def tokenizer_of_pairs() -> Tokenizer:
    tokenizer = make_tokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A", pair="<|bos|> $A <|bos|> $B", special_tokens=[("<|bos|>", 0)]
    )
    return tokenizer


@given(st.text(alphabet=st.one_of(st.characters(codec="utf-8"), st.sampled_from("helo 🙂é")), max_size=30), st.data())
def test_a_beginning_is_of_so_many_tokens_without_half_characters(text: str, data: st.DataObject) -> None:
    token_ids = asyncio.run(OURS.encode(text, add_special_tokens=False))
    number = data.draw(st.integers(0, len(token_ids) + 1))
    (beginning,) = asyncio.run(OURS.beginnings([text], [number]))
    assert text.startswith(beginning)
    assert TOKENIZER.decode(token_ids[:number], skip_special_tokens=False).rstrip("\ufffd") in (
        beginning,
        beginning.rstrip("\ufffd"),
    )
    assert (beginning == text) == (number >= len(token_ids))


def test_many_messages_are_no_work_for_the_event_loop_even_if_they_are_empty(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_many_texts_are_no_work_for_the_event_loop_even_if_they_are_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []
    encode = TextTokenizer._encode

    def encoding(*args: Any) -> list[int]:
        threads.append(threading.current_thread())
        return encode(*args)

    monkeypatch.setattr(TextTokenizer, "_encode", encoding)
    for count in (1, 2048):
        asyncio.run(OURS.encode_all([""] * count, add_special_tokens=True))
    assert [thread is threading.main_thread() for thread in threads] == [True] + [False] * 2048


def test_truncation_and_padding_of_the_file_are_switched_off() -> None:
    tokenizer = make_tokenizer()
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=50)
    ours = TextTokenizer(make_model(tokenizer))
    text = "hello world, hello adapters"
    assert asyncio.run(ours.encode(text, add_special_tokens=True)) == THEIRS(text)["input_ids"]


def test_a_model_without_a_template_says_so() -> None:
    ours = TextTokenizer(make_model(TOKENIZER, chat_template=None))
    chat = Conversation([ChatMessage("user", "x")], param="input")
    with pytest.raises(ServingError, match="no chat template") as caught:
        asyncio.run(ours.encode_chat(chat, add_special_tokens=False))
    assert caught.value.param == "input"
