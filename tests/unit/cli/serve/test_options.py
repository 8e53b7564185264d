import asyncio
import contextlib
import errno
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner, Result

from loraserve.cli.main import main
from loraserve.cli.serve.control_start import opened_declared, start_errors
from loraserve.cli.serve.option_types import LoraModule
from loraserve.cli.serve.settings import DEMO, ServeSettings
from loraserve.cli.serve.start_error import StartError
from loraserve.cli.serve.vllm_flags import OFF_BY_DEFAULT
from loraserve.control.tenancy.api_keys import generate_key
from loraserve.serving.settings import SettingSource
from loraserve.serving.text.named_template import NamedChatTemplate
from loraserve.serving.text.reasoning import ReasoningFormat
from loraserve.serving.tool_calls.formats import ToolCallFormat
from tests.support.hugging_face_cache import add_to_cache
from tests.support.valkey import Valkey, valkey

__all__ = ["valkey"]

Invoke = Callable[..., Result]


class Started(list[ServeSettings]):
    @property
    def settings(self) -> ServeSettings:
        (only,) = self
        return only


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Started:
    """Settings of the servers that would have been started."""
    started = Started()

    def run_server(settings: ServeSettings) -> int:
        started.append(settings)
        return 0

    monkeypatch.setitem(sys.modules, "loraserve.cli.serve.server", SimpleNamespace(run_server=run_server))
    return started


def invoke(*args: str, env: dict[str, str] | None = None, code: int = 0) -> str:
    result = CliRunner().invoke(main, ["serve", *args], env={"COLUMNS": "300", **(env or {})}, prog_name="loraserve")
    assert result.exit_code == code, result.output
    return " ".join(result.output.split())


def test_the_demo_is_served_without_a_model(started: Started) -> None:
    invoke()
    settings = started.settings
    assert settings.is_demo
    assert settings.engine.model == str(DEMO / "model")
    assert settings.model_names == ("loraserve-demo",)
    assert settings.bind_host == "127.0.0.1"
    assert settings.port == 8000


@pytest.mark.parametrize("flag", ["--model", "--model-id", "--model-path", "--model_path"])
def test_the_model_is_given_as_an_argument_or_a_flag(started: Started, flag: str) -> None:
    invoke("org/model", flag, "org/model")
    invoke(flag + "=org/model")
    assert [settings.engine.model for settings in started] == ["org/model"] * 2


def test_metrics_listen_on_loopback_by_default(started: Started) -> None:
    invoke()
    invoke("--metrics-port", "9400", "--allowed-hosts", "box")
    invoke("--metrics-port", "9400", "--metrics-host", "0.0.0.0")
    none, own, everybodys = started
    assert none.metrics_port is None
    assert own.metrics_bind_host == "127.0.0.1"
    assert own.metrics_hosts == ["localhost", "127.0.0.1", "[::1]", "box"]
    assert (everybodys.metrics_bind_host, everybodys.metrics_hosts) == ("0.0.0.0", None)
    assert "--metrics-host needs --metrics-port" in invoke("--metrics-host", "0.0.0.0", code=2)


def test_a_scan_interval_requires_an_adapter_dir(started: Started, tmp_path: Path) -> None:
    for interval in ((), ("--adapter-dir-scan-s", "0"), ("--adapter-dir-scan-s", "2.5")):
        invoke("--adapter-dir", str(tmp_path), *interval)
    assert [settings.scan_interval_s for settings in started] == [10, 0, 2.5]
    assert "--adapter-dir-scan-s needs --adapter-dir" in invoke("--adapter-dir-scan-s", "5", code=2)


def test_two_models_are_refused(started: Started) -> None:
    assert "two models are given" in invoke("a", "--model", "b", code=2)


def test_lora_modules_accept_several_values_in_both_forms(started: Started) -> None:
    json_form = '{"name": "c", "path": "/c", "base_model_name": "m"}'
    invoke("--lora-modules", "a=/a", "b=/b", json_form, "m", "--lora-modules", "d=/d=/e")
    settings = started.settings
    assert settings.model == "m"
    assert settings.lora_modules == (
        LoraModule("a", Path("/a")),
        LoraModule("b", Path("/b")),
        LoraModule("c", Path("/c"), "m"),
        LoraModule("d", Path("/d=/e")),
    )


@pytest.mark.parametrize("value", ["nameonly", "=path", "name=", '{"name": "a"}', '{"name": "a"', '{"name":"a","x":1}'])
def test_a_malformed_lora_module_is_refused(started: Started, value: str) -> None:
    assert "--lora-modules" in invoke("m", "--lora-modules", value, code=2)


