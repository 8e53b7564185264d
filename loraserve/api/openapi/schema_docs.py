"""Documents schemas and their fields in the OpenAPI document with the docstrings in the code."""

import ast
import inspect
import textwrap
from collections.abc import Iterator
from typing import Any

import msgspec

from loraserve.api.schemas.body_examples import BODY_EXAMPLES
from loraserve.api.schemas.examples import EXAMPLES
from loraserve.api.schemas.inference_examples import INFERENCE_EXAMPLES

Json = dict[str, Any]
DESCRIBED = ("loraserve.api.", "loraserve.store.records")
"""Modules whose structs are sent over HTTP."""


def document_schemas(schemas: Json) -> None:
    """Adds descriptions and examples to the components of an OpenAPI document, in place."""
    for struct in _structs(msgspec.Struct):
        schema = schemas.get(struct.__name__)
        if schema is None or not struct.__module__.startswith(DESCRIBED):
            continue
        if own := struct.__dict__.get("__doc__"):
            schema.setdefault("description", inspect.cleandoc(own))
        for base in reversed(struct.__mro__):
            if base.__module__.startswith(DESCRIBED):
                _describe_fields(schema.get("properties", {}), base)
    for example in (*EXAMPLES, *INFERENCE_EXAMPLES):
        schemas[type(example).__name__]["examples"] = [msgspec.to_builtins(example)]
    for body, sent in BODY_EXAMPLES.items():
        schemas[body.__name__]["examples"] = [sent]


def _structs(of: type) -> Iterator[type]:
    for struct in of.__subclasses__():
        yield struct
        yield from _structs(struct)


def _describe_fields(properties: Json, struct: type) -> None:
    for field, text in _field_docs(struct):
        if field in properties:
            described = properties[field]
            if "$ref" in described:
                properties[field] = {"allOf": [described], "description": text}
            else:
                described["description"] = text


def _field_docs(struct: type) -> Iterator[tuple[str, str]]:
    """(field, docstring) of each documented field that the class itself defines."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(struct))).body
    assert isinstance(definition, ast.ClassDef)
    field: str | None = None
    for statement in definition.body:
        match statement:
            case ast.AnnAssign(target=ast.Name(id=name)):
                field = name
            case ast.Expr(value=ast.Constant(value=str(text))) if field is not None:
                yield field, inspect.cleandoc(text).strip()
                field = None
            case _:
                field = None
