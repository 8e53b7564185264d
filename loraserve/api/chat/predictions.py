"""A request's prediction of its answer, from which the engine drafts."""

from loraserve.api.chat.conversations import TEXT_PARTS, text_of
from loraserve.api.http.ranges import check_at_most, unsupported
from loraserve.api.schemas.chat import Prediction
from loraserve.engine.model_description import ModelDescription
from loraserve.serving.text.tokenizer import TextTokenizer


def predicted_text(prediction: Prediction | None, model: ModelDescription) -> str:
    """Empty without a prediction. Raises `ServingError`, also if the server has no speculative decoding."""
    if prediction is None:
        return ""
    if prediction.type != "content":
        raise unsupported("prediction.type", f"is {prediction.type[:32]!r}; only 'content' is supported.")
    if model.num_speculative_tokens == 0:
        raise unsupported("prediction", "is not supported by this server: it has no speculative decoding.")
    return text_of("prediction.content", prediction.content, TEXT_PARTS, split="")


async def predicted_tokens(text: str, tokenizer: TextTokenizer, model: ModelDescription) -> list[int]:
    """Raises `ServingError` for more tokens than the model's context has."""
    token_ids = await tokenizer.encode(text, add_special_tokens=False)
    check_at_most("prediction", len(token_ids), model.max_model_len, "tokens")
    return token_ids