def test_adapter_chat_templates_accept_several_values_in_both_forms(started: Started, tmp_path: Path) -> None:
    plain, chatml = tmp_path / "plain.jinja", tmp_path / "chatml.jinja"
    plain.write_text("{{ messages[0].content }}")
    chatml.write_text("{{ messages }}")
    json_form = json.dumps({"name": "chatml", "path": str(chatml), "stop_tokens": ["<|im_end|>"]})
    invoke("--adapter-chat-templates", f"plain={plain}", json_form, "m")
    settings = started.settings
    assert settings.model == "m"
    assert settings.serving.adapter_chat_templates == [
        NamedChatTemplate(name="plain", source="{{ messages[0].content }}"),
        NamedChatTemplate(name="chatml", source="{{ messages }}", stop_tokens=["<|im_end|>"]),
    ]
    (shown,) = (value for value in settings.config if value.name == "adapter-chat-templates")
    assert shown.value == f"plain={plain}, chatml={chatml}"


@pytest.mark.parametrize("white", [" ", "\n", "  \t "])
def test_a_variable_accepts_several_values_in_both_forms(started: Started, tmp_path: Path, white: str) -> None:
    (tmp_path / "a.jinja").write_text("{{ messages }}")
    named, fields = f"a={tmp_path}/a.jinja", {"name": "b", "path": f"{tmp_path}/a.jinja", "stop_tokens": ["<|end|>"]}
    modules = f'm=/m{white}{{"name": "n", "path": "/n n"}}{white}o=/o'
    env = {
        "LORASERVE_ADAPTER_CHAT_TEMPLATES": f"{named}{white}{json.dumps(fields, indent=1)}{white}c{named}",
        "LORASERVE_LORA_MODULES": modules,
    }
    invoke("m", env=env)
    settings = started.settings
    assert [template.name for template in settings.adapter_chat_templates] == ["a", "b", "ca"]
    assert settings.adapter_chat_templates[1].template.stop_tokens == ["<|end|>"]
    assert settings.engine.turn_end_tokens == ("<|end|>",)
    assert [(module.name, str(module.path)) for module in settings.lora_modules] == [
        ("m", "/m"),
        ("n", "/n n"),
        ("o", "/o"),
    ]
    assert "is not valid JSON" in invoke("m", env={"LORASERVE_LORA_MODULES": 'a=/a {"name": '}, code=2)


def test_an_adapter_chat_template_may_be_a_table_in_the_config_file(started: Started, tmp_path: Path) -> None:
    (tmp_path / "a.jinja").write_text("{{ messages }}")
    config = tmp_path / "serve.toml"
    table = f'[[adapter-chat-templates]]\nname = "a"\npath = "{tmp_path}/a.jinja"\nstop_tokens = ["<|end|>"]\n'
    config.write_text(table)
    invoke("m", "--config", str(config))
    (template,) = started.settings.serving.adapter_chat_templates
    assert (template.name, template.stop_tokens) == ("a", ["<|end|>"])


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("plain", "'plain' is neither name=path nor a JSON object"),
        ("plain=nowhere.jinja", "nowhere.jinja cannot be read: No such file or directory"),
        ("plain=broken.jinja", "broken.jinja is not a valid Jinja template"),
        ("plain=latin1.jinja", "latin1.jinja is not a valid Jinja template"),
        ("plain=nested.jinja", "nested.jinja is not a valid Jinja template"),
        ("plain=ze\0ro.jinja", "is not a valid Jinja template"),
        ("a/b=good.jinja", "'a/b' is not a valid name for a chat template: 1 to 64 letters"),
        ('{"name": "a", "path": "good.jinja", "stop": ["x"]}', "unknown field 'stop'"),
        ('{"name": "a", "path": "good.jinja", "stop_tokens": "x"}', "stop_tokens that are not a list of strings"),
        ('{"name": "a", "path": "good.jinja", "stop_tokens": [3]}', "stop_tokens that are not a list of strings"),
        ('{"name": "a"}', "needs name and path"),
        ("{", "is not valid JSON"),
    ],
)
def test_an_invalid_adapter_chat_template_is_refused(
    started: Started, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "good.jinja").write_text("{{ messages }}")
    (tmp_path / "broken.jinja").write_text("{% for %}")
    (tmp_path / "latin1.jinja").write_bytes(b"\xff")
    (tmp_path / "nested.jinja").write_text("{% if x %}" * 5000 + "{% endif %}" * 5000)
    output = invoke("--adapter-chat-templates", value, code=2)
    assert "--adapter-chat-templates" in output
    assert said in output
    assert not started


