import msgspec
import pytest
from loraserve_adapters.base_layout import BaseLayout, BaseModule

from loraserve.engine.config import EngineConfig
from loraserve.engine.model_description import ModelDescription
from loraserve.engine.request import (
    EngineRequest,
    EngineStats,
    FinishReason,
    LabelActivation,
    Pooling,
    PoolingParams,
    SamplingParams,
    SequenceOutput,
    TokenLogprob,
    to_classify,
)
from loraserve.serving.process.framing import MAX_FRAME_BYTES, FrameBuffer, FramingError, encode_frame
from loraserve.serving.process.messages import (
    Abort,
    AddRequest,
    FromEngine,
    LoadAdapter,
    Ready,
    StepOutputs,
    ToEngine,
)

LAYOUT = BaseLayout(
    "f", "float32", ((BaseModule("a", 2, 3), BaseModule("b", 2, 4, "hash")),), ("norm",), ("model.layers",)
)
MODEL = ModelDescription(
    "m",
    "Llama",
    "float32",
    "float32",
    "cpu",
    "cpu",
    64,
    100,
    8,
    [2],
    "{}",
    None,
    {"eos_token": "</s>"},
    {"temperature": 0.5},
    4,
    64,
    8,
    16,
    0,
    0,
    LAYOUT,
)
REQUEST = EngineRequest("r", [1, 2], SamplingParams(max_tokens=4, logit_bias={3: -1.5}, stop_token_ids=(7,)), "digest")
TO_CLASSIFY = EngineRequest("c", [1], SamplingParams(max_tokens=1), pooling=to_classify(LabelActivation.SIGMOID))
TO_POOL = EngineRequest("p", [1, 2], SamplingParams(max_tokens=1), pooling=PoolingParams(Pooling.MEAN, 3))
POOLED = SequenceOutput("p", 0, [], finish_reason=FinishReason.STOP, pooled=bytes(range(12)))
OUTPUT = SequenceOutput("r", 0, [5], [TokenLogprob(5, -0.5, 1, [(5, -0.5)])], FinishReason.STOP, prompt_logprobs=[None])


@pytest.mark.parametrize(
    "message",
    [
        AddRequest(REQUEST),
        AddRequest(TO_POOL),
        AddRequest(TO_CLASSIFY),
        Abort("r"),
        Abort("s", 2),
        LoadAdapter("d", "/p"),
    ],
)
def test_messages_to_the_engine_survive_a_round_trip(message: ToEngine) -> None:
    buffer = FrameBuffer()
    buffer.feed(encode_frame(message))
    assert [msgspec.msgpack.decode(payload, type=ToEngine) for payload in buffer.payloads()] == [message]


@pytest.mark.parametrize(
    "message", [Ready(MODEL), StepOutputs([OUTPUT, POOLED], EngineStats(step=3, resident_adapters=["d"]))]
)
def test_messages_from_the_engine_survive_a_round_trip(message: FromEngine) -> None:
    buffer = FrameBuffer()
    buffer.feed(encode_frame(message))
    assert [msgspec.msgpack.decode(payload, type=FromEngine) for payload in buffer.payloads()] == [message]


def test_engine_config_survives_a_round_trip() -> None:
    config = EngineConfig("m", max_model_len=5, seed=7)
    buffer = FrameBuffer()
    buffer.feed(encode_frame(config))
    assert [msgspec.msgpack.decode(payload, type=EngineConfig) for payload in buffer.payloads()] == [config]


@pytest.mark.parametrize("piece_bytes", [1, 3, 5, 1000])
def test_frames_are_found_whatever_the_size_of_the_pieces(piece_bytes: int) -> None:
    messages = [Abort("r" * 10 * i) for i in range(9)]
    stream = b"".join(encode_frame(message) for message in messages)
    buffer = FrameBuffer()
    found = []
    for start in range(0, len(stream), piece_bytes):
        buffer.feed(stream[start : start + piece_bytes])
        found += [msgspec.msgpack.decode(payload, type=ToEngine) for payload in buffer.payloads()]
    assert found == messages


def test_length_above_the_limit_is_refused() -> None:
    buffer = FrameBuffer()
    buffer.feed((MAX_FRAME_BYTES + 1).to_bytes(4, "little"))
    with pytest.raises(FramingError, match="announces"):
        list(buffer.payloads())


def test_abandoned_iteration_loses_nothing_that_was_not_yielded() -> None:
    buffer = FrameBuffer()
    buffer.feed(encode_frame([1]) + encode_frame([2]))
    payloads = buffer.payloads()
    assert next(payloads) == msgspec.msgpack.encode([1])
    payloads.close()
    assert list(buffer.payloads()) == [msgspec.msgpack.encode([2])]
