"""Every object of every overlay is valid for Kubernetes, KEDA and the Prometheus operator, and is hardened."""

from __future__ import annotations

import functools
import json
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tests.support.deploy import custom_resources
from tests.support.deploy.compose_project import COMPOSE, ROOT, rejection
from tests.support.deploy.kubernetes_programs import find
from tests.support.deploy.kubernetes_schemas import RELEASES, problems
from tests.support.deploy.kustomization import CLUSTER_WIDE, Object, content_hash, documents, rendered
from weir import __version__
from weir.schemas.core.names import ListenAddress

K8S = ROOT / "k8s"
OVERLAYS = sorted(path.parent.name for path in K8S.glob("overlays/*/kustomization.yaml"))
COPY_MODELS = documents(K8S / "copy-models.yaml")[0]
WORKLOADS = {"Deployment", "StatefulSet"}

needs_definitions = pytest.mark.skipif(
    not custom_resources.are_installed(),
    reason="the definitions of custom resources are not installed (make test unpacks them)",
)


@functools.cache
def objects(overlay: str) -> list[Object]:
    return rendered(K8S / "overlays" / overlay)


def everything() -> Iterator[tuple[str, Object]]:
    """(overlay/kind/name, object), each object once though it is in several overlays."""
    seen = set()
    for overlay in OVERLAYS:
        for item in objects(overlay):
            text = json.dumps(item, sort_keys=True)
            if text not in seen:
                seen.add(text)
                yield f"{overlay}/{item['kind']}/{item['metadata']['name']}", item


def pods() -> Iterator[tuple[str, Object]]:
    """(overlay/kind/name, pod's template) of each workload."""
    for place, item in everything():
        if item["kind"] in WORKLOADS:
            yield place, item["spec"]["template"]


def named(overlay: str, kind: str, name: str) -> Object:
    (found,) = [one for one in objects(overlay) if (one["kind"], one["metadata"]["name"]) == (kind, name)]
    return found


def test_there_are_the_overlays_that_the_documentation_tells_of() -> None:
    assert OVERLAYS == ["cpu", "gpu", "kind", "production"]


@pytest.mark.parametrize("release", RELEASES)
def test_every_object_follows_its_schema(release: str) -> None:
    own = {place: item for place, item in everything() if not custom_resources.is_custom(item)}
    assert {place: found for place, item in own.items() if (found := problems(item, release))} == {}


@needs_definitions
def test_every_custom_resource_follows_its_definition() -> None:
    custom = {place: item for place, item in everything() if custom_resources.is_custom(item)}
    assert {item["kind"] for item in custom.values()} == {"PrometheusRule", "ScaledObject", "ServiceMonitor"}
    assert {place: found for place, item in custom.items() if (found := problems(item))} == {}


@pytest.mark.parametrize(
    ("kind", "path", "value"),
    [
        ("Deployment", ("spec", "template", "spec", "containers", 0, "imagee"), "weir:cpu"),
        ("Deployment", ("spec", "replicas"), "two"),
        ("NetworkPolicy", ("spec", "podSelector"), "all"),
        pytest.param("ScaledObject", ("spec", "maxReplicas"), 3, marks=needs_definitions),
        pytest.param("ScaledObject", ("spec", "scaleTargetRef"), {}, marks=needs_definitions),
        pytest.param("ScaledObject", ("spec", "scale_target_ref"), {"name": "worker-gpu"}, marks=needs_definitions),
        pytest.param("ScaledObject", ("spec", "triggers", 0, "metricType"), 1, marks=needs_definitions),
        pytest.param("ScaledObject", ("spec", "triggers", 0, "metadata", "threshold"), 1, marks=needs_definitions),
        pytest.param("ScaledObject", ("metadata", "labels", "ours"), 3, marks=needs_definitions),
        pytest.param("ServiceMonitor", ("spec", "endpoints", 0, "ports"), "metrics", marks=needs_definitions),
        pytest.param("ServiceMonitor", ("spec", "endpoints", 0, "interval"), "5 s", marks=needs_definitions),
        pytest.param("PrometheusRule", ("spec", "groups", 0, "rules", 0, "record"), 5, marks=needs_definitions),
        pytest.param("PrometheusRule", ("spec", "groups", 0, "limit"), "9", marks=needs_definitions),
        pytest.param("PrometheusRule", ("spec", "groups", 0, "interval"), "1 minute", marks=needs_definitions),
    ],
)
def test_what_is_wrong_is_noticed(kind: str, path: tuple[Any, ...], value: Any) -> None:
    item = json.loads(json.dumps(next(one for one in objects("production") if one["kind"] == kind)))
    place = item
    for part in path[:-1]:
        place = place[part]
    place[path[-1]] = value
    assert problems(item)


