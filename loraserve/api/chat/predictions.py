"""What a request says its answer will be, for the engine to draft from."""

from loraserve.api.chat.conversations import TEXT_PARTS, text_of
from loraserve.api.http.ranges import check_at_most, unsupported
from loraserve.api.schemas.chat import Prediction
from loraserve.engine.model_description import ModelDescription
from loraserve.serving.text.tokenizer import TextTokenizer


def predicted_text(prediction: Prediction | None, model: ModelDescription) -> str:
    """Empty without one. Raises `ServingError`, also where nothing is drafted."""
    if prediction is None:
        return ""
    if prediction.type != "content":
        raise unsupported("prediction.type", f"is {prediction.type[:32]!r}; only 'content' is supported.")
    if model.num_speculative_tokens == 0:
        raise unsupported("prediction", "is not supported by this server: it has no speculative decoding.")
    return text_of("prediction.content", prediction.content, TEXT_PARTS, split="")


async def predicted_tokens(text: str, tokenizer: TextTokenizer, model: ModelDescription) -> list[int]:
    """Raises `ServingError` for more tokens than an answer can have."""
    token_ids = await tokenizer.encode(text, add_special_tokens=False)
    check_at_most("prediction", len(token_ids), model.max_model_len, "tokens")
    return token_ids
