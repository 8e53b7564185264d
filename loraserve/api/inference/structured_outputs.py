"""Turns the fields that constrain an answer's format into a grammar."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from loraserve.api.http.ranges import check_at_most
from loraserve.api.inference.neutral_keywords import without_neutral_keywords
from loraserve.api.inference.schema_cost import check_cost
from loraserve.api.schemas.sampling import GenerationFields, SamplingFields
from loraserve.api.schemas.structured_outputs import JsonObjectFormat, JsonSchemaFormat, StructuredOutputs
from loraserve.api.schemas.unsupported import refuse_unsupported
from loraserve.engine.request import Grammar, GrammarCalls, GrammarKind
from loraserve.serving.errors import invalid_value
from loraserve.serving.settings import RequestLimits

ANY_OBJECT = {"type": "object"}
WHITESPACE = r" |\r?\n[ \t]{0,40}"
"""Optional whitespace between JSON's tokens: a space, or a line break with indentation. JSON allows unlimited
whitespace, as do other servers, and small models write it until they run out of tokens."""


class RequestedFormat(NamedTuple):
    """The format that a request asks of its answer."""

    param: str
    """The field that asks for it."""
    kind: GrammarKind
    value: Any
    is_for_text: bool = False
    """OpenAI's and Anthropic's formats: calls are not held to them. vLLM's are for the whole answer."""


def grammar_of(
    request: SamplingFields,
    limits: RequestLimits,
    formats: Sequence[RequestedFormat],
    tool_schema: dict[str, Any] | None = None,
    calls: GrammarCalls | None = None,
) -> Grammar | None:
    """None if the answer is not constrained. Raises `ServingError`; whether the grammar is valid is left to the engine.

    formats: from fields that are specific to the request's API.
    tool_schema: the constraint of `tool_choice`.
    calls: those that the answer may consist of instead, if its format is for text.
    """
    requested = _distinct([*formats, *_structured_outputs(request)])
    if tool_schema is not None:
        # The answer consists of calls. Agents send the format of their final answer with every request.
        whole = [asked for asked in requested if not asked.is_for_text]
        requested = [json_format("tool_choice", tool_schema), *whole]
    if not requested:
        return None
    (param, kind, value, is_for_text), *others = requested
    if others:
        raise invalid_value(others[0].param, f"cannot be combined with '{param}': an answer follows only one of them.")
    for other in ("allowed_token_ids", "ignore_eos"):
        if getattr(request, other):
            raise invalid_value(other, f"cannot be combined with '{param}'.")
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    if not text or value == []:
        raise invalid_value(param, "is empty.")
    limit = limits.max_grammar_chars if kind in (GrammarKind.REGEX, GrammarKind.GRAMMAR) else limits.max_schema_chars
    what = "characters" if tool_schema is None else "characters in the schema of 'tools'"
    check_at_most(param, len(text), limit, what)
    if isinstance(value, dict):
        check_cost(param, value, limits)
    return Grammar(kind, text, calls=calls if is_for_text else None, param=param)


def formats_of(request: GenerationFields) -> list[RequestedFormat]:
    """Formats from `response_format` and from fields with vLLM's older names. Raises `ServingError`."""
    requested: list[RequestedFormat] = []
    match request.response_format:
        case JsonObjectFormat(schema):
            requested.append(text_format("response_format", schema or ANY_OBJECT))
        case JsonSchemaFormat(json_schema):
            requested.append(text_format("response_format.json_schema.schema", json_schema.schema))
    older = StructuredOutputs(
        json=request.guided_json,
        regex=request.guided_regex,
        choice=request.guided_choice,
        grammar=request.guided_grammar,
        whitespace_pattern=request.guided_whitespace_pattern,
    )
    return requested + _formats_in(older, "guided_")


def json_format(param: str, schema: dict[str, Any]) -> RequestedFormat:
    return RequestedFormat(param, GrammarKind.JSON_SCHEMA, _laid_out(schema))


def text_format(param: str, schema: dict[str, Any]) -> RequestedFormat:
    return json_format(param, schema)._replace(is_for_text=True)


def _distinct(requested: Sequence[RequestedFormat]) -> list[RequestedFormat]:
    """Without repetitions: clients of both older and newer vLLM, such as guidance, send a grammar under both names."""
    distinct: dict[tuple[GrammarKind, bool, bytes], RequestedFormat] = {}
    for asked in requested:
        # As JSON, because Python's 1 equals its True.
        distinct.setdefault((asked.kind, asked.is_for_text, msgspec.json.encode(asked.value)), asked)
    return list(distinct.values())


def _structured_outputs(request: SamplingFields) -> list[RequestedFormat]:
    if request.structured_outputs is None:
        return []
    refuse_unsupported(request.structured_outputs, "structured_outputs.")
    return _formats_in(request.structured_outputs, "structured_outputs.")


def _formats_in(outputs: StructuredOutputs, prefix: str) -> list[RequestedFormat]:
    _check_whitespace(outputs, prefix)
    schema = _parsed(f"{prefix}json", outputs.json) if isinstance(outputs.json, str) else outputs.json
    whitespace = None if outputs.disable_any_whitespace else outputs.whitespace_pattern or WHITESPACE
    given = {
        "json": (GrammarKind.JSON_SCHEMA, None if schema is None else _laid_out(schema, whitespace)),
        "json_object": (GrammarKind.JSON_SCHEMA, _laid_out(ANY_OBJECT, whitespace) if outputs.json_object else None),
        "regex": (GrammarKind.REGEX, outputs.regex),
        "choice": (GrammarKind.CHOICE, outputs.choice),
        "grammar": (GrammarKind.GRAMMAR, outputs.grammar),
    }
    return [RequestedFormat(prefix + name, kind, value) for name, (kind, value) in given.items() if value is not None]


def _check_whitespace(outputs: StructuredOutputs, prefix: str) -> None:
    requested = [name for name in ("disable_any_whitespace", "whitespace_pattern") if getattr(outputs, name)]
    if len(requested) > 1:
        raise invalid_value(prefix + requested[1], f"cannot be combined with '{prefix}{requested[0]}'.")
    if requested and outputs.json is None and not outputs.json_object:
        raise invalid_value(prefix + requested[0], f"is only for '{prefix}json'.")


def _laid_out(schema: dict[str, Any], whitespace: str | None = WHITESPACE) -> dict[str, Any]:
    """Adds options for llguidance unless the schema has its own. whitespace: a regular expression; None = forbidden."""
    options = {"whitespace_flexible": False} if whitespace is None else {"whitespace_pattern": whitespace}
    return {"x-guidance": options} | without_neutral_keywords(schema)


def _parsed(param: str, schema: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(schema, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError) as error:
        raise invalid_value(param, f"is not a JSON schema: {error}.") from error
