import errno

import pytest
from litestar.testing import RequestFactory

from loraserve.api.http import errors
from loraserve.api.http.errors import CODE_OF_STATUS, ERROR_TABLE, error_body, serving_error_of
from loraserve.serving.errors import SERVER_FAULTS, ErrorCode, ServingError
from loraserve.store.errors import DamagedFileError, UnreadFileError

TYPES = {
    "invalid_request_error",
    "authentication_error",
    "permission_error",
    "not_found_error",
    "rate_limit_error",
    "server_error",
}


def test_every_code_has_a_status_and_a_known_type() -> None:
    assert set(ERROR_TABLE) == set(ErrorCode)
    for status, kind in ERROR_TABLE.values():
        assert 400 <= status < 600
        assert kind in TYPES
        assert (kind == "server_error") == (status >= 500)


def test_server_faults_are_exactly_the_codes_with_a_5xx_status() -> None:
    assert {code for code, (status, _) in ERROR_TABLE.items() if status >= 500} == SERVER_FAULTS


def test_the_frameworks_statuses_map_to_codes_of_the_same_status() -> None:
    for status, code in CODE_OF_STATUS.items():
        assert ERROR_TABLE[code][0] == status


def test_an_error_body_has_the_message_type_param_and_code() -> None:
    body = error_body(ServingError(ErrorCode.MODEL_NOT_FOUND, "gone", param="model")).error
    assert (body.message, body.type, body.param, body.code) == ("gone", "not_found_error", "model", "model_not_found")


def test_a_path_cannot_inject_lines_into_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(errors.logger, "error", lambda text, *args, exc_info: lines.append(text % args))
    request = RequestFactory().get("/adapters/x\n2026-11-24 CRITICAL forged\x1b[31m")
    assert serving_error_of(request, RuntimeError("unforeseen")).code is ErrorCode.INTERNAL_ERROR
    (line,) = lines
    assert "forged" in line
    assert line.isprintable()


def test_a_full_disk_is_reported_as_service_unavailable() -> None:
    request = RequestFactory().post("/v1/keys")
    refusal = serving_error_of(request, OSError(errno.ENOSPC, "No space left on device", "/var/lib/loraserve/docs/x"))
    assert refusal.code is ErrorCode.SERVICE_UNAVAILABLE
    assert "No space left on device" in refusal.message
    assert "/var/lib" not in refusal.message
    assert serving_error_of(request, OSError(errno.EIO, "Input/output error")).code is ErrorCode.INTERNAL_ERROR


def test_a_file_that_the_server_may_not_access_is_reported_as_service_unavailable() -> None:
    request = RequestFactory().delete("/v1/keys/abcdefgh")
    path = "/var/lib/loraserve/docs/key/4b"
    for error in (PermissionError(errno.EACCES, "Permission denied", path), UnreadFileError(path, "cannot be read")):
        refusal = serving_error_of(request, error)
        assert refusal.code is ErrorCode.SERVICE_UNAVAILABLE
        assert "/var/lib" not in refusal.message


def test_a_damaged_file_is_named_in_one_line_of_the_log_and_not_to_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(errors.logger, "error", lambda text, *args: lines.append(text % args))
    request = RequestFactory().delete("/v1/keys/abcdefgh")
    path = "/var/lib/loraserve/docs/key/4b/00000002.json"
    refusal = serving_error_of(request, DamagedFileError(path, "cannot be read: Input data was truncated"))
    assert refusal.code is ErrorCode.INTERNAL_ERROR
    assert "damaged" in refusal.message
    assert "not carried out" in refusal.message
    assert "/var/lib" not in refusal.message
    (line,) = lines
    for part in ("DELETE '/v1/keys/abcdefgh'", path, "restore it from a backup or move it away"):
        assert part in line
