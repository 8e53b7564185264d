"""The oracle in bfloat16 on the kernels for the narrowest CPUs (AVX2 on x86), which multiply it via float32."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from loraserve_kernels import cpu_library

from tests.inference import test_oracle_bfloat16 as cases
from tests.support.cpu_libraries import library_of, narrowest_variant
from tests.support.peft_oracle import Oracle, OracleOf


@pytest.fixture(scope="module", autouse=True)
def narrowest(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    variant = narrowest_variant()
    path = library_of(variant, tmp_path_factory).path
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(cpu_library, "find_prebuilt", lambda: iter([(variant, path)]))
        yield path


@pytest.fixture(scope="module", params=["gemma2", "llama", "qwen3"])
def float32_oracle(request: pytest.FixtureRequest, oracle_of: OracleOf) -> Oracle:
    return oracle_of(request.param)


@pytest.fixture(scope="module")
def served(float32_oracle: Oracle) -> cases.Served:
    return cases.serve(float32_oracle, ("cpu", "bfloat16"), max_num_batched_tokens=cases.CHUNK)


def test_engine_uses_the_narrowest_library(served: cases.Served, narrowest: Path) -> None:
    assert cpu_library.load_cpu_library().path == narrowest
    assert served.engine.describe().backend == "cpu"


test_chunks_prefix_hits_and_batch_mates_equal_peft = cases.test_chunks_prefix_hits_and_batch_mates_equal_peft
test_preemption_and_eviction_mid_stream_equal_peft = cases.test_preemption_and_eviction_mid_stream_equal_peft
test_oracle_notices_each_missing_adapter = cases.test_oracle_notices_each_missing_adapter
