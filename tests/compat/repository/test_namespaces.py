"""Repositories as namespaces with models of equal names: texts and behaviour are those of a Triton 2.51."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import httpx
import pytest
from tritonclient.grpc import service_pb2

from tests.support.models.ensembles import write_ensemble
from tests.support.servers.repository import Repository, serving, write_adds
from tests.support.waiting import wait_until

IN, OUT = {"IN": ("FP32", [1])}, {"OUT": ("FP32", [1])}
READY, UNLOADED = ("1", "READY", ""), ("1", "UNAVAILABLE", "unloaded")


def ambiguous(name: str) -> str:
    return (
        f"There are 2 identifiers of model '{name}' in global map, model namespace must be provided to resolve "
        "ambiguity."
    )


def write_asking(root: Path, name: str, asked: str) -> None:
    """An ensemble that is another model."""
    write_ensemble(root, name, IN, OUT, [(asked, {"IN": "IN"}, {"OUT": "OUT"})])


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Repository]:
    folder = tmp_path_factory.mktemp("namespaces")
    for number, name in ((1, "models"), (10, "more")):
        write_adds(folder / name, "adds", number)
        write_asking(folder / name, f"asks_of_{name}", "adds")
        write_asking(folder / name, "asks", "adds")
    write_adds(folder / "more", "alone", 5)
    write_asking(folder / "models", "crosses", "alone")
    write_asking(folder / "third", "torn", "adds")
    others = [f"--model-repository={folder / name}" for name in ("more", "third")]
    explicit = ["--model-control-mode=explicit", *(f"--load-model={n}" for n in ("adds", "alone", "asks", "crosses"))]
    yield from serving(folder, *others, "--model-namespacing=true", *explicit)


def rows(repository: Repository, name: str) -> list[tuple[str, str, str]]:
    return [(row["version"], row["state"], row.get("reason", "")) for row in repository.rows(name) if "version" in row]


def namespaces(repository: Repository, line: str) -> dict[str, float]:
    """The values of a series by the name of the folder in its label."""
    page = httpx.get(f"http://{repository.server.metrics_place}/metrics").text
    found = (text.rpartition(" ") for text in page.splitlines() if text.startswith(line))
    return {labels.partition('namespace="')[2].partition('"')[0].rpartition("/")[2]: float(v) for labels, _, v in found}


def test_a_name_of_one_repository_is_served_as_ever(repository: Repository) -> None:
    assert repository.added("alone") == 5
    assert repository.added("crosses") == 5, "an ensemble may be made of another namespace's models"
    assert repository.rows("alone") == [{"name": "alone", "version": "1", "state": "READY"}]
    assert repository.http.get_model_metadata("alone")["name"] == "alone"
    assert repository.infer("nobody") == (404, "Request for unknown model: 'nobody' is not found")


def test_a_name_of_several_is_refused(repository: Repository) -> None:
    text = ambiguous("adds")
    assert repository.infer("adds") == repository.infer("adds", "1") == repository.infer("adds", "7") == (400, text)
    for path in ("", "/config", "/versions/1"):
        answer = repository.raw.get(f"/v2/models/adds{path}")
        assert (answer.status_code, answer.json()["error"]) == (400, text)
    answer = repository.raw.get("/v2/models/adds/stats")
    assert (answer.status_code, answer.json()["error"]) == (400, "requested model 'adds' is not available")
    assert repository.raw.get("/v2/models/adds/ready").status_code == 400
    assert not repository.grpc.is_model_ready("adds")
    code, reply = repository.refusal("ModelInfer", service_pb2.ModelInferRequest(model_name="adds"))
    assert (code.name, reply) == ("INVALID_ARGUMENT", text)
    assert rows(repository, "adds") == [READY, READY]


def test_a_model_is_named_by_its_identity_in_a_path(repository: Repository) -> None:
    for name in ("models", "more"):
        identity = quote(f"{repository.root.parent / name}::adds", safe="")
        for path in ("", "/config", "/ready", "/stats", "/history", "/traffic"):
            answer = repository.raw.get(f"/v2/models/{identity}{path}")
            assert answer.status_code == 200, answer.text
        body = {"inputs": [{"name": "IN", "datatype": "FP32", "shape": [1], "data": [0]}]}
        answer = repository.raw.post(f"/v2/models/{identity}/infer", json=body)
        assert answer.json()["outputs"][0]["data"] == [{"models": 1, "more": 10}[name]]
    assert repository.raw.get("/v2/models/nobody%2Fconfig").json()["error"].startswith("Request for unknown model")


def test_ensembles_ask_the_models_of_their_own_namespace(repository: Repository) -> None:
    for name, number in (("models", 1), ("more", 10)):
        assert repository.load(f"asks_of_{name}") == (200, "")
        assert repository.added(f"asks_of_{name}") == number
        config = repository.raw.get(f"/v2/models/asks_of_{name}/config").json()
        (step,) = config["ensemble_scheduling"]["step"]
        assert (step["model_name"], step["model_namespace"]) == ("adds", str(repository.root.parent / name))
    assert repository.infer("asks") == (400, ambiguous("asks"))
    text = "load failed for model 'torn': ensemble torn contains models that are not available or ambiguous: adds\n"
    assert repository.load("torn") == (400, text)


def test_statistics_and_metrics_tell_them_apart(repository: Repository) -> None:
    repository.load("asks_of_more")
    before = namespaces(repository, 'nv_inference_request_success{model="adds"')
    assert before.keys() == {"models", "more"}
    repository.added("asks_of_more")
    after = namespaces(repository, 'nv_inference_request_success{model="adds"')
    assert (after["models"], after["more"]) == (before["models"], before["more"] + 1)
    assert namespaces(repository, 'nv_inference_count{model="alone"').keys() == {"more"}
    assert namespaces(repository, 'weir_queue_depth{model="adds"').keys() == {"models", "more"}
    reply = repository.raw.get("/v2/models/stats").json()["model_stats"]
    assert sorted(row["inference_count"] for row in reply if row["name"] == "adds") == sorted(after.values())


def test_a_load_or_unload_by_name_is_one_of_all_of_them(repository: Repository) -> None:
    assert repository.unload("adds") == (200, "")
    assert rows(repository, "adds") == [UNLOADED, UNLOADED]
    assert repository.infer("adds")[0] == 404
    wait_until(lambda: rows(repository, "asks") == [UNLOADED, UNLOADED])
    status, reply = repository.load("adds", {"parameters": {"config": '{"backend": "nothing"}'}})
    assert status == 400
    assert reply.startswith(f"load failed for model '{repository.root}::adds': version 1 is at")
    assert repository.infer("adds") == (400, ambiguous("adds"))
    assert repository.load("adds") == (200, "")
    assert rows(repository, "adds") == [READY, READY]
    wait_until(lambda: rows(repository, "asks") == [READY, READY])


def test_what_an_ensemble_brought_goes_with_it_and_leaves_the_name_to_the_other(repository: Repository) -> None:
    for name in ("asks", "adds"):
        assert repository.unload(name) == (200, "")
    assert repository.load("asks_of_models") == (200, "")
    assert rows(repository, "adds") == [READY, READY], "all models of a step's name are loaded"
    assert repository.load("asks_of_more") == (200, "")
    assert repository.unload("asks_of_more", {"parameters": {"unload_dependents": True}}) == (200, "")
    wait_until(lambda: rows(repository, "adds") == [READY, UNLOADED])
    assert repository.added("adds") == repository.added("asks_of_models") == 1
    for name in ("adds", "asks", "asks_of_more"):
        assert repository.load(name) == (200, "")
    assert repository.infer("adds") == (400, ambiguous("adds"))


def test_a_name_that_is_there_once_again_needs_no_namespace(repository: Repository) -> None:
    repository.load("asks_of_models")
    folder = repository.root.parent / "more" / "adds"
    kept = repository.root.parent / "kept"
    shutil.move(folder, kept)
    try:
        assert repository.load("adds") == (200, "")
        assert repository.added("adds") == 1
        wait_until(lambda: rows(repository, "adds") == [READY])
        wait_until(lambda: repository.server.is_ready("asks_of_models"))
        assert repository.added("asks_of_models") == 1
    finally:
        shutil.move(kept, folder)
    assert repository.load("adds") == (200, "")
    assert repository.infer("adds") == (400, ambiguous("adds"))
    wait_until(lambda: rows(repository, "adds") == [READY, READY])


def test_ensembles_follow_a_model_that_leaves_and_comes_back(repository: Repository) -> None:
    for name in ("asks_of_models", "asks_of_more", "asks", "adds"):
        repository.unload(name)
    folder = repository.root / "adds"
    kept = repository.root.parent / "kept"
    shutil.move(folder, kept)
    try:
        for name in ("asks_of_models", "asks_of_more"):
            assert repository.load(name) == (200, "")
        assert [repository.added(name) for name in ("asks_of_more", "asks_of_models", "adds")] == [10, 10, 10]
    finally:
        shutil.move(kept, folder)
    assert repository.load("asks_of_models") == (200, "")
    assert [repository.added(name) for name in ("asks_of_models", "asks_of_more")] == [1, 10]
    assert repository.infer("adds") == (400, ambiguous("adds"))
