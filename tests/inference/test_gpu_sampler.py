"""Sampling and prompt logprobs on a GPU, against the same on the CPU."""

from dataclasses import replace

import pytest
import torch
from loraserve_kernels.host_sampling import ReferenceSampling

from loraserve.engine.request import SamplingParams
from loraserve.engine.sampling.device_logprobs import prompt_logprobs
from loraserve.engine.sampling.row import SamplingRow
from loraserve.engine.sampling.sampler import Sampler
from tests.support.hash_model import approximately

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DEVICE = "cuda"
GREEDY = SamplingParams(max_tokens=64, temperature=0.0)
RANDOM = SamplingParams(max_tokens=64, temperature=0.8)


def test_a_row_samples_the_same_token_alone_in_a_batch_and_on_the_cpu() -> None:
    """Without Triton."""
    vocab_size = 50_257
    params = [GREEDY, RANDOM, replace(RANDOM, top_p=0.9), replace(RANDOM, top_k=50), replace(RANDOM, min_p=0.01)]
    logits = torch.randn(40, vocab_size, generator=torch.Generator().manual_seed(0))
    rows = [SamplingRow(replace(params[index % 5], logprobs=2), 0, index, (), (), (2, 3)) for index in range(40)]
    sampler = Sampler(vocab_size, vocab_size, ReferenceSampling())

    together = sampler.sample(logits.to(DEVICE), rows)

    for index, row in enumerate(rows):
        alone = sampler.sample(logits[index : index + 1].to(DEVICE), [row])
        assert (alone.token_ids[0], alone.logprobs[0]) == (together.token_ids[index], together.logprobs[index])
    assert together.token_ids == sampler.sample(logits, rows).token_ids


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_prompt_logprobs_on_the_gpu_equal_the_cpus(dtype: torch.dtype) -> None:
    """Logits beyond the vocabulary must not be read."""
    vocab_size = 50_257
    logits = torch.randn(40, vocab_size + 3, generator=torch.Generator().manual_seed(0)).to(dtype)
    logits[:, vocab_size:], logits[7, 9] = torch.inf, torch.nan
    targets = [(1000 * row) % vocab_size for row in range(40)]
    expected = Sampler(vocab_size, vocab_size + 3, ReferenceSampling()).prompt_logprobs(logits, targets, 5)
    found = prompt_logprobs(logits.to(DEVICE), vocab_size, targets, 5)
    assert found[7].top == []
    del found[7], expected[7]
    assert found == [approximately(each) for each in expected]
