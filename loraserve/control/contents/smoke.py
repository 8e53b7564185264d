"""A first request with new content to the live engine, before anyone can see the content."""

import secrets
from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Protocol

from loraserve_adapters.checks import Check, CheckStatus
from loraserve_adapters.remedies import remedy_for

from loraserve.control.documents.adapter_edits import Content
from loraserve.control.ingest.report import AdapterRejectedError, Report
from loraserve.engine.request import (
    EngineErrorCode,
    EngineRequest,
    FinishReason,
    LabelActivation,
    SamplingParams,
    to_classify,
)
from loraserve.serving.engine_client import EngineClient, EngineDeadError
from loraserve.serving.engine_errors import engine_dead
from loraserve.serving.errors import ErrorCode, ServingError

PROMPT_TOKENS = 8
NEW_TOKENS = 4


class Holder(Protocol):
    """See `Residency`."""

    def hold(self, digest: str) -> AbstractAsyncContextManager[object]: ...


class SmokeTest:
    """Values that are all finite can still overflow when they are multiplied; only a forward pass shows that."""

    def __init__(self, engine: EngineClient, residency: Holder) -> None:
        self._engine = engine
        self._residency = residency

    @asynccontextmanager
    async def __call__(self, content: Content) -> AsyncGenerator[None]:
        """Entered once the test is passed. The engine has the content until it is left, so that content published by
        then need not be loaded again. Raises `AdapterRejectedError` if the adapter is at fault, else `ServingError`.
        """
        model = self._engine.model
        request = EngineRequest(
            request_id=f"smoke-{secrets.token_hex(8)}",
            prompt_token_ids=_prompt(model.vocab_size, model.max_model_len, content.invocation_token_ids),
            sampling=SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True),
            adapter_digest=content.digest,
            pooling=None if content.classifier is None else to_classify(LabelActivation.NONE),
            # A cache of its own: it uses nothing that was cached before, and nothing later finds its blocks.
            cache_salt=secrets.token_hex(16),
        )
        async with self._residency.hold(content.digest):
            try:
                async for outputs in self._engine.generate(request):
                    for output in outputs:
                        if output.finish_reason is FinishReason.ERROR:
                            raise _failure(output.error_code, output.error or "the engine gave no reason")
            except EngineDeadError:
                raise engine_dead() from None
            yield


def _prompt(vocab_size: int, max_model_len: int, invocation_token_ids: Sequence[int]) -> list[int]:
    """Tokens from the whole vocabulary, after those that activate the adapter."""
    length = max(1, min(PROMPT_TOKENS, max_model_len - NEW_TOKENS - len(invocation_token_ids)))
    return [*invocation_token_ids, *(index * vocab_size // length for index in range(length))]


def _failure(code: EngineErrorCode | None, error: str) -> ServingError:
    if code is not EngineErrorCode.NOT_FINITE:
        return ServingError(ErrorCode.ENGINE_ERROR, f"The first generation with the adapter failed: {error}.")
    check = Check(
        name="smoke",
        status=CheckStatus.FAIL,
        message=f"the first generation with the adapter failed: {error}",
        code="not_finite",
        expected="finite logits",
        remedy=remedy_for("not_finite"),
    )
    return AdapterRejectedError(Report(checks=[check]))