def test_no_enable_lora_excludes_adapter_chat_templates(started: Started, tmp_path: Path) -> None:
    (tmp_path / "good.jinja").write_text("{{ messages }}")
    said = invoke("--no-enable-lora", "--adapter-chat-templates", f"a={tmp_path}/good.jinja", code=2)
    assert "--no-enable-lora excludes --adapter-chat-templates" in said
    assert not started


def test_adapter_chat_templates_with_the_same_name_are_refused(started: Started, tmp_path: Path) -> None:
    (tmp_path / "good.jinja").write_text("{{ messages }}")
    values = [f"a={tmp_path}/good.jinja"] * 2
    assert "two templates are named 'a'" in invoke("--adapter-chat-templates", *values, code=2)
    assert not started


@pytest.mark.parametrize("name", ["org/Llama", "llama", "sql-prod", "", None])
def test_a_lora_module_may_name_its_base_model_by_path_or_by_served_name(started: Started, name: str | None) -> None:
    module = json.dumps({"name": "a", "path": "/a", "base_model_name": name})
    invoke("org/Llama", "--served-model-name", "sql-prod", "--lora-modules", module)
    assert [module.name for module in started.settings.lora_modules] == ["a"]


@pytest.mark.parametrize(("name", "reason"), [("org/other", "'org/other'"), (3, "base_model_name")])
def test_a_lora_module_for_another_base_model_is_refused(started: Started, name: object, reason: str) -> None:
    module = json.dumps({"name": "a", "path": "/a", "base_model_name": name})
    said = invoke("org/Llama", "--lora-modules", module, code=2)
    assert "--lora-modules" in said
    assert reason in said


@pytest.mark.parametrize("value", [True, False, None])
def test_is_3d_lora_weight_of_a_lora_module_is_accepted_and_ignored(started: Started, value: bool | None) -> None:
    invoke("m", "--lora-modules", json.dumps({"name": "a", "path": "/a", "is_3d_lora_weight": value}))
    assert started.settings.lora_modules == (LoraModule("a", Path("/a")),)


@pytest.mark.parametrize("value", ["false", 0])
def test_is_3d_lora_weight_that_is_not_a_boolean_is_refused(started: Started, value: object) -> None:
    module = json.dumps({"name": "a", "path": "/a", "is_3d_lora_weight": value})
    said = " ".join(invoke("m", "--lora-modules", module, code=2).split())
    assert "is_3d_lora_weight that is not true or false" in said


@pytest.mark.parametrize("form", ["sql={}", '{{"name": "sql", "path": "{}"}}'])
def test_a_lora_module_may_be_a_hugging_face_name_in_the_cache(
    started: Started, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    said = invoke("m", "--lora-modules", form.format("org/sql"), code=2)
    assert "org/sql is neither a folder nor" in said
    assert "hf download org/sql" in said
    snapshot = add_to_cache(tmp_path, "org/sql")
    invoke("m", "--lora-modules", form.format("org/sql"))
    assert started.settings.lora_modules == (LoraModule("sql", snapshot),)


def test_served_model_name_accepts_several_values(started: Started) -> None:
    invoke("m", "--served-model-name", "a", "b", "--port", "1")
    assert started.settings.model_names == ("a", "b")


def test_a_model_parsed_as_a_value_of_served_model_name_is_detected(started: Started) -> None:
    assert "require a model" in invoke("--served-model-name", "a", "m", code=2)


@pytest.mark.parametrize(
    ("text", "count"), [("4096", 4096), ("32k", 32_000), ("32K", 32_768), ("1.5K", 1536), ("2MiB", 2 << 20)]
)
def test_counts_accept_suffixes(started: Started, text: str, count: int) -> None:
    invoke("--max-model-len", text)
    assert started.settings.engine.max_model_len == count


@pytest.mark.parametrize("text", ["0", "-1", "12x", "1.3", "k", ""])
def test_malformed_counts_are_refused(started: Started, text: str) -> None:
    assert "--max-model-len" in invoke("--max-model-len", text, code=2)


def test_the_engine_chooses_the_draft_length_unless_it_is_given(started: Started) -> None:
    invoke()
    invoke("--num-speculative-tokens", "0")
    assert [settings.engine.num_speculative_tokens for settings in started] == [None, 0]
    assert "0<=x<=64" in invoke("--num-speculative-tokens", "65", code=2)


def test_flags_accept_underscores_for_dashes(started: Started) -> None:
    invoke("--max_num_seqs", "7", "--no-enable_prefix_caching")
    assert started.settings.engine.max_num_seqs == 7
    assert not started.settings.engine.enable_prefix_caching


@pytest.mark.parametrize(
    "option",
    [
        ["--shutdown-timeout", "nan"],
        ["--redis-grace-s", "nan"],
        ["--adapter-dir-scan-s", "nan"],
        ["--gpu-memory-utilization", "nan"],
        ["--seed", str(2**63)],
        ["--max-num-seqs", str(2**63)],
        ["--max-model-len", f"{2**63}T"],
        ["--redis-prefix", ""],
        ["--redis-prefix", "a:b"],
        ["--allowed-origins", "example.com"],
        ["--allowed-origins", "https://example.com/"],
        ["--allowed-origins", "*"],
        ["--allowed-hosts", "http://example.com"],
        ["--allowed-hosts", "example.com:8000"],
        ["--allowed-hosts", "::1"],
    ],
)
def test_a_value_that_cannot_have_its_effect_is_refused_with_its_option(option: list[str], started: Started) -> None:
    assert option[0] in invoke(*option, code=2)
    assert not started


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("port = [1]", "a whole number"),
        ("port = true", "a whole number"),
        ("port = 1.5", "a whole number"),
        ("port = 1979-05-27", "a whole number"),
        ("certificates = 5", "true or false"),
        ("shutdown-timeout = [5]", "a number"),
        ("max-model-len = true", "a number"),
        ("data-dir = ['a']", "text in quotes"),
        ("model = 5", "text in quotes"),
        ("served-model-name = [5]", "text in quotes"),
        ("lora-modules = [['a', 'b']]", "text in quotes or a table"),
    ],
)
def test_a_config_value_of_another_type_is_refused(line: str, expected: str, started: Started, tmp_path: Path) -> None:
    file = tmp_path / "loraserve.toml"
    file.write_text(line)
    refused = invoke("--config", str(file), code=2)
    assert f"{line.partition(' ')[0]} must be {expected}" in refused
    assert not started


