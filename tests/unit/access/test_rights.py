"""Everything that a client can do names an action: found in the running code, so that no door stands beside the policy."""

from __future__ import annotations

import pytest
from starlette.routing import Route as PlainRoute

from docs import rights
from weir.access.policy.actions import Action
from weir.bus.naming.permissions import PRODUCER, permissions, permissions_of_broker_user
from weir.bus.naming.subject_actions import action_of_subject
from weir.commands.access.rights import COMMAND_ACTIONS
from weir.http_server.routing import Route


def test_each_route_of_each_port_names_an_action() -> None:
    found = list(rights.rights_of_routes())
    assert {port for port, _, _ in found} == {"HTTP", "SageMaker", "metrics", "console"}
    assert len(found) > 80
    assert ("HTTP", "POST /v2/repository/models/{model}/load", Action.LOAD) in found


def test_a_route_without_an_action_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    apps = rights.applications()
    apps["console"].router.routes.append(PlainRoute("/side-door", lambda _request: None))
    monkeypatch.setattr(rights, "applications", lambda: apps)
    with pytest.raises(TypeError, match="side-door"):
        list(rights.rights_of_routes())
    with pytest.raises(TypeError):
        Route("/x", lambda _request: None)  # type: ignore[call-arg, arg-type, return-value]


def test_a_route_of_a_model_asks_about_that_model() -> None:
    """A path that names a model in a parameter the route does not know of would be decided as one about the server."""
    for port, app in rights.applications().items():
        for route in app.routes:
            assert isinstance(route, Route)
            named = {"model", "name"} & set(route.param_convertors)
            asks = route.lists or route.model_parameter in route.param_convertors
            changes_in_console = port == "console" and not route.action.is_of_model
            assert not named or asks or changes_in_console, route.path


def test_each_grpc_method_names_an_action() -> None:
    found = rights.rights_of_methods()
    assert found["/inference.GRPCInferenceService/ModelStreamInfer"] is Action.INFER
    assert found["/weir.v1.TrafficService/SetTraffic"] is Action.TRAFFIC
    assert len(found) > 20


def test_each_subject_of_a_client_is_decided_about_or_asks_nothing() -> None:
    found = rights.rights_of_subjects()
    assert found.keys() == {*permissions()[PRODUCER].publish, *permissions_of_broker_user("*").publish}
    asked = {subject.partition(".")[0] for subject, action in found.items() if action is Action.INFER}
    assert asked == {"infer", "event", "batch", "by"}
    assert {subject for subject, action in found.items() if action is None and subject.startswith("by.")} == {
        "by.*.flow.*.*"
    }
    with pytest.raises(KeyError):
        action_of_subject("api.request")  # producers can't publish there
    with pytest.raises(KeyError):
        action_of_subject("by.alice.api.request")


def test_each_command_names_an_action_or_asks_nothing_of_a_server() -> None:
    assert rights.rights_of_commands().keys() == COMMAND_ACTIONS.keys()


def test_each_action_stands_for_something() -> None:
    used = {action for _, _, action in rights.rights_of_routes()} | set(rights.rights_of_methods().values())
    assert used == set(Action)
