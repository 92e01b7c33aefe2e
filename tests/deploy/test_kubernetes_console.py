"""The console's pod: who reaches it, and what its command does on a real broker with the permissions of the cluster."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest
import requests

from tests.support.deploy.compose_project import COMPOSE, ROOT
from tests.support.deploy.kustomization import Object, rendered
from tests.support.servers.nats import PermittedNats
from tests.support.servers.roles import role_started
from tests.support.waiting import wait_until

NAME = "weir-console"
PRODUCTION = rendered(ROOT / "k8s" / "overlays" / "production")


def named(kind: str, name: str = NAME) -> Object:
    (found,) = [item for item in PRODUCTION if (item["kind"], item["metadata"]["name"]) == (kind, name)]
    return found


@pytest.mark.parametrize(("overlay", "has_console"), [("cpu", 0), ("gpu", 0), ("kind", 1), ("production", 1)])
def test_the_overlays_kind_and_production_have_one(overlay: str, has_console: int) -> None:
    items = rendered(ROOT / "k8s" / "overlays" / overlay)
    found = [item for item in items if item["kind"] == "Deployment" and item["metadata"]["name"] == NAME]
    assert len(found) == has_console
    for item in found:
        assert item["spec"]["replicas"] == 1


def test_without_a_login_only_labelled_pods_of_the_namespace_reach_it() -> None:
    service = named("Service")["spec"]
    assert service["type"] == "ClusterIP"
    assert [port["port"] for port in service["ports"]] == [8080]
    assert not [item for item in PRODUCTION if item["kind"] == "Ingress"]
    clients = {"matchLabels": {"weir/asks-console": "true"}}
    # A peer without a namespace selector is of the policy's own namespace.
    policy = named("NetworkPolicy")["spec"]
    assert policy["podSelector"] == {"matchLabels": service["selector"]}
    (rule,) = policy["ingress"]
    assert rule == {"from": [{"podSelector": clients}], "ports": [{"port": 8080, "protocol": "TCP"}]}
    # All else is denied in the namespace, so a client must also be allowed to ask.
    asking = named("NetworkPolicy", f"{NAME}-clients")["spec"]
    assert asking["podSelector"] == clients
    (rule,) = asking["egress"]
    assert rule == {"to": [{"podSelector": policy["podSelector"]}], "ports": [{"port": 8080, "protocol": "TCP"}]}


def test_its_command_is_healthy_and_answers_to_the_names_that_reach_it(tmp_path: Path) -> None:
    (container,) = named("Deployment")["spec"]["template"]["spec"]["containers"]
    words = [word.replace("0.0.0.0", "127.0.0.1") for word in container["args"]]
    assert words != container["args"]
    alive = tmp_path / "alive"
    nats = PermittedNats(tmp_path / "nats", (COMPOSE / "nats" / "users.conf").read_text())
    values = {
        "WEIR_NATS_URL": nats.url_of("console").replace("weir-console:of-console@", ""),
        "WEIR_NATS_PASSWORD": "of-console",
        "WEIR_ALIVE_FILE": str(alive),
    }
    environment = {one["name"]: values.get(one["name"], one.get("value", "")) for one in container["env"]}
    assert environment.keys() == {*values, "WEIR_NATS_USER"}
    log = tmp_path / "log"
    process, facts = role_started([*words, "--console-port=0"], tmp_path, log, environment)
    try:
        assert facts, log.read_text()

        def status(host: str) -> int:
            url = f"http://127.0.0.1:{facts['console_port']}/api/status"
            return requests.get(url, headers={"Host": host}, timeout=10).status_code

        wait_until(alive.exists)
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            program, *limit = container[probe]["exec"]["command"]
            done = subprocess.run(
                [COMPOSE / "images" / program, *limit],
                env={"PATH": os.environ["PATH"], "WEIR_ALIVE_FILE": str(alive)},
                check=False,
            )
            assert done.returncode == 0, probe
        # By port-forward, and of a proxy that names the Service.
        assert [status("localhost:8080"), status(f"{NAME}:8080"), status("console.example.com")] == [200, 200, 400]
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=20) == 0
        assert nats.violations == []
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        nats.stop()