def test_origins_and_hosts_are_taken_as_browsers_send_them(started: Started) -> None:
    origins = ["https://example.com", "http://[::1]:3000", "null", "chrome-extension://abc"]
    hosts = ["example.com", "[2001:db8::1]", "10.0.0.5", "Box"]
    invoke("--allowed-origins", *origins, "--allowed-hosts", *hosts)
    assert started.settings.allowed_origins == tuple(origins)
    assert started.settings.allowed_hosts == tuple(hosts)


@pytest.mark.parametrize(
    "url", ["", "localhost:6379", "http://redis", "redis://[::1", "redis://:hidden@host:99999", "redis://:hid/den@host"]
)
def test_the_url_of_redis_is_checked_without_quoting_it(url: str, started: Started) -> None:
    refused = invoke("--redis-url", url, code=2)
    assert "'--redis-url': the URL cannot be read" in refused
    assert "hid" not in refused
    assert not started


def test_the_otlp_traces_endpoint_must_be_an_http_url(started: Started) -> None:
    invoke("--otlp-traces-endpoint", "http://collector:4318")
    invoke(env={"LORASERVE_OTLP_TRACES_ENDPOINT": "https://collector/own"})
    assert [settings.otlp_traces_endpoint for settings in started] == [
        "http://collector:4318/v1/traces",
        "https://collector/own",
    ]
    refused = invoke("--otlp-traces-endpoint", "grpc://collector:4317", code=2)
    assert "'grpc://collector:4317' is not the URL of an OTLP/HTTP collector" in refused


@pytest.mark.parametrize(
    "flag",
    ["--tensor-parallel-size=2", "-tp", "--swap_space", "--trust-remote-code", "--collect-detailed-traces=all"],
)
def test_an_unsupported_vllm_flag_is_refused_with_the_reason(started: Started, flag: str) -> None:
    assert "is a flag of vLLM that loraserve does not have:" in invoke("m", flag, "2", code=2)


@pytest.mark.parametrize(
    "flag",
    [
        "--enable-tower-connector-lora",
        "--default-mm-loras",
        "--specialize-active-lora",
        "--enable-mixed-moe-lora-format",
        "--enable-moe-shared-loras",
        "--max-lora-cls-labels",
        "--enable-lora-bias",
        "--long-lora-scaling-factors",
        "--lora-dtype",
        "--trust-request-chat-template",
    ],
)
def test_unsupported_vllm_flags_for_adapters_and_templates_are_refused_with_the_reason(
    started: Started, flag: str
) -> None:
    assert "is a flag of vLLM that loraserve does not have:" in invoke("m", flag, "2", code=2)


