from pathlib import Path

from requests_file import draw_requests, in_turn, num_output_tokens, read_requests, write_requests, zipf


def test_request_mixes_differ_in_models_only() -> None:
    ours, base = (draw_requests(models, vocab_size=100) for models in (in_turn(["a", "b"], 8), ["base"] * 8))
    assert [request.model for request in ours] == ["a", "b"] * 4
    assert [(r.prompt_token_ids, r.num_output_tokens) for r in ours] == [
        (r.prompt_token_ids, r.num_output_tokens) for r in base
    ]


def test_each_seed_draws_other_requests_with_the_same_models_and_prefixes() -> None:
    first, second, again = (draw_requests(["a", "b"], vocab_size=100, prefix_tokens=5, seed=seed) for seed in (0, 1, 0))
    assert first == again
    for one, other in zip(first, second, strict=True):
        assert one.model == other.model
        assert one.prompt_token_ids[:5] == other.prompt_token_ids[:5]
        assert one.prompt_token_ids[5:] != other.prompt_token_ids[5:]


def test_lengths_are_within_the_spread() -> None:
    requests = draw_requests(["a"] * 200, vocab_size=100, prompt_mean=20, output_mean=10)
    assert {len(request.prompt_token_ids) for request in requests} == set(range(10, 31))
    assert {request.num_output_tokens for request in requests} == set(range(5, 16))


def test_requests_of_a_model_share_its_prefix() -> None:
    requests = draw_requests(["a", "b", "a"], vocab_size=100, prompt_mean=4, prefix_tokens=50)
    a, b, again = (request.prompt_token_ids for request in requests)
    assert a[:50] == again[:50] != b[:50]
    assert a[50:] != again[50:]


def test_zipf_favors_the_first_models() -> None:
    models = zipf(["a", "b", "c"], 3000)
    assert models.count("a") > 1.7 * models.count("b") > 2 * models.count("c")


def test_requests_are_read_as_written(tmp_path: Path) -> None:
    requests = draw_requests(["a", "b"], vocab_size=100)
    path = write_requests(tmp_path / "new" / "requests.jsonl", requests)
    assert read_requests(path) == requests
    assert num_output_tokens(path) == sum(request.num_output_tokens for request in requests)
