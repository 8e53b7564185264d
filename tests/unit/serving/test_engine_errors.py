import logging

import pytest

from loraserve.api.http.errors import ERROR_TABLE
from loraserve.engine.request import EngineErrorCode, FinishReason, Grammar, GrammarKind, SequenceOutput
from loraserve.serving.bound_adapter import BoundAdapter
from loraserve.serving.engine_errors import request_failed
from loraserve.serving.errors import ErrorCode, ServingError

ADAPTER = BoundAdapter("sql", "sql", "d" * 64)


def failed(code: EngineErrorCode | None, adapter: BoundAdapter | None = ADAPTER) -> ServingError:
    output = SequenceOutput("r", 0, [], finish_reason=FinishReason.ERROR, error="/srv/x broke", error_code=code)
    return request_failed(output, adapter)


@pytest.mark.parametrize(
    ("code", "expected", "status"),
    [
        (EngineErrorCode.INVALID_REQUEST, ErrorCode.INVALID_REQUEST, 400),
        (EngineErrorCode.ADAPTER_NOT_LOADED, ErrorCode.MODEL_NOT_FOUND, 404),
        (EngineErrorCode.ADAPTER_UNREADABLE, ErrorCode.ADAPTER_UNREADABLE, 500),
        (EngineErrorCode.GRAMMAR, ErrorCode.INVALID_VALUE, 400),
        (EngineErrorCode.NOT_FINITE, ErrorCode.NOT_FINITE, 500),
        (None, ErrorCode.ENGINE_ERROR, 500),
    ],
)
def test_every_engine_code_maps_to_its_own_error(
    code: EngineErrorCode | None, expected: ErrorCode, status: int
) -> None:
    error = failed(code)
    assert (error.code, ERROR_TABLE[error.code][0]) == (expected, status)


def test_a_grammar_error_names_the_parameter_that_requested_it() -> None:
    output = SequenceOutput(
        "r", 0, [], finish_reason=FinishReason.ERROR, error="no", error_code=EngineErrorCode.GRAMMAR
    )
    error = request_failed(output, None, Grammar(GrammarKind.REGEX, "(a", param="guided_regex"))
    assert error.param == "guided_regex"


def test_grammars_are_equal_whatever_parameter_requested_them() -> None:
    one, other = (Grammar(GrammarKind.REGEX, "a", param=param) for param in ("guided_regex", None))
    assert (one, hash(one)) == (other, hash(other))


def test_no_engine_code_maps_to_the_generic_engine_error() -> None:
    assert all(failed(code).code is not ErrorCode.ENGINE_ERROR for code in EngineErrorCode)


def test_errors_name_the_adapter_as_the_client_does_and_the_reason_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.ERROR):
        error = failed(EngineErrorCode.ADAPTER_UNREADABLE)
    assert "'sql'" in error.message
    assert "/srv/x" not in error.message
    assert "/srv/x broke" in caplog.text
    assert "'sql'" in failed(EngineErrorCode.ADAPTER_NOT_LOADED).message
    assert failed(EngineErrorCode.ADAPTER_NOT_LOADED, None).code is ErrorCode.ENGINE_ERROR
