import pytest
import torch

from loraserve.engine.grammars.matcher import GrammarMatcher
from loraserve.engine.sampling import logit_masks
from loraserve.engine.sampling.logit_masks import mask_logits
from tests.support.hash_grammars import CHARS, EOS, VOCAB_SIZE, hash_grammars, one_of


@pytest.fixture(params=["host", "device"], autouse=True)
def masked_on(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device's implementation is plain torch, so that it runs on the host too."""
    if request.param == "device":
        monkeypatch.setattr(logit_masks, "_mask_on_host", logit_masks._mask_on_device)


def matcher_of(*texts: str, after: str = "") -> GrammarMatcher:
    matcher = hash_grammars().compile(one_of(*texts)).result().copy()
    assert all(matcher.take(CHARS.index(char)) for char in after)
    return matcher


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab_size", [VOCAB_SIZE, 29, 8])
def test_masks_change_only_their_rows_and_only_the_vocabulary(dtype: torch.dtype, vocab_size: int) -> None:
    logits = torch.randn(4, 40).to(dtype)
    before = logits.clone()
    mask_logits(
        logits, [(1, matcher_of("abc", "xyz", "0").mask()), (3, matcher_of("ab", "abc", after="ab").mask())], vocab_size
    )
    for row, expected in ((1, [CHARS.index(char) for char in "ax0"]), (3, [2, EOS])):
        kept = [token_id for token_id in expected if token_id < vocab_size]
        assert torch.isfinite(logits[row, :vocab_size]).nonzero().flatten().tolist() == sorted(kept)
        assert torch.equal(logits[row, kept], before[row, kept])
        assert torch.equal(logits[row, vocab_size:], before[row, vocab_size:])
    assert torch.equal(logits[[0, 2]], before[[0, 2]])


def test_masks_apply_to_strided_rows_too() -> None:
    whole = torch.randn(3, 2, 40)
    logits = whole[:, 0]
    mask_logits(logits, [(2, matcher_of("a").mask())], VOCAB_SIZE)
    assert torch.isfinite(whole).sum() == whole.numel() - VOCAB_SIZE + 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_tokens_beyond_the_end_of_a_mask_are_masked_out(dtype: torch.dtype) -> None:
    logits = torch.zeros(1, 100, dtype=dtype)
    mask_logits(logits, [(0, matcher_of("a", "z").mask())], 90)
    assert torch.isfinite(logits[0]).nonzero().flatten().tolist() == [0, 25, *range(90, 100)]
    assert (logits[0, 1:25] == -torch.inf).all()


def test_infinite_and_nan_logits_can_be_masked_out() -> None:
    logits = torch.tensor([[torch.nan, 1.0, torch.inf, torch.nan] + [0.0] * 26])
    mask_logits(logits, [(0, matcher_of("b").mask())], VOCAB_SIZE)
    assert logits[0, 1] == 1
    assert (logits[0, [0, 2, 3]] == -torch.inf).all()
