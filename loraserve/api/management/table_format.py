"""Answers for other programs than the console, which browsers save as files."""

from typing import Any, cast

from litestar import Response


def as_attachment(text: str, media_type: str, filename: str) -> Response[Any]:
    headers = {"content-disposition": f'attachment; filename="{filename}"', "x-content-type-options": "nosniff"}
    return Response(cast(Any, text.encode()), media_type=media_type, headers=headers)
