"""Writes the templates of the Helm chart `k8s/chart` from the kustomizations in `k8s/`: `make chart`.

The kustomizations stay the one description of the objects. The functions below name the places in them that take a value
of the chart; all else is the same in both. Templates without a counterpart in a kustomization (secrets, ingress, notes) are
written by hand, and lie beside the generated ones.
"""

from __future__ import annotations

import copy
import json
import re
import shutil
from collections.abc import Callable, Iterable
from typing import Any

import yaml

from tests.support.deploy.compose_project import ROOT
from tests.support.deploy.kustomization import Object, documents, rendered

K8S = ROOT / "k8s"
CHART = K8S / "chart"

_HEADER = "{{/* Written by `make chart` from %s: change it there. */}}\n"


class _Places:
    """Marks places in objects that are to be template text, and puts the text there once the objects are YAML."""

    def __init__(self) -> None:
        self._texts: list[str] = []

    def value(self, expression: str) -> str:
        """A value that the template computes: `{{ toJson EXPRESSION }}`."""
        return self.text("{{ toJson (" + expression + ") }}")

    def text(self, text: str) -> str:
        """A value, a whole item of a list, or a whole entry of a mapping (as its key, with the value None)."""
        self._texts.append(text)
        return f"@@{len(self._texts) - 1}@@"

    def put_into(self, document: str) -> str:
        """`document` with the texts in their places; those of several lines are indented as their place is."""

        def entry(found: re.Match[str]) -> str:
            text = self._texts[int(found[3])]
            # A condition or a loop has items of its own; a value is one.
            lines = text.splitlines() if text.startswith("{{-") else [f"{found[2] or ''}{text}"]
            return "\n".join(f"{found[1]}{line}" for line in lines)

        document = re.sub(r"^( *)(- )?'?@@(\d+)@@'?(?:: null)?$", entry, document, flags=re.MULTILINE)
        return re.sub(r"'?@@(\d+)@@'?", lambda found: self._texts[int(found[1])], document)


def _dumped(item: Any) -> str:
    return yaml.safe_dump(item, sort_keys=False, width=10_000, allow_unicode=True)


def _escaped(item: Any, places: _Places) -> Any:
    """`item` with strings that Helm would take for templates (of Prometheus) as values that give them back."""
    if isinstance(item, dict):
        return {key: _escaped(value, places) for key, value in item.items()}
    if isinstance(item, list):
        return [_escaped(value, places) for value in item]
    if isinstance(item, str) and "{{" in item:
        return places.value(json.dumps(item, ensure_ascii=False))
    return item


def _container(item: Object) -> Object:
    (container,) = item["spec"]["template"]["spec"]["containers"]
    return container


def _only_if(condition: str, item: Any, kind: str = "list") -> str:
    """Text for an item of a list, or a mapping's entry, that is there on a condition."""
    lines = _dumped([item] if kind == "list" else item).rstrip()
    return f"{{{{- if {condition} }}}}\n{lines}\n{{{{- end }}}}"


def _each(expression: str) -> str:
    return f"{{{{- range {expression} }}}}\n- {{{{ toJson . }}}}\n{{{{- end }}}}"


def _with(expression: str, key: str) -> str:
    return f"{{{{- with {expression} }}}}\n{key}: {{{{ toJson . }}}}\n{{{{- end }}}}"


def _workload(item: Object, values: str, places: _Places, tag: str = "cpuTag") -> None:
    """What every pod of Weir's takes from values."""
    pod, container = item["spec"]["template"]["spec"], _container(item)
    # The release's own tag, as in `0.1.0-cpu`, where none is given.
    own = f'default (printf "%s-{tag[:3]}" .Chart.AppVersion) .Values.image.{tag}'
    container["image"] = places.value(f'printf "%s:%s" .Values.image.repository ({own})')
    container["resources"] = places.value(f"{values}.resources")
    container["args"].append(places.text(_each(f"{values}.extraArgs")))
    for volume in pod["volumes"]:
        if isinstance(volume, dict) and volume["name"] == "shm":
            volume["emptyDir"]["sizeLimit"] = places.value(f"{values}.shmSize")
    _placement(item, values, places)


