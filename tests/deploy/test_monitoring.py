"""Dashboards, rules and KEDA queries are valid PromQL over existing metrics, by a parser of PromQL."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import promql_parser
import pytest
import yaml

from tests.support.deploy.compose_project import COMPOSE, ROOT
from tests.support.deploy.kustomization import rendered

DASHBOARD = json.loads((COMPOSE / "grafana" / "dashboards" / "weir.json").read_text())
GROUPS = yaml.safe_load((COMPOSE / "prometheus" / "rules.yml").read_text())["groups"]
RULES = [rule for group in GROUPS for rule in group["rules"]]
RECORDED = {rule["record"] for rule in RULES if "record" in rule}
OF_PROMETHEUS = {"up"}

UNITS = {"short", "s", "µs", "reqps", "cps", "percentunit", "bytes"}
"""The units of Grafana's that the panels have."""


def panels() -> list[dict[str, Any]]:
    return [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def expressions() -> Iterator[tuple[str, str]]:
    """(where, PromQL)"""
    for panel in panels():
        yield from ((f"panel {panel['title']!r}", target["expr"]) for target in panel["targets"])
    yield from ((f"rule {rule.get('record') or rule['alert']}", rule["expr"]) for rule in RULES)
    for item in rendered(ROOT / "k8s" / "overlays" / "production"):
        if item["kind"] == "ScaledObject":
            for trigger in item["spec"]["triggers"]:
                yield f"ScaledObject {item['metadata']['name']}", trigger["metadata"]["query"]


def test_every_expression_is_promql() -> None:
    wrong = {}
    for where, expression in expressions():
        try:
            assert list(asked(expression)), where
        except ValueError as error:
            wrong[where] = str(error)
    assert wrong == {}


def test_what_is_no_promql_is_noticed() -> None:
    with pytest.raises(ValueError):
        list(asked("sum by (model (rate(up[5m])))"))


def unknown_metrics(families: dict[str, str]) -> dict[str, str]:
    """Of `families` (kind by name): the metrics that nobody has, by where they are asked for."""
    series = {"histogram": ("_bucket", "_sum", "_count"), "summary": ("", "_sum", "_count")}
    there = {name + suffix for name, kind in families.items() for suffix in series.get(kind, ("",))}
    there |= RECORDED | OF_PROMETHEUS
    return {where: name for where, expression in expressions() for name, _ in asked(expression) if name not in there}


def test_alerts_say_what_is_wrong_and_what_to_do() -> None:
    alerts = [rule for rule in RULES if "alert" in rule]
    for alert in alerts:
        assert alert["labels"]["severity"] in ("warning", "critical"), alert["alert"]
        assert alert["annotations"].keys() == {"summary", "description"}, alert["alert"]
    names = [alert["alert"] for alert in alerts]
    assert len(set(names)) == len(names)
    runbook = set(re.findall(r"`(Weir[A-Z]\w+)`", (ROOT / "docs" / "operations.md").read_text()))
    assert runbook == set(names)


def test_the_dashboard_is_one_that_grafana_can_show() -> None:
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24, panel["title"]
        assert place["w"] > 0, panel["title"]
    taken = [
        (x, y)
        for place in (panel["gridPos"] for panel in DASHBOARD["panels"])
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(set(taken)) == len(taken), "panels lie on each other"
    assert [
        row["title"] for row in DASHBOARD["panels"] if row["type"] == "row" and not row["title"].endswith("?")
    ] == []
    for panel in panels():
        assert panel["type"] in ("timeseries", "stat")
        assert panel["datasource"]["uid"] == "${datasource}"
        assert panel["fieldConfig"]["defaults"]["unit"] in UNITS, panel["title"]
        assert panel["fieldConfig"]["defaults"]["thresholds"]["steps"][0]["value"] is None
        refs = [target["refId"] for target in panel["targets"]]
        assert len(set(refs)) == len(refs)
    variables = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
    assert variables.keys() == {"datasource", "model"}
    assert variables["model"]["includeAll"]


def test_grafana_finds_the_dashboard_and_prometheus() -> None:
    services = yaml.safe_load((COMPOSE / "monitoring.yaml").read_text())["services"]
    grafana = services["grafana"]
    mounted = {volume.split(":")[1]: volume.split(":")[0] for volume in grafana["volumes"]}
    (provider,) = yaml.safe_load((COMPOSE / "grafana/provisioning/dashboards/weir.yaml").read_text())["providers"]
    folder = COMPOSE / mounted[provider["options"]["path"]]
    assert (folder / "weir.json").is_file()
    (source,) = yaml.safe_load((COMPOSE / "grafana/provisioning/datasources/weir.yaml").read_text())["datasources"]
    assert source["url"].startswith("http://prometheus:")
    config = yaml.safe_load((COMPOSE / "prometheus" / "prometheus.yml").read_text())
    assert config["rule_files"] == ["/etc/prometheus/rules.yml"]
    (job,) = config["scrape_configs"]
    assert job["job_name"] == "weir"
    (found,) = job["dns_sd_configs"]
    known = yaml.safe_load((COMPOSE / "compose.yaml").read_text())["services"].keys()
    known |= yaml.safe_load((COMPOSE / "roles.yaml").read_text())["services"].keys()
    assert set(found["names"]) <= known


_GRAFANA = {"$__rate_interval": "5m", "$__interval": "1m", "$__range": "1h"}
_CHILDREN = ("expr", "lhs", "rhs", "param", "vector_selector")


def asked(expression: str) -> Iterator[tuple[str, set[str]]]:
    """(metric, labels that are matched) for each selector. Raises ValueError for what is no PromQL."""
    for name, value in _GRAFANA.items():
        expression = expression.replace(name, value)
    yield from _selectors(promql_parser.parse(re.sub(r"\$\{?model\b\}?", ".*", expression)))


def _selectors(node: Any) -> Iterator[tuple[str, set[str]]]:
    if isinstance(node, promql_parser.VectorSelector):
        yield node.name, {matcher.name for matcher in node.matchers.matchers}
        return
    for name in _CHILDREN:
        child = getattr(node, name, None)
        if child is not None:
            yield from _selectors(child)
    for argument in getattr(node, "args", None) or ():
        yield from _selectors(argument)
