"""The bytes that each token stands for, derived from the tokenizer's own decoder."""

import re
from collections.abc import Callable

import msgspec
from tokenizers import Tokenizer

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")

TokenToBytes = Callable[[str], bytes]


class _Pattern(msgspec.Struct, frozen=True):
    String: str | None = None


class _Decoder(msgspec.Struct, frozen=True):
    """One step of the `decoder` section of tokenizer.json."""

    type: str
    decoders: list["_Decoder"] = []
    pattern: _Pattern | None = None
    content: str = ""
    replacement: str = ""
    stop: int = 0


class _TokenizerFile(msgspec.Struct, frozen=True):
    decoder: _Decoder | None = None


class TokenText:
    """The text of each token id, independent of its neighbors."""

    def __init__(self, tokenizer: Tokenizer, tokenizer_json: str) -> None:
        self._tokenizer = tokenizer
        self._rule = token_to_bytes_rule(tokenizer_json)
        self._cache: dict[int, bytes] = {}
        self._texts: dict[int, str | None] = {}
        self.special_ids = frozenset(
            token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special
        )

    @property
    def is_exact(self) -> bool:
        """Whether a text's bytes are the joined bytes of its tokens; if not, `bytes_of` is an approximation."""
        return self._rule is not None

    def bytes_of(self, token_id: int) -> bytes:
        """Empty for an id that the tokenizer does not know."""
        known = self._cache.get(token_id)
        if known is None:
            known = self._cache[token_id] = self._read(token_id)
        return known

    def try_text_of(self, token_id: int) -> str | None:
        """`bytes_of`, decoded by itself; None if it begins or ends inside a character."""
        try:
            return self._texts[token_id]
        except KeyError:
            text = self._texts[token_id] = _try_decode(self.bytes_of(token_id))
            return text

    def text_of(self, token_id: int) -> str:
        """For display: a token that is part of a character becomes U+FFFD."""
        return self.bytes_of(token_id).decode("utf-8", "replace")

    def _read(self, token_id: int) -> bytes:
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if self._rule is None:
            return self._tokenizer.decode([token_id], skip_special_tokens=False).encode()
        return self._rule(token)


def _try_decode(data: bytes) -> str | None:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None


def token_to_bytes_rule(tokenizer_json: str) -> TokenToBytes | None:
    """None if the decoder's result depends on neighboring tokens (WordPiece, CTC, …)."""
    decoder = msgspec.json.decode(tokenizer_json, type=_TokenizerFile).decoder
    if decoder is None:
        return None
    steps = decoder.decoders if decoder.type == "Sequence" else [decoder]
    if [step.type for step in steps] == ["ByteLevel"]:
        return _byte_level_bytes
    return _metaspace_rule(steps)


def _metaspace_rule(steps: list[_Decoder]) -> TokenToBytes | None:
    """SentencePiece style: replacements, <0xNN> bytes, and stripping the start of the whole text.

    The stripping is omitted: generated text continues a prompt, so its leading space is real.
    """
    replacements: list[tuple[str, str]] = []
    has_bytes = fused = False
    for step in steps:
        match step.type:
            case "Replace" if step.pattern is not None and step.pattern.String:
                replacements.append((step.pattern.String, step.content))
            case "Metaspace":
                replacements.append((step.replacement, " "))
            case "ByteFallback":
                has_bytes = True
            case "Fuse":
                fused = True
            case "Strip" if fused and step.stop == 0:
                pass
            case _:
                return None

    def rule(token: str) -> bytes:
        if has_bytes and (byte := BYTE_TOKEN.fullmatch(token)):
            return bytes([int(byte[1], 16)])
        for old, new in replacements:
            token = token.replace(old, new)
        return token.encode()

    return rule


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's mapping: printable Latin-1 stands for itself, every other byte for a character from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


BYTE_OF_CHAR = _byte_level_alphabet()


def _byte_level_bytes(token: str) -> bytes:
    """A token with any character outside the alphabet (an added token) stands for itself, as in tokenizers."""
    try:
        return bytes([BYTE_OF_CHAR[char] for char in token])
    except KeyError:
        return token.encode()