def _placement(item: Object, values: str, places: _Places) -> None:
    pod = item["spec"]["template"]["spec"]
    pod[places.text(_with(".Values.image.pullSecrets", "imagePullSecrets"))] = None
    for key in ("nodeSelector", "tolerations", "affinity"):
        pod.pop(key, None)
        pod[places.text(_with(f"{values}.{key}", key))] = None


def _encrypted(item: Object, places: _Places) -> None:
    """Has the container use the certificate of a Secret, and its probes ask over TLS."""
    pod, container, condition = item["spec"]["template"]["spec"], _container(item), ".Values.tls.secret"
    options = "- --tls-cert=/tls/tls.crt\n- --tls-key=/tls/tls.key"
    container["args"].append(places.text(f"{{{{- if {condition} }}}}\n{options}\n{{{{- end }}}}"))
    mount = {"name": "tls", "mountPath": "/tls", "readOnly": True}
    container["volumeMounts"].append(places.text(_only_if(condition, mount)))
    volume = "- name: tls\n  secret:\n    secretName: {{ toJson .Values.tls.secret }}"
    pod["volumes"].append(places.text(f"{{{{- if {condition} }}}}\n{volume}\n{{{{- end }}}}"))
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        if "httpGet" in container[probe]:
            container[probe]["httpGet"][places.text(_only_if(condition, {"scheme": "HTTPS"}, "entry"))] = None


def _guarded(item: Object, places: _Places) -> None:
    """Has the container decide by the access policy of a ConfigMap."""
    pod, container, condition = item["spec"]["template"]["spec"], _container(item), ".Values.accessPolicy"
    option = "- --access-policy=/access/policy.yaml"
    container["args"].append(places.text(f"{{{{- if {condition} }}}}\n{option}\n{{{{- end }}}}"))
    mount = {"name": "access", "mountPath": "/access", "readOnly": True}
    container["volumeMounts"].append(places.text(_only_if(condition, mount)))
    volume = "- name: access\n  configMap:\n    name: weir-access-policy"
    pod["volumes"].append(places.text(f"{{{{- if {condition} }}}}\n{volume}\n{{{{- end }}}}"))


def _replicas(item: Object, expression: str, condition: str, places: _Places) -> None:
    spec = item["spec"]
    del spec["replicas"]
    text = f"{{{{- if {condition} }}}}\nreplicas: {{{{ toJson {expression} }}}}\n{{{{- end }}}}"
    item["spec"] = {places.text(text): None, **spec}


def _gateway(item: Object, places: _Places) -> None:
    values = ".Values.gateway"
    match item["kind"]:
        case "Deployment":
            _workload(item, values, places)
            _encrypted(item, places)
            _guarded(item, places)
        case "HorizontalPodAutoscaler":
            item["spec"]["minReplicas"] = places.value(f"{values}.minReplicas")
            item["spec"]["maxReplicas"] = places.value(f"{values}.maxReplicas")
            item["spec"]["metrics"][0]["resource"]["target"]["averageValue"] = places.value(f"{values}.averageCpu")
        case "Service":
            item["metadata"][places.text(_with(f"{values}.service.annotations", "annotations"))] = None
            item["spec"][places.text(_with(f"{values}.service.type", "type"))] = None


def _scheduler(item: Object, places: _Places) -> None:
    if item["kind"] != "Deployment":
        return
    _workload(item, ".Values.scheduler", places)
    item["spec"]["replicas"] = places.value(".Values.scheduler.replicas")
    (with_keda,) = [patch for patch in _keda_patches() if patch["target"]["name"] == "scheduler"]
    more = [operation["value"] for operation in yaml.safe_load(with_keda["patch"])]
    items = "\n".join(f"- {word}" for word in more)
    _container(item)["args"].insert(-1, places.text(f"{{{{- if .Values.keda.enabled }}}}\n{items}\n{{{{- end }}}}"))


def _keda_patches() -> list[Object]:
    (component,) = documents(K8S / "components" / "keda" / "kustomization.yaml")
    return component["patches"]


