"""Grammars for calls in the syntax that a model was trained to write, in Lark as llguidance reads it.

A schema that a syntax cannot express exactly has no such grammar. Calls are then constrained as JSON, as in other
formats.
"""

import json
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from loraserve.api.chat.forced_calls import schema_of_arguments
from loraserve.api.inference.neutral_keywords import without_neutral_keywords
from loraserve.api.inference.structured_outputs import WHITESPACE
from loraserve.serving.text.conversation import JsonObject
from loraserve.serving.tool_calls.formats import ToolCallFormat
from loraserve.serving.tool_calls.parameter_types import NULL, STRING, TYPES, resolved

ANNOTATIONS = frozenset({"$comment", "default", "deprecated", "description", "example", "examples", "title"})
DEFINITIONS = ("$defs", "definitions")
OF_OBJECTS = frozenset({"$schema", "additionalProperties", "properties", "required", "type", *DEFINITIONS})
"""What may be in the schema of a tool's parameters. The model adds no properties, even if it may."""
PARAMETER_NAME = re.compile(r"[\w.$-]{1,64}")
ARGUMENT_NAME = re.compile(r"[^\W\d]\w{0,63}")
MAX_LENGTH = 1000
"""Characters of a text with a limit: llguidance has states for each."""
MAX_BRANCHES = 8
MAX_REFERENCES = 4
END_OF_PARAMETER = "\n</parameter>\n"
ANY_TEXT = r"(/(?s:.{%s})/ & ~/(?s:.*)(<\/parameter>|<\/function>\n<\/tool_call>)(?s:.*)/)"
"""Text without anything that ends a parameter when it is read."""
NULL_TEXTS = ("null", "None")

BLANK = r"/\n{1,2}/"
"""Models write line breaks between their reasoning and a call."""

Rules = dict[str, str]
"""By name."""


class Layout(NamedTuple):
    """The rules around functions."""

    answer: str
    between: str
    """Between calls."""
    call: str


TAGGED = Layout("BLANK? calls", r'"\n"', r'mark_0 "\n<function=" function "</function>\n" mark_1')
PYTHON = Layout('BLANK? mark_0 "[" calls "]" mark_1', '", "', "function")


def call_syntax(call_format: ToolCallFormat, tools: Sequence[JsonObject], max_calls: int | None) -> str | None:
    """The grammar of one or more calls, at most `max_calls`, which is 1 or None. It refers to the format's opening as
    `mark_0` and to its closing as `mark_1`. None = there is none, for the format or for these tools.

    Raises `ServingError` as `schema_of_arguments`.
    """
    match call_format:
        case ToolCallFormat.QWEN3_CODER:
            add_rules, layout = _tagged_function, TAGGED
        case ToolCallFormat.LFM2:
            add_rules, layout = _python_function, PYTHON
        case _:
            return None
    functions = {f"f{index}": tool for index, tool in enumerate(tools)}
    rules = {"start": layout.answer, "BLANK": BLANK, "call": layout.call, "function": " | ".join(functions)}
    rules["calls"] = "call" if max_calls == 1 else f"call ({layout.between} call)*"
    for rule, tool in functions.items():
        schema = without_neutral_keywords(schema_of_arguments(tool))
        if not add_rules(rule, tool["function"]["name"], schema, rules):
            return None
    return "\n".join(f"{name}: {rule}" for name, rule in rules.items())


def _tagged_function(rule: str, name: str, schema: JsonObject, rules: Rules) -> bool:
    """Adds a function's rules, for parameters in the schema's order. False = it has none."""
    parameters = _parameters(schema, PARAMETER_NAME)
    if parameters is None:
        return False
    parts = [_text(f"{name}>\n")]
    for index, (parameter, (part, is_required)) in enumerate(parameters.items()):
        value = _tagged_value(f"{rule}_{index}", part, schema, rules)
        if value is None:
            return False
        rules[f"{rule}_p{index}"] = _text(f"<parameter={parameter}>\n") + " " + value
        parts.append(f"{rule}_p{index}" + ("" if is_required else "?"))
    rules[rule] = " ".join(parts)
    return True


def _tagged_value(rule: str, part: Any, schema: JsonObject, rules: Rules) -> str | None:
    """A value and the end of its parameter, such that what is read from it follows the schema."""
    branches = _branches(part, schema, MAX_REFERENCES)
    if branches is None or len(branches) > MAX_BRANCHES:
        return None
    texts = [branch for branch in branches if _may_be_text(branch)]
    if not texts:
        value = _json(part, schema)
        return None if value is None else f"{value} {_text(END_OF_PARAMETER)}"
    others = [branch for branch in branches if not _may_be_text(branch)]
    if all(branch.keys() <= {"type"} for branch in branches):
        texts, others = [{}], []
    if len(texts) > 1 or others not in ([], [{"type": NULL}]):
        return None
    return _tagged_text(rule, texts[0], rules, or_null=bool(others))


