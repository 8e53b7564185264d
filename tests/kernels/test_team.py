"""Threads of `csrc/team.c`: results do not depend on which of them take part."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from loraserve_kernels.c_compiler import SOURCE_DIR, find_compilers
from loraserve_kernels.cpu_backend import CpuBackend
from loraserve_kernels.decoder_model import DecoderModel
from loraserve_kernels.draw import Draw, pack_draws
from loraserve_kernels.lora_add import make_lora_inputs
from loraserve_kernels.step_batch import StepBatch
from torch import Tensor

from tests.kernels.test_decoder_model import make_caches, make_model, make_model_parts, with_tokens
from tests.support.decoder_cases import Case, make_case

LENT_CPUS = Path(__file__).parents[1] / "support" / "lent_cpus.c"


@pytest.fixture(autouse=True)
def same_threads_afterwards() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


class Work:
    """A model and a step of prompts and decode rows with adapters."""

    def __init__(self, cpu: CpuBackend, dtype: torch.dtype) -> None:
        self.model: DecoderModel = make_model(cpu, make_model_parts(cpu, dtype))
        self.case: Case = make_case("mixed", dtype)
        self.batch: StepBatch = with_tokens(self.case, slice(None, None, 8))
        torch.set_num_threads(1)
        self.expected = self.logits()

    def logits(self) -> Tensor:
        found = self.model(*make_caches(self.case), self.batch, self.case.table)
        assert found is not None
        return found.logits


@pytest.fixture
def work(cpu: CpuBackend, dtype: torch.dtype) -> Work:
    return Work(cpu, dtype)


@pytest.mark.parametrize("num_threads", [2, 3, 7])
def test_any_number_of_threads_gives_the_same_bits(work, num_threads):
    torch.set_num_threads(num_threads)
    assert all(torch.equal(work.logits(), work.expected) for _ in range(20))


def test_threads_that_lose_their_cores_do_not_change_the_result(work):
    cpus = os.sched_getaffinity(0)
    torch.set_num_threads(len(cpus))
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(3)]
    try:
        assert all(torch.equal(work.logits(), work.expected) for _ in range(200))
        assert os.sched_getaffinity(0) == cpus
    finally:
        for process in busy:
            process.kill()
            process.wait()


def test_concurrent_callers_do_not_disturb_each_other(cpu, dtype):
    num_right = []

    def call(work: Work) -> None:
        torch.set_num_threads(2)
        num_right.append(sum(torch.equal(work.logits(), work.expected) for _ in range(50)))

    callers = [threading.Thread(target=call, args=(Work(cpu, dtype),)) for _ in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert num_right == [50, 50, 50]


def test_the_callers_cpu_affinity_is_the_same_after_a_step(work):
    before = os.sched_getaffinity(0)
    torch.set_num_threads(len(before))
    work.logits()
    assert os.sched_getaffinity(0) == before


def test_a_forked_process_gets_threads_of_its_own(work):
    torch.set_num_threads(2)
    work.logits()
    child = os.fork()
    if child == 0:
        os._exit(0 if torch.equal(work.logits(), work.expected) else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert torch.equal(work.logits(), work.expected)


def test_a_request_for_too_many_threads_gets_the_maximum(cpu_library):
    """In a process of its own, which ends together with the threads."""
    logits, chosen = torch.randn(1, 100), torch.empty(1, dtype=torch.int64)
    draws = pack_draws([Draw(row=0, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=1, position=1)])
    child = os.fork()
    if child == 0:
        before = len(os.listdir("/proc/self/task"))
        cpu_library.functions.draw(chosen.data_ptr(), draws, 1, logits.data_ptr(), 100, 100, 0, 300)
        os._exit(len(os.listdir("/proc/self/task")) - before)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 255


def test_threads_that_lend_their_cpus_do_not_race(tmp_path):
    compiler = next(find_compilers(), None)
    num_cpus = len(os.sched_getaffinity(0))
    if compiler is None or num_cpus < 2:
        pytest.skip("needs a C compiler and two CPUs")
    program = tmp_path / "lent_cpus"
    sources = [str(LENT_CPUS), str(SOURCE_DIR / "team.c")]
    flags = ["-g", "-O1", "-std=gnu11", "-fsanitize=thread", f"-I{SOURCE_DIR}", "-pthread", "-lm"]
    built = subprocess.run([*compiler.command, *sources, *flags, "-o", str(program)], capture_output=True, text=True)
    if built.returncode != 0:
        pytest.skip(f"{compiler.version} has no ThreadSanitizer: {built.stderr}")
    ran = subprocess.run([str(program), str(num_cpus)], capture_output=True, text=True)
    if "FATAL: ThreadSanitizer" in ran.stderr:
        pytest.skip(ran.stderr)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize("num_threads", [2, 3, 7])
def test_operations_soon_and_long_after_layers_give_the_same_bits(work, cpu, dtype, num_threads):
    """They run on the layers' threads at first, then on OpenMP's."""
    generator = torch.Generator().manual_seed(0)
    linear = cpu.linear(torch.randn(700, 160, generator=generator).to(dtype), None, keep_weight=False)
    lora = make_lora_inputs([5, 4, 40], [0, -1, 1], [(40,), (33,)], 400, (640,), dtype)
    token_ids = torch.randint(400, (49,), generator=generator)
    x = torch.randn(40, 160, generator=generator).to(dtype)
    logits = torch.randn(3, 300_000, generator=generator).to(dtype)
    rows = torch.arange(0, 700, 3)

    def results() -> list[Tensor]:
        added, looked_up = lora.y.clone(), lora.y.clone()
        cpu.lora_add(added, lora.x, lora.group, lora.table, lora.segments)
        cpu.lora_embed(looked_up, token_ids, 1.5, lora.group, lora.table, lora.segments)
        normed = cpu.rms_norm(logits.view(1000, 900), logits[0, :900], 1e-6)
        return [linear(x), linear.rows(rows), added, looked_up, normed]

    torch.set_num_threads(1)
    expected, best = results(), cpu.argmax(logits, 300_000)
    torch.set_num_threads(num_threads)
    for _ in range(3):
        assert torch.equal(work.logits(), work.expected)
        for _ in range(6):
            assert all(map(torch.equal, results(), expected))
            assert cpu.argmax(logits, 300_000) == best