def _nats(item: Object, places: _Places) -> None:
    match item["kind"], item["metadata"]["name"].partition("-")[2]:
        case "StatefulSet", _:
            spec, container = item["spec"], _container(item)
            container["image"] = places.value(".Values.nats.image")
            container["resources"] = places.value(".Values.nats.resources")
            (claim,) = spec["volumeClaimTemplates"]
            claim["spec"]["resources"]["requests"]["storage"] = places.value(".Values.nats.storage")
            claim["spec"][places.text(_with(".Values.nats.storageClass", "storageClassName"))] = None
            (spread,) = spec["template"]["spec"]["topologySpreadConstraints"]
            spread["whenUnsatisfiable"] = places.value(".Values.nats.whenUnsatisfiable")
            _placement(item, ".Values.nats", places)
            # The names of the configurations end in a hash of the default: another size must roll the servers, too.
            annotation = "annotations:\n  weir/max-file-store: {{ toJson .Values.nats.maxFileStore }}"
            text = f'{{{{- if ne .Values.nats.maxFileStore "{_file_store()}" }}}}\n{annotation}\n{{{{- end }}}}'
            spec["template"]["metadata"][places.text(text)] = None
        case "ConfigMap", name:
            (file,) = item["data"]
            text = f'.Files.Get "files/{file}"'
            if name.startswith("config"):
                new = 'printf "max_file_store: %s" .Values.nats.maxFileStore'
                text = f'replace "max_file_store: {_file_store()}" ({new}) ({text})'
            item["data"][file] = places.value(text)


def _file_store() -> str:
    """What JetStream may store in the kustomizations."""
    (size,) = re.findall(r"max_file_store: (\w+)", (K8S / "base" / "nats.conf").read_text())
    return str(size)


def _worker(pool: str) -> Callable[[Object, _Places], None]:
    values = f".Values.workers.{pool}"

    def edit(item: Object, places: _Places) -> None:
        if item["kind"] != "Deployment":
            return
        container, pod = _container(item), item["spec"]["template"]["spec"]
        (place,) = [n for n, word in enumerate(container["args"]) if word.startswith("--model-repository=")]
        container["args"][place] = places.value('printf "--model-repository=%s" .Values.models.repository')
        for listed in (container["volumeMounts"], pod["volumes"]):
            (index,) = [n for n, one in enumerate(listed) if one["name"] == "models"]
            one = listed[index]
            if "persistentVolumeClaim" in one:
                one["persistentVolumeClaim"]["claimName"] = "{{ .Values.models.claim }}"
            listed[index] = places.text(_only_if(".Values.models.claim", one).replace("'{{", "{{").replace("}}'", "}}"))
        _workload(item, values, places, f"{pool}Tag")
        _replicas(item, f"{values}.replicas", "not .Values.keda.enabled", places)

    return edit


def _scaled(item: Object, places: _Places) -> None:
    values = f".Values.keda.{item['metadata']['name'].removeprefix('worker-')}"
    spec = item["spec"]
    spec["minReplicaCount"] = places.value(f"{values}.minReplicas")
    spec["maxReplicaCount"] = places.value(f"{values}.maxReplicas")
    (trigger,) = spec["triggers"]
    trigger["metadata"]["serverAddress"] = places.value(".Values.keda.prometheusAddress")
    # With both kinds of workers each follows its own models.
    (production,) = documents(K8S / "overlays" / "production" / "kustomization.yaml")
    (patch,) = [one for one in production["patches"] if one["target"]["name"] == item["metadata"]["name"]]
    ((own,), all_models) = yaml.safe_load(patch["patch"]), trigger["metadata"]["query"]
    assert own["path"] == "/spec/triggers/0/metadata/query"
    both = "and .Values.workers.cpu.enabled .Values.workers.gpu.enabled"
    trigger["metadata"]["query"] = places.value(f'ternary "{own["value"]}" "{all_models}" ({both})')


def _dashboard(item: Object, places: _Places) -> None:
    if "release" in item["metadata"]["labels"]:
        item["metadata"]["labels"]["release"] = places.value(".Values.monitoring.release")
    if item["kind"] == "ServiceMonitor":
        (endpoint,) = item["spec"]["endpoints"]
        lines = "scheme: https\ntlsConfig: {{ toJson .Values.monitoring.tlsConfig }}"
        endpoint[places.text(f"{{{{- if .Values.tls.secret }}}}\n{lines}\n{{{{- end }}}}")] = None
    if item["kind"] == "ConfigMap":
        (file,) = item["data"]
        item["data"][file] = f'{{{{ .Files.Get "files/{file}" | toJson }}}}'


