"""An engine process without a model: speaks the protocol on the socket given as its argument.

The model's name in the config selects how it starts: "refused" fails, "crash" exits with code 3, "slow" takes ten
minutes, any other name gets ready. A request generates the tokens n, n+1, n+2 … (modulo 250), one per step for each
choice; n is 0 without an adapter, else `first_token` of its digest. The prompt [666] kills the engine and [667] raises;
max_tokens < 0 and adapter paths with "bad" are refused.
"""

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from loraserve_adapters.errors import AdapterError
from tokenizers import Tokenizer

from loraserve import demo
from loraserve.engine.errors import EngineRequestError
from loraserve.engine.model_description import ModelDescription
from loraserve.engine.request import BegunPrompt, EngineRequest, EngineStats, FinishReason, SequenceOutput
from loraserve.serving.process.engine_loop import EngineLoop
from loraserve.serving.process.engine_process import SocketChannel, main
from loraserve.serving.process.messages import Ready, StartFailed, StartProgress
from tests.unit.adapters.folders import tiny_layout

STEP_S = 0.002
VOCABULARY = 250


def first_token(digest: str | None) -> int:
    return 0 if digest is None else int(digest, 16) % VOCABULARY


class FakeEngine:
    def __init__(self) -> None:
        self._running: dict[str, tuple[EngineRequest, int]] = {}
        self._live: dict[str, set[int]] = {}
        """Choices of each request that are not aborted."""
        self._unloaded: list[str] = []
        self._loaded: list[str] = []
        self._num_aborts = 0
        self._step = 0
        self.on_prompts_begun: Callable[[list[BegunPrompt]], None] = lambda _: None

    def add_request(self, request: EngineRequest) -> None:
        if request.sampling.max_tokens < 0:
            raise EngineRequestError("max_tokens is negative")
        if request.request_id in self._running:
            raise EngineRequestError(f"request id {request.request_id!r} is in use")
        self._running[request.request_id] = (request, 0)
        self._live[request.request_id] = set(range(request.sampling.n))

    def abort(self, request_id: str, index: int | None = None) -> list[SequenceOutput]:
        live = self._live.get(request_id, set())
        ended = sorted(live if index is None else live & {index})
        live -= set(ended)
        self._num_aborts += len(ended)
        if not live:
            self._live.pop(request_id, None)
            self._running.pop(request_id, None)
        return [SequenceOutput(request_id, index, [], finish_reason=FinishReason.ABORT) for index in ended]

    def load_adapter(self, digest: str, packed_path: str) -> None:
        if "bad" in packed_path:
            raise AdapterError("shape_mismatch", f"{packed_path} does not fit")
        self._loaded.append(digest)

    def unload_adapter(self, digest: str) -> None:
        self._loaded.remove(digest)
        self._unloaded.append(digest)

    def take_unloaded(self) -> list[str]:
        unloaded, self._unloaded = self._unloaded, []
        return unloaded

    def has_work(self) -> bool:
        return bool(self._running)

    def use_idle_time(self) -> bool:
        return False

    def step(self) -> list[SequenceOutput]:
        begun = [BegunPrompt(request_id, 0.0, 0) for request_id, (_, token) in self._running.items() if token == 0]
        if begun:
            self.on_prompts_begun(begun)
        time.sleep(STEP_S)
        self._step += 1
        return [output for request_id in list(self._running) for output in self._advance(request_id)]

    def _advance(self, request_id: str) -> list[SequenceOutput]:
        request, token = self._running[request_id]
        if request.prompt_token_ids == [666]:
            os.kill(os.getpid(), signal.SIGKILL)
        if request.prompt_token_ids == [667]:
            raise RuntimeError("a planted failure")
        done = token + 1 == request.sampling.max_tokens
        self._running[request_id] = (request, token + 1)
        if done:
            del self._running[request_id]
        reason = FinishReason.LENGTH if done else None
        live = sorted(self._live.pop(request_id) if done else self._live[request_id])
        token_id = (first_token(request.adapter_digest) + token) % VOCABULARY
        return [SequenceOutput(request_id, index, [token_id], finish_reason=reason) for index in live]

    def stats(self, *, list_residents: bool = True) -> EngineStats:
        return EngineStats(
            step=self._step,
            num_running=len(self._running),
            num_preemptions=self._num_aborts,
            resident_adapters=sorted(self._loaded) if list_residents else [],
            lists_residents=list_residents,
        )


def model_info(name: str, turn_end_tokens: Sequence[str] = ()) -> ModelDescription:
    tokenizer = Tokenizer.from_file(str(Path(demo.__file__).parent / "model" / "tokenizer.json"))
    return ModelDescription(
        name=name,
        architecture="Fake",
        dtype="float32",
        kv_cache_dtype="float32",
        device="cpu",
        backend="fake",
        max_model_len=1 << 30,
        vocab_size=VOCABULARY,
        hidden_size=8,
        eos_token_ids=[249],
        tokenizer_json=tokenizer.to_str(),
        turn_end_ids={token: tokenizer.token_to_id(token) for token in turn_end_tokens},
        chat_template=None,
        special_tokens={},
        default_sampling={},
        max_num_seqs=8,
        max_num_batched_tokens=64,
        num_blocks=16,
        block_size=16,
        arena_size_bytes=0,
        host_tier_bytes=0,
        layout=tiny_layout(),
    )


def serve(channel: SocketChannel) -> int:
    config = channel.receive_config()
    if config.model == "crash":
        return 3
    for done in range(3):
        channel.send(StartProgress("weights", done + 1, 3))
    if config.model == "refused":
        channel.send(StartFailed("the model is refused because of a reason"))
        return 1
    if config.model == "slow":
        time.sleep(600)
    channel.send(Ready(model_info(config.model, config.turn_end_tokens)))
    EngineLoop(FakeEngine(), channel).run()
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), serve))
