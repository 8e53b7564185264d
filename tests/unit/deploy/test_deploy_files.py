"""Checks the files in deploy/ as far as possible without a container engine."""

import configparser
import re
import shlex
from pathlib import Path

import pytest
import yaml

from tests.support.cli_words import ENVIRONMENT, FLAG, options_of, serve_variables

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy"


def commands_in(text: str) -> list[list[str]]:
    """The words after `loraserve` on each line: the subcommand, then its flags."""
    found = []
    for line in text.splitlines():
        match = re.search(r"\bloraserve ((?:serve|keys create)\b.*)", line)
        if match:
            found.append(shlex.split(match.group(1)))
    return found


@pytest.mark.parametrize("name", ["Dockerfile", "compose.yaml", "prometheus.yml", "loraserve.service"])
def test_every_flag_in_a_deploy_file_exists(name: str) -> None:
    for words in commands_in((DEPLOY / name).read_text()):
        subcommand = ["keys", "create"] if words[:2] == ["keys", "create"] else ["serve"]
        assert set(filter(FLAG.fullmatch, words)) <= options_of(*subcommand), words


@pytest.mark.parametrize("name", ["Dockerfile", "compose.yaml", "loraserve.service"])
def test_every_variable_in_a_deploy_file_is_read_by_serve(name: str) -> None:
    text = "\n".join(line for line in (DEPLOY / name).read_text().splitlines() if not line.lstrip().startswith("#"))
    build_time = {"LORASERVE_PREBUILD"}
    assert set(ENVIRONMENT.findall(text)) - build_time <= serve_variables()


def test_files_copied_into_the_image_exist_and_are_not_ignored() -> None:
    dockerfile = (DEPLOY / "Dockerfile").read_text()
    kept = {line[1:] for line in (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = [word for line in re.findall(r"^COPY (.+)$", dockerfile, re.M) for word in line.split()[:-1]]
    assert copied
    for path in copied:
        assert (ROOT / path).exists(), path
        assert path in kept, path


def test_both_images_run_as_an_unprivileged_user() -> None:
    stages = re.split(r"^FROM ", (DEPLOY / "Dockerfile").read_text(), flags=re.M)
    targets = {stage.split()[2]: stage for stage in stages[1:]}
    for name in ("cpu", "cuda"):
        assert targets[name].rstrip().endswith("USER loraserve")


def test_the_gpu_image_has_the_compiler_that_launching_kernels_needs() -> None:
    stage = (DEPLOY / "Dockerfile").read_text().split("AS cuda")[1].split("FROM ")[0]
    assert {"gcc", "libc6-dev"} <= set(stage.split())


def test_the_compose_file_is_consistent() -> None:
    composition = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    services, volumes = composition["services"], composition["volumes"]
    assert set(services) == {"loraserve", "valkey", "prometheus"}
    for name, service in services.items():
        for dependency in service.get("depends_on", []):
            assert dependency in services, (name, dependency)
        for mount in service.get("volumes", []):
            source = re.sub(r"\$\{[^}]*:-([^}]*)\}", r"\1", mount).split(":")[0]
            assert source.startswith("./") or source in volumes, (name, mount)
    build = services["loraserve"]["build"]
    assert (DEPLOY / build["context"] / build["dockerfile"]).is_file()
    assert f"AS {build['target']}" in (DEPLOY / "Dockerfile").read_text()
    command = services["loraserve"]["command"]
    assert set(filter(FLAG.fullmatch, command)) <= options_of(command[0])


def test_the_compose_file_serves_the_model_that_it_mounts() -> None:
    server = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["loraserve"]
    (mounted_at,) = re.findall(r"\$\{MODEL_DIR:-[^}]*\}:([^:]+):ro", "\n".join(server["volumes"]))
    assert server["environment"]["LORASERVE_MODEL"] == f"${{MODEL_DIR:+{mounted_at}}}"


def test_compose_and_systemd_wait_longer_than_the_server_drains() -> None:
    composition = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    server = composition["services"]["loraserve"]
    drain_s = float(server["environment"]["LORASERVE_SHUTDOWN_TIMEOUT"])
    assert float(server["stop_grace_period"].removesuffix("s")) > drain_s
    unit = (DEPLOY / "loraserve.service").read_text()
    stop_s = re.search(r"^TimeoutStopSec=(\d+)$", unit, re.M)
    flag = re.search(r"--shutdown-timeout (\d+)", unit)
    assert stop_s is not None
    assert flag is not None
    assert int(stop_s.group(1)) > int(flag.group(1))


def test_the_systemd_unit_is_well_formed_and_unprivileged() -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(DEPLOY / "loraserve.service")
    assert unit.sections() == ["Unit", "Service", "Install"]
    assert unit["Service"]["User"] == "loraserve"
    assert unit["Service"]["NoNewPrivileges"] == "true"


def test_prometheus_scrapes_the_metrics_port_which_compose_does_not_publish() -> None:
    scraping = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())["scrape_configs"][0]
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    (target,) = scraping["static_configs"][0]["targets"]
    host, port = target.split(":")
    command = services[host]["command"]
    assert command[command.index("--metrics-port") + 1] == port
    assert command[command.index("--metrics-host") + 1] == "0.0.0.0"
    assert not [published for published in services[host]["ports"] if published.endswith(f":{port}")]
