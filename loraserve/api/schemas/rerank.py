"""/v1/rerank."""

import msgspec
from msgspec import UNSET, UnsetType

from loraserve.api.schemas.inputs import PairFields
from loraserve.api.schemas.unsupported import ABSENT
from loraserve.api.schemas.usage import Usage


class RankedDocument(msgspec.Struct, frozen=True):
    """A document with its text."""

    text: str
    """The only field that is read; any other fields are ignored."""


class RerankRequest(PairFields, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Field names and meanings as in Cohere's, Jina's and vLLM's APIs."""

    query: str
    documents: list[str | RankedDocument]
    """1 to 2,048 documents of at most 4 MiB in total; the query and the text around them count once per document."""
    top_n: int | None = None
    """Return only this many documents, the best ones. Default, and 0: all."""
    return_documents: bool | None = None
    """Include the full text of each document. Default: true."""
    rank_fields: msgspec.Raw = ABSENT
    max_chunks_per_doc: msgspec.Raw = ABSENT


class RerankResult(msgspec.Struct, frozen=True):
    index: int
    """Position of the document in the request."""
    relevance_score: float
    """A probability, or the head's number: see `use_activation`."""
    document: RankedDocument | UnsetType = UNSET
    """Absent with `return_documents`: false."""


class RerankResponse(msgspec.Struct, frozen=True):
    id: str
    model: str
    results: list[RerankResult]
    """Best first; equal ones in the order of the request."""
    usage: Usage
