import asyncio

import pytest

from loraserve.api.inference.activation import check_activated
from loraserve.control.names.resolve import ResolvedAdapter
from loraserve.engine.request import SamplingParams
from loraserve.serving.errors import ErrorCode, ServingError
from loraserve.serving.generation import Prompt
from loraserve.serving.text.tokenizer import TextTokenizer
from tests.support.fake_engine_client import make_model, make_tokenizer

TOKENIZER = TextTokenizer(make_model(make_tokenizer()))
JUDGE = asyncio.run(TOKENIZER.encode(" judge:", add_special_tokens=False))
ADAPTER = ResolvedAdapter(
    tenant="acme",
    name="judge",
    version=3,
    digest="d" * 64,
    alias="live",
    adapter_rev=1,
    max_lora_rank=8,
    size_bytes=1,
    created=0,
    invocation_token_ids=tuple(JUDGE),
)


def check(*prompts: list[int]) -> None:
    asyncio.run(
        check_activated(ADAPTER, [Prompt(token_ids, SamplingParams(max_tokens=1)) for token_ids in prompts], TOKENIZER)
    )


def test_each_prompt_needs_the_invocation() -> None:
    check(JUDGE, [1, *JUDGE, 2])
    with pytest.raises(ServingError) as refused:
        check(JUDGE, JUDGE[:-1])
    assert refused.value.code == ErrorCode.ADAPTER_NOT_ACTIVATED


def test_the_error_names_the_version_and_its_invocation() -> None:
    """During a canary, the other version may have another invocation: clients refused now and then must see why."""
    with pytest.raises(ServingError, match=r"'judge' \(version 3\) .* ' judge:'"):
        check([1])