def test_lora_dtype_auto_is_accepted_and_other_values_are_refused(started: Started) -> None:
    for args in (["--lora-dtype", "auto"], ["--lora_dtype", "auto"], ["--lora-dtype=auto"]):
        invoke(*args, "m", "--dtype", "auto", "--port", "7")
    assert [(settings.model, settings.port) for settings in started] == [("m", 7)] * 3
    for args in (["--lora-dtype", "float16"], ["--lora-dtype=bfloat16"], ["--lora-dtype"]):
        assert "adapters are served in the model's dtype (--dtype)" in " ".join(invoke("m", *args, code=2).split())


@pytest.mark.parametrize("flag", sorted(OFF_BY_DEFAULT))
def test_unsupported_vllm_flags_that_default_to_off_can_be_switched_off(started: Started, flag: str) -> None:
    name = flag.removeprefix("--")
    invoke(f"--no-{name}", "m", f"--no_{name.replace('-', '_')}", "--port", "7")
    assert (started.settings.model, started.settings.port) == ("m", 7)
    assert "is a flag of vLLM that loraserve does not have:" in invoke("m", flag, code=2)


def test_other_negated_vllm_flags_are_refused(started: Started) -> None:
    for flag in ("--no-enable-chunked-prefill", "--no-disable-log-requests", "--no-enforce"):
        assert flag in invoke("m", flag, code=2)
    assert not list(started)


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda", "cuda:1"])
def test_gpu_options_reach_the_engine(started: Started, device: str) -> None:
    invoke("m", "--device", device, "--gpu-memory-utilization", "0.5", "--enforce-eager")
    engine = started.settings.engine
    assert (engine.device, engine.gpu_memory_utilization, engine.enforce_eager) == (device, 0.5, True)


@pytest.mark.parametrize(
    ("flag", "value"), [("--device", "cuda:x"), ("--device", "mps"), ("--gpu-memory-utilization", "1.1")]
)
def test_an_invalid_device_or_memory_utilization_is_refused(started: Started, flag: str, value: str) -> None:
    assert value in invoke("m", flag, value, code=2)


@pytest.mark.parametrize(("args", "value"), [([], "auto"), (["--kv-cache-dtype", "fp8"], "fp8")])
def test_the_dtype_of_the_kv_cache_reaches_the_engine(started: Started, args: list[str], value: str) -> None:
    invoke("m", *args)
    assert started.settings.engine.kv_cache_dtype == value


@pytest.mark.parametrize(
    ("args", "value"), [([], "none"), (["--quantization", "int8"], "int8"), (["-q", "int4"], "int4")]
)
def test_the_quantization_reaches_the_engine(started: Started, args: list[str], value: str) -> None:
    invoke("m", *args)
    assert started.settings.engine.quantization == value


def test_an_unsupported_quantization_is_refused_with_the_supported_ones(started: Started) -> None:
    assert "'awq' is not one of 'none', 'int8', 'int4'" in invoke("m", "-q", "awq", code=2)


@pytest.mark.parametrize("value", ["fp8_e5m2", "bfloat16"])
def test_an_unsupported_kv_cache_dtype_is_refused_with_the_supported_ones(started: Started, value: str) -> None:
    assert f"'{value}' is not one of 'auto', 'fp8'" in invoke("m", "--kv-cache-dtype", value, code=2)


@pytest.mark.parametrize(("args", "value"), [([], None), (["4G"], 4 << 30), (["0"], 0)])
def test_the_size_of_the_host_tier_reaches_the_engine(started: Started, args: list[str], value: int | None) -> None:
    invoke("m", *(["--adapter-host-memory-bytes", *args] if args else []))
    assert started.settings.engine.adapter_host_memory_bytes == value


def test_a_host_tier_without_adapters_is_refused(started: Started) -> None:
    output = invoke("m", "--no-enable-lora", "--adapter-host-memory-bytes", "1G", code=2)
    assert "--no-enable-lora excludes --adapter-host-memory-bytes" in output


def test_a_misspelled_flag_gets_a_suggestion(started: Started) -> None:
    assert "--max-num-seqs" in invoke("--max-num-seq", "2", code=2)


def test_a_flag_overrides_the_environment_which_overrides_the_config_file(started: Started, tmp_path: Path) -> None:
    config = tmp_path / "serve.toml"
    config.write_text('port = 1\nmax-num-seqs = 2\nseed = 3\nlora_modules = "a=/a"\nserved-model-name = ["x", "y"]\n')
    env = {"LORASERVE_MAX_NUM_SEQS": "20", "LORASERVE_SEED": "30", "LORASERVE_MODEL": "m"}
    invoke("--config", str(config), "--seed", "300", env=env)
    settings = started.settings
    assert (settings.port, settings.max_num_seqs, settings.seed) == (1, 20, 300)
    assert settings.lora_modules == (LoraModule("a", Path("/a")),)
    assert settings.model_names == ("x", "y")
    assert settings.model == "m"


