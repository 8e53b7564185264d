"""An adapter's own chat template: one of the operator's templates, named in the adapter's config."""

from dataclasses import replace

from loraserve.control.names.resolve import ResolvedAdapter
from loraserve.serving.generation import Prompt
from loraserve.serving.runtime import Runtime
from loraserve.serving.text.choice import TextOptions


def template_of(adapter: ResolvedAdapter | None) -> str | None:
    """The template's name; None = the base model's template."""
    return None if adapter is None else adapter.chat_template


def with_turn_ends(
    runtime: Runtime, adapter: ResolvedAdapter | None, prompt: Prompt, text: TextOptions
) -> tuple[Prompt, TextOptions]:
    """Adds the tokens that end a turn in the adapter's chat template to those that end the answer."""
    return with_ends(prompt, text, runtime.tokenizer.turn_ends(template_of(adapter)))


def with_ends(prompt: Prompt, text: TextOptions, token_ids: tuple[int, ...]) -> tuple[Prompt, TextOptions]:
    """These tokens end the answer like EOS: they are not part of its text and do not appear as stop_reason."""
    if prompt.sampling.ignore_eos or not token_ids:
        return prompt, text
    sampling = replace(prompt.sampling, stop_token_ids=prompt.sampling.stop_token_ids + token_ids)
    return replace(prompt, sampling=sampling), replace(text, eos_token_ids=text.eos_token_ids | {*token_ids})
