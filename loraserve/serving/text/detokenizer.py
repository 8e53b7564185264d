"""Text of a growing token sequence. The joined pieces are the whole text; no piece ends inside a character."""

import codecs
from typing import Protocol

from tokenizers import Tokenizer

from loraserve.serving.text.token_text import TokenText

REPLACEMENT = "\ufffd"
PRIMER_TOKENS = 6
"""Enough context for decoders that depend on neighboring tokens (leading spaces, clean-up)."""
MAX_HELD_TOKENS = 16
"""A character is at most four bytes: text still incomplete after this many tokens is not UTF-8."""


class Detokenizer(Protocol):
    def step(self, token_id: int) -> str:
        """The text that became certain with this token; often empty inside a character."""
        ...

    def flush(self) -> str:
        """The rest, after the last token: an incomplete character becomes U+FFFD."""
        ...


class ByteDetokenizer:
    """For tokenizers whose tokens are pieces of bytes: an incremental UTF-8 decoder, constant work per token."""

    __slots__ = ("_decoder", "_is_inside", "_skipped", "_token_text")

    def __init__(self, token_text: TokenText, skip_special_tokens: bool) -> None:
        self._token_text = token_text
        self._skipped = token_text.special_ids if skip_special_tokens else frozenset[int]()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._is_inside = False
        """Whether the text so far ends inside a character, whose beginning is in the decoder."""

    def step(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        if not self._is_inside:
            text = self._token_text.try_text_of(token_id)
            if text is not None:
                return text
        text = self._decoder.decode(self._token_text.bytes_of(token_id))
        self._is_inside = bool(self._decoder.getstate()[0])
        return text

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer:
    """For any other tokenizer: decodes a short window with and without the newest tokens."""

    __slots__ = ("_num_read", "_read_text", "_skip_special_tokens", "_tokenizer", "_window")

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: list[int], skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._window = prompt_token_ids[-PRIMER_TOKENS:]
        self._num_read = len(self._window)
        self._read_text = self._decode(self._window)

    def step(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._decode(self._window)
        is_complete = len(text) > len(self._read_text) and not text.endswith(REPLACEMENT)
        if is_complete or len(self._window) - self._num_read > MAX_HELD_TOKENS:
            return self._advance(text)
        return ""

    def flush(self) -> str:
        return self._advance(self._decode(self._window))

    def _advance(self, text: str) -> str:
        delta = text[len(self._read_text) :]
        self._window = self._window[self._num_read :]
        self._num_read = len(self._window)
        self._read_text = self._decode(self._window)
        return delta

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens)
