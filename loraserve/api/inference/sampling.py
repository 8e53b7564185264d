"""Checks a request's fields and turns them into the engine's sampling parameters."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from loraserve.api.http.ranges import INT64, check_at_most, check_range, check_token_ids, unsupported
from loraserve.api.http.request_id import HARMLESS_ID
from loraserve.api.inference.common_fields import CommonFields, checked_fields
from loraserve.api.inference.structured_outputs import RequestedFormat, formats_of, grammar_of
from loraserve.api.schemas.sampling import GenerationFields, SamplingFields
from loraserve.engine.model_description import ModelDescription
from loraserve.engine.request import GrammarCalls, SamplingParams
from loraserve.serving.errors import ErrorCode, ServingError, invalid_value
from loraserve.serving.settings import RequestLimits
from loraserve.serving.text.choice import TextOptions

T = TypeVar("T")

GREEDY_BELOW = 1e-5
MIN_TEMPERATURE = 1e-2
"""As in vLLM: below the first, sampling is greedy; below the second, which is used instead, logits could overflow."""
NUM_SEEDS = 2**62
"""Seeds are reduced modulo this number so that seed + choice stays a positive int64."""


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Values for fields that a request omits: from the model's generation_config, otherwise OpenAI's defaults."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_new_tokens: int | None = None

    @classmethod
    def of(cls, model: ModelDescription) -> "SamplingDefaults":
        given = model.default_sampling
        max_new_tokens = given.get("max_new_tokens")
        return cls(
            temperature=float(given.get("temperature", 1.0)),
            top_p=float(given.get("top_p", 1.0)),
            top_k=int(given.get("top_k", 0)),
            min_p=float(given.get("min_p", 0.0)),
            repetition_penalty=float(given.get("repetition_penalty", 1.0)),
            max_new_tokens=None if max_new_tokens is None else int(max_new_tokens),
        )


@dataclass(frozen=True, slots=True)
class CheckedSampling:
    """Everything that does not depend on the prompt. max_tokens and seed in `params` are still to be set per prompt."""

    params: SamplingParams
    text: TextOptions
    max_tokens: int | None
    seed: int | None
    fields: CommonFields


class SamplingChecker:
    """One per app."""

    def __init__(self, model: ModelDescription, limits: RequestLimits) -> None:
        self._vocab_size = model.vocab_size
        self._max_model_len = model.max_model_len
        self._is_headless = model.is_headless
        self._eos_token_ids = frozenset(model.eos_token_ids)
        self._turn_end_ids = tuple(model.turn_end_ids.values())
        self._limits = limits
        self._defaults = SamplingDefaults.of(model)

    def check(
        self,
        request: GenerationFields,
        *,
        max_tokens: int | None,
        logprobs: int | None,
        prompt_logprobs: int | None,
        tool_schema: dict[str, Any] | None = None,
        calls: GrammarCalls | None = None,
    ) -> CheckedSampling:
        """For completions and chats. Raises `ServingError`. max_tokens: 0 = generate nothing."""
        check_stream_options(request.stream, request.stream_options)
        if request.prompt_logprobs is not None:
            if request.stream:
                raise unsupported("prompt_logprobs", "is not available with 'stream': true.")
            self.check_top_logprobs("prompt_logprobs", request.prompt_logprobs)
        n = _or(request.n, 1)
        check_range("n", n, 1, self._limits.max_n)
        checked = self.check_shared(
            request,
            max_tokens=max_tokens,
            logprobs=logprobs,
            formats=formats_of(request),
            tool_schema=tool_schema,
            calls=calls,
        )
        return replace(checked, params=replace(checked.params, n=n, prompt_logprobs=prompt_logprobs))

    def check_shared(
        self,
        request: SamplingFields,
        *,
        max_tokens: int | None,
        logprobs: int | None,
        formats: Sequence[RequestedFormat],
        tool_schema: dict[str, Any] | None,
        calls: GrammarCalls | None = None,
    ) -> CheckedSampling:
        """Checks the fields that all APIs share. Raises `ServingError`. tool_schema, calls: see `grammar_of`."""
        if self._is_headless:
            message = "The model was saved without an lm_head and cannot generate text."
            message += " POST /v1/embeddings, /v1/classify, /v1/rerank or /v1/score."
            raise ServingError(ErrorCode.UNSUPPORTED_PARAMETER, message, param="model")
        self._check_without_effect(request)
        if max_tokens is not None:
            check_range("max_tokens", max_tokens, 0, INT64 - 1)
        min_tokens = _or(request.min_tokens, 0)
        check_range("min_tokens", min_tokens, 0, self._max_model_len if max_tokens is None else max_tokens)
        stop_token_ids = self._stop_token_ids(request)
        grammar = grammar_of(request, self._limits, formats, tool_schema, calls)
        # With a grammar, the engine accepts them as ends of the output, whichever adapter's template they are from.
        turn_end_ids = self._turn_end_ids if grammar is not None else ()
        seed = request.seed
        if seed is not None:
            check_range("seed", seed, -INT64, INT64 - 1)
        params = SamplingParams(
            max_tokens=1,
            temperature=self._temperature(request),
            top_k=self._top_k(request),
            top_p=self._top_p(request),
            min_p=_checked("min_p", _or(request.min_p, self._defaults.min_p), 0, 1),
            repetition_penalty=_checked(
                "repetition_penalty", _or(request.repetition_penalty, self._defaults.repetition_penalty), 0.01, 10
            ),
            presence_penalty=_checked("presence_penalty", _or(request.presence_penalty, 0.0), -2, 2),
            frequency_penalty=_checked("frequency_penalty", _or(request.frequency_penalty, 0.0), -2, 2),
            logit_bias=self._logit_bias(request),
            allowed_token_ids=self._allowed_token_ids(request),
            stop_token_ids=stop_token_ids + turn_end_ids,
            ignore_eos=request.ignore_eos,
            min_tokens=min_tokens,
            logprobs=logprobs,
            grammar=grammar,
        )
        text = TextOptions(
            eos_token_ids=self._eos_token_ids | {*turn_end_ids},
            stop=self.checked_stop("stop", request.stop),
            include_stop_str_in_output=request.include_stop_str_in_output,
            skip_special_tokens=request.skip_special_tokens,
            stop_token_ids=frozenset(stop_token_ids),
            min_tokens=min_tokens,
            discard_tokens=max_tokens == 0,
        )
        return CheckedSampling(params, text, max_tokens, seed, checked_fields(request))

    def default_max_tokens(self, room: int) -> int:
        """For a request without max_tokens: `room`, or the generation_config's max_new_tokens if that is less."""
        if self._defaults.max_new_tokens is None:
            return room
        return min(room, self._defaults.max_new_tokens)

    def check_top_logprobs(self, param: str, count: int) -> None:
        check_range(param, count, 0, self._limits.max_top_logprobs)

    def _check_without_effect(self, request: SamplingFields) -> None:
        if request.store:
            raise unsupported("store", "is true; this server stores nothing. Leave it out.")
        if request.request_id is not None and not HARMLESS_ID.fullmatch(request.request_id):
            raise invalid_value("request_id", f"must match {HARMLESS_ID.pattern}.")

    def _temperature(self, request: SamplingFields) -> float:
        temperature = _checked("temperature", _or(request.temperature, self._defaults.temperature), 0, 2)
        return 0.0 if temperature < GREEDY_BELOW else max(temperature, MIN_TEMPERATURE)

    def _top_p(self, request: SamplingFields) -> float:
        top_p = _checked("top_p", _or(request.top_p, self._defaults.top_p), 0, 1)
        if top_p == 0:
            raise invalid_value("top_p", "is 0; it must be greater than 0 and at most 1.")
        return top_p

    def _top_k(self, request: SamplingFields) -> int:
        top_k = _or(request.top_k, self._defaults.top_k)
        check_range("top_k", top_k, -1, INT64 - 1)
        return 0 if top_k == -1 else min(top_k, self._vocab_size)

    def _logit_bias(self, request: SamplingFields) -> dict[int, float]:
        given = request.logit_bias or {}
        check_at_most("logit_bias", len(given), self._limits.max_logit_bias, "entries")
        bias: dict[int, float] = {}
        for key, value in given.items():
            if not (key.isascii() and key.isdigit() and len(key) <= 19):
                raise invalid_value("logit_bias", f"has the key {key[:32]!r}; keys must be token ids.")
            check_range("logit_bias", value, -100, 100)
            bias[int(key)] = value
        check_token_ids("logit_bias", bias, self._vocab_size)
        return bias

    def _allowed_token_ids(self, request: SamplingFields) -> tuple[int, ...]:
        if request.allowed_token_ids is None:
            return ()
        if not request.allowed_token_ids:
            raise invalid_value("allowed_token_ids", "is empty; leave it out to allow every token.")
        check_token_ids("allowed_token_ids", request.allowed_token_ids, self._vocab_size)
        return tuple(sorted(set(request.allowed_token_ids)))

    def _stop_token_ids(self, request: SamplingFields) -> tuple[int, ...]:
        token_ids = request.stop_token_ids or []
        check_at_most("stop_token_ids", len(token_ids), self._limits.max_stop_token_ids, "ids")
        check_token_ids("stop_token_ids", token_ids, self._vocab_size)
        return tuple(dict.fromkeys(token_ids))

    def checked_stop(self, param: str, given: str | list[str] | None) -> tuple[str, ...]:
        """Each stop string once. Raises `ServingError`."""
        stop = [given] if isinstance(given, str) else given or []
        check_at_most(param, len(stop), self._limits.max_stop_strings, "strings")
        for text in stop:
            if not text:
                raise invalid_value(param, "contains an empty string.")
            check_at_most(param, len(text), self._limits.max_stop_chars, "characters in one string")
        return tuple(dict.fromkeys(stop))