def _tagged_text(rule: str, branch: JsonObject, rules: Rules, *, or_null: bool) -> str | None:
    """As `_tagged_value`, for one schema of strings, or of strings and null."""
    if not branch.keys() <= {"type", "enum", "minLength", "maxLength"}:
        return None
    if "enum" in branch:
        if branch.keys() & {"minLength", "maxLength"}:
            return None
        given = branch["enum"]
        or_null = or_null or None in given
        choices = [*dict.fromkeys(value for value in given if value is not None), *(["null"] if or_null else [])]
        is_ambiguous = or_null and any(value.strip() in NULL_TEXTS for value in given if value is not None)
        if is_ambiguous or any("</" in value for value in choices):
            return None
        return f"({' | '.join(_text(value + END_OF_PARAMETER) for value in choices)})"
    least, most = branch.get("minLength", 0), branch.get("maxLength", "")
    if any(not isinstance(limit, int) or limit > MAX_LENGTH for limit in (least, most or 0)):
        return None
    terminal = rule.upper() if (least, most) != (0, "") else "TEXT"
    rules[terminal] = f"{ANY_TEXT % f'{least},{most}'} {_text(END_OF_PARAMETER)}"
    return f"({terminal} | {_text('null' + END_OF_PARAMETER)})" if or_null and terminal != "TEXT" else terminal


def _python_function(rule: str, name: str, schema: JsonObject, rules: Rules) -> bool:
    """As `_tagged_function`."""
    parameters = _parameters(schema, ARGUMENT_NAME)
    if parameters is None:
        return False
    for index, (parameter, (part, _)) in enumerate(parameters.items()):
        value = '("True" | "False")' if _plain(part) == {"type": "boolean"} else _json(part, schema)
        if value is None:
            return False
        rules[f"{rule}_p{index}"] = _text(f"{parameter}=") + " " + value
    required = [is_required for _, is_required in parameters.values()]
    for index in reversed(range(len(required))):
        # The first argument has no comma before it.
        argument, after = f"{rule}_p{index}", f" {rule}_n{index + 1}" if index + 1 < len(required) else ""
        rules[f"{rule}_n{index}"] = f'(", " {argument}){"" if required[index] else "?"}{after}'
        skipped = f" | {rule}_a{index + 1}" if after and not required[index] else ""
        rules[f"{rule}_a{index}"] = f"{argument}{after}{skipped}"
    arguments = f"{rule}_a0{'' if any(required) else '?'}" if required else ""
    rules[rule] = _text(f"{name}(") + f' {arguments} ")"'
    return True


def _parameters(schema: JsonObject, name: re.Pattern[str]) -> dict[str, tuple[Any, bool]] | None:
    """The schema of each parameter and whether it is required; None = more is demanded than that."""
    properties, required = schema.get("properties", {}), schema.get("required", [])
    is_plain = schema.keys() - ANNOTATIONS <= OF_OBJECTS and isinstance(properties, dict) and isinstance(required, list)
    if not is_plain or not {*map(str, required)} <= properties.keys():
        return None
    if not all(name.fullmatch(each) for each in properties):
        return None
    return {each: (part, each in required) for each, part in properties.items()}


def _branches(part: Any, schema: JsonObject, num_references: int) -> list[JsonObject] | None:
    """Schemas of which one applies: of one type each, or with an `enum` whose values are all strings, or null, or none
    of them strings. None = it cannot be said."""
    if part is True:
        part = {}
    if not isinstance(part, dict):
        return None
    part = _plain(part)
    if "const" in part:
        part = {"enum": [part["const"]]} | {key: value for key, value in part.items() if key != "const"}
    match part:
        case {"$ref": str(reference), **others} if not others and num_references:
            return _branches(resolved(reference, schema), schema, num_references - 1)
        case {"anyOf": list(several), **others} | {"oneOf": list(several), **others} if not others and num_references:
            branches = [_branches(each, schema, num_references - 1) for each in several]
            return None if None in branches else [branch for each in branches for branch in each or []]
        case {"enum": list(values), **others} if values and others.keys() <= {"type"}:
            strings = [isinstance(value, str) for value in values]
            is_clear = not any(strings) or all(isinstance(value, str | None) for value in values)
            return [{"enum": values}] if is_clear else None
        case {"type": list(types), **others} if not others and all(each in TYPES for each in types):
            return [{"type": each} for each in types]
        case {"type": str(kind)} if kind in TYPES:
            return [part]
        case _:
            return [{}] if not part else None


def _may_be_text(branch: JsonObject) -> bool:
    if "enum" in branch:
        return any(isinstance(value, str) for value in branch["enum"])
    return branch.get("type", STRING) == STRING


def _plain(part: Any) -> Any:
    """Without annotations."""
    return {key: value for key, value in part.items() if key not in ANNOTATIONS} if isinstance(part, dict) else part


def _json(part: Any, schema: JsonObject) -> str | None:
    """A rule for JSON that follows a part of a schema; None if the part refers to what is not a definition."""
    if not isinstance(part, dict):
        return _json({}, schema) if part is True else None
    definitions = {key: schema[key] for key in DEFINITIONS if key in schema}
    text = json.dumps(part | definitions, ensure_ascii=False)
    if any(mark in text for mark in ('"$id"', '"$anchor"', '"$dynamicRef"', '"x-guidance"')):
        return None
    references = re.findall(r'"\$ref": "(.*?)"', text)
    if not all(each.startswith(tuple(f"#/{key}/" for key in definitions)) for each in references):
        return None
    if not references:
        definitions = {}
    options = {"x-guidance": {"whitespace_pattern": WHITESPACE}}
    return f"%json {json.dumps(options | part | definitions, ensure_ascii=False)}"


def _text(text: str) -> str:
    """In Lark's syntax, JSON's strings are texts."""
    return json.dumps(text, ensure_ascii=False)
