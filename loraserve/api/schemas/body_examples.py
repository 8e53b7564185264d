"""For each request body, one example as a client sends it, for the OpenAPI document."""

from typing import Any

import msgspec

from loraserve.api.schemas.adapters import (
    LoadLoraAdapterRequest,
    PatchAdapterRequest,
    PinRequest,
    UnloadLoraAdapterRequest,
)
from loraserve.api.schemas.aliases import PutAliasRequest, RollbackRequest
from loraserve.api.schemas.chat import ChatCompletionRequest
from loraserve.api.schemas.classify import ClassifyRequest
from loraserve.api.schemas.completions import CompletionRequest
from loraserve.api.schemas.embeddings import EmbeddingRequest
from loraserve.api.schemas.keys import CreateKeyRequest, PatchKeyRequest, RotateKeyRequest
from loraserve.api.schemas.lorax import LoraxRequest
from loraserve.api.schemas.messages import CountTokensRequest, MessagesRequest
from loraserve.api.schemas.rerank import RerankRequest
from loraserve.api.schemas.responses import ResponsesRequest
from loraserve.api.schemas.score import ScoreRequest
from loraserve.api.schemas.session import CreateLinkRequest, CreateSessionRequest
from loraserve.api.schemas.tenants import CreateTenantRequest, PatchTenantRequest
from loraserve.api.schemas.tokenize import DetokenizeRequest, TokenizeRequest
from loraserve.api.schemas.uploads import CreateUploadRequest

FOUND = ["Our offices are closed on Sunday.", "Money comes back within 14 days."]
QUESTION = [{"role": "user", "content": "How many orders were there yesterday?"}]

BODY_EXAMPLES: dict[type[msgspec.Struct], dict[str, Any]] = {
    CompletionRequest: {"model": "sql", "prompt": "-- orders of yesterday\nSELECT", "max_tokens": 64, "temperature": 0},
    ChatCompletionRequest: {"model": "sql@v3", "messages": QUESTION, "stream": True, "include_metrics": True},
    ResponsesRequest: {"model": "sql", "instructions": "Answer in SQL.", "input": QUESTION, "max_output_tokens": 64},
    MessagesRequest: {"model": "sql", "system": "Answer in SQL.", "messages": QUESTION, "max_tokens": 64},
    CountTokensRequest: {"model": "sql", "system": "Answer in SQL.", "messages": QUESTION},
    EmbeddingRequest: {"model": "search", "input": ["orders of yesterday", "refunds"], "dimensions": 256},
    ClassifyRequest: {"model": "intent", "input": ["My invoice is wrong", "I cannot log in"]},
    RerankRequest: {"model": "ranker", "query": "How do I get a refund?", "documents": FOUND, "top_n": 1},
    ScoreRequest: {"model": "ranker", "queries": "How do I get a refund?", "documents": FOUND},
    TokenizeRequest: {"model": "sql", "messages": QUESTION},
    DetokenizeRequest: {"model": "sql", "tokens": [128000, 9906]},
    LoraxRequest: {"inputs": "All orders:", "parameters": {"adapter_id": "sql", "max_new_tokens": 64}},
    PatchAdapterRequest: {"description": "Questions to SQL", "tags": ["team-data"]},
    PinRequest: {"tier": "device", "ttl_s": 3600},
    PutAliasRequest: {"version": 3, "canary": {"version": 4, "weight_bp": 500}},
    RollbackRequest: {"alias": "live"},
    CreateUploadRequest: {
        "files": [
            {"name": "adapter_config.json", "size_bytes": 1119},
            {"name": "adapter_model.safetensors", "size_bytes": 33_684_385},
        ],
        "activate": False,
    },
    LoadLoraAdapterRequest: {"lora_name": "sql", "lora_path": "/srv/adapters/sql"},
    UnloadLoraAdapterRequest: {"lora_name": "sql"},
    CreateKeyRequest: {"role": "infer", "name": "the shop's backend", "limits": {"requests_per_min": 600}},
    PatchKeyRequest: {"status": "suspended"},
    RotateKeyRequest: {"grace_s": 3600},
    CreateTenantRequest: {"id": "acme", "description": "The shop", "limits": {"requests_per_min": 6000}},
    PatchTenantRequest: {"status": "suspended"},
    CreateSessionRequest: {"token": "6gEuvIGnQ0nCUyvSLiw3Cl0tMbFy4sLkFVJH4Dq6S9o"},
    CreateLinkRequest: {"key_id": "ptwzheyn"},
}
