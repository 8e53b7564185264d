"""Translates `thinking` and `output_config.effort` into the terms of chat templates."""

from loraserve.api.http.ranges import INT64, check_range, unsupported
from loraserve.api.messages.kinds import DISABLED, ENABLED, THINKINGS
from loraserve.api.schemas.messages import OutputConfig, Thinking
from loraserve.serving.errors import invalid_value, missing
from loraserve.serving.text.conversation import ReasoningBudget, ReasoningEffort

EFFORTS = ("low", "medium", "high", "xhigh", "max")
DEFAULT_EFFORT = "high"
"""In Anthropic's API, this is the same as not sending an effort."""
SUMMARIZED = "summarized"
BUDGET = "thinking.budget_tokens"


def thinking_budget(thinking: Thinking | None, max_tokens: int, *, separates_thinking: bool) -> ReasoningBudget | None:
    """None if nothing ends the thinking earlier than `max_tokens`. Raises `ServingError`.

    separates_thinking: from text, on this server (--reasoning-parser). If not, nothing is known to be thinking.
    """
    if thinking is None:
        return None
    if thinking.type not in THINKINGS:
        message = f"is {thinking.type[:32]!r}; only {', '.join(map(repr, THINKINGS))} are supported."
        raise unsupported("thinking.type", message)
    if thinking.display not in (None, SUMMARIZED):
        message = f"is {thinking.display[:32]!r}; thinking is always returned in full. Leave it out."
        raise unsupported("thinking.display", message)
    budget = thinking.budget_tokens
    if thinking.type != ENABLED:
        if budget is not None:
            raise invalid_value(BUDGET, f"is only for the type {ENABLED!r}.")
        return None
    if budget is None:
        raise missing(BUDGET)
    check_range(BUDGET, budget, 1, INT64 - 1)
    return ReasoningBudget(BUDGET, budget) if separates_thinking and budget < max_tokens - 1 else None


def reasoning_effort(thinking: Thinking | None, output: OutputConfig | None) -> ReasoningEffort | None:
    """Raises `ServingError`. If thinking is disabled, the effort has nothing to apply to."""
    effort = None if output is None else output.effort
    if effort is not None and effort not in EFFORTS:
        raise invalid_value("output_config.effort", f"is {effort[:32]!r}; it must be one of {', '.join(EFFORTS)}.")
    if thinking is not None and thinking.type == DISABLED:
        return ReasoningEffort("thinking.type", "none", word=DISABLED)
    if effort is None:
        return None
    return ReasoningEffort("output_config.effort", effort, is_default=effort == DEFAULT_EFFORT)


def thinking_kwargs(thinking: Thinking | None) -> dict[str, bool]:
    """Variables for chat templates, which ignore unknown ones."""
    return {"enable_thinking": True} if thinking is not None and thinking.type == ENABLED else {}
