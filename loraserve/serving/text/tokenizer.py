"""Text to token ids and back, as in AutoTokenizer, without blocking the event loop."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from tokenizers import Encoding, Tokenizer

from loraserve.engine.model_description import ModelDescription
from loraserve.serving.text.chat_template import ChatTemplate, no_adapter_template, no_chat_template
from loraserve.serving.text.conversation import Conversation
from loraserve.serving.text.detokenizer import ByteDetokenizer, Detokenizer, WindowDetokenizer
from loraserve.serving.text.named_template import NamedChatTemplate
from loraserve.serving.text.token_text import TokenText

INLINE_SIZE = 2048
"""Work on up to this many characters or tokens is done on the event loop: about 1 ms, and no thread hop."""
TEXT_SIZE = 32
"""Cost of the call for one text, in characters, even if the text is empty: 5 to 13 µs."""
NUM_THREADS = 2

T = TypeVar("T")
Join = Callable[[str, str], str]


class TextTokenizer:
    """One per model. The methods that may take long are coroutines."""

    def __init__(self, model: ModelDescription, adapter_chat_templates: Sequence[NamedChatTemplate] = ()) -> None:
        self._tokenizer = Tokenizer.from_str(model.tokenizer_json)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._template = ChatTemplate(model.chat_template, model.special_tokens) if model.chat_template else None
        self._adapter_templates = {
            named.name: ChatTemplate(named.source, model.special_tokens, named.name) for named in adapter_chat_templates
        }
        self._turn_ends = {
            named.name: tuple(model.turn_end_ids[token] for token in named.stop_tokens)
            for named in adapter_chat_templates
        }
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="tokenize")
        self.token_text = TokenText(self._tokenizer, model.tokenizer_json)

    async def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return await self.run(len(text), lambda: self._encode(text, add_special_tokens))

    async def encode_all(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
        size = sum(map(len, texts)) + TEXT_SIZE * len(texts)
        return await self.run(size, lambda: [self._encode(text, add_special_tokens) for text in texts])

    async def encode_pairs(
        self, pairs: Sequence[tuple[str, str]], join: Join | None, *, add_special_tokens: bool, longest: int | None
    ) -> list[list[int]]:
        """join: makes one text of a pair; None = one after the other, with the separator of the model's tokenizer.
        longest: second texts are cut at the end so that no pair has more tokens, if possible; None = no cutting."""
        size = sum(len(first) + len(second) + TEXT_SIZE for first, second in pairs)
        return await self.run(
            size, lambda: [self._encode_pair(pair, join, add_special_tokens, longest) for pair in pairs]
        )

    async def beginnings(self, texts: Sequence[str], num_tokens: int) -> list[str]:
        """The part of each text that its first `num_tokens` tokens cover, without partial characters. Special tokens
        are not counted."""
        size = sum(map(len, texts)) + TEXT_SIZE * len(texts)
        return await self.run(size, lambda: [self._beginning(text, num_tokens) for text in texts])

    async def encode_chat(
        self, conversation: Conversation, *, add_special_tokens: bool, template_name: str | None = None
    ) -> list[int]:
        """template_name: a template for adapters; None = the base model's.

        Raises `ServingError` if there is no such template or it rejects the conversation.
        """
        template = self._template_called(template_name, conversation.param)

        def render_and_encode() -> list[int]:
            return self._encode(template.render(conversation), add_special_tokens)

        return await self.run(conversation.work_size, render_and_encode)

    def adapter_template(self, name: str | None) -> ChatTemplate | None:
        """None if the base model's template applies, or the name is unknown."""
        return None if name is None else self._adapter_templates.get(name)

    def turn_ends(self, template_name: str | None) -> tuple[int, ...]:
        """Tokens that end an answer with this template, besides the model's own. Empty if the template is unknown."""
        return self._turn_ends.get(template_name, ()) if template_name is not None else ()

    async def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        return await self.run(len(token_ids), lambda: self._decode(token_ids, skip_special_tokens))

    def decode_few(self, token_ids: Sequence[int]) -> str:
        """With special tokens. Runs on the caller's thread, so only for few tokens."""
        return self._decode(list(token_ids), skip_special_tokens=False)

    async def decode_all(self, sequences: Sequence[list[int]], *, skip_special_tokens: bool) -> list[str]:
        size = sum(map(len, sequences)) + TEXT_SIZE * len(sequences)
        return await self.run(size, lambda: [self._decode(token_ids, skip_special_tokens) for token_ids in sequences])

    def detokenizer(self, prompt_token_ids: list[int], *, skip_special_tokens: bool) -> Detokenizer:
        if self.token_text.is_exact:
            return ByteDetokenizer(self.token_text, skip_special_tokens)
        return WindowDetokenizer(self._tokenizer, prompt_token_ids, skip_special_tokens)

    def token_id(self, token: str) -> int | None:
        """Id of a token, written as in the vocabulary."""
        return self._tokenizer.token_to_id(token)

    async def token_strings(self, token_ids: list[int]) -> list[str | None]:
        """The tokens as written in the vocabulary."""
        return await self.run(len(token_ids), lambda: [self._tokenizer.id_to_token(token_id) for token_id in token_ids])

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def run(self, size: int, work: Callable[[], T]) -> T:
        """Run `work` on `size` characters or tokens: directly if that is short, else in a thread."""
        if size <= INLINE_SIZE:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def _template_called(self, name: str | None, param: str) -> ChatTemplate:
        if name is not None:
            if name not in self._adapter_templates:
                raise no_adapter_template(name)
            return self._adapter_templates[name]
        if self._template is None:
            raise no_chat_template(param)
        return self._template

    def _encode(self, text: str | tuple[str, str], add_special_tokens: bool) -> list[int]:
        # The batch call releases the interpreter lock, the single one does not.
        return self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def _encoded(self, text: str) -> Encoding:
        """Includes the position of each token in the text."""
        return self._tokenizer.encode_batch([text], add_special_tokens=False)[0]

    def _beginning(self, text: str, num_tokens: int) -> str:
        encoded = self._encoded(text)
        return text if len(encoded) <= num_tokens else _of_tokens(encoded, text, num_tokens)

    def _encode_pair(
        self, pair: tuple[str, str], join: Join | None, add_special_tokens: bool, longest: int | None
    ) -> list[int]:
        first, second = pair

        def encode(second: str) -> list[int]:
            return self._encode((first, second) if join is None else join(first, second), add_special_tokens)

        token_ids = encode(second)
        if longest is None or len(token_ids) <= longest:
            return token_ids
        whole, kept, least = self._encoded(second), second, 1
        num_kept = len(whole)
        while True:
            if (left := _of_tokens(whole, second, num_kept)) != kept:
                kept, token_ids = left, encode(left)
            if len(token_ids) <= longest or num_kept == 0:
                return token_ids
            # The rest may tokenize differently, into as many tokens. The minimum cut doubles, so the loop ends soon.
            num_kept = max(0, num_kept - max(len(token_ids) - longest, least))
            least *= 2

    def _decode(self, token_ids: list[int], skip_special_tokens: bool) -> str:
        return self._tokenizer.decode_batch([token_ids], skip_special_tokens=skip_special_tokens)[0]


def _of_tokens(encoded: Encoding, text: str, num_tokens: int) -> str:
    """The part of the text that its first `num_tokens` tokens cover. encoded: the text."""
    # NOTE: do not use `offsets`: it builds a tuple for each token while holding the interpreter lock.
    first = encoded.token_to_chars(0) if num_tokens else None
    if first is None:
        return ""
    end = encoded.token_to_chars(num_tokens) if num_tokens < len(encoded) else None
    # Starts at the first token: characters that the tokenizer strips there would become tokens after other text.
    return text[first[0] : len(text) if end is None else end[0]]
