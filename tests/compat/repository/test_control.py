"""The model repository through stock clients: loads, unloads, the index, and the exact errors.

Texts were compared with those of a running Triton 2.51.0.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import signal
from collections.abc import Iterator
from urllib.parse import quote

import grpc
import pytest
import tritonclient.grpc.aio
import tritonclient.http
import tritonclient.http.aio
from tritonclient.grpc import service_pb2
from tritonclient.utils import InferenceServerException

from tests.support.models.zoo import config_text, write_model, write_slow, write_versions
from tests.support.servers.repository import (
    ADDS,
    ADDS_CONFIG,
    INDEX,
    NOT_POLLED,
    Repository,
    folders,
    serving,
    write_adds,
)
from tests.support.waiting import wait_until


@pytest.fixture(scope="module")
def explicit(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Repository]:
    folder = tmp_path_factory.mktemp("explicit")
    (folder / "models").mkdir()
    write_adds(folder / "models", "at_start", 1)
    write_versions(folder / "models", "all_versions", "version_policy { all { } }")
    yield from serving(folder, "--model-control-mode=explicit", "--load-model=at_start")


def test_only_the_named_models_are_there_at_the_start(explicit: Repository) -> None:
    assert explicit.http.is_server_ready()
    assert explicit.rows("at_start") == [{"name": "at_start", "version": "1", "state": "READY"}]
    assert explicit.rows("all_versions") == [{"name": "all_versions"}]
    assert (
        explicit.grpc.get_model_repository_index(as_json=True)["models"] == explicit.http.get_model_repository_index()
    )
    assert explicit.infer("all_versions") == (404, "Request for unknown model: 'all_versions' is not found")
    extensions = explicit.http.get_server_metadata()["extensions"]
    assert extensions[extensions.index("model_repository") + 1] == "model_repository(unload_dependents)"


@pytest.mark.parametrize("door", ["http", "grpc"])
def test_a_model_is_loaded_and_unloaded(explicit: Repository, door: str) -> None:
    name = f"by_{door}"
    write_adds(explicit.root, name, 3)
    client = getattr(explicit, door)
    assert explicit.rows(name) == [{"name": name}], "a folder that is new is seen"
    client.load_model(name)
    assert client.is_model_ready(name)
    assert explicit.added(name) == 3
    client.unload_model(name)
    assert not client.is_model_ready(name)
    assert explicit.infer(name) == (404, f"Request for unknown model: '{name}' has no available versions")
    unready = f"Request for unknown model: '{name}' version 1 is not at ready state"
    assert explicit.infer(name, "1") == (503, unready)
    assert explicit.infer(name, "7") == (404, f"Request for unknown model: '{name}' version 7 is not found")
    wait_until(lambda: explicit.rows(name)[0]["state"] == "UNAVAILABLE")
    assert explicit.rows(name) == [{"name": name, "version": "1", "state": "UNAVAILABLE", "reason": "unloaded"}]
    assert explicit.http.is_server_ready(), "what was unloaded on request is missed by nobody"
    assert name not in {row["name"] for row in json.loads(explicit.raw.post(INDEX, json={"ready": True}).content)}
    client.load_model(name)
    assert explicit.added(name) == 3
    client.unload_model(name)


async def test_the_asynchronous_clients_do_it_too(explicit: Repository) -> None:
    write_adds(explicit.root, "by_aio", 4)
    for client in (
        tritonclient.http.aio.InferenceServerClient(explicit.server.http_place),
        tritonclient.grpc.aio.InferenceServerClient(explicit.server.grpc_place),
    ):
        await client.load_model("by_aio")
        assert await client.is_model_ready("by_aio")
        await client.unload_model("by_aio", unload_dependents=True)
        assert not await client.is_model_ready("by_aio")
        with pytest.raises(InferenceServerException, match="failed to load 'nobody', failed to poll"):
            await client.load_model("nobody")
        await client.close()


def test_a_plain_load_of_what_has_not_changed_does_nothing(explicit: Repository) -> None:
    def processes() -> set[int]:
        # Those of models that other tests have unloaded may still be ending.
        return set(explicit.server.python_children()) - others

    others: set[int] = set()
    others = processes()
    write_slow(explicit.root, "unchanged", "")
    explicit.http.load_model("unchanged")
    (first,) = processes()
    explicit.http.load_model("unchanged")
    assert processes() == {first}
    os.utime(explicit.root / "unchanged" / "1" / "model.py", (1, 1))
    explicit.http.load_model("unchanged")
    wait_until(lambda: first not in processes())
    assert len(processes()) == 1, "one process has replaced it"
    explicit.unload("unchanged")


def test_a_reload_that_fails_leaves_what_serves(explicit: Repository) -> None:
    write_adds(explicit.root, "spoilt", 5)
    assert explicit.load("spoilt") == (200, "")
    (explicit.root / "spoilt" / "1" / "model.py").write_text("raise ValueError('no')")
    for _ in range(2):
        status, text = explicit.load("spoilt")
        assert status == 400
        assert text.startswith(
            "load failed for model 'spoilt': version 1 is at UNAVAILABLE state: Internal: ValueError: no"
        )
        assert text.endswith(";\n")
    assert explicit.added("spoilt") == 5
    (explicit.root / "spoilt" / "config.pbtxt").write_text("nonsense")
    status, text = explicit.load("spoilt")
    assert status == 500
    assert text.startswith(f"{NOT_POLLED.format('spoilt')}: spoilt/config.pbtxt:1:1: field 'nonsense': ")
    assert explicit.added("spoilt") == 5
    (row,) = explicit.rows("spoilt")
    assert row["state"] == "READY"
    assert "could not be loaded" in row["reason"]
    assert "nonsense" in row["reason"]
    write_adds(explicit.root, "spoilt", 6)
    assert explicit.load("spoilt") == (200, "")
    assert explicit.added("spoilt") == 6
    explicit.unload("spoilt")


def test_loads_that_fail_say_why(explicit: Repository) -> None:
    root = explicit.root
    write_adds(root, "partly", 1, 1, "version_policy { all { } }")
    write_adds(root, "partly", 2, 2, "version_policy { all { } }")
    (root / "partly" / "2" / "model.py").write_text("raise ValueError('not two')")
    status, text = explicit.load("partly")
    assert status == 400
    assert text.startswith(
        "load failed for model 'partly': version 2 is at UNAVAILABLE state: Internal: ValueError: not two"
    )
    first, second = explicit.rows("partly")
    assert first == {"name": "partly", "version": "1", "state": "UNAVAILABLE", "reason": "unloaded"}
    assert second["reason"].startswith("Internal: ValueError: not two")
    unknown = "Request for unknown model: 'partly' has no available versions: Internal: ValueError: not two"
    status, text = explicit.infer("partly")
    assert status == 404
    assert text.startswith(unknown)
    assert "\n" not in text
    assert not explicit.http.is_server_ready()
    shutil.rmtree(root / "partly")
    write_adds(root, "partly", 1)
    assert explicit.load("partly") == (200, "")
    explicit.unload("partly")
    assert explicit.http.is_server_ready()

    write_model(root, "empty", config_text("empty", "python", {}, {}))
    (root / "empty" / "1").rmdir()
    none_left = "at least one version must be available under the version policy of model 'empty'"
    assert explicit.load("empty") == (400, f"load failed for model 'empty': {none_left}\n")
    shutil.rmtree(root / "empty")
    explicit.unload("empty")
    write_model(root, "misnamed", config_text("other", "python", {}, {}))
    status, text = explicit.load("misnamed")
    why = (
        "unexpected directory name 'misnamed' for model 'other', directory name must equal model name "
        "(misnamed/config.pbtxt:1, field 'name')"
    )
    assert (status, text) == (500, f"{NOT_POLLED.format('misnamed')}: {why}")
    (row,) = explicit.rows("misnamed")
    assert row == {"name": "misnamed", "state": "UNAVAILABLE", "reason": f"Invalid argument: {why}"}
    assert explicit.http.is_server_ready(), "as in Triton: it is no model of the server"
    assert explicit.load("nobody") == (500, NOT_POLLED.format("nobody"))
    assert explicit.rows("nobody") == []
    dots = "invalid model name '..', model name must not contain path traversal characters"
    assert explicit.load("%2E%2E") == (400, dots)
    assert explicit.load("...") == (500, NOT_POLLED.format("..."))
    assert explicit.load("..my_model") == (500, NOT_POLLED.format("..my_model"))
    for path in ("../adds", "adds/../..", "/adds", "..\\adds"):
        status, message = explicit.load(quote(path, safe=""))
        assert status == 400
        assert message.endswith(f"invalid model name '{path}', model name must not contain path traversal characters")
    assert explicit.load("model;test")[0] == 400
    assert "Invalid stub name: contains invalid characters" in explicit.load("model;test")[1]
    unnamed = service_pb2.RepositoryModelLoadRequest()
    empty = "Model name cannot be empty. Please enter a valid name to deploy."
    assert explicit.refusal("RepositoryModelLoad", unnamed) == (grpc.StatusCode.INVALID_ARGUMENT, empty)
    assert explicit.load("%20") == (400, empty)


def test_unloading_what_is_not_there_is_no_error(explicit: Repository) -> None:
    explicit.http.unload_model("nobody")
    explicit.grpc.unload_model("nobody")
    assert explicit.unload("all_versions") == (200, "")
    assert explicit.rows("all_versions") == [{"name": "all_versions"}]


def test_a_configuration_stands_in_for_the_one_on_disk(explicit: Repository) -> None:
    explicit.http.load_model("all_versions")
    assert [explicit.added("all_versions", version) for version in "123"] == [1, 2, 3]
    config = explicit.http.get_model_config("all_versions")
    config["version_policy"] = {"specific": {"versions": [2]}}
    explicit.grpc.load_model("all_versions", config=json.dumps(config))
    assert explicit.added("all_versions") == 2
    wait_until(lambda: "UNLOADING" not in {row["state"] for row in explicit.rows("all_versions")})
    assert [row["state"] for row in explicit.rows("all_versions")] == ["UNAVAILABLE", "READY", "UNAVAILABLE"]
    assert explicit.http.is_server_ready()
    before = explicit.http.get_model_config("all_versions")
    assert before["version_policy"] == {"specific": {"versions": [2]}}
    for bad in ("{", '{"nope": 1}', "", "[]"):
        status, text = explicit.load("all_versions", {"parameters": {"config": bad}})
        assert status == 500
        assert text.startswith(f"{NOT_POLLED.format('all_versions')}: Invalid config override: ")
    assert explicit.added("all_versions") == 2
    explicit.http.load_model("all_versions")
    assert explicit.added("all_versions") == 2, "a plain load keeps it as long as the files are the same"
    assert explicit.http.get_model_config("all_versions")["version_policy"] == {"specific": {"versions": [2]}}
    loads = explicit.server.log().count("successfully loaded 'all_versions'")
    explicit.server.kill("worker", signal.SIGKILL)
    wait_until(lambda: explicit.server.log().count("successfully loaded 'all_versions'") > loads, 30)
    assert explicit.added("all_versions") == 2, "so does a restart"
    os.utime(explicit.root / "all_versions" / "config.pbtxt", (1, 1))
    explicit.grpc.load_model("all_versions")
    assert explicit.added("all_versions") == 3, "a load after a change goes back to what is on disk"
    explicit.grpc.load_model("all_versions", config=json.dumps(config))
    assert explicit.added("all_versions") == 2
    explicit.unload("all_versions")
    explicit.http.load_model("all_versions")
    assert explicit.added("all_versions") == 3, "and so does one after an unload"
    explicit.unload("all_versions")


def test_files_stand_in_for_those_on_disk_and_leave_with_the_model(explicit: Repository) -> None:
    files = {"file:/1/model.py": ADDS.replace("NUMBER", "50").encode(), "file:1/more/data": bytes(3_000_000)}
    explicit.http.load_model("at_start", config=json.dumps(ADDS_CONFIG), files=files)
    assert explicit.added("at_start") == 50
    explicit.grpc.load_model("only_sent", config=json.dumps(ADDS_CONFIG), files=files)
    explicit.grpc.load_model("..sent", config=json.dumps(ADDS_CONFIG), files=files)
    assert explicit.added("..sent") == 50
    explicit.unload("..sent")
    assert explicit.added("only_sent") == 50
    assert len(folders(explicit)) == 2
    sent = folders(explicit)[0].parent
    assert sorted(path.name for path in sent.glob("weir-model-*/*/1/more/*")) == ["data", "data"]
    explicit.unload("only_sent")
    assert explicit.rows("only_sent") == []
    assert explicit.load("only_sent") == (500, NOT_POLLED.format("only_sent"))
    explicit.http.load_model("at_start")
    assert explicit.added("at_start") == 1
    wait_until(lambda: not folders(explicit))


@pytest.mark.parametrize("path", ["../x", "1/../../x", "/../x", "", "1/", "1/..", "..\\x"])
def test_files_stay_inside_the_model_s_folder(explicit: Repository, path: str) -> None:
    content = base64.b64encode(b"x").decode()
    body = {"parameters": {"config": json.dumps(ADDS_CONFIG), f"file:{path}": content}}
    status, text = explicit.load("at_start", body)
    assert status == 500
    assert text.startswith(f"{NOT_POLLED.format('at_start')}: ")
    assert "must stay within model directory" in text
    assert explicit.added("at_start") == 1
    assert not folders(explicit)
    assert not list(explicit.server.folder.rglob("x"))


def test_files_want_a_configuration(explicit: Repository) -> None:
    body = {"parameters": {"file:1/model.py": base64.b64encode(b"x").decode()}}
    why = "Load parameter 'config' must be specified for model file override"
    assert explicit.load("at_start", body) == (500, f"{NOT_POLLED.format('at_start')}: {why}")


def test_bodies_that_make_no_sense_are_answered_as_by_triton(explicit: Repository) -> None:
    malformed = "failed to parse the request JSON buffer: Missing a name for object member. at 1"
    no_text = "attempt to access JSON non-string as string"
    no_members = "attempt to get members for non-object"
    no_boolean = "attempt to access JSON non-boolean as boolean"
    no_repository = "'repository_name' specification is not supported"
    for body, reply in (
        (b"{nope", malformed),
        ({"parameters": 3}, no_members),
        ({"parameters": None}, no_members),
        ({"parameters": {"foo": "bar"}}, "unexpected error on creating Triton parameter"),
        ({"parameters": {"foo": 1}}, no_text),
        ({"parameters": {"config": 1}}, no_text),
        ({"parameters": {"file:1/model.py": 1}}, no_text),
    ):
        assert explicit.load("at_start", body) == (500, reply)
    for body in (b"[]", {}, {"other": 1}):
        assert explicit.load("at_start", body) == (200, "")
    for ready in ("x", None, 1):
        assert explicit.post(INDEX, {"ready": ready}) == (500, no_boolean)
    assert explicit.post(INDEX, b"{nope") == (500, malformed)
    everything = explicit.raw.post(INDEX).json()
    for path, body in ((INDEX, b"{}"), (INDEX, b"[]"), ("/v2/repository/any/index", b"")):
        assert explicit.raw.post(path, content=body).json() == everything
    for verb in ("load", "unload"):
        assert explicit.post(f"/v2/repository/any/models/at_start/{verb}") == (501, no_repository)
        assert explicit.raw.get(f"/v2/repository/models/at_start/{verb}").status_code == 405
        assert explicit.post(f"/v2/repository/models//{verb}")[0] == 404
    write_adds(explicit.root, "unloaded", 1)
    for body in (b"{nope", {"parameters": {"foo": 1}}, {"parameters": {"unload_dependents": "x"}}):
        assert explicit.load("unloaded") == (200, "")
        assert explicit.unload("unloaded", body) == (200, "")


def test_grpc_parameters_of_the_wrong_kind_are_refused(explicit: Repository) -> None:
    text, truth = service_pb2.ModelRepositoryParameter(string_param="x"), {"bool_param": True}
    flag = service_pb2.ModelRepositoryParameter(**truth)
    invalid, unimplemented = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED
    wrong = "invalid value type for"
    for method, request, reply in (
        ("RepositoryModelLoad", {"parameters": {"foo": text}}, (invalid, "unrecognized load parameter 'foo'.")),
        (
            "RepositoryModelLoad",
            {"parameters": {"config": flag}},
            (invalid, f"{wrong} load parameter 'config', expected string_param."),
        ),
        (
            "RepositoryModelLoad",
            {"parameters": {"file:1/x": text}},
            (invalid, f"{wrong} load parameter 'file:1/x', expected bytes_param."),
        ),
        (
            "RepositoryModelUnload",
            {"parameters": {"unload_dependents": text}},
            (invalid, f"{wrong} 'unload_dependents' parameter, expected bool_param."),
        ),
        ("RepositoryModelLoad", {"repository_name": "r"}, None),
        ("RepositoryModelUnload", {"repository_name": "r"}, None),
    ):
        message = getattr(service_pb2, f"{method}Request")(model_name="at_start", **request)
        expected = reply or (unimplemented, "'repository_name' specification is not supported")
        assert explicit.refusal(method, message) == expected
    index = service_pb2.RepositoryIndexRequest(repository_name="r")
    assert explicit.refusal("RepositoryIndex", index)[0] is unimplemented
    assert explicit.added("at_start") == 1


@pytest.mark.parametrize("killed", ["worker", "nats", "gateway"])
def test_what_was_asked_for_outlives_processes(explicit: Repository, killed: str) -> None:
    files = {"file:1/model.py": ADDS.replace("NUMBER", "70").encode()}
    explicit.http.load_model("kept", config=json.dumps(ADDS_CONFIG), files=files)
    explicit.http.unload_model("at_start")
    explicit.server.kill(killed, signal.SIGKILL)
    wait_until(lambda: explicit.server.is_ready("kept"), 30)
    if killed == "nats":
        # The broker came back empty, and now the worker starts from what is there.
        loads = explicit.server.log().count("successfully loaded 'kept'")
        wait_until(lambda: "uploaded 1 files of 'kept' again" in explicit.server.log())
        explicit.server.kill("worker", signal.SIGKILL)
        wait_until(lambda: explicit.server.log().count("successfully loaded 'kept'") > loads, 30)
    assert explicit.added("kept") == 70
    assert not explicit.server.is_ready("at_start")
    assert explicit.unload("kept") == (200, "")
    explicit.http.load_model("at_start")
    wait_until(lambda: not folders(explicit) and explicit.http.is_server_ready())


def test_the_log_tells_what_is_loaded_and_unloaded(explicit: Repository) -> None:
    log = explicit.server.log()
    for line in (
        "loading: at_start:1",
        "successfully loaded 'at_start'",
        "successfully unloaded 'at_start' version 1",
        "failed to load 'spoilt' version 1: Internal: ValueError: no",
        "failed to load 'spoilt'",
    ):
        assert f'"{line}' in log
