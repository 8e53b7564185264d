"""/v1/score."""

import msgspec

from loraserve.api.schemas.inputs import PairFields
from loraserve.api.schemas.usage import Usage


class ScoreRequest(PairFields, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Names and meaning as in vLLM's API."""

    queries: str | list[str] | None = None
    """One for all documents, or one for each."""
    documents: str | list[str] | None = None
    text_1: str | list[str] | None = None
    """The same as `queries`."""
    text_2: str | list[str] | None = None
    """The same as `documents`."""


class Score(msgspec.Struct, frozen=True):
    index: int
    object: str
    score: float


class ScoreResponse(msgspec.Struct, frozen=True):
    id: str
    object: str
    created: int
    """Unix time."""
    model: str
    data: list[Score]
    """In the order of the documents."""
    usage: Usage
