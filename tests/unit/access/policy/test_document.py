"""Policies: what a document says, and where it says something wrong."""

from __future__ import annotations

import pytest

from weir.access.policy.actions import ALL_ACTIONS, Action
from weir.access.policy.document import MAX_DEPTH, MAX_POLICY_BYTES, AccessPolicy, PolicyError, parse_policy

CALLER = """
roles:
  caller:
    rules:
      - model: "resnet*"
        versions: [1, 2]
        actions: [infer, metadata]
  operator:
    rules:
      - actions: ["*"]
"""


def test_roles_have_their_rules() -> None:
    roles = parse_policy(CALLER).roles
    (rule,) = roles["caller"].rules
    assert (rule.model, rule.versions, rule.actions) == ("resnet*", (1, 2), {Action.INFER, Action.METADATA})
    (rule,) = roles["operator"].rules
    assert (rule.model, rule.versions, rule.actions) == ("*", None, ALL_ACTIONS)


@pytest.mark.parametrize("text", ["", "# nothing\n", "roles: {}\n"])
def test_a_policy_without_roles_allows_nothing(text: str) -> None:
    assert parse_policy(text) == AccessPolicy()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("roles: [", "line 1, column 9: expected the node content, but found '<stream end>'"),
        ("role: {}", "line 1, column 1: role: Extra inputs are not permitted"),
        ("roles:\n  a: {}\n  a: {}", "line 3, column 3: 'a' stands twice"),
        ("roles:\n  1: {}", "line 2, column 3: 1 is no name"),
        (
            "roles:\n  a:\n    rules:\n      - actions: [infr]",
            "line 4, column 9: roles.a.rules.0.actions: unknown action 'infr'; expected '*' or one of health, ",
        ),
        ("roles:\n  a:\n    rules:\n      - actions: []", "line 4, column 9: roles.a.rules.0.actions: expected a list"),
        ("roles:\n  a:\n    rules:\n      - model: m", "line 4, column 9: roles.a.rules.0.actions: Field required"),
        (
            "roles:\n  a:\n    rules:\n      - actions: [infer]\n        versions: [0]",
            "line 5, column 20: roles.a.rules.0.versions.0: Input should be greater than or equal to 1",
        ),
        (
            "broker_users:\n  - {user: a.b, roles: []}",
            "line 2, column 6: broker_users.0.user: String should match pattern",
        ),
        (
            "roles: {}\nbroker_users:\n  - {user: a, roles: []}\n  - {user: a, roles: [b]}",
            "line 2, column 1: broker_users: the user 'a' stands twice",
        ),
        ("a: &x [1]\nb: *x", "line 1, column 4: an alias, which a policy can't have"),
        ("!!python/object/apply:os.system [x]", "line 1, column 1: "),
        (
            "[" * (MAX_DEPTH + 2) + "]" * (MAX_DEPTH + 2),
            f"line 1, column {MAX_DEPTH + 2}: more than {MAX_DEPTH} levels",
        ),
        (" " * (MAX_POLICY_BYTES + 1), f"the policy has {MAX_POLICY_BYTES + 1} characters"),
        ("\x00", "the policy is no YAML: unacceptable character #x0000"),
    ],
)
def test_a_problem_names_its_line_and_column(text: str, problem: str) -> None:
    with pytest.raises(PolicyError) as caught:
        parse_policy(text)
    assert str(caught.value).startswith(problem)
