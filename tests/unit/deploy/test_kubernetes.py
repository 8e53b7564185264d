"""The manifests in deploy/kubernetes agree with the image and the command line."""

import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from loraserve.api.route_table import ROUTES
from loraserve.cli.main import main
from loraserve.cli.serve.settings import LOOPBACK_HOSTS
from tests.support.cli_words import ENVIRONMENT, FLAG, options_of, serve_variables

DEPLOY = Path(__file__).parents[3] / "deploy"
BASE, GPU = DEPLOY / "kubernetes" / "base", DEPLOY / "kubernetes" / "gpu"
DOCKERFILE = (DEPLOY / "Dockerfile").read_text()
WAIT_S = 30.0


def read(path: Path) -> dict[str, Any]:
    return yaml.safe_load(path.read_text())


@pytest.fixture
def pod() -> dict[str, Any]:
    return read(BASE / "stateful-set.yaml")["spec"]["template"]["spec"]


@pytest.fixture
def server(pod: dict[str, Any]) -> dict[str, Any]:
    (container,) = pod["containers"]
    return container


def image_setting(name: str) -> str:
    found = re.search(rf"\b{name}=(\S+)", DOCKERFILE)
    assert found is not None
    return found[1]


def after(flag: str, words: list[str]) -> str:
    return words[words.index(flag) + 1]


def drain_s(server: dict[str, Any]) -> float:
    return float(after("--shutdown-timeout", server["args"]))


def test_every_file_is_listed_by_kustomize_or_offered_in_a_comment() -> None:
    for folder in (BASE, GPU):
        listing = (folder / "kustomization.yaml").read_text()
        for path in folder.glob("*.yaml"):
            assert path.name == "kustomization.yaml" or f"- {path.name}" in listing or f": {path.name}" in listing
        for resource in read(folder / "kustomization.yaml")["resources"]:
            assert (folder / resource).exists()


def test_the_flags_and_variables_of_the_container_exist(server: dict[str, Any]) -> None:
    subcommand, *words = server["args"]
    assert set(filter(FLAG.fullmatch, words)) <= options_of(subcommand)
    for path in (BASE / "kustomization.yaml", GPU / "stateful-set.yaml"):
        assert set(ENVIRONMENT.findall(path.read_text())) <= serve_variables()


def test_ports_and_folders_match_the_image(server: dict[str, Any]) -> None:
    ports = {port["name"]: port["containerPort"] for port in server["ports"]}
    assert str(ports["http"]) == image_setting("LORASERVE_PORT")
    assert str(ports["metrics"]) == after("--metrics-port", server["args"])
    assert after("--metrics-host", server["args"]) not in LOOPBACK_HOSTS
    mounts = {mount["name"]: mount["mountPath"] for mount in server["volumeMounts"]}
    assert mounts == {"data": image_setting("LORASERVE_DATA_DIR"), "tmp": "/tmp"}


def test_service_policy_budget_and_monitor_select_the_pod(server: dict[str, Any]) -> None:
    stateful = read(BASE / "stateful-set.yaml")
    labels = stateful["spec"]["template"]["metadata"]["labels"]
    service, policy = read(BASE / "service.yaml"), read(BASE / "network-policy.yaml")
    budget, monitor = read(BASE / "disruption-budget.yaml"), read(BASE / "pod-monitor.yaml")
    selectors = [found["spec"]["selector"]["matchLabels"] for found in (stateful, budget, monitor)]
    assert [service["spec"]["selector"], policy["spec"]["podSelector"]["matchLabels"], *selectors] == [labels] * 5
    assert stateful["spec"]["serviceName"] == service["metadata"]["name"]
    named = {port["name"] for port in server["ports"]}
    assert {port["targetPort"] for port in service["spec"]["ports"]} == {"http"} < named
    assert {port["port"] for rule in policy["spec"]["ingress"] for port in rule["ports"]} == named
    assert [endpoint["port"] for endpoint in monitor["spec"]["podMetricsEndpoints"]] == ["metrics"]


def test_metrics_access_is_restricted_by_the_network_policy() -> None:
    rules = read(BASE / "network-policy.yaml")["spec"]["ingress"]
    assert [bool(rule.get("from")) for rule in rules if {"port": "metrics"} in rule["ports"]] == [True]


def test_probes_use_routes_that_need_no_key(server: dict[str, Any]) -> None:
    public = {path for handler in ROUTES if handler.opt.get("public") for path in handler.paths}
    for name in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert server[name]["httpGet"]["path"] in public
        assert server[name]["httpGet"]["port"] == "http"


def test_kubernetes_waits_longer_than_the_server_drains(pod: dict[str, Any], server: dict[str, Any]) -> None:
    assert pod["terminationGracePeriodSeconds"] > drain_s(server)


def test_the_user_matches_the_image_and_is_unprivileged(pod: dict[str, Any]) -> None:
    user = re.search(r"useradd --uid (\d+)", DOCKERFILE)
    group = re.search(r"groupadd --gid (\d+)", DOCKERFILE)
    assert user is not None
    assert group is not None
    assert pod["securityContext"]["runAsUser"] == int(user[1])
    assert pod["securityContext"]["runAsGroup"] == pod["securityContext"]["fsGroup"] == int(group[1])
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in (*pod["initContainers"], *pod["containers"]):
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }


def test_the_service_link_variables_do_not_set_our_port(pod: dict[str, Any]) -> None:
    name = read(BASE / "service.yaml")["metadata"]["name"].upper()
    assert f"{name}_PORT" not in serve_variables() or pod["enableServiceLinks"] is False


def test_the_init_container_prints_how_to_create_the_first_key_and_ends_once_it_exists(
    pod: dict[str, Any], tmp_path: Path
) -> None:
    (waiting,) = pod["initContainers"]
    words = [word.replace("/data", str(tmp_path)) for word in waiting["command"]]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "waiting for a key:\n"
        advice = shlex.split(process.stdout.readline())
        assert advice[advice.index("-c") + 1] == waiting["name"]
        assert CliRunner().invoke(main, advice[advice.index("--") + 2 :]).exit_code == 0
        assert process.wait(WAIT_S) == 0
    finally:
        process.kill()
        process.communicate()


def test_the_gpu_overlay_patches_names_that_the_base_has(pod: dict[str, Any], server: dict[str, Any]) -> None:
    overlay = read(GPU / "kustomization.yaml")
    (image,) = overlay["images"]
    assert {container["image"].split(":")[0] for container in (*pod["initContainers"], server)} == {image["name"]}
    assert f" AS {image['newTag']}\n" in DOCKERFILE
    patch = read(GPU / "stateful-set.yaml")
    assert patch["metadata"]["name"] == read(BASE / "stateful-set.yaml")["metadata"]["name"]
    (container,) = patch["spec"]["template"]["spec"]["containers"]
    assert container["name"] == server["name"]
    values = {variable["name"]: variable["value"] for variable in container["env"]}
    assert values["LORASERVE_MODEL"] in {mount["mountPath"] for mount in container["volumeMounts"]}