def check_stream_options(stream: bool | None, options: object) -> None:
    if options is not None and not stream:
        raise invalid_value("stream_options", "is only allowed with 'stream': true.")


def prompt_sampling(checked: CheckedSampling, max_tokens: int) -> SamplingParams:
    """Each prompt has its own random seed if the request gives none, or -1, as in vLLM."""
    check_range("min_tokens", checked.params.min_tokens, 0, max_tokens)
    seed = secrets.randbelow(NUM_SEEDS) if checked.seed in (None, -1) else checked.seed % NUM_SEEDS
    return replace(checked.params, max_tokens=max_tokens, seed=seed)


def check_context(
    num_prompt_tokens: int, max_tokens: int | None, max_model_len: int, prompt_param: str, max_tokens_param: str
) -> None:
    """Raises `ServingError` unless the prompt fits the context with `max_tokens` of answer, or one token if None or 0.

    prompt_param, max_tokens_param: the API's names for the prompt and the answer's limit.
    """
    if num_prompt_tokens + (max_tokens or 1) <= max_model_len:
        return
    # LiteLLM recognizes the first words, and LangChain "prompt is too long": agents then summarize the conversation.
    message = f"This model's maximum context length is {max_model_len} tokens, but the prompt has {num_prompt_tokens}"
    if num_prompt_tokens >= max_model_len:
        param = prompt_param
        message = f"{message}, which leaves no room for an answer: the prompt is too long. Shorten it."
    else:
        param = max_tokens_param
        message = f"{message} and up to {max_tokens} were requested: the prompt is too long for that. Shorten it"
        message = f"{message} or lower {param}."
    raise ServingError(ErrorCode.CONTEXT_LENGTH_EXCEEDED, message, param=param)


def _checked(param: str, value: float, low: float, high: float) -> float:
    check_range(param, value, low, high)
    return value


def _or(value: T | None, default: T) -> T:
    return default if value is None else value
