"""Queries, each with a document that is to be judged by it, as a reranker was trained to read them."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from loraserve.api.http.ranges import check_at_most, check_range
from loraserve.api.inference.pooled_inputs import check_truncation, longest_of
from loraserve.api.schemas.inputs import PairFields
from loraserve.control.names.resolve import ResolvedAdapter
from loraserve.engine.model_description import ModelDescription
from loraserve.serving.errors import ErrorCode, ServingError, invalid_value
from loraserve.serving.settings import Limits
from loraserve.serving.text.tokenizer import TextTokenizer

PLACEHOLDER = re.compile(r"\{(query|document)\}")
"""In a `score_template`."""


@dataclass(frozen=True, slots=True)
class PairInputs:
    queries: Sequence[str]
    """As many as documents."""
    documents: Sequence[str]
    asked: PairFields
    max_model_len: int
    param: str
    """Of the documents."""
    query_param: str

    @property
    def num_inputs(self) -> int:
        return len(self.documents)

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self.queries)) + sum(map(len, self.documents))

    async def token_ids(self, adapter: ResolvedAdapter | None, tokenizer: TextTokenizer) -> list[list[int]]:
        """Documents are shortened where they may be, never queries."""
        template = None if adapter is None or adapter.classifier is None else adapter.classifier.score_template
        limit, documents = self.asked.truncate_prompt_tokens, list(self.documents)
        longest = longest_of(limit, self.max_model_len)
        if self.asked.max_tokens_per_doc is not None:
            documents = await tokenizer.beginnings(documents, [self.asked.max_tokens_per_doc] * len(documents))
        inputs = await self._encode(template, range(len(documents)), documents, tokenizer)
        while limit is not None and (too_long := [i for i, ids in enumerate(inputs) if len(ids) > longest]):
            # More than once only where what is left of a document is other tokens than it was.
            shortened = [documents[index] for index in too_long]
            num_tokens = map(len, await tokenizer.encode_all(shortened, add_special_tokens=False))
            left = [count + longest - len(inputs[index]) for index, count in zip(too_long, num_tokens, strict=True)]
            if min(left) < 1:
                index = too_long[left.index(min(left))]
                message = f"'{self.query_param}' and what is put around it leave no room for '{self._name(index)}' in "
                raise ServingError(
                    ErrorCode.CONTEXT_LENGTH_EXCEEDED, f"{message}{longest} tokens. Shorten it.", param=self.query_param
                )
            shortened = await tokenizer.beginnings(shortened, left)
            encoded = await self._encode(template, too_long, shortened, tokenizer)
            for index, document, token_ids in zip(too_long, shortened, encoded, strict=True):
                documents[index], inputs[index] = document, token_ids
        for index, token_ids in enumerate(inputs):
            if not token_ids:
                raise invalid_value(self._name(index), "and its query have no tokens.")
            if len(token_ids) > longest:
                message = f"This model's maximum context length is {longest} tokens, but '{self._name(index)}' and its "
                message += f"query have {len(token_ids)}. Shorten them, or send 'truncate_prompt_tokens': -1."
                raise ServingError(ErrorCode.CONTEXT_LENGTH_EXCEEDED, message, param=self.param)
        return inputs

    async def _encode(
        self, template: str | None, indices: Sequence[int], documents: Sequence[str], tokenizer: TextTokenizer
    ) -> list[list[int]]:
        """documents: those of the indices, as far as they are left."""
        pairs = [(self.queries[index], document) for index, document in zip(indices, documents, strict=True)]
        add_special_tokens = self.asked.add_special_tokens is not False
        if template is None:
            return await tokenizer.encode_pairs(pairs, add_special_tokens=add_special_tokens)
        texts = [_filled(template, query, document) for query, document in pairs]
        return await tokenizer.encode_all(texts, add_special_tokens=add_special_tokens)

    def _name(self, index: int) -> str:
        return self.param if len(self.documents) == 1 else f"{self.param}[{index}]"


def pair_inputs(
    queries: dict[str, list[str]],
    documents: dict[str, list[str]],
    asked: PairFields,
    model: ModelDescription,
    limits: Limits,
) -> PairInputs:
    """queries: one for all documents, or one for each; both by the names of their fields. Raises `ServingError`."""
    ((query_param, given_queries),) = queries.items()
    ((param, given_documents),) = documents.items()
    if not given_documents:
        raise invalid_value(param, "is empty.")
    check_at_most(param, len(given_documents), limits.max_inputs, "documents")
    if len(given_queries) not in (1, len(given_documents)):
        message = f"has {len(given_queries)} for {len(given_documents)} of '{param}'; send one, or one for each."
        raise invalid_value(query_param, message)
    check_truncation(asked.truncate_prompt_tokens, model.max_model_len)
    if asked.max_tokens_per_doc is not None:
        check_range("max_tokens_per_doc", asked.max_tokens_per_doc, 1, model.max_model_len)
    if len(given_queries) == 1:
        given_queries = given_queries * len(given_documents)
    inputs = PairInputs(given_queries, given_documents, asked, model.max_model_len, param, query_param)
    if inputs.num_bytes > limits.max_pair_chars:
        message = (
            f"and their queries have {inputs.num_bytes} characters; the limit is {limits.max_pair_chars}. A query "
        )
        raise invalid_value(param, f"{message}counts with each of its documents: send fewer at once.")
    return inputs


def _filled(template: str, query: str, document: str) -> str:
    texts = {"query": query, "document": document}
    return PLACEHOLDER.sub(lambda found: texts[found[1]], template)
