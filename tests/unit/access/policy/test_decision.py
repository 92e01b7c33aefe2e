"""Decisions: the same as reading all rules one by one, whatever was asked before."""

from __future__ import annotations

from fnmatch import fnmatchcase

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weir.access.policy import decision as module
from weir.access.policy.actions import Action
from weir.access.policy.decision import Decisions
from weir.access.policy.document import parse_policy
from weir.access.policy.rules import AccessPolicy, Limits, Role, Rule
from weir.access.principal import NOBODY, Principal, Proof

POLICY = parse_policy("""
roles:
  anonymous:
    rules:
      - actions: [health]
  caller:
    rules:
      - model: "resnet*"
        versions: [1, 2]
        actions: [infer]
      - model: "bert"
        actions: [infer, statistics]
  operator:
    rules:
      - actions: ["*"]
""")


NO_RULE = "no rule allows the role caller"


def principal(*roles: str) -> Principal:
    return Principal("somebody", "", frozenset(roles), Proof.KEY)


@pytest.mark.parametrize(
    ("who", "action", "model", "version", "why"),
    [
        (NOBODY, Action.HEALTH, "m", 1, "rule 1 of role 'anonymous'"),
        (principal("caller"), Action.HEALTH, "", 0, "rule 1 of role 'anonymous'"),
        (principal("caller"), Action.INFER, "resnet50", 2, "rule 1 of role 'caller'"),
        (principal("caller"), Action.INFER, "bert", 7, "rule 2 of role 'caller'"),
        (principal("operator"), Action.LOGS, "", 0, "rule 1 of role 'operator'"),
        (principal("caller", "operator"), Action.INFER, "vgg", 1, "rule 1 of role 'operator'"),
    ],
)
def test_a_rule_allows(who: Principal, action: Action, model: str, version: int, why: str) -> None:
    assert Decisions(POLICY).decide(who, action, model, version) == (True, why)


@pytest.mark.parametrize(
    ("who", "action", "model", "version", "why"),
    [
        (NOBODY, Action.INFER, "bert", 1, "no rule allows a request without a key 'infer' on model 'bert' version 1"),
        (principal("caller"), Action.INFER, "resnet50", 3, NO_RULE + " 'infer' on model 'resnet50' version 3"),
        # A rule for some versions does not cover all of them, and one for some models nothing of the server.
        (principal("caller"), Action.INFER, "resnet50", 0, NO_RULE + " 'infer' on model 'resnet50'"),
        (principal("caller"), Action.STATISTICS, "", 0, NO_RULE + " 'statistics'"),
        (principal("caller"), Action.INFER, "BERT", 1, NO_RULE + " 'infer' on model 'BERT' version 1"),
        (principal("caller"), Action.INFER, "bert\n", 1, NO_RULE + " 'infer' on model 'bert\n' version 1"),
        (principal("b", "a"), Action.LOGS, "", 0, "no rule allows the roles a, b 'logs'"),
    ],
)
def test_what_no_rule_allows_is_refused(who: Principal, action: Action, model: str, version: int, why: str) -> None:
    assert Decisions(POLICY).decide(who, action, model, version) == (False, why)


NAMES = st.sampled_from(["anonymous", "a", "b"])
MODELS = st.sampled_from(["", "m", "mm", "n", "m.1"])
RULES = st.builds(
    Rule.model_construct,
    model=st.sampled_from(["*", "m", "m*", "?", "[!m]"]),
    versions=st.none() | st.lists(st.integers(1, 3)).map(tuple),
    actions=st.frozensets(st.sampled_from(Action), min_size=1, max_size=4),
)
POLICIES = st.dictionaries(NAMES, st.lists(RULES, max_size=4).map(lambda rules: Role.model_construct(rules=rules))).map(
    lambda roles: AccessPolicy.model_construct(roles=roles)
)
QUESTIONS = st.tuples(st.frozensets(NAMES), st.sampled_from(Action), MODELS, st.integers(0, 3))


def read_one_by_one(policy: AccessPolicy, roles: frozenset[str], action: Action, model: str, version: int) -> bool:
    for name in roles | {"anonymous"}:
        for rule in policy.roles[name].rules if name in policy.roles else ():
            if action not in rule.actions:
                continue
            if action.is_of_model and model:
                if fnmatchcase(model, rule.model) and (rule.versions is None or version in rule.versions):
                    return True
            elif rule.model == "*" and rule.versions is None:
                return True
    return False


@given(policy=POLICIES, questions=st.lists(QUESTIONS, max_size=20), most=st.integers(1, 4))
def test_a_decision_is_that_of_the_rules_one_by_one(policy: AccessPolicy, questions: list, most: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MAX_REMEMBERED", most)
        decisions = Decisions(policy)
        for roles, *question in [*questions, *questions]:
            who = Principal("somebody", "", roles, Proof.TOKEN)
            assert decisions.decide(who, *question).is_allowed == read_one_by_one(policy, roles, *question)


def test_a_model_of_which_nothing_is_allowed_is_not_known() -> None:
    decisions = Decisions(POLICY)
    assert decisions.knows(principal("caller"), "resnet50")
    assert decisions.knows(principal("operator"), "vgg")
    assert not decisions.knows(principal("caller"), "vgg")
    assert not decisions.knows(NOBODY, "resnet50")  # health alone tells nothing


def test_the_limits_of_several_roles_are_the_most_generous() -> None:
    policy = parse_policy("""
roles:
  small: {limits: {requests_per_s: 10, in_flight: 4, weight: 1}}
  large: {limits: {requests_per_s: 100, weight: 3}}
  free: {}
  anonymous: {limits: {requests_per_s: 1}}
""")
    decisions = Decisions(policy)
    assert decisions.limits_of(principal("small")) == Limits(requests_per_s=10, in_flight=4)
    assert decisions.limits_of(principal("small", "large")) == Limits(requests_per_s=100, weight=3)
    assert decisions.limits_of(principal("small", "free")) == Limits(requests_per_s=10, in_flight=4)
    assert decisions.limits_of(principal("free")) == decisions.limits_of(principal("unknown")) == Limits()
    assert decisions.limits_of(NOBODY) == Limits(requests_per_s=1)
