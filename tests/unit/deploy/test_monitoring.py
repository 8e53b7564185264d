"""Alerts and dashboard query what /metrics has. Syntax was checked with promtool, panels on a live server."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from loraserve.control.contents.residency import MAX_LOADED
from loraserve.engine.config import MAX_RESIDENT_ADAPTERS
from loraserve.serving.errors import SERVER_FAULTS, ErrorCode
from tests.support.fake_engine_client import FakeEngine
from tests.support.live_server import live_server, make_settings
from tests.support.management import complete
from tests.support.server_process import wait_until

DEPLOY = Path(__file__).parents[3] / "deploy"
GROUP = yaml.safe_load((DEPLOY / "alerts.yml").read_text())["groups"][0]
RULES = GROUP["rules"]
PANELS = json.loads((DEPLOY / "grafana" / "loraserve.json").read_text())["panels"]
OF_PROMETHEUS = {"up": {"job", "instance"}}
ADDED_WHEN_SCRAPED = {"instance"}

METRIC = re.compile(r"\b(?:up(?=\{)|loraserve_\w+|vllm:\w+)")
MATCHERS = re.compile(r"(\w+)\s*(?:=~|!~|!=|=)\s*\"")
GROUPING = re.compile(r"\bby \(([^)]*)\)")


@pytest.fixture(scope="module")
def labels_of(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """Labels by sample name, from a server that has answered one request and refused one."""
    found: dict[str, set[str]] = {name: set(labels) for name, labels in OF_PROMETHEUS.items()}
    with (
        live_server(FakeEngine(), make_settings(tmp_path_factory.mktemp("data"))) as server,
        httpx.Client(base_url=server.url) as http,
    ):
        assert complete(http, "tiny").status_code == 200
        assert complete(http, "unknown").status_code == 404
        wait_until(lambda: "loraserve_data_free_bytes" in http.get("/metrics").text, "the disk was measured")
        for family in text_string_to_metric_families(http.get("/metrics").text):
            for sample in family.samples:
                found.setdefault(sample.name, set()).update(sample.labels)
    return found


def expressions() -> Iterator[tuple[str, str]]:
    for rule in RULES:
        yield rule["alert"], rule["expr"]
    for panel in PANELS:
        for target in panel["targets"]:
            yield panel["title"], target["expr"]


@pytest.mark.parametrize(("where", "expression"), [*expressions()])
def test_every_metric_and_label_that_is_queried_exists(
    labels_of: dict[str, set[str]], where: str, expression: str
) -> None:
    names = METRIC.findall(expression)
    assert names
    assert set(names) <= labels_of.keys(), where
    labels = set.union(*(labels_of[name] for name in names)) | ADDED_WHEN_SCRAPED
    assert set(MATCHERS.findall(expression)) <= labels
    for grouping in GROUPING.findall(expression):
        assert {label.strip() for label in grouping.split(",")} <= labels


def test_the_fault_alert_covers_all_server_faults_except_draining() -> None:
    (rule,) = (rule for rule in RULES if rule["alert"] == "LoraserveServerFaults")
    codes = re.search(r'code=~"([^"]*)"', rule["expr"])
    assert codes is not None
    assert set(codes[1].split("|")) == SERVER_FAULTS - {ErrorCode.SERVER_DRAINING}


def test_every_alert_is_documented() -> None:
    documented = (DEPLOY.parent / "docs" / "operations.md").read_text()
    for rule in RULES:
        assert f"| `{rule['alert']}` |" in documented
        assert {"summary", "description"} <= rule["annotations"].keys()


def test_the_maximum_of_adapters_in_memory_is_documented_where_more_memory_is_advised() -> None:
    (rule,) = (rule for rule in RULES if rule["alert"] == "LoraserveAdaptersThrash")
    assert f"loraserve_adapters_resident is {MAX_RESIDENT_ADAPTERS} already" in rule["annotations"]["description"]
    documented = (DEPLOY.parent / "docs" / "operations.md").read_text()
    assert f"Adapter memory holds at most {MAX_RESIDENT_ADAPTERS:,} adapters" in documented
    assert f"at most {MAX_LOADED:,} contents" in documented


def test_alerts_are_evaluated_at_least_as_often_as_their_shortest_duration() -> None:
    """Without an interval, Prometheus evaluates once a minute."""
    shortest_s = min(seconds(rule["for"]) for rule in RULES)
    assert seconds(GROUP.get("interval", "1m")) <= shortest_s


def seconds(duration: str) -> int:
    return int(duration[:-1]) * {"s": 1, "m": 60}[duration[-1]]


def test_the_compose_file_mounts_the_rules_of_prometheus() -> None:
    mounts = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["prometheus"]["volumes"]
    (rules,) = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())["rule_files"]
    assert f"./{rules}:/etc/prometheus/{rules}:ro" in mounts


def test_dashboard_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in PANELS:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert max(x for x, _ in cells) < 24
        assert not cells & taken, panel["title"]
        taken |= cells
    assert len({panel["id"] for panel in PANELS}) == len(PANELS)
