"""/v1/rerank."""

import msgspec
from msgspec import UNSET, UnsetType

from loraserve.api.schemas.inputs import PairFields
from loraserve.api.schemas.unsupported import ABSENT
from loraserve.api.schemas.usage import Usage


class RankedDocument(msgspec.Struct, frozen=True):
    text: str
    """All that counts of a document: what else it has is not looked at."""


class RerankRequest(PairFields, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Names and meaning as in the APIs of Cohere and Jina, and in vLLM's."""

    query: str
    documents: list[str | RankedDocument]
    top_n: int | None = None
    """Answer with this many, the best ones. Default, and 0: all."""
    return_documents: bool | None = None
    """Whether the answer has the documents' texts, whole. Default: true."""
    rank_fields: msgspec.Raw = ABSENT
    max_chunks_per_doc: msgspec.Raw = ABSENT


class RerankResult(msgspec.Struct, frozen=True):
    index: int
    """In the request's documents."""
    relevance_score: float
    document: RankedDocument | UnsetType = UNSET


class RerankResponse(msgspec.Struct, frozen=True):
    id: str
    model: str
    results: list[RerankResult]
    """The best first, of equal ones the first one."""
    usage: Usage
