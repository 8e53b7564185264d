from hypothesis import given
from hypothesis import strategies as st

from loraserve.engine.request import FinishReason, SequenceOutput, TokenLogprob
from loraserve.serving.text.choice import ChoiceAssembler, ChoiceDelta, TextOptions, joined
from loraserve.serving.text.detokenizer import ByteDetokenizer
from loraserve.serving.text.token_text import TokenText
from tests.support.fake_engine_client import make_tokenizer

TOKENIZER = make_tokenizer()
TOKEN_TEXT = TokenText(TOKENIZER, TOKENIZER.to_str())
EOS = 1


def options(**changes: object) -> TextOptions:
    return TextOptions(eos_token_ids=frozenset({EOS}), **changes)  # pyright: ignore[reportArgumentType]


def outputs_of(
    token_ids: list[int],
    sizes: list[int],
    reason: FinishReason | None = FinishReason.LENGTH,
    stop_token_id: int | None = None,
) -> list[SequenceOutput]:
    """The tokens in steps of the given sizes; the rest in one."""
    outputs: list[SequenceOutput] = []
    start = 0
    for size in [*sizes, len(token_ids)]:
        piece = token_ids[start : start + size]
        start += len(piece)
        logprobs = [TokenLogprob(token_id, -1.0, 1, []) for token_id in piece]
        outputs.append(SequenceOutput("r", 0, piece, logprobs))
        if start >= len(token_ids):
            break
    last = outputs[-1]
    outputs[-1] = SequenceOutput("r", 0, last.token_ids, last.logprobs, reason, stop_token_id)
    return outputs


def assemble(outputs: list[SequenceOutput], text_options: TextOptions) -> tuple[ChoiceDelta, list[ChoiceDelta], int]:
    assembler = ChoiceAssembler(0, 0, text_options, ByteDetokenizer(TOKEN_TEXT, text_options.skip_special_tokens))
    deltas: list[ChoiceDelta] = []
    for output in outputs:
        if not assembler.finished:
            deltas.append(assembler.add(output))
    return joined(deltas), deltas, assembler.num_tokens


def encode(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False).ids


@given(
    st.lists(st.integers(2, TOKENIZER.get_vocab_size() - 1), min_size=1, max_size=30),
    st.lists(st.integers(1, 5), max_size=10),
    st.lists(st.sampled_from(["e", "he", "\ufffd", "or", " t"]), max_size=3, unique=True),
    st.booleans(),
    st.integers(0, 5),
)
def test_the_result_does_not_depend_on_how_steps_were_joined(
    token_ids: list[int], sizes: list[int], stops: list[str], include: bool, min_tokens: int
) -> None:
    text_options = options(stop=tuple(stops), include_stop_str_in_output=include, min_tokens=min_tokens)
    one_by_one = assemble(outputs_of(token_ids, [1] * len(token_ids)), text_options)
    joined = assemble(outputs_of(token_ids, sizes), text_options)
    assert joined[0] == one_by_one[0]
    assert joined[2] == one_by_one[2] == len(joined[0].token_ids) == len(joined[0].logprobs)


def test_tokens_after_a_stop_string_are_cut_from_text_tokens_and_logprobs() -> None:
    token_ids = encode("hello STOP here, said the user")
    whole, _, num_tokens = assemble(outputs_of(token_ids, []), options(stop=("STOP",)))
    assert whole.text == "hello "
    assert (whole.finish_reason, whole.stop_reason) == (FinishReason.STOP, "STOP")
    kept = TOKENIZER.decode(whole.token_ids)
    assert kept.startswith("hello STOP")
    assert not TOKENIZER.decode(whole.token_ids[:-1]).startswith("hello STOP")
    assert num_tokens == len(whole.token_ids) == len(whole.logprobs) == len(whole.text_offsets) < len(token_ids)


def test_a_stop_string_split_over_tokens_is_never_shown() -> None:
    token_ids = [TOKENIZER.token_to_id(char) for char in "abSTOPc"]
    _, deltas, _ = assemble(outputs_of(token_ids, [1] * 7), options(stop=("STOP",)))
    assert [delta.text for delta in deltas] == ["a", "b", "", "", "", ""]


def test_a_held_back_start_of_a_stop_string_is_released_at_the_end() -> None:
    token_ids = [TOKENIZER.token_to_id(char) for char in "abSTO"]
    whole, deltas, _ = assemble(outputs_of(token_ids, [1] * 5), options(stop=("STOP",)))
    assert [delta.text for delta in deltas] == ["a", "b", "", "", "STO"]
    assert whole.finish_reason is FinishReason.LENGTH


def test_eos_is_counted_but_not_shown() -> None:
    whole, _, num_tokens = assemble(
        outputs_of([*encode("hi"), EOS], [1], FinishReason.STOP), options(skip_special_tokens=False)
    )
    assert whole.text == "hi"
    assert num_tokens == len(encode("hi")) + 1
    assert whole.stop_reason is None


def test_the_stop_token_is_shown_only_on_request() -> None:
    token_ids = encode("hello")
    outputs = outputs_of(token_ids, [1], FinishReason.STOP, token_ids[-1])
    stop_token_ids = frozenset({token_ids[-1]})
    silent, _, _ = assemble(outputs, options(stop_token_ids=stop_token_ids))
    shown, _, _ = assemble(outputs, options(stop_token_ids=stop_token_ids, include_stop_str_in_output=True))
    assert silent.text == TOKENIZER.decode(token_ids[:-1])
    assert shown.text == "hello"
    assert silent.stop_reason == shown.stop_reason == token_ids[-1]


def test_stop_strings_are_ignored_before_min_tokens() -> None:
    token_ids = [TOKENIZER.token_to_id(char) for char in "aXbXc"]
    whole, _, num_tokens = assemble(outputs_of(token_ids, [1] * 5), options(stop=("X",), min_tokens=2))
    assert whole.text == "aXb"
    assert num_tokens == 4


def test_discarded_tokens_appear_in_neither_text_nor_counts() -> None:
    whole, _, num_tokens = assemble(outputs_of([EOS], [], FinishReason.STOP), options(discard_tokens=True))
    assert (whole.text, whole.token_ids, num_tokens) == ("", [], 0)
    assert whole.finish_reason is FinishReason.LENGTH


def test_text_offsets_are_where_tokens_begin() -> None:
    token_ids = encode("a🙂b")
    whole, _, _ = assemble(outputs_of(token_ids, [1] * len(token_ids)), options())
    assert whole.text == "a🙂b"
    assert whole.text_offsets[0] == 0
    assert whole.text_offsets[-1] == 2
    assert set(whole.text_offsets[1:-1]) == {1}
