"""The oracle's cases in float32 on a GPU. A separate file, so that its kernels compile in parallel to bfloat16's."""

import pytest

from tests.inference import test_oracle_bfloat16 as cases

float32_oracle = cases.float32_oracle
served = cases.served
test_engine_computes_in_its_place = cases.test_engine_computes_in_its_place
test_chunks_prefix_hits_and_batch_mates_equal_peft = cases.test_chunks_prefix_hits_and_batch_mates_equal_peft
test_preemption_and_eviction_mid_stream_equal_peft = cases.test_preemption_and_eviction_mid_stream_equal_peft
test_oracle_notices_each_missing_adapter = cases.test_oracle_notices_each_missing_adapter

pytestmark = cases.ON_A_GPU


@pytest.fixture(scope="module", params=[pytest.param(("cuda", "float32"), id="cuda")])
def place(request: pytest.FixtureRequest) -> cases.Place:
    return request.param