def _console(item: Object, places: _Places) -> None:
    if item["kind"] == "Deployment":
        _workload(item, ".Values.console", places)
        _encrypted(item, places)
        _guarded(item, places)


def _claim(item: Object, places: _Places) -> None:
    spec = item["spec"]
    item["metadata"]["name"] = places.value(".Values.models.claim")
    spec["accessModes"] = places.value(".Values.models.accessModes")
    spec["resources"]["requests"]["storage"] = places.value(".Values.models.storage")
    spec[places.text(_with(".Values.models.storageClass", "storageClassName"))] = None


def _unedited(_item: Object, _places: _Places) -> None:
    """As in the kustomization."""


def written() -> dict[str, str]:
    """The generated files of the chart by their path in it."""
    base = rendered(K8S / "base")
    users = [item for item in base if item["kind"] == "ConfigMap"]
    files = {name: text for item in users for name, text in item["data"].items()}
    pools = {pool: documents(K8S / "components" / f"{pool}-workers" / "worker.yaml") for pool in ("cpu", "gpu")}
    console = documents(K8S / "components" / "console" / "console.yaml")
    console_policies = documents(K8S / "components" / "console" / "network-policies.yaml")
    scaled = documents(K8S / "components" / "keda" / "scaled-objects.yaml")
    monitoring = rendered(K8S / "components" / "monitoring")
    for item in monitoring:
        if item["kind"] == "ConfigMap":
            files |= item["data"]

    def of(name: str) -> list[Object]:
        return [
            item
            for item in base
            if item["kind"] != "NetworkPolicy" and item["metadata"]["name"].partition("-")[0] == name
        ]

    policies = [item for item in base if item["kind"] == "NetworkPolicy"]
    templates = {
        "nats": ("k8s/base", "", of("nats"), _nats),
        "scheduler": ("k8s/base", "", of("scheduler"), _scheduler),
        "gateway": ("k8s/base", "", of("gateway"), _gateway),
        "network-policies": ("k8s/base", ".Values.networkPolicies.enabled", policies, _unedited),
        "console": ("k8s/components/console", ".Values.console.enabled", console, _console),
        "network-policies-console": ("k8s/components/console",
                                     "and .Values.console.enabled .Values.networkPolicies.enabled",
                                     console_policies, _unedited),
        "models": ("k8s/overlays/cpu", "and .Values.models.claim .Values.models.create",
                   documents(K8S / "overlays" / "cpu" / "models.yaml"), _claim),
        "monitoring": ("k8s/components/monitoring", ".Values.monitoring.enabled", monitoring, _dashboard),
    }  # fmt: skip
    for pool, items in pools.items():
        condition = f".Values.workers.{pool}.enabled"
        templates[f"worker-{pool}"] = (f"k8s/components/{pool}-workers", condition, items, _worker(pool))
        own = [item for item in scaled if item["metadata"]["name"] == f"worker-{pool}"]
        condition = f"and .Values.keda.enabled {condition}"
        templates[f"keda-{pool}"] = ("k8s/components/keda", condition, own, _scaled)
    texts = {f"templates/{name}.yaml": _template(*described) for name, described in templates.items()}
    return texts | {f"files/{name}": text for name, text in files.items()}


def _template(source: str, condition: str, items: Iterable[Object], edit: Callable[[Object, _Places], None]) -> str:
    places = _Places()
    parts = []
    for item in copy.deepcopy(list(items)):
        item["metadata"]["namespace"] = places.text("{{ .Release.Namespace }}")
        if edit is _unedited or item["kind"] == "PrometheusRule":
            item = _escaped(item, places)
        edit(item, places)
        parts.append(_dumped(item).replace("'{{ .Files", "{{ .Files").replace("toJson }}'", "toJson }}"))
    text = places.put_into("---\n".join(parts))
    if condition:
        text = f"{{{{- if {condition} }}}}\n{text}{{{{- end }}}}\n"
    return _HEADER % source + text


def main() -> None:
    """Writes the files."""
    shutil.rmtree(CHART / "files", ignore_errors=True)
    for name, text in written().items():
        path = CHART / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
