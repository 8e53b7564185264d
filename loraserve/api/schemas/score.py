"""/v1/score."""

import msgspec

from loraserve.api.schemas.inputs import PairFields
from loraserve.api.schemas.usage import Usage


class ScoreRequest(PairFields, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Field names and meanings as in vLLM's API. Send `queries` or `text_1`, and `documents` or `text_2`."""

    queries: str | list[str] | None = None
    """One query for all documents, or one for each document."""
    documents: str | list[str] | None = None
    """1 to 2,048 documents of at most 4 MiB in total; the query and the text around them count once per document."""
    text_1: str | list[str] | None = None
    """Another name for `queries`."""
    text_2: str | list[str] | None = None
    """Another name for `documents`."""


class Score(msgspec.Struct, frozen=True):
    index: int
    """Position of the document in the request."""
    object: str
    score: float
    """A probability, or the head's number: see `use_activation`."""


class ScoreResponse(msgspec.Struct, frozen=True):
    id: str
    object: str
    created: int
    """Unix seconds."""
    model: str
    data: list[Score]
    """In the order of the documents."""
    usage: Usage
