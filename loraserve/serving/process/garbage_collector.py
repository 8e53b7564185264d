"""Keeps Python's garbage collector from scanning objects that live as long as the process."""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def gc_disabled() -> Iterator[None]:
    """For imports: of the 570,000 objects that torch and transformers create, 2 % are garbage; repeated scans for it
    took a quarter of the time. Objects created in the body are never scanned again."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def tune_garbage_collector() -> None:
    """Call once all long-lived objects exist: they are never scanned again, and new objects are scanned less often.

    A large body, or a step of many sequences, creates thousands of objects. In the API process, decoding a body of
    480,000 short lists blocked the event loop for 250 ms before and 60 ms after, and a message with the logprobs of
    100,000 prompt tokens for 530 ms and 80 ms (two busy cores of an EPYC). In an engine with a stand-in for a GPU, the
    host's part of a decode step of 256 sequences took 1.7 ms on average before and 0.8 to 1.2 ms after.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 10)