def test_a_model_given_as_an_argument_overrides_environment_and_config_file(started: Started, tmp_path: Path) -> None:
    config = tmp_path / "serve.toml"
    config.write_text('model = "c"\n')
    invoke("a", env={"LORASERVE_MODEL": "b"})
    invoke("a", "--config", str(config))
    assert [settings.model for settings in started] == ["a", "a"]


def test_a_flag_overrides_an_environment_variable_that_it_excludes(started: Started) -> None:
    """The images set LORASERVE_HOST."""
    invoke("m", "--uds", "/run/s", env={"LORASERVE_HOST": "0.0.0.0"})
    invoke("m", "--host", "::1", env={"LORASERVE_UDS": "/run/s"})
    assert [(settings.uds, settings.host) for settings in started] == [(Path("/run/s"), None), (None, "::1")]
    shown = {value.name: (value.value, value.source) for value in started[0].config}
    assert shown["host"] == ("", SettingSource.DEFAULT)
    assert "--uds excludes --host" in invoke("m", "--uds", "/run/s", "--host", "::1", code=2)


def test_a_variable_for_a_negative_flag_is_refused(started: Started) -> None:
    output = invoke("m", env={"LORASERVE_NO_CERTIFICATES": "1"}, code=2)
    assert "there is no variable LORASERVE_NO_CERTIFICATES: set LORASERVE_CERTIFICATES=false instead" in output
    invoke("m", env={"LORASERVE_CERTIFICATES": "false"})
    assert not started.settings.certificates


def test_all_versions_are_kept_by_default(started: Started) -> None:
    invoke("m")
    invoke("m", env={"LORASERVE_KEEP_VERSIONS": "3"})
    assert [settings.keep_versions for settings in started] == [None, 3]
    for num_versions in ("0", "501"):
        refusal = f"{num_versions} is not in the range 1<=x<=500"
        assert refusal in invoke("m", "--keep-versions", num_versions, code=2)


def test_an_unknown_key_in_the_config_file_gets_a_suggestion(started: Started, tmp_path: Path) -> None:
    config = tmp_path / "serve.toml"
    config.write_text("max-model-length = 5\n")
    output = invoke("--config", str(config), code=2)
    assert "'max-model-length'; did you mean 'max-model-len'?" in output


@pytest.mark.parametrize("variable", ["LORASERVE_API_KEY", "VLLM_API_KEY"])
def test_an_api_key_opens_the_server_to_the_network(started: Started, variable: str) -> None:
    invoke(env={variable: "secret"})
    assert started.settings.api_key == ("secret",)
    assert started.settings.bind_host == "0.0.0.0"


def test_a_generated_key_does_not_open_the_server_to_the_network(started: Started) -> None:
    """`export LORASERVE_API_KEY=ls-…` is meant for client commands. The server still requires that key."""
    made = generate_key().text
    invoke(env={"LORASERVE_API_KEY": made})
    assert started.settings.api_key == (made,)
    assert started.settings.bind_host == "127.0.0.1"
    assert not started.settings.is_open_on_loopback


def test_a_password_next_to_a_generated_key_opens_the_server_to_the_network(started: Started) -> None:
    invoke("--api-key", generate_key().text, "--api-key", "secret")
    assert started.settings.bind_host == "0.0.0.0"


def test_an_empty_api_key_is_refused(started: Started) -> None:
    assert "--api-key is empty" in invoke("--api-key", "", code=2)


def test_api_key_can_be_repeated_and_a_given_host_is_kept(started: Started) -> None:
    invoke("--api-key", "a", "--api-key", "b", "--host", "127.0.0.2")
    assert started.settings.api_key == ("a", "b")
    assert started.settings.bind_host == "127.0.0.2"


def test_data_dir_is_taken_from_flag_then_environment_then_home(started: Started, tmp_path: Path) -> None:
    home = {"HOME": str(tmp_path), "XDG_DATA_HOME": ""}
    invoke("--data-dir", "/a", env={"LORASERVE_DATA_DIR": "/b"})
    invoke(env={"LORASERVE_DATA_DIR": "/b"})
    assert [settings.data_path for settings in started] == [Path("/a"), Path("/b")]
    with pytest.MonkeyPatch.context() as patch:
        for name, value in home.items():
            patch.setenv(name, value)
        invoke("m")
        assert started[-1].data_path == tmp_path / ".local/share/loraserve"
        invoke()
        assert started[-1].data_path == tmp_path / ".local/share/loraserve/demo", "its adapters fit no other model"


