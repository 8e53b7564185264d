import dataclasses
import shlex
from pathlib import Path

from loraserve_adapters.base_layout import BaseLayout

from loraserve.cli.serve.banner import Banner
from loraserve.engine.model_description import ModelDescription

MODEL = ModelDescription(
    name="m",
    architecture="LlamaForCausalLM",
    dtype="bfloat16",
    kv_cache_dtype="bfloat16",
    device="cpu",
    backend="cpu",
    max_model_len=64,
    vocab_size=9,
    hidden_size=8,
    eos_token_ids=[],
    tokenizer_json="{}",
    chat_template="{{ messages }}",
    special_tokens={},
    default_sampling={},
    max_num_seqs=1,
    max_num_batched_tokens=1,
    num_blocks=1,
    block_size=16,
    arena_size_bytes=0,
    host_tier_bytes=0,
    layout=BaseLayout("f", "bfloat16", (), ()),
    notes=["max_model_len lowered to 64"],
)


def banner(
    *,
    adapters: list[str],
    particular: frozenset[str] = frozenset(),
    uds: Path | None = None,
    needs_key: bool = False,
    is_demo: bool = False,
    login_token: str | None = None,
    open_to: str | None = None,
    model: ModelDescription = MODEL,
    notes: list[str] | None = None,
    base_url: str = "http://127.0.0.1:8000",
) -> str:
    return str(
        Banner(
            base_url=base_url,
            uds=uds,
            needs_key=needs_key,
            login_token=login_token,
            open_to=open_to,
            model_name="base",
            model=model,
            adapters=adapters,
            particular=particular,
            data_dir=Path("/data"),
            is_demo=is_demo,
            notes=notes or [],
        )
    )


def curls(text: str) -> list[list[str]]:
    return [shlex.split(line) for line in text.splitlines() if line.startswith("curl")]


def test_three_commands_list_models_query_one_adapter_and_stream_from_another() -> None:
    text = banner(adapters=["a", "b", "c"])
    models, completion, chat = curls(text)
    assert models == ["curl", "http://127.0.0.1:8000/v1/models"]
    assert '"model": "a"' in completion[-1]
    assert '"model": "c"' in chat[-1]
    assert '"stream": true' in chat[-1]
    assert "max_model_len lowered to 64" in text


def test_notes_of_the_model_and_of_the_start_get_one_line_each() -> None:
    lines = banner(adapters=[], notes=["something else"]).splitlines()
    assert [line for line in lines if line.startswith("  note      ")] == [
        "  note      max_model_len lowered to 64",
        "  note      something else",
    ]


def test_without_adapters_the_commands_use_the_base_model() -> None:
    assert all('"model": "base"' in command[-1] for command in curls(banner(adapters=[]))[1:])


def test_adapters_that_need_an_invocation_are_listed_but_not_used_in_commands() -> None:
    text = banner(adapters=["judge", "sql", "turn"], particular=frozenset({"judge", "turn"}))
    assert "adapters  judge, sql, turn" in text
    assert all('"model": "sql"' in command[-1] for command in curls(text)[1:])
    for model in (MODEL, dataclasses.replace(MODEL, is_headless=True)):
        text = banner(adapters=["judge"], particular=frozenset({"judge"}), model=model)
        assert all('"model": "base"' in command[-1] for command in curls(text)[1:])


def test_the_key_is_given_as_a_variable_and_the_socket_as_a_flag() -> None:
    for command in curls(banner(adapters=[], needs_key=True, uds=Path("/run/my socket"))):
        assert "Authorization: Bearer $LORASERVE_API_KEY" in command
        assert command[command.index("--unix-socket") + 1] == "/run/my socket"


def test_a_kv_cache_dtype_other_than_the_models_is_shown() -> None:
    assert "LlamaForCausalLM, bfloat16, cpu backend" in banner(adapters=[])
    small = dataclasses.replace(MODEL, kv_cache_dtype="float8_e4m3fn")
    assert "bfloat16 (KV cache float8_e4m3fn), cpu backend" in banner(adapters=[], model=small)


def test_weights_in_another_form_than_the_models_dtype_are_shown() -> None:
    small = dataclasses.replace(MODEL, quantization="int8")
    assert "bfloat16 (weights int8), cpu backend" in banner(adapters=[], model=small)
    smaller = dataclasses.replace(small, kv_cache_dtype="float8_e4m3fn")
    assert "bfloat16 (weights int8, KV cache float8_e4m3fn), cpu backend" in banner(adapters=[], model=smaller)
    stored = dataclasses.replace(MODEL, keeps_stored=True)
    assert "bfloat16 (weights 4 bits as stored), cpu backend" in banner(adapters=[], model=stored)
    both = dataclasses.replace(stored, quantization="int8")
    assert "bfloat16 (weights int8, 4 bits as stored), cpu backend" in banner(adapters=[], model=both)


def test_adapters_beyond_the_first_few_are_counted() -> None:
    assert "and 12 more" in banner(adapters=[f"a{i}" for i in range(20)])


def test_shows_the_console_and_how_to_log_in() -> None:
    console = "console   http://127.0.0.1:8000/ui/"
    assert f"{console}\n" in banner(adapters=[])
    assert f"{console} (`loraserve ui login` prints a link)\n" in banner(adapters=[], needs_key=True)
    assert f"{console}#/login/tok (one login" in banner(adapters=[], needs_key=True, login_token="tok")
    assert "console" not in banner(adapters=[], uds=Path("/run/s"))


def test_the_login_command_names_the_url_of_this_server() -> None:
    url = "http://127.0.0.1:8001"
    assert f"(`loraserve ui login --url {url}` prints a link)\n" in banner(adapters=[], needs_key=True, base_url=url)


def test_shows_the_address_at_which_other_machines_can_reach_it() -> None:
    assert "listens" not in banner(adapters=[])
    assert "listens   on 0.0.0.0: other machines can reach it" in banner(adapters=[], open_to="0.0.0.0")


def test_an_embedding_model_is_shown_with_an_embeddings_request() -> None:
    text = banner(adapters=["search"], model=dataclasses.replace(MODEL, is_headless=True))
    *_, command = text.splitlines()
    words = shlex.split(command)
    assert words[1] == "http://127.0.0.1:8000/v1/embeddings"
    assert '"model": "search"' in words[-1]
    assert "completions" not in text
