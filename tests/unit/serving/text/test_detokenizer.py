import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from loraserve.serving.text.detokenizer import ByteDetokenizer, Detokenizer, WindowDetokenizer
from loraserve.serving.text.token_text import TokenText, token_to_bytes_rule
from tests.support.fake_engine_client import make_tokenizer

BYTE_LEVEL = make_tokenizer()


def sentencepiece_tokenizer() -> Tokenizer:
    """Llama 2 style: ▁ for spaces, <0xNN> for bytes."""
    words = ["<s>", "</s>", "▁Hello", "▁world", "!", "▁", "e", "日"]
    vocabulary = {word: index for index, word in enumerate([*words, *(f"<0x{byte:02X}>" for byte in range(256))])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    return tokenizer


SENTENCEPIECE = sentencepiece_tokenizer()


def text_of(detokenizer: Detokenizer, token_ids: list[int]) -> str:
    return "".join([*(detokenizer.step(token_id) for token_id in token_ids), detokenizer.flush()])


def byte_detokenizer(tokenizer: Tokenizer, skip_special_tokens: bool = True) -> ByteDetokenizer:
    return ByteDetokenizer(TokenText(tokenizer, tokenizer.to_str()), skip_special_tokens)


@given(st.lists(st.integers(0, BYTE_LEVEL.get_vocab_size() - 1), max_size=40), st.booleans())
def test_pieces_joined_equal_the_tokenizers_own_decode(token_ids: list[int], skip: bool) -> None:
    expected = BYTE_LEVEL.decode(token_ids, skip_special_tokens=skip)
    assert text_of(byte_detokenizer(BYTE_LEVEL, skip), token_ids) == expected


@given(st.text(max_size=30))
def test_no_piece_ends_inside_a_character(text: str) -> None:
    detokenizer = byte_detokenizer(BYTE_LEVEL)
    token_ids = BYTE_LEVEL.encode(text, add_special_tokens=False).ids
    pieces = [detokenizer.step(token_id) for token_id in token_ids]
    assert "".join(pieces) == text
    assert detokenizer.flush() == ""


@given(st.text(alphabet="Hello world!e日🙂", max_size=20))
def test_sentencepiece_bytes_and_spaces_are_decoded(text: str) -> None:
    token_ids = [
        token_id
        for char in text
        for token_id in (
            [SENTENCEPIECE.token_to_id(char.replace(" ", "▁"))]
            if SENTENCEPIECE.token_to_id(char.replace(" ", "▁")) is not None
            else [SENTENCEPIECE.token_to_id(f"<0x{byte:02X}>") for byte in char.encode()]
        )
    ]
    assert text_of(byte_detokenizer(SENTENCEPIECE), token_ids) == text


def test_output_continues_the_prompt_so_its_leading_space_is_kept() -> None:
    ids = [SENTENCEPIECE.token_to_id(token) for token in ("▁Hello", "▁world", "!")]
    assert SENTENCEPIECE.decode(ids) == "Hello world!"
    assert text_of(byte_detokenizer(SENTENCEPIECE), ids) == " Hello world!"


def test_an_incomplete_character_at_the_end_becomes_a_replacement_character() -> None:
    ids = BYTE_LEVEL.encode("🙂", add_special_tokens=False).ids
    detokenizer = byte_detokenizer(BYTE_LEVEL)
    whole = bytes(BYTE_LEVEL.decode(ids), "utf-8")
    assert whole == "🙂".encode()
    byte_ids = [BYTE_LEVEL.token_to_id(char) for char in "ðŁĻ"]
    assert [detokenizer.step(token_id) for token_id in byte_ids] == ["", "", ""]
    assert detokenizer.flush() == "\ufffd"


@given(
    st.lists(st.integers(6, BYTE_LEVEL.get_vocab_size() - 1), max_size=30), st.lists(st.integers(6, 200), max_size=8)
)
def test_window_detokenizer_agrees_on_valid_text(token_ids: list[int], prompt: list[int]) -> None:
    text = BYTE_LEVEL.decode(token_ids)
    if "\ufffd" in text or "\ufffd" in BYTE_LEVEL.decode(prompt):
        return
    assert text_of(WindowDetokenizer(BYTE_LEVEL, prompt, True), token_ids) == text


def test_window_detokenizer_releases_bytes_that_form_no_character() -> None:
    detokenizer = WindowDetokenizer(BYTE_LEVEL, [], True)
    broken = BYTE_LEVEL.token_to_id("Ļ")  # 0x99, a continuation byte
    assert text_of(detokenizer, [broken] * 100) == "\ufffd" * 100


@pytest.mark.parametrize(
    "decoder",
    [
        {"type": "WordPiece", "prefix": "##", "cleanup": True},
        {"type": "Sequence", "decoders": [{"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
        {"type": "Sequence", "decoders": [{"type": "Replace", "pattern": {"Regex": "x+"}, "content": " "}]},
        None,
    ],
)
def test_decoders_that_depend_on_neighboring_tokens_have_no_rule(decoder: object) -> None:
    assert token_to_bytes_rule(json.dumps({"decoder": decoder})) is None


def test_token_text_handles_tokens_that_are_parts_of_characters() -> None:
    token_text = TokenText(BYTE_LEVEL, BYTE_LEVEL.to_str())
    piece = BYTE_LEVEL.token_to_id("ð")
    assert token_text.bytes_of(piece) == b"\xf0"
    assert token_text.text_of(piece) == "\ufffd"
    assert token_text.bytes_of(10**6) == b""
    assert token_text.text_of(0) == "<|bos|>"