def test_adapters_in_the_adapter_dir_are_named_after_their_folder(started: Started, tmp_path: Path) -> None:
    for name in ("b", "a"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_config.json").write_text("{}")
    (tmp_path / "not-an-adapter").mkdir()
    invoke("m", "--adapter-dir", str(tmp_path), "--lora-modules", "c=/c")
    assert [adapter.name for adapter in started.settings.named_adapters] == ["c"]
    assert [adapter.name for adapter in started.settings.found_adapters] == ["a", "b"]


def test_no_enable_lora_excludes_lora_modules_and_disables_adapters(started: Started) -> None:
    assert "excludes" in invoke("m", "--no-enable-lora", "--lora-modules", "a=/a", code=2)
    invoke("--no-enable-lora")
    assert started.settings.named_adapters == started.settings.found_adapters == []
    assert not started.settings.engine.enable_lora


@pytest.mark.parametrize(("args", "value"), [([], "auto"), (["--generation-config", "vllm"], "vllm")])
def test_generation_config_is_auto_or_vllm(started: Started, args: list[str], value: str) -> None:
    invoke("m", *args)
    assert started.settings.engine.generation_config == value


def test_generation_config_of_another_folder_is_refused(started: Started) -> None:
    assert "'auto', 'vllm'" in invoke("m", "--generation-config", "/folder", code=2)


def test_help_imports_neither_torch_nor_the_server() -> None:
    code = (
        "import sys\nfrom loraserve.cli.main import main\n"
        "for args in ([], ['serve']):\n    main([*args, '--help'], standalone_mode=False)\n"
        "print(sorted({'torch', 'transformers', 'uvicorn', 'litestar', 'httpx'} & sys.modules.keys()))"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert output.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("args", "hosts", "may_load"),
    [
        ([], ["localhost", "127.0.0.1", "[::1]"], True),
        (["--allowed-hosts", "box", "lan"], ["localhost", "127.0.0.1", "[::1]", "box", "lan"], True),
        (["--host", "0.0.0.0"], None, False),
        (["--host", "0.0.0.0", "--allowed-hosts", "box"], ["localhost", "127.0.0.1", "[::1]", "box"], False),
        (["--api-key", "k", "--host", "127.0.0.1"], None, False),
        (["--api-key", "k", "--allow-runtime-lora-updating"], None, False),
    ],
)
def test_open_servers_check_hosts_and_only_loopback_may_load_from_any_path(
    started: Started, args: list[str], hosts: list[str] | None, may_load: bool
) -> None:
    invoke("m", *args)
    serving = started.settings.serving
    assert serving.allowed_hosts == hosts
    assert serving.has_free_paths is may_load


def test_adapter_roots_are_resolved_through_symbolic_links(started: Started, tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "b")
    invoke("m", "--adapter-roots", str(tmp_path / "a"), str(tmp_path / "link"), "--no-allow-runtime-lora-updating")
    serving = started.settings.serving
    assert serving.adapter_roots == [tmp_path / "a", tmp_path / "b"]
    assert not serving.allow_runtime_lora


def test_the_api_process_imports_neither_torch_nor_transformers() -> None:
    code = (
        "import importlib, sys; from loraserve.cli.serve.server_start import HTTP_MODULES\n"
        "for name in HTTP_MODULES: importlib.import_module(name)\n"
        "print(sorted({'torch', 'transformers', 'uvicorn'} & sys.modules.keys()))"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert output.stdout.strip() == "['uvicorn']"


def test_http_modules_are_not_imported_before_the_engine_starts() -> None:
    code = (
        "import sys, loraserve.cli.serve.server; print(sorted({'litestar', 'uvicorn', 'numpy'} & sys.modules.keys()))"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert output.stdout.strip() == "[]"


@pytest.mark.parametrize("extra", [[], ["--enable-auto-tool-choice"]])
@pytest.mark.parametrize("name", ["hermes", "llama3_json", "mistral", "qwen3_coder", "glm45", "lfm2", "openai"])
def test_the_tool_call_parser_reaches_the_api(started: Started, name: str, extra: list[str]) -> None:
    invoke("m", "--tool-call-parser", name, *extra)
    assert started.settings.serving.tool_call_parser is ToolCallFormat(name)
    invoke("m")
    assert started[-1].serving.tool_call_parser is None


def test_parsers_have_vllms_other_names(started: Started) -> None:
    invoke("m", "--tool-call-parser", "qwen3_xml")
    assert started.settings.serving.tool_call_parser is ToolCallFormat.QWEN3_CODER
    invoke("m", "--tool-call-parser", "glm47", "--reasoning-parser", "glm45")
    assert started[-1].serving.tool_call_parser is ToolCallFormat.GLM45
    assert started[-1].serving.reasoning_parser is ReasoningFormat.QWEN3


@pytest.mark.parametrize("name", ["deepseek_r1", "qwen3", "mistral", "openai_gptoss"])
def test_the_reasoning_parser_reaches_the_api(started: Started, name: str) -> None:
    invoke("m", "--reasoning-parser", name)
    assert started.settings.serving.reasoning_parser is ReasoningFormat(name)
    invoke("m")
    assert started[-1].serving.reasoning_parser is None
    assert "'qwen3'" in invoke("m", "--reasoning-parser", "granite", code=2)
    assert "lists the available parsers" in invoke("m", "--reasoning-parser-plugin", "x.py", code=2)


def test_the_openai_tool_call_parser_implies_the_gptoss_reasoning_parser(started: Started) -> None:
    for extra in ([], ["--reasoning-parser", "openai_gptoss"]):
        invoke("m", "--tool-call-parser", "openai", *extra)
        assert started[-1].serving.reasoning_parser is ReasoningFormat.OPENAI_GPTOSS
    refused = invoke("m", "--tool-call-parser", "openai", "--reasoning-parser", "qwen3", code=2)
    assert "--tool-call-parser openai excludes --reasoning-parser qwen3" in refused


def test_auto_tool_choice_without_a_parser_and_unknown_parsers_are_refused(started: Started) -> None:
    assert "needs --tool-call-parser" in invoke("m", "--enable-auto-tool-choice", code=2)
    assert "'hermes'" in invoke("m", "--tool-call-parser", "pythonic", code=2)
    assert "may not call" in invoke("m", "--exclude-tools-when-tool-choice-none", code=2)


def test_only_the_server_that_started_the_private_redis_drops_publish_leases(started: Started, tmp_path: Path) -> None:
    invoke("--data-dir", str(tmp_path))

    async def run() -> None:
        async with opened_declared(started.settings) as first:
            assert await first.live.publish_leases.try_take("acme", "first")
            async with opened_declared(started.settings) as second:
                assert not await second.live.publish_leases.try_take("acme", "second")
        async with opened_declared(started.settings) as alone:
            assert await alone.live.publish_leases.try_take("acme", "next")

    asyncio.run(run())


def test_adapters_may_be_for_the_models_own_name_too_by_which_no_request_asks(
    started: Started, valkey: Valkey, tmp_path: Path
) -> None:
    data_dir = ("--data-dir", str(tmp_path), "--redis-url", valkey.url)
    invoke("org/Llama", "--served-model-name", "sql-prod", *data_dir)

    async def run() -> None:
        async with opened_declared(started.settings) as declared:
            assert declared.settings.served_names == ["sql-prod"]
            assert declared.settings.adapter_rules.base_names == ("sql-prod", "org/Llama")

    asyncio.run(run())


def test_a_start_without_its_redis_names_the_option(started: Started, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    invoke("--data-dir", str(tmp_path), "--redis-url", f"redis://:hidden@127.0.0.1:{port}")

    async def run() -> None:
        with start_errors(started.settings):
            async with opened_declared(started.settings):
                pass

    with pytest.raises(
        StartError, match=r"^the Redis of --redis-url cannot be used: Error .* connecting to 127"
    ) as failed:
        asyncio.run(run())
    assert "next attempt" not in str(failed.value)
    assert "hidden" not in str(failed.value)


def test_file_errors_name_the_data_directory_only_during_startup(
    started: Started, valkey: Valkey, tmp_path: Path
) -> None:
    invoke("--data-dir", str(tmp_path), "--redis-url", valkey.url)

    async def run(at_start: OSError | None, later: OSError | None) -> None:
        async with contextlib.AsyncExitStack() as opened:
            with start_errors(started.settings):
                await opened.enter_async_context(opened_declared(started.settings))
                if at_start is not None:
                    raise at_start
            if later is not None:
                raise later

    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with pytest.raises(StartError, match=r"--data-dir .* cannot be used: .*No space left"):
        asyncio.run(run(full, None))
    with pytest.raises(OSError, match="No space left"):
        asyncio.run(run(None, full))
