"""The decorators of routes that take a prompt: those that run the model, and those that only count or convert it."""

from functools import partial

import msgspec
from litestar import post
from litestar.openapi.datastructures import ResponseSpec

from loraserve.api.http.needs import INFERENCE, needs
from loraserve.api.openapi.document import json_body
from loraserve.control.tenancy.principal import Action


def inference_post(body: type[msgspec.Struct], responses: dict[int, ResponseSpec]) -> "partial[post]":
    """`post` for both routes of an endpoint: the one whose body names the model, and the one whose path does.

    body and responses: as in the OpenAPI document.
    """
    return partial(
        post,
        opt=INFERENCE,
        status_code=200,
        operation_class=json_body(body),
        responses=responses,
        tags=["inference"],
    )


def text_post(body: type[msgspec.Struct], responses: dict[int, ResponseSpec]) -> "partial[post]":
    """As `inference_post`, for routes that do not run the model."""
    return partial(
        post,
        opt=needs(Action.INFER),
        status_code=200,
        operation_class=json_body(body),
        responses=responses,
        tags=["text"],
    )
