"""The Helm chart renders what the kustomizations do, rejects wrong values, and is up to date."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.deploy.compose_project import ROOT, rejection
from tests.support.deploy.helm_chart import CHART, written
from tests.support.deploy.kubernetes_programs import find
from tests.support.deploy.kubernetes_schemas import problems
from tests.support.deploy.kustomization import Object, rendered

HELM = find("helm")
needs_helm = pytest.mark.skipif(HELM is None, reason="helm is not installed (make test unpacks it)")

VALUES = {
    "cpu": (),
    "gpu": ("--set=workers.cpu.enabled=false,workers.gpu.enabled=true",),
    "production": ("--set=workers.gpu.enabled=true,console.enabled=true,keda.enabled=true,monitoring.enabled=true",),
    "kind": ("--values", str(CHART / "values-kind.yaml")),
}
"""Options of helm for the objects of each overlay."""


def helm(*words: str) -> subprocess.CompletedProcess[str]:
    assert HELM
    return subprocess.run([HELM, *words], capture_output=True, text=True)


def template(*options: str) -> list[Object]:
    done = helm("template", "weir", str(CHART), "--namespace", "weir", *options)
    assert done.returncode == 0, done.stderr
    return [item for item in yaml.safe_load_all(done.stdout) if item]


def by_name(items: list[Object]) -> dict[tuple[str, str], Object]:
    named = {(item["kind"], item["metadata"]["name"]): item for item in items}
    assert len(named) == len(items)
    return named


def test_the_generated_files_are_up_to_date() -> None:
    differs = [name for name, text in written().items() if (CHART / name).read_text() != text]
    assert differs == [], "run: make chart"
    assert {f"files/{path.name}" for path in (CHART / "files").iterdir()} <= written().keys()


@needs_helm
def test_the_linter_has_nothing_to_say() -> None:
    for options in VALUES.values():
        done = helm("lint", "--strict", str(CHART), *options)
        assert done.returncode == 0, done.stdout


@needs_helm
@pytest.mark.parametrize("overlay", VALUES)
def test_it_renders_what_the_kustomization_does(overlay: str) -> None:
    """But for the namespace, which `helm install --create-namespace` makes."""
    wanted = [item for item in rendered(ROOT / "k8s" / "overlays" / overlay) if item["kind"] != "Namespace"]
    assert by_name(template(*VALUES[overlay])) == by_name(wanted)


@needs_helm
@pytest.mark.slow
def test_every_value_has_its_place() -> None:
    """Each of these changes what is rendered, and the result is valid and a command that Weir takes."""
    changes = {
        "image.repository": "registry.example/weir",
        "image.pullSecrets[0].name": "mine",
        "gateway.extraArgs[0]": "--log-verbose=1",
        "scheduler.extraArgs[0]": "--max-queue-wait-secs=1",
        "gateway.service.type": "LoadBalancer",
        "gateway.averageCpu": "700m",
        "gateway.shmSize": "3Gi",
        "scheduler.replicas": "3",
        "workers.cpu.replicas": "7",
        "workers.cpu.nodeSelector.disk": "fast",
        "models.repository": "s3://bucket/models",
        "models.claim": "other",
        "models.create": "false",
        "models.storageClass": "shared",
        "nats.storage": "50Gi",
        "nats.maxFileStore": "45GB",
        "nats.storageClass": "fast",
        "console.enabled": "false",
        "console.extraArgs[0]": "--console-allow-changes=true",
        "console.resources.limits.memory": "1Gi",
        "networkPolicies.enabled": "false",
        "tls.secret": "weir-tls",
        "accessPolicy": "roles: [mine]",
        "users.passwords.admin": "a-long-password",
    }
    plain = template("--set=console.enabled=true")
    for name, value in changes.items():
        changed = template("--set=console.enabled=true", f"--set={name}={value}")
        assert changed != plain, name
        assert {item["metadata"]["name"]: found for item in changed if (found := problems(item))} == {}, name
        for item in changed:
            if item["kind"] == "Deployment":
                assert rejection(item["spec"]["template"]["spec"]["containers"][0]["args"]) is None, name


@needs_helm
def test_an_ingress_for_each_protocol() -> None:
    options = "ingress.enabled=true,ingress.host=weir.example,ingress.grpcHost=grpc.example,ingress.className=nginx"
    annotation = "ingress.grpcAnnotations.nginx\\.ingress\\.kubernetes\\.io/backend-protocol=GRPC"
    items = template(f"--set={options},{annotation},ingress.tlsSecret=cert")
    found = {item["metadata"]["name"]: item for item in items if item["kind"] == "Ingress"}
    assert {name: item["spec"]["rules"][0]["host"] for name, item in found.items()} == {
        "gateway-http": "weir.example",
        "gateway-grpc": "grpc.example",
    }
    assert "annotations" not in found["gateway-http"]["metadata"]
    assert found["gateway-grpc"]["metadata"]["annotations"] == {"nginx.ingress.kubernetes.io/backend-protocol": "GRPC"}
    for item in found.values():
        assert problems(item) == []


@needs_helm
@pytest.mark.parametrize(
    "wrong",
    [
        "gateway.minReplica=3",
        "scheduler.replicas=0",
        "image.cpuTag=latest",
        "models.repository=models",
        "users.passwords.gatewai=a-long-password",
        "users.passwords.gateway=short",
        "nats.whenUnsatisfiable=Never",
        "gateway.extraArgs[0]=log-verbose",
        "console.replicas=2",
    ],
)
def test_a_wrong_value_is_rejected(wrong: str) -> None:
    done = helm("template", "weir", str(CHART), f"--set={wrong}")
    assert done.returncode != 0
    assert "don't meet the specifications of the schema" in done.stderr


@needs_helm
def test_a_secret_encrypts_all_ports() -> None:
    options = (
        "--set=console.enabled=true,monitoring.enabled=true,tls.secret=mine",
        "--set=monitoring.tlsConfig.serverName=weir",
    )
    found = by_name(template(*options))
    for name in ("gateway", "weir-console"):
        pod = found["Deployment", name]["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        assert container["args"][-2:] == ["--tls-cert=/tls/tls.crt", "--tls-key=/tls/tls.key"]
        assert {"name": "tls", "mountPath": "/tls", "readOnly": True} in container["volumeMounts"]
        assert {"name": "tls", "secret": {"secretName": "mine"}} in pod["volumes"]
        probes = [container[f"{name}Probe"].get("httpGet") for name in ("startup", "readiness", "liveness")]
        assert all(probe["scheme"] == "HTTPS" for probe in probes if probe)
    (endpoint,) = found["ServiceMonitor", "weir"]["spec"]["endpoints"]
    assert (endpoint["scheme"], endpoint["tlsConfig"]) == ("https", {"serverName": "weir"})


@needs_helm
def test_a_policy_guards_gateways_and_the_console(tmp_path: Path) -> None:
    policy = tmp_path / "access.yaml"
    policy.write_text('roles:\n  anonymous: {rules: [{actions: [health]}]}  # "{{ no template }}"\n')
    found = by_name(template("--set=console.enabled=true", f"--set-file=accessPolicy={policy}"))
    kept = found["ConfigMap", "weir-access-policy"]
    assert (kept["data"], problems(kept)) == ({"policy.yaml": policy.read_text()}, [])
    for (kind, name), item in found.items():
        if kind not in ("Deployment", "StatefulSet"):
            continue
        pod = item["spec"]["template"]["spec"]
        (container, *_) = pod["containers"]
        is_guarded = name in ("gateway", "weir-console")
        assert ("--access-policy=/access/policy.yaml" in container["args"]) == is_guarded
        assert ({"name": "access", "mountPath": "/access", "readOnly": True} in container["volumeMounts"]) == is_guarded
        assert ({"name": "access", "configMap": {"name": "weir-access-policy"}} in pod["volumes"]) == is_guarded


@needs_helm
def test_the_notes_say_what_to_do() -> None:
    def notes(*options: str) -> str:
        done = helm("install", "weir", str(CHART), "--namespace", "weir", "--dry-run=client", *options)
        assert done.returncode == 0, done.stderr
        return done.stdout.partition("NOTES:")[2]

    assert "create secret generic weir-$user-user" in notes()
    assert "create secret" not in notes(*VALUES["kind"])
    assert "weir push" in notes(*VALUES["kind"])
    assert "port-forward service/weir-console 8080" in notes(*VALUES["kind"])
    assert "weir-console 8080" not in notes()


def test_the_chart_has_the_version_of_weir() -> None:
    chart: dict[str, Any] = yaml.safe_load((CHART / "Chart.yaml").read_text())
    version = (ROOT / "pyproject.toml").read_text().partition('version = "')[2].partition('"')[0]
    assert chart["appVersion"] == chart["version"] == version
