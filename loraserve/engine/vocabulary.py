"""What a model's tokenizer says, and which of its tokens end a text or a turn."""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from transformers import GenerationConfig, PreTrainedConfig, PreTrainedTokenizerBase

from loraserve.engine.errors import EngineStartError
from loraserve.models import loader

SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")
"""Those that chat templates may name."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    tokenizer_json: str
    token_ids: Set[int]
    num_ids: int
    """One more than the largest of `token_ids`: some ids below it may have no token."""
    eos_token_ids: list[int]
    turn_end_ids: dict[str, int]
    """Ids of `EngineConfig.turn_end_tokens`, by token."""
    special_tokens: dict[str, str]
    """By name, those of `SPECIAL_TOKENS` that the tokenizer has."""
    chat_template: str | None

    @property
    def ending_ids(self) -> list[int]:
        """Of the tokens that end an output."""
        return [*self.eos_token_ids, *self.turn_end_ids.values()]

    def size_for(self, logits_size: int) -> int:
        """The number of ids that the tokenizer and a model with this many logits have. Raises `EngineStartError` if a
        turn cannot end: a tokenizer may have more tokens than the model."""
        vocab_size = min(self.num_ids, logits_size)
        _check_in_vocabulary(self.turn_end_ids, vocab_size)
        return vocab_size


def read_vocabulary(
    tokenizer: PreTrainedTokenizerBase,
    config: PreTrainedConfig,
    generation_config: GenerationConfig | None,
    turn_end_tokens: Sequence[str],
    processor_template: str | None = None,
) -> Vocabulary:
    """turn_end_tokens: see `EngineConfig`. processor_template: the chat template if the tokenizer has none. Raises
    `EngineStartError`."""
    tokenizer_json = loader.tokenizer_json(tokenizer)
    token_ids = set(tokenizer.get_vocab().values())
    num_ids = max(token_ids) + 1
    return Vocabulary(
        tokenizer_json=tokenizer_json,
        token_ids=token_ids,
        num_ids=num_ids,
        eos_token_ids=_eos_token_ids(tokenizer, config, generation_config, num_ids),
        turn_end_ids=_turn_end_ids(tokenizer, turn_end_tokens),
        special_tokens={
            name: str(value) for name in SPECIAL_TOKENS if (value := getattr(tokenizer, name, None)) is not None
        },
        chat_template=_chat_template(tokenizer) or processor_template,
    )


def _eos_token_ids(
    tokenizer: PreTrainedTokenizerBase,
    config: PreTrainedConfig,
    generation_config: GenerationConfig | None,
    num_ids: int,
) -> list[int]:
    """The union of what tokenizer, config and generation_config name, without ids that the tokenizer lacks."""
    ids: set[int] = set()
    for source in (tokenizer, config, config.get_text_config(), generation_config):
        value = getattr(source, "eos_token_id", None)
        ids.update([value] if isinstance(value, int) else value or [])
    return sorted(token_id for token_id in ids if token_id < num_ids)


def _turn_end_ids(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[str]) -> dict[str, int]:
    """Only special tokens: a token that may also occur within a text would cut it off."""
    special = {token.content: number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    for token in tokens:
        if token not in special:
            reason = f"stop token {token!r} is not a special token of the model's tokenizer"
            raise EngineStartError(f"--adapter-chat-templates: {reason}")
    return {token: special[token] for token in tokens}


def _check_in_vocabulary(turn_end_ids: Mapping[str, int], vocab_size: int) -> None:
    """A tokenizer may have more tokens than the model."""
    for token, token_id in turn_end_ids.items():
        if token_id >= vocab_size:
            reason = f"stop token {token!r} has id {token_id}, but the model's token ids are 0 to {vocab_size - 1}"
            raise EngineStartError(f"--adapter-chat-templates: {reason}")


def _chat_template(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """If there are several named templates, the default one."""
    template = tokenizer.chat_template
    return template.get("default") if isinstance(template, dict) else template
