"""One example of each object that inference routes and their records return, for the OpenAPI document."""

import msgspec

from loraserve.api.schemas.audit import AuditItem
from loraserve.api.schemas.chat import ChatChoice, ChatCompletionResponse, ResponseMessage
from loraserve.api.schemas.classify import Classification, ClassifyResponse
from loraserve.api.schemas.completions import CompletionChoice, CompletionResponse
from loraserve.api.schemas.embeddings import Embedding, EmbeddingResponse, EmbeddingUsage
from loraserve.api.schemas.lorax import LoraxError, LoraxResponse
from loraserve.api.schemas.message_answer import (
    AnswerText,
    Message,
    MessageError,
    MessageErrorDetail,
    TokenCount,
    message_usage,
)
from loraserve.api.schemas.metrics import RequestMetrics
from loraserve.api.schemas.models import AdapterCard, ModelCard, ModelPermission
from loraserve.api.schemas.requests import RequestItem
from loraserve.api.schemas.rerank import RankedDocument, RerankResponse, RerankResult
from loraserve.api.schemas.response_answer import (
    EchoedText,
    InputTokenCount,
    OutputMessage,
    OutputText,
    ResponseObject,
    response_usage,
)
from loraserve.api.schemas.score import Score, ScoreResponse
from loraserve.api.schemas.tokenize import TokenizeResponse
from loraserve.api.schemas.usage import PromptTokensDetails, Usage
from loraserve.api.schemas.usage_report import UsageRow
from loraserve.serving.generation import TokenUsage

DIGEST = "30b84a326bc9f1fca5b33a61aa1a7f38d1b0c1d1a9c1e0e6d1f7a1c2b3d4e5f6"
ASKED_AT = 1795301684
USAGE = Usage(21, 9, 30, PromptTokensDetails(16))
METRICS = RequestMetrics(
    queue_time_ms=1.8,
    adapter_load_ms=0.0,
    time_to_first_token_ms=38.4,
    generation_time_ms=201.5,
    mean_itl_ms=25.2,
    tokens_per_second=39.7,
    cached_tokens=16,
    adapter_version=3,
)

INFERENCE_EXAMPLES: list[msgspec.Struct] = [
    CompletionResponse(
        id="cmpl-5f3a9f1e6b0c4b0d",
        object="text_completion",
        created=ASKED_AT,
        model="sql",
        system_fingerprint="fp_2f4be1c7aa",
        choices=[CompletionChoice(0, " count(*) FROM orders;", None, "stop", None)],
        usage=USAGE,
    ),
    ChatCompletionResponse(
        id="chatcmpl-5f3a9f1e6b0c4b0d",
        object="chat.completion",
        created=ASKED_AT,
        model="sql@v3",
        system_fingerprint="fp_2f4be1c7aa",
        choices=[ChatChoice(0, ResponseMessage("assistant", "SELECT count(*) FROM orders;"), None, "stop", None)],
        usage=USAGE,
        metrics=METRICS,
    ),
    EmbeddingResponse(
        object="list",
        data=[Embedding("embedding", 0, [0.018, -0.041, 0.007]), Embedding("embedding", 1, [-0.022, 0.013, 0.05])],
        model="search",
        usage=EmbeddingUsage(9, 9),
    ),
    ClassifyResponse(
        id="classify-5f3a9f1e6b0c4b0d",
        object="list",
        created=ASKED_AT,
        model="intent",
        data=[
            Classification(0, "billing", [0.955, 0.03, 0.015], 3),
            Classification(1, "login", [0.02, 0.972, 0.008], 3),
        ],
        usage=Usage(9, 0, 9, PromptTokensDetails(0)),
    ),
    RerankResponse(
        id="rerank-5f3a9f1e6b0c4b0d",
        model="ranker",
        results=[RerankResult(1, 0.934, RankedDocument("Money comes back within 14 days."))],
        usage=Usage(30, 0, 30, PromptTokensDetails(0)),
    ),
    ScoreResponse(
        id="score-5f3a9f1e6b0c4b0d",
        object="list",
        created=ASKED_AT,
        model="ranker",
        data=[Score(0, "score", 0.012), Score(1, "score", 0.934)],
        usage=Usage(30, 0, 30, PromptTokensDetails(0)),
    ),
    ResponseObject(
        id="resp_5f3a9f1e6b0c4b0d",
        created_at=ASKED_AT,
        status="completed",
        model="sql",
        output=[
            OutputMessage("msg_5f3a9f1e6b0c4b0d_0", "completed", [OutputText("SELECT count(*) FROM orders;", [])]),
        ],
        usage=response_usage(TokenUsage(21, 9, 16)),
        instructions="Answer in SQL.",
        max_output_tokens=64,
        metadata={},
        parallel_tool_calls=True,
        temperature=1.0,
        text=EchoedText({"type": "text"}),
        tool_choice="auto",
        tools=[],
        top_logprobs=0,
        top_p=1.0,
    ),
    Message(
        id="msg_5f3a9f1e6b0c4b0d",
        model="sql",
        content=[AnswerText("SELECT count(*) FROM orders;")],
        stop_reason="end_turn",
        usage=message_usage(TokenUsage(21, 9, 16)),
    ),
    TokenCount(21),
    InputTokenCount(21),
    MessageError(
        MessageErrorDetail("not_found_error", "The model 'sql' does not exist."), request_id="5f3a9f1e6b0c4b0d"
    ),
    METRICS,
    LoraxResponse("SELECT * FROM orders;"),
    LoraxError("the adapter 'sql' does not exist", "generation"),
    TokenizeResponse(count=2, max_model_len=8192, tokens=[128000, 9906]),
    ModelCard(
        id="sql",
        created=ASKED_AT,
        owned_by="loraserve",
        root=DIGEST,
        parent="llama-3.1-8b-instruct",
        max_model_len=None,
        permission=[ModelPermission(f"modelperm-{DIGEST[:32]}", ASKED_AT)],
        adapter=AdapterCard(rank=16, size_bytes=33_685_504, digest=DIGEST, version=3),
    ),
    RequestItem(
        id="5f3a9f1e6b0c4b0d",
        tenant="acme",
        key_id="ptwzheyn",
        adapter="sql",
        version=3,
        route="chat.completions",
        state="stop",
        error=None,
        stream=True,
        at=ASKED_AT + 0.5,
        num_prompt_tokens=21,
        num_cached_tokens=16,
        num_output_tokens=9,
        queue_ms=1.8,
        adapter_load_ms=0.0,
        ttft_ms=38.4,
        duration_ms=240.1,
    ),
    UsageRow(
        start=1795298400.0,
        tenant=None,
        key_id="ptwzheyn",
        adapter="sql",
        version=3,
        num_requests=1284,
        num_errors=2,
        num_prompt_tokens=26_964,
        num_cached_tokens=20_544,
        num_output_tokens=11_556,
        ttft_p50_ms=41.0,
        ttft_p95_ms=118.0,
    ),
    AuditItem(
        id="1795301684500-0",
        at=ASKED_AT + 0.5,
        actor="ptwzheyn",
        action="alias.move",
        outcome="done",
        kind="adapter",
        subject="acme/sql",
        tenant="acme",
        request_id="5f3a9f1e6b0c4b0d",
        detail="",
        before={"aliases": {"live": {"version": 2}}},
        after={"aliases": {"live": {"version": 3}}},
    ),
]
