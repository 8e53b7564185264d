"""A response before it has any output: it repeats fields of its request."""

import time

import msgspec

from loraserve.api.responses.request import CheckedResponse
from loraserve.api.schemas.response_answer import IN_PROGRESS, EchoedText, EchoedTool, ResponseObject
from loraserve.api.schemas.responses import ResponsesRequest
from loraserve.api.schemas.structured_outputs import TextFormat


def begun_response(body: ResponsesRequest, checked: CheckedResponse, name: str, request_id: str) -> ResponseObject:
    """name: the answering model's."""
    params = checked.sampling.params
    text_format = (body.text and body.text.format) or TextFormat()
    return ResponseObject(
        id=f"resp_{request_id}",
        created_at=int(time.time()),
        status=IN_PROGRESS,
        model=name,
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        metadata=body.metadata or {},
        parallel_tool_calls=body.parallel_tool_calls is not False,
        temperature=params.temperature,
        text=EchoedText(msgspec.to_builtins(text_format)),
        tool_choice=body.tool_choice or "auto",
        tools=_tools(body, checked),
        top_logprobs=body.top_logprobs or 0,
        top_p=params.top_p,
    )


def _tools(body: ResponsesRequest, checked: CheckedResponse) -> list[EchoedTool]:
    functions = (tool["function"] for tool in checked.tools)
    return [
        EchoedTool(tool.name, tool.description, function.get("parameters"), tool.strict)
        for tool, function in zip(body.tools or [], functions, strict=True)
    ]
