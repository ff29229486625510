"""The files of deploy/ are what their programs read, and speak of metrics, flags and routes that exist."""

from __future__ import annotations

import configparser
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate  # type: ignore[import-untyped]
import pytest
import yaml
from prometheus_client import CollectorRegistry, Metric, generate_latest

from radixserve.configs.options import OPTIONS
from radixserve.configs.schema import ServeConfig
from radixserve.engine.messages import EngineStatus
from radixserve.server.metrics import COUNTERS, Numbers
from radixserve.server.routes.metrics import PREFIX, Snapshot

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
YAML_FILES = sorted(path for path in DEPLOY.rglob("*") if path.suffix in (".yaml", ".yml"))
ENGINE_LABELS = {"model_name", "state", "le", "instance"}
PROMTOOL = shutil.which("promtool")
needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="promtool is not here (Debian: apt install prometheus)")


def families() -> list[Metric]:
    return list(Snapshot(EngineStatus(1, "ready"), Numbers.zero(), "m").collect())


def sample_names() -> set[str]:
    suffixes = {"gauge": [""], "counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"]}
    return {family.name + suffix for family in families() for suffix in suffixes[family.type]}


def expressions(node: Any) -> list[str]:
    if isinstance(node, dict):
        own = [node["expr"]] if "expr" in node else []
        return own + [found for value in node.values() for found in expressions(value)]
    return [found for value in node for found in expressions(value)] if isinstance(node, list) else []


def check_expression(expression: str) -> None:
    names = set(re.findall(rf"{PREFIX}\w+", expression))
    assert names and names <= sample_names(), expression
    assert expression.count("(") == expression.count(")")
    labels = {label.strip() for by in re.findall(r"by \((.*?)\)", expression) for label in by.split(",")}
    assert labels <= ENGINE_LABELS | {label for _, label in COUNTERS.values()}, expression


def promtool(*arguments: str | Path) -> str:
    """What it printed; fails with that when the exit status is not 0."""
    command = [str(PROMTOOL), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_dashboard_shows_metrics_and_labels_that_exist() -> None:
    dashboard = json.loads((DEPLOY / "grafana" / "radixserve.json").read_text())
    found = expressions(dashboard)
    assert len(found) >= len(dashboard["panels"]) >= 10
    for expression in found:
        check_expression(expression)


def test_alerts_ask_for_metrics_that_exist_and_say_what_is_wrong() -> None:
    (group,) = yaml.safe_load((DEPLOY / "alerts.yml").read_text())["groups"]
    for rule in group["rules"]:
        check_expression(rule["expr"])
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert set(rule["annotations"]) == {"summary", "description"}


@needs_promtool
def test_prometheus_reads_its_configuration_and_our_alerts() -> None:
    assert "alerts.yml" in promtool("check", "config", DEPLOY / "prometheus.yml")


@needs_promtool
def test_prometheus_finds_nothing_wrong_with_the_metrics_but_the_colon_of_their_names() -> None:
    registry = CollectorRegistry(auto_describe=False)
    numbers = Numbers.zero()
    for name, (_, label) in COUNTERS.items():
        numbers.count(name, "stop" if label else "")
    registry.register(Snapshot(EngineStatus(1, "ready"), numbers, "m"))
    text = generate_latest(registry).decode()
    command = [str(PROMTOOL), "check", "metrics"]
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=60)
    complaints = [line for line in done.stderr.splitlines() if "should not contain ':'" not in line]
    assert complaints == [] and len(done.stderr.splitlines()) == len(families())


