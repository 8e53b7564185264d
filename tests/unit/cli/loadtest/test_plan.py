from loraserve.cli.loadtest.lengths import UniformLengths
from loraserve.cli.loadtest.plan import PlannedRequest, SharedPrefixes, Workload, plan


def workload(**changes: object) -> Workload:
    fields: dict[str, object] = {
        "models": ["a", "b"],
        "num_requests": 200,
        "prompt_tokens": UniformLengths(20, 5),
        "output_tokens": UniformLengths(8),
    }
    return Workload(**{**fields, **changes})  # pyright: ignore[reportArgumentType]


def test_the_same_seed_gives_the_same_plan() -> None:
    assert plan(workload(seed=1)) == plan(workload(seed=1)) != plan(workload(seed=2))


def test_prompts_and_outputs_have_the_given_lengths() -> None:
    requests = plan(workload())
    assert {request.max_tokens for request in requests} == {8}
    assert all(len(request.prompt) == request.prompt_tokens in range(15, 26) for request in requests)


def test_text_prompts_are_words() -> None:
    request = plan(workload(text_prompts=True, num_requests=1))[0]
    assert isinstance(request.prompt, str)
    assert len(request.prompt.split()) == request.prompt_tokens


def prefixes_of(requests: list[PlannedRequest], model: str, count: int) -> set[tuple[int | str, ...]]:
    return {tuple(request.prompt[:count]) for request in requests if request.model == model}


def test_every_model_has_shared_prefixes_of_its_own() -> None:
    requests = plan(workload(prefixes=SharedPrefixes(3, 50)))
    assert all(request.prompt_tokens in range(65, 76) for request in requests)
    of_a, of_b = prefixes_of(requests, "a", 50), prefixes_of(requests, "b", 50)
    assert len(of_a) == len(of_b) == 3
    assert not of_a & of_b
    assert len(prefixes_of(requests, "a", 60)) > 90


def test_another_seed_gives_other_prefixes() -> None:
    first, second = (plan(workload(prefixes=SharedPrefixes(2, 50), seed=seed)) for seed in (0, -1))
    assert not prefixes_of(first, "a", 50) & prefixes_of(second, "a", 50)
