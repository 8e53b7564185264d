"""The files in deploy/ as far as a machine without a container engine can check them."""

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
    """What follows `loraserve` on lines of a file, as words: the subcommands, then its flags."""
    found = []
    for line in text.splitlines():
        match = re.search(r"\bloraserve ((?:serve|keys create)\b.*)", line)
        if match:
            found.append(shlex.split(match.group(1)))
    return found


@pytest.mark.parametrize("name", ["Dockerfile", "compose.yaml", "prometheus.yml", "loraserve.service"])
def test_every_flag_of_a_command_exists(name: str) -> None:
    for words in commands_in((DEPLOY / name).read_text()):
        subcommand = ["keys", "create"] if words[:2] == ["keys", "create"] else ["serve"]
        assert set(filter(FLAG.fullmatch, words)) <= options_of(*subcommand), words


@pytest.mark.parametrize("name", ["Dockerfile", "compose.yaml", "loraserve.service"])
def test_every_variable_is_one_that_serve_reads(name: str) -> None:
    text = "\n".join(line for line in (DEPLOY / name).read_text().splitlines() if not line.lstrip().startswith("#"))
    build_time = {"LORASERVE_PREBUILD"}
    assert set(ENVIRONMENT.findall(text)) - build_time <= serve_variables()


def test_what_the_image_copies_exists_and_is_not_ignored() -> None:
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


def test_the_image_for_gpus_can_compile_what_launches_kernels() -> None:
    stage = (DEPLOY / "Dockerfile").read_text().split("AS cuda")[1].split("FROM ")[0]
    assert {"gcc", "libc6-dev"} <= set(stage.split())


def test_the_composition_is_whole() -> None:
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


def test_the_composition_serves_the_model_that_it_mounts() -> None:
    server = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["loraserve"]
    (mounted_at,) = re.findall(r"\$\{MODEL_DIR:-[^}]*\}:([^:]+):ro", "\n".join(server["volumes"]))
    assert server["environment"]["LORASERVE_MODEL"] == f"${{MODEL_DIR:+{mounted_at}}}"


def test_whoever_stops_the_server_waits_longer_than_it_drains() -> None:
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


def test_the_unit_is_well_formed_and_unprivileged() -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(DEPLOY / "loraserve.service")
    assert unit.sections() == ["Unit", "Service", "Install"]
    assert unit["Service"]["User"] == "loraserve"
    assert unit["Service"]["NoNewPrivileges"] == "true"


def test_prometheus_scrapes_the_metrics_port_of_the_composition_which_nobody_else_reaches() -> None:
    scraping = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())["scrape_configs"][0]
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    (target,) = scraping["static_configs"][0]["targets"]
    host, port = target.split(":")
    command = services[host]["command"]
    assert command[command.index("--metrics-port") + 1] == port
    assert command[command.index("--metrics-host") + 1] == "0.0.0.0"
    assert not [published for published in services[host]["ports"] if published.endswith(f":{port}")]