def test_objects_lie_in_one_namespace_and_say_that_they_are_weirs() -> None:
    for place, item in everything():
        if item["kind"] not in CLUSTER_WIDE:
            assert item["metadata"]["namespace"] == "weir", place
    assert {
        place for place, pod in pods() if pod["metadata"]["labels"].get("app.kubernetes.io/part-of") != "weir"
    } == set()


def test_what_is_referred_to_is_there() -> None:
    for overlay in OVERLAYS:
        known = {(item["kind"], item["metadata"]["name"]) for item in objects(overlay)}
        for item in objects(overlay):
            kind, spec = item["kind"], item.get("spec", {})
            if kind in ("HorizontalPodAutoscaler", "ScaledObject"):
                target = spec["scaleTargetRef"]
                assert (target["kind"], target["name"]) in known
            if kind in ("Service", "PodDisruptionBudget"):
                wanted = spec["selector"] if kind == "Service" else spec["selector"]["matchLabels"]
                assert selected(overlay, wanted), item["metadata"]
            if kind == "Service":
                (pod,) = selected(overlay, spec["selector"])
                ports = {port["name"] for container in pod["spec"]["containers"] for port in container["ports"]}
                assert {port["targetPort"] for port in spec["ports"]} <= ports
            if kind == "StatefulSet":
                assert ("Service", spec["serviceName"]) in known
            if kind in WORKLOADS:
                labels = spec["template"]["metadata"]["labels"]
                assert spec["selector"]["matchLabels"].items() <= labels.items()
                pod = spec["template"]["spec"]
                volumes = {volume["name"] for volume in pod["volumes"]}
                volumes |= {claim["metadata"]["name"] for claim in spec.get("volumeClaimTemplates", ())}
                for container in pod["containers"]:
                    assert {mount["name"] for mount in container["volumeMounts"]} == volumes
                for volume in pod["volumes"]:
                    if "configMap" in volume:
                        assert ("ConfigMap", volume["configMap"]["name"]) in known
                    if "persistentVolumeClaim" in volume:
                        assert ("PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"]) in known


def selected(overlay: str, labels: dict[str, str]) -> list[Object]:
    """The pods that a selector finds."""
    templates = [item["spec"]["template"] for item in objects(overlay) if item["kind"] in WORKLOADS]
    return [pod for pod in templates if labels.items() <= pod["metadata"]["labels"].items()]