DOWN = """
rule_files: [{alerts}]
evaluation_interval: 1m
tests:
  - interval: 1m
    input_series:
      - {{series: 'radixserve:engine_up{{instance="a"}}', values: '1 1 0 0 0 0'}}
      - {{series: 'radixserve:engine_up{{instance="b"}}', values: '1 0 1 1 1 1'}}
      - {{series: 'radixserve:admission_rejections_total{{instance="b", reason="queue_full"}}', values: '0+60x20'}}
      - {{series: 'radixserve:admission_rejections_total{{instance="b", reason="context_length"}}', values: '0+60x20'}}
    alert_rule_test:
      - eval_time: 3m
        alertname: RadixserveDown
        exp_alerts: []
      - eval_time: 5m
        alertname: RadixserveDown
        exp_alerts:
          - exp_labels: {{instance: a, severity: critical}}
            exp_annotations:
              summary: a serves nothing
              description: "The server does not answer, or has no engine with a loaded model; GET /health says why."
      - eval_time: 10m
        alertname: RadixserveFull
        exp_alerts:
          - exp_labels: {{instance: b, severity: warning}}
            exp_annotations:
              summary: b turns requests away
              description: "Its queue is full, 1 refusals a second: add replicas, or let clients come slower."
"""


@needs_promtool
def test_alerts_fire_when_they_should_and_not_before(tmp_path: Path) -> None:
    file = tmp_path / "test.yml"
    file.write_text(DOWN.format(alerts=DEPLOY / "alerts.yml"))
    promtool("test", "rules", file)


def test_panels_do_not_cover_each_other() -> None:
    panels = json.loads((DEPLOY / "grafana" / "radixserve.json").read_text())["panels"]
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels]
    assert len({panel["id"] for panel in panels}) == len(set(places)) == len(panels)


def test_the_page_describes_every_metric_and_no_other() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text()
    described = set(re.findall(r"^\| `(\w+)`", page, re.MULTILINE))
    assert described == {
        family.name.removeprefix(PREFIX) + ("_total" if family.type == "counter" else "") for family in families()
    }


@pytest.mark.parametrize("path", YAML_FILES, ids=lambda path: path.name)
def test_yaml_files_can_be_read(path: Path) -> None:
    assert all(isinstance(document, dict) for document in yaml.safe_load_all(path.read_text()))


def test_compose_mounts_files_that_exist_and_scrapes_the_service() -> None:
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    mounts = [volume.split(":")[0] for service in compose["services"].values() for volume in service["volumes"]]
    for mount in mounts:
        assert (DEPLOY / mount).is_file() if mount.startswith("./") else mount in compose["volumes"]
    assert set(compose["services"]["radixserve"]["environment"]) <= {option.variable for option in OPTIONS.values()}
    (job,) = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())["scrape_configs"]
    assert job["static_configs"][0]["targets"] == [f"radixserve:{ServeConfig().port}"]


def test_kubernetes_knows_every_field() -> None:
    for resource in yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()):
        kubernetes_validate.validate(resource, kubernetes_validate.latest_version(), strict=True)


def test_kubernetes_waits_for_the_model_and_for_the_drain() -> None:
    deployment, claim, service = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
    pod = deployment["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    assert deployment["spec"]["selector"]["matchLabels"] == pod["metadata"]["labels"] == service["spec"]["selector"]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"] == {"path": "/health", "port": container["ports"][0]["name"]}
        assert container[probe]["timeoutSeconds"] < container[probe]["periodSeconds"]
    pause_s = float(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["spec"]["terminationGracePeriodSeconds"] > pause_s + ServeConfig().drain_timeout + 15
    volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == set(volumes)
    assert volumes["models"]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]


def test_systemd_signals_the_supervisor_alone_and_waits_for_the_drain() -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read_string((DEPLOY / "radixserve.service").read_text())
    service = unit["Service"]
    assert (service["Type"], service["KillMode"]) == ("simple", "mixed")
    assert float(service["TimeoutStopSec"]) > ServeConfig().drain_timeout + 15
    # A dynamic user has no home: what is compiled at the first start would be compiled at each.
    assert "HOME=%C/radixserve" in service["Environment"].split() and service["CacheDirectory"] == "radixserve"
