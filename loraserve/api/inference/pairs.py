"""Pairs of a query and a document, in the form that a reranker was trained to read."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from loraserve.api.http.ranges import check_at_most
from loraserve.api.inference.pooled_inputs import check_truncation, longest_of
from loraserve.api.schemas.inputs import PairFields
from loraserve.control.names.resolve import ResolvedAdapter
from loraserve.engine.model_description import ModelDescription
from loraserve.serving.errors import ErrorCode, ServingError, invalid_value
from loraserve.serving.settings import RequestLimits
from loraserve.serving.text.tokenizer import Join, TextTokenizer

PLACEHOLDER = re.compile(r"\{(query|document)\}")
"""Placeholders of a `score_template`."""


@dataclass(frozen=True, slots=True)
class PairInputs:
    queries: Sequence[str]
    """One per document."""
    documents: Sequence[str]
    body: PairFields
    max_model_len: int
    num_bytes: int
    param: str
    """The field of the documents."""
    query_param: str

    @property
    def num_inputs(self) -> int:
        return len(self.documents)

    async def token_ids(self, adapter: ResolvedAdapter | None, tokenizer: TextTokenizer) -> list[list[int]]:
        """Truncates documents if the request allows it, but never queries."""
        template, longest = _template_of(adapter), longest_of(self.body.truncate_prompt_tokens, self.max_model_len)
        join, add_special_tokens = _join_of(template), self.body.add_special_tokens is not False
        shortens = self.body.truncate_prompt_tokens is not None or self.body.max_tokens_per_doc is not None
        # Checked first, because a query is encoded again with each of its documents.
        bare = await tokenizer.encode_pairs(
            [(query, "") for query in dict.fromkeys(self.queries)],
            join,
            add_special_tokens=add_special_tokens,
            longest=None,
        )
        if max(map(len, bare)) + shortens > longest:
            message = f"'{self.query_param}' and the text around it have {max(map(len, bare))} tokens, which leaves "
            message += f"no room for documents in {longest}. Shorten it."
            raise ServingError(ErrorCode.CONTEXT_LENGTH_EXCEEDED, message, param=self.query_param)
        documents = self.documents
        if self.body.max_tokens_per_doc is not None:
            documents = await tokenizer.beginnings(documents, self.body.max_tokens_per_doc)
        inputs = await tokenizer.encode_pairs(
            [*zip(self.queries, documents, strict=True)],
            join,
            add_special_tokens=add_special_tokens,
            longest=longest if shortens else None,
        )
        self._check(inputs, longest)
        return inputs

    def _check(self, inputs: Sequence[list[int]], longest: int) -> None:
        for index, token_ids in enumerate(inputs):
            which = self.param if len(inputs) == 1 else f"{self.param}[{index}]"
            if not token_ids:
                message = f"'{which}' and its query have no tokens."
                raise ServingError(ErrorCode.INVALID_VALUE, message, param=self.param)
            if len(token_ids) > longest:
                message = f"This model's maximum context length is {longest} tokens, but '{which}' and its query have "
                message += f"{len(token_ids)}. Shorten them, or send 'truncate_prompt_tokens': -1."
                raise ServingError(ErrorCode.CONTEXT_LENGTH_EXCEEDED, message, param=self.param)


def pair_inputs(
    queries: Mapping[str, Sequence[str]],
    documents: Mapping[str, Sequence[str]],
    body: PairFields,
    adapter: ResolvedAdapter | None,
    model: ModelDescription,
    limits: RequestLimits,
) -> PairInputs:
    """queries: one for all documents, or one for each. Both are keyed by their field's name. Raises `ServingError`."""
    ((query_param, given_queries),) = queries.items()
    ((param, given_documents),) = documents.items()
    if not given_documents:
        raise invalid_value(param, "is empty.")
    check_at_most(param, len(given_documents), limits.max_inputs, "documents")
    if len(given_queries) not in (1, len(given_documents)):
        message = (
            f"has {len(given_queries)} entries for {len(given_documents)} in '{param}'; send one, or one for each."
        )
        raise invalid_value(query_param, message)
    check_truncation(body.truncate_prompt_tokens, model.max_model_len)
    if body.max_tokens_per_doc is not None and body.max_tokens_per_doc < 1:
        raise invalid_value("max_tokens_per_doc", f"is {body.max_tokens_per_doc}; it must be 1 or more.")
    times = len(given_documents) // len(given_queries)
    num_bytes = times * _num_bytes(given_queries) + _num_bytes(given_documents)
    num_bytes += len(given_documents) * _num_bytes([_template_of(adapter) or ""])
    if num_bytes > limits.max_pair_bytes:
        message = f"and their queries have {num_bytes} bytes; the limit is {limits.max_pair_bytes}. A query and the "
        raise invalid_value(param, f"{message}text around it count once per document. Send fewer at once.")
    return PairInputs(
        [*given_queries] * times, given_documents, body, model.max_model_len, num_bytes, param, query_param
    )


def _num_bytes(texts: Sequence[str]) -> int:
    return sum(len(text.encode()) for text in texts)


def _template_of(adapter: ResolvedAdapter | None) -> str | None:
    return None if adapter is None or adapter.classifier is None else adapter.classifier.score_template


def _join_of(template: str | None) -> Join | None:
    if template is None:
        return None
    before, first, between, _, after = PLACEHOLDER.split(template)

    def join(query: str, document: str) -> str:
        one, other = (query, document) if first == "query" else (document, query)
        return f"{before}{one}{between}{other}{after}"

    return join
