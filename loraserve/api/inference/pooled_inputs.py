"""Inputs of embedding, classification and scoring requests, as token ids."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, cast

from loraserve.api.http.ranges import check_range
from loraserve.api.inference.prompts import prompt_bytes, split_prompts, truncate_around
from loraserve.api.schemas.inputs import InputFields
from loraserve.control.names.resolve import ResolvedAdapter
from loraserve.engine.model_description import ModelDescription
from loraserve.serving.errors import ErrorCode, ServingError
from loraserve.serving.settings import RequestLimits
from loraserve.serving.text.tokenizer import TextTokenizer


class PooledInputs(Protocol):
    @property
    def param(self) -> str:
        """The request field of the inputs."""
        ...

    @property
    def num_inputs(self) -> int: ...

    @property
    def num_bytes(self) -> int:
        """Approximate size before tokenization."""
        ...

    async def token_ids(self, adapter: ResolvedAdapter | None, tokenizer: TextTokenizer) -> list[list[int]]:
        """The ids of each input, no more than the model takes. adapter: the one to be used; None = the base model.
        Raises `ServingError`."""
        ...


@dataclass(frozen=True, slots=True)
class GivenInputs:
    """Texts or token ids, as the request gives them."""

    given: Sequence[str | list[int]]
    body: InputFields
    max_model_len: int
    param: str = "input"

    @property
    def num_inputs(self) -> int:
        return len(self.given)

    @property
    def num_bytes(self) -> int:
        return sum(map(prompt_bytes, self.given))

    async def token_ids(self, adapter: ResolvedAdapter | None, tokenizer: TextTokenizer) -> list[list[int]]:
        limit, add_special_tokens = self.body.truncate_prompt_tokens, self.body.add_special_tokens is not False
        longest = longest_of(limit, self.max_model_len)
        if isinstance(self.given[0], str):
            texts = cast(Sequence[str], self.given)
            inputs = await tokenizer.encode_all(texts, add_special_tokens=add_special_tokens)
            too_long = [index for index, token_ids in enumerate(inputs) if len(token_ids) > longest]
            if limit is not None and too_long:
                bare = await tokenizer.encode_all([texts[index] for index in too_long], add_special_tokens=False)
                for index, token_ids in zip(too_long, bare, strict=True):
                    inputs[index] = truncate_around(inputs[index], token_ids, longest)
        else:
            inputs = cast(list[list[int]], self.given)
            if limit is not None:
                inputs = [token_ids[:longest] for token_ids in inputs]
        for index, token_ids in enumerate(inputs):
            which = "input" if len(inputs) == 1 else f"input[{index}]"
            if not token_ids:
                raise ServingError(ErrorCode.INVALID_VALUE, f"'{which}' has no tokens.", param="input")
            if len(token_ids) > longest:
                message = (
                    f"This model's maximum context length is {longest} tokens, but '{which}' has {len(token_ids)}."
                )
                message += " Shorten it, or send 'truncate_prompt_tokens': -1."
                raise ServingError(ErrorCode.CONTEXT_LENGTH_EXCEEDED, message, param="input")
        return inputs


def given_inputs(
    body: InputFields, _: ResolvedAdapter | None, model: ModelDescription, limits: RequestLimits
) -> GivenInputs:
    """Raises `ServingError`."""
    given = split_prompts("input", body.input, limits.max_inputs, model.vocab_size)
    check_truncation(body.truncate_prompt_tokens, model.max_model_len)
    return GivenInputs(given, body, model.max_model_len)


def check_truncation(limit: int | None, max_model_len: int) -> None:
    if limit is not None and limit != -1:
        check_range("truncate_prompt_tokens", limit, 1, max_model_len)


def longest_of(limit: int | None, max_model_len: int) -> int:
    """limit: -1 or None = the model's maximum."""
    return max_model_len if limit in (None, -1) else limit
