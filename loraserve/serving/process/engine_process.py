"""Entry point of the engine process: `python -m loraserve.serving.process.engine_process <fd>`.

fd is our end of a socket pair inherited from the API process, so no other process can talk to the engine. The process
ends on `Shutdown`, when the socket closes, when its parent dies, or with exit code 1 when a step fails.
"""

import contextlib
import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable

import msgspec

from loraserve.engine.config import EngineConfig
from loraserve.engine.cpu_budget import available_cpus
from loraserve.engine.errors import EngineStartError
from loraserve.serving.process.engine_loop import EngineLoop
from loraserve.serving.process.framing import FrameBuffer, encode_frame
from loraserve.serving.process.garbage_collector import gc_disabled, tune_garbage_collector
from loraserve.serving.process.messages import (
    EngineFailed,
    FromEngine,
    Ready,
    StartFailed,
    StartProgress,
    ToEngine,
)
from loraserve.serving.process.parent_death import die_with_parent
from loraserve.serving.process.standard_streams import never_fail

RECEIVE_BYTES = 1 << 18


class PeerGone(Exception):
    """The API process closed the socket or died."""


class SocketChannel:
    """Frames over a blocking socket."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._frames = FrameBuffer()
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self._decoder = msgspec.msgpack.Decoder(ToEngine)

    def receive_config(self) -> EngineConfig:
        """Waits for the first frame."""
        while True:
            self._feed(self._socket.recv(RECEIVE_BYTES))
            for payload in self._frames.payloads():
                return msgspec.msgpack.decode(payload, type=EngineConfig)

    def receive(self, timeout_s: float) -> list[ToEngine]:
        if self._poll.poll(timeout_s * 1000):
            self._drain_socket()
        return [self._decoder.decode(payload) for payload in self._frames.payloads()]

    def send(self, message: FromEngine) -> None:
        try:
            self._socket.sendall(encode_frame(message))
        except ConnectionError as error:
            raise PeerGone from error

    def _drain_socket(self) -> None:
        try:
            while True:
                self._feed(self._socket.recv(RECEIVE_BYTES, socket.MSG_DONTWAIT))
        except BlockingIOError:
            return
        except ConnectionError as error:
            raise PeerGone from error

    def _feed(self, data: bytes) -> None:
        if not data:
            raise PeerGone
        self._frames.feed(data)


def main(fd: int, serve: Callable[[SocketChannel], int]) -> int:
    _leave_signals_to_parent()
    die_with_parent()
    channel = SocketChannel(socket.socket(fileno=fd))
    try:
        return serve(channel)
    except PeerGone:
        return 0
    except Exception as error:
        traceback.print_exc()
        return _report_failure(channel, error)


def serve_model(channel: SocketChannel) -> int:
    config = channel.receive_config()
    _limit_threads(config.num_threads)
    # The parent shows our progress; progress bars of libraries would overwrite it.
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    # A name refers to the local cache: looking up an unknown one on the network would take a minute and disclose it.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    with gc_disabled():
        # torch reads the thread limit when it is imported.
        from loraserve.engine.engine import Engine

    try:
        engine = Engine(config, lambda phase, done, total: channel.send(StartProgress(phase, done, total)))
    except EngineStartError as error:
        channel.send(StartFailed(str(error)))
        return 1
    channel.send(Ready(engine.describe()))
    tune_garbage_collector()
    EngineLoop(engine, channel).run()
    return 0


def _report_failure(channel: SocketChannel, error: Exception) -> int:
    with contextlib.suppress(PeerGone):
        channel.send(EngineFailed(f"{type(error).__name__}: {error}"))
    return 1


def _leave_signals_to_parent() -> None:
    """A terminal's Ctrl-C or hangup reaches the whole process group; the parent drains first and then tells us to
    stop."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def _limit_threads(num_threads: int | None) -> None:
    if num_threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(num_threads)
    else:
        os.environ.setdefault("OMP_NUM_THREADS", str(available_cpus()))


if __name__ == "__main__":
    never_fail()
    exit_code = main(int(sys.argv[1]), serve_model)
    sys.stderr.flush()
    # Nothing is left to save, and an orderly shutdown of torch takes long and prints messages.
    os._exit(exit_code)