def test_pods_are_restricted() -> None:
    """As the standard `restricted` of pod security asks, and with a root that can't be written to."""
    for place, pod in pods():
        spec = pod["spec"]
        assert spec["securityContext"]["runAsNonRoot"] is True, place
        assert spec["securityContext"]["runAsUser"] > 0, place
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, place
        assert spec["automountServiceAccountToken"] is False, place
        assert not spec.keys() & {"hostNetwork", "hostPID", "hostIPC"}, place
        assert not [volume for volume in spec["volumes"] if "hostPath" in volume], place
        for container in spec["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }, place
            assert "memory" in container["resources"]["limits"], place
            assert {"startupProbe", "readinessProbe", "livenessProbe"} <= container.keys(), place
            assert ":" in container["image"], place
            assert not container["image"].endswith(":latest"), place
    labels = named("cpu", "Namespace", "weir")["metadata"]["labels"]
    assert labels["pod-security.kubernetes.io/enforce"] == "restricted"


def test_commands_are_weirs_and_end_in_time() -> None:
    for place, pod in pods():
        (container,) = pod["spec"]["containers"]
        if not container["image"].startswith("weir:"):
            continue
        args = container["args"]
        assert rejection(args) is None, place
        (exit_s,) = [float(text.partition("=")[2]) for text in args if text.startswith("--exit-timeout-secs=")]
        # A worker hands over for half of that time, and then waits for the whole of it.
        least_s = exit_s * (1.5 if args[0] == "worker" else 1) + 5
        assert pod["spec"]["terminationGracePeriodSeconds"] > least_s, place
        environment = {variable["name"]: variable for variable in container["env"]}
        assert environment["WEIR_NATS_USER"]["value"] == f"weir-{args[0]}", place
        secret = environment["WEIR_NATS_PASSWORD"]["valueFrom"]["secretKeyRef"]
        assert secret == {"name": f"weir-{args[0]}-user", "key": "password"}, place


def test_memory_is_shared_by_a_volume_of_its_own() -> None:
    for place, pod in pods():
        (container,) = pod["spec"]["containers"]
        if container["name"] not in ("gateway", "worker"):
            continue
        (mount,) = [mount for mount in container["volumeMounts"] if mount["mountPath"] == "/dev/shm"]
        (volume,) = [volume for volume in pod["spec"]["volumes"] if volume["name"] == mount["name"]]
        assert volume["emptyDir"]["medium"] == "Memory", place
        assert volume["emptyDir"]["sizeLimit"], place


def test_nobody_talks_to_anybody_but_for_what_is_named() -> None:
    policies = {
        item["metadata"]["name"]: item["spec"] for item in objects("production") if item["kind"] == "NetworkPolicy"
    }
    assert policies["default-deny"] == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    asking = policies["roles-to-broker"]["podSelector"]["matchLabels"]
    roles = {pod["metadata"]["labels"]["app.kubernetes.io/name"] for pod in selected("production", asking)}
    assert roles == {"gateway", "scheduler", "worker-cpu", "worker-gpu", "weir-console"}
    opened = {
        policies[name]["podSelector"]["matchLabels"]["app.kubernetes.io/name"]: sorted(
            port["port"] for rule in policies[name]["ingress"] for port in rule["ports"]
        )
        for name in ("broker", "clients-to-gateways")
    }
    assert opened == {"nats": [4222, 6222, 8222], "gateway": [8000, 8001, 8002]}


def test_who_may_read_payloads_listens_for_its_like() -> None:
    policy = named("production", "NetworkPolicy", "payloads")["spec"]
    likes = policy["podSelector"]
    pods = selected("production", likes["matchLabels"])
    assert {pod["metadata"]["labels"]["app.kubernetes.io/name"] for pod in pods} == {
        "gateway",
        "worker-cpu",
        "worker-gpu",
    }
    (ingress,), (egress,) = policy["ingress"], policy["egress"]
    assert [peer["podSelector"] for peer in (*ingress["from"], *egress["to"])] == [likes, likes]
    assert ingress["ports"] == egress["ports"] == [{"port": 7422, "protocol": "TCP"}]
    for pod in pods:
        (container,) = pod["spec"]["containers"]
        assert {"name": "payloads", "containerPort": 7422} in container["ports"]
        (option,) = [word for word in container["args"] if word.startswith("--payload-listen=")]
        assert ListenAddress.of(option.partition("=")[2].replace("$(POD_IP)", "fd00::7")) == ("fd00::7", 7422)
        names = [one["name"] for one in container["env"]]
        assert "POD_IP" in names


def test_a_gpu_worker_has_a_gpu() -> None:
    (container,) = named("gpu", "Deployment", "worker-gpu")["spec"]["template"]["spec"]["containers"]
    assert container["image"] == f"weir:{__version__}-gpu"
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 1


def test_keda_owns_how_many_workers_there_are() -> None:
    for pool in ("worker-cpu", "worker-gpu"):
        assert "replicas" not in named("production", "Deployment", pool)["spec"]
        assert named("production", "ScaledObject", pool)["spec"]["minReplicaCount"] == 0
    assert named("cpu", "Deployment", "worker-cpu")["spec"]["replicas"] == 2
    assert "replicas" not in named("cpu", "Deployment", "gateway")["spec"]


def test_without_an_answer_workers_are_not_scaled_to_none() -> None:
    for pool in ("worker-cpu", "worker-gpu"):
        spec = named("production", "ScaledObject", pool)["spec"]
        (trigger,) = spec["triggers"]
        assert trigger["metadata"]["ignoreNullValues"] == "false", "an empty answer would be 0"
        assert spec["fallback"]["replicas"] > 0


def test_each_pool_follows_its_own_models() -> None:
    queries = {
        pool: named("production", "ScaledObject", pool)["spec"]["triggers"][0]["metadata"]["query"]
        for pool in ("worker-cpu", "worker-gpu")
    }
    for pool, excluded in (("worker-cpu", 1), ("worker-gpu", 0)):
        own, _, none = queries[pool].partition(" or ")
        assert own == f"max(weir_desired_workers unless weir_model_on_gpu == {excluded})"
        # Without a model of the pool it is 0, and without any series it has no value.
        assert none == "0 * max(weir_desired_workers)"


def test_the_operator_of_prometheus_finds_its_objects() -> None:
    """As kube-prometheus-stack selects them: by the label of its release."""
    for kind in ("ServiceMonitor", "PrometheusRule"):
        (item,) = [one for one in objects("production") if one["kind"] == kind]
        assert item["metadata"]["labels"]["release"] == "kube-prometheus-stack", kind


def test_changed_configuration_of_the_broker_rolls_it() -> None:
    for overlay in OVERLAYS:
        maps = {item["metadata"]["name"]: item for item in objects(overlay) if item["kind"] == "ConfigMap"}
        volumes = named(overlay, "StatefulSet", "nats")["spec"]["template"]["spec"]["volumes"]
        used = [volume["configMap"]["name"] for volume in volumes if "configMap" in volume]
        assert len(used) == 2
        for name in used:
            assert name.endswith(f"-{content_hash(maps[name]['data'])}"), name


@pytest.mark.parametrize(
    ("data", "ending"),
    [({}, "6ct58987ht"), ({"one": ""}, "9g67k2htb6"), ({"three": "3", "one": "", "two": "2"}, "f5h7t85m9b")],
)
def test_hashes_are_those_of_kustomize(data: dict[str, str], ending: str) -> None:
    assert content_hash(data) == ending


def test_images_have_the_tag_of_a_release() -> None:
    """A node that has an image of this tag does not pull it again: the tag must not move."""
    of_weir = [pod["spec"]["containers"][0]["image"] for _, pod in pods()]
    of_weir.append(COPY_MODELS["spec"]["containers"][0]["image"])
    tags = {image.partition(":")[2] for image in of_weir if image.startswith("weir:")}
    assert tags == {f"{__version__}-cpu", f"{__version__}-gpu"}


def test_the_claim_of_the_models_can_be_filled() -> None:
    for overlay in ("cpu", "gpu", "production"):
        assert named(overlay, "PersistentVolumeClaim", "weir-models")["spec"]["accessModes"] == ["ReadWriteMany"]
    assert problems(COPY_MODELS) == []
    (volume,) = COPY_MODELS["spec"]["volumes"]
    assert volume["persistentVolumeClaim"] == {"claimName": "weir-models"}
    (container,) = COPY_MODELS["spec"]["containers"]
    assert container["volumeMounts"] == [{"name": volume["name"], "mountPath": "/models"}]
    assert COPY_MODELS["spec"]["securityContext"]["runAsUser"] == 10001


def name_server(peer: Object) -> str:
    """The namespace of servers of names, or their address."""
    block = peer.get("ipBlock")
    return str(block["cidr"] if block else peer["namespaceSelector"]["matchLabels"]["kubernetes.io/metadata.name"])


def test_names_are_asked_of_every_kind_of_server() -> None:
    rules = named("cpu", "NetworkPolicy", "names")["spec"]["egress"]
    opened = {
        (name_server(peer), port["port"], port["protocol"])
        for rule in rules
        for port in rule["ports"]
        for peer in rule["to"]
    }
    assert opened == {
        (place, port, protocol)
        for place, port in (("kube-system", 53), ("169.254.20.10/32", 53), ("openshift-dns", 5353))
        for protocol in ("UDP", "TCP")
    }


def test_gateways_ask_every_broker_whether_it_syncs() -> None:
    (container,) = named("cpu", "Deployment", "gateway")["spec"]["template"]["spec"]["containers"]
    (option,) = [word for word in container["args"] if word.startswith("--nats-monitor=")]
    replicas = named("cpu", "StatefulSet", "nats")["spec"]["replicas"]
    wanted = [f"http://nats-{number}.nats-peers:8222" for number in range(replicas)]
    assert option.partition("=")[2].split(",") == wanted
    egress = named("cpu", "NetworkPolicy", "gateways-to-monitors")["spec"]
    assert egress["podSelector"]["matchLabels"] == {"app.kubernetes.io/name": "gateway"}
    assert egress["egress"][0]["ports"] == [{"port": 8222, "protocol": "TCP"}]


def test_every_user_of_the_broker_has_a_secret() -> None:
    (container,) = named("kind", "StatefulSet", "nats")["spec"]["template"]["spec"]["containers"]
    asked = {one["valueFrom"]["secretKeyRef"]["name"] for one in container["env"] if one["name"].startswith("WEIR_")}
    assert asked == {item["metadata"]["name"] for item in objects("kind") if item["kind"] == "Secret"}
    in_compose = yaml.safe_load((COMPOSE / "roles.yaml").read_text())["x-nats"]
    assert {one["name"] for one in container["env"] if one["name"].startswith("WEIR_")} == {
        name for name in in_compose["environment"] if name.startswith("WEIR_")
    }
    assert container["image"] == in_compose["image"]


def test_rules_are_those_of_compose() -> None:
    (rules,) = documents(COMPOSE / "prometheus" / "rules.yml")
    assert named("production", "PrometheusRule", "weir")["spec"] == rules


@pytest.mark.skipif(find("kubectl") is None, reason="kubectl is not installed (make test unpacks it)")
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_kubectl_makes_the_same_of_it(overlay: str) -> None:
    kubectl = find("kubectl")
    assert kubectl
    done = subprocess.run([kubectl, "kustomize", K8S / "overlays" / overlay], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

    def by_name(items: Any) -> dict[tuple[str, str], Object]:
        return {(item["kind"], item["metadata"]["name"]): item for item in items}

    assert by_name(objects(overlay)) == by_name(yaml.safe_load_all(done.stdout))
