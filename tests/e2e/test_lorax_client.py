"""lorax-client and TGI's routes against the real server."""

import httpx
import pytest
from lorax import Client
from lorax.errors import GenerationError, ValidationError

from tests.support.demo_questions import templated

PROMPT = templated("hello world")


@pytest.mark.filterwarnings("ignore::pydantic.warnings.PydanticDeprecatedSince20")
class TestClient:
    def test_an_adapters_answer_comes_with_details(self, lorax: Client) -> None:
        response = lorax.generate(PROMPT, adapter_id="uppercase", max_new_tokens=40)
        assert response.generated_text == "HELLO WORLD"
        details = response.details
        assert details is not None
        assert (details.finish_reason, details.prompt_tokens, details.generated_tokens) == ("eos_token", 14, 12)
        assert "".join(token.text for token in details.tokens if not token.special) == "HELLO WORLD"
        assert details.tokens[-1].special
        assert all(token.logprob <= 0 for token in details.tokens)
        assert details.seed is None

    def test_a_stream_yields_tokens_and_ends_with_the_details(self, lorax: Client) -> None:
        events = [*lorax.generate_stream(PROMPT, adapter_id="reverse", max_new_tokens=40)]
        assert "".join(event.token.text for event in events if not event.token.special) == "dlrow olleh"
        assert [event.generated_text for event in events[:-1]] == [None] * (len(events) - 1)
        last = events[-1]
        assert last.generated_text == "dlrow olleh"
        assert last.details is not None
        assert (last.details.finish_reason, last.details.generated_tokens) == ("eos_token", len(events))

    def test_without_an_adapter_the_base_answers(self, lorax: Client) -> None:
        assert lorax.generate(PROMPT, max_new_tokens=40).generated_text == "You said: hello world"

    def test_generation_options_take_effect(self, lorax: Client) -> None:
        stopped = lorax.generate(PROMPT, adapter_id="uppercase", max_new_tokens=40, stop_sequences=["WOR"])
        assert stopped.generated_text == "HELLO WOR"
        assert stopped.details is not None
        assert stopped.details.finish_reason == "stop_sequence"
        cut = lorax.generate(PROMPT, adapter_id="uppercase", max_new_tokens=2, return_full_text=True)
        assert cut.generated_text.startswith(PROMPT)
        assert cut.details is not None
        assert cut.details.finish_reason == "length"
        sampled = lorax.generate(PROMPT, do_sample=True, seed=7, temperature=1.0, max_new_tokens=8)
        assert sampled.details is not None
        assert sampled.details.seed == 7
        details = lorax.generate(PROMPT, max_new_tokens=2, decoder_input_details=True, return_k_alternatives=2).details
        assert details is not None
        assert len(details.prefill) == details.prompt_tokens
        assert details.prefill[0].logprob is None
        assert [len(token.alternative_tokens or []) for token in details.tokens] == [2, 2]

    def test_errors_raise_the_lorax_clients_own_exceptions(self, lorax: Client) -> None:
        with pytest.raises(GenerationError, match="does not exist"):
            lorax.generate(PROMPT, adapter_id="nosuch")
        with pytest.raises(GenerationError, match="does not exist"):
            next(iter(lorax.generate_stream(PROMPT, adapter_id="nosuch")))
        with pytest.raises(ValidationError, match="maximum context length"):
            lorax.generate(PROMPT, max_new_tokens=100_000)


class TestRoutes:
    @pytest.mark.parametrize(
        ("parameters", "named"),
        [
            ({"merged_adapters": {"ids": ["a"], "weights": [1.0]}}, "merged_adapters"),
            ({"typical_p": 0.5}, "typical_p"),
            ({"watermark": True}, "watermark"),
            ({"best_of": 2}, "best_of"),
            ({"adapter_source": "s3"}, "adapter_source"),
            ({"api_token": "x"}, "api_token"),
            ({"response_format": {"type": "regex"}}, "response_format"),
            ({"schema": {}}, "schema"),
            ({"max_new_tokens": 0}, "max_new_tokens"),
            ({"max_new_tokens": 10**6}, "lower max_new_tokens"),
            ({"truncate": 0}, "parameters.truncate"),
            ({"adapter_id": ""}, "adapter_id"),
            ({"decoder_input_details": True, "details": False}, "decoder_input_details"),
        ],
    )
    def test_unsupported_and_invalid_parameters_are_refused_by_name(
        self, http: httpx.Client, parameters: dict[str, object], named: str
    ) -> None:
        response = http.post("/generate", json={"inputs": "x", "parameters": parameters})
        assert (response.status_code, response.json()["error_type"]) == (422, "validation"), response.text
        assert named in response.json()["error"]

    def test_generate_returns_one_object_and_reports_the_cost_in_headers(self, http: httpx.Client) -> None:
        body = {"inputs": PROMPT, "parameters": {"adapter_id": "uppercase", "details": False, "max_new_tokens": 40}}
        response = http.post("/generate", json=body)
        assert response.json() == {"generated_text": "HELLO WORLD"}
        headers = response.headers
        assert (headers["x-adapter-id"], headers["x-adapter-version"]) == ("uppercase", "1")
        assert (headers["x-prompt-tokens"], headers["x-generated-tokens"]) == ("14", "12")
        assert float(headers["x-ttft-ms"]) > 0

    def test_inputs_can_be_formatted_with_the_chat_template(self, http: httpx.Client) -> None:
        parameters = {"adapter_id": "uppercase", "apply_chat_template": True, "max_new_tokens": 40}
        response = http.post("/generate", json={"inputs": "hello world", "parameters": parameters})
        assert response.json()["generated_text"] == "HELLO WORLD"

    def test_info_reports_the_model_and_its_limit(self, http: httpx.Client) -> None:
        info = http.get("/info").json()
        assert (info["model_id"], info["max_total_tokens"]) == ("loraserve-demo", 1024)
