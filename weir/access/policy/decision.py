"""`Decisions`: whether a principal may do something, by a policy. Every door asks here, and nowhere else."""

from __future__ import annotations

import re
from fnmatch import translate
from typing import NamedTuple

from weir.access.policy.actions import Action
from weir.access.policy.rules import ANONYMOUS, ANY, NO_LIMITS, AccessPolicy, Limits, Rule
from weir.access.principal import Principal

MAX_REMEMBERED = 10_000
"""Decisions that are remembered; after that all are made anew, so that names which clients make up take no memory."""


class Decision(NamedTuple):
    """Whether something is allowed, and why: the rule that allows it, or what is missing."""

    is_allowed: bool
    why: str


class _Granted(NamedTuple):
    """What one rule of a role allows. `models` is None for every model, `versions` for every version."""

    models: re.Pattern[str] | None
    versions: frozenset[int] | None
    why: str


class Decisions:
    """The decisions of one policy. They depend on nothing else, so they are remembered."""

    def __init__(self, policy: AccessPolicy) -> None:
        self._granted: dict[str, dict[Action, list[_Granted]]] = {}
        for name, role in policy.roles.items():
            actions: dict[Action, list[_Granted]] = {}
            for number, rule in enumerate(role.rules, 1):
                for action in rule.actions:
                    actions.setdefault(action, []).append(_granted(name, number, rule))
            self._granted[name] = actions
        rules = [rule for role in policy.roles.values() for rule in role.rules]
        self.has_versions = any(rule.versions is not None for rule in rules)
        """Whether any rule is for some versions only."""
        self._acting = frozenset(name for name, role in policy.roles.items() if role.acts_for_tenants)
        self._limits_by_role = {name: role.limits for name, role in policy.roles.items()}
        self._limits: dict[frozenset[str], Limits] = {}
        self._remembered: dict[tuple[frozenset[str], Action, str, int], Decision] = {}

    def decide(self, principal: Principal, action: Action, model: str = "", version: int = 0) -> Decision:
        """Whether `principal` may do this to `model`: "" for what concerns every model, or the server.

        `version` is the one that serves the request, 0 for all of them: then a rule for some versions is not enough.
        """
        key = principal.roles, action, model, version
        decision = self._remembered.get(key)
        if decision is None:
            if len(self._remembered) >= MAX_REMEMBERED:
                self._remembered.clear()
            decision = self._remembered[key] = self._made(*key)
        return decision

    def knows(self, principal: Principal, model: str) -> bool:
        """Whether `principal` may do anything with any version of `model`: else the model does not exist for it."""
        return any(
            granted.models is None or granted.models.match(model)
            for role in (*principal.roles, ANONYMOUS)
            for action, rules in self._granted.get(role, {}).items()
            if action.is_of_model and action is not Action.HEALTH
            for granted in rules
        )

    def depends_on_version(self, principal: Principal, action: Action, model: str) -> bool:
        """Whether the decision about `model` differs between its versions, as far as a rule says so."""
        return self.has_versions and any(
            granted.versions is not None and (granted.models is None or granted.models.match(model))
            for role in (*principal.roles, ANONYMOUS)
            for granted in self._granted.get(role, {}).get(action, ())
        )

    def is_any_allowed(self, principal: Principal, action: Action) -> bool:
        """Whether `principal` may do this to some model or version of it."""
        return any(self._granted.get(role, {}).get(action) for role in (*principal.roles, ANONYMOUS))

    def limits_of(self, principal: Principal) -> Limits:
        """The limits of whom the principal acts for: of several roles with limits the most generous, one by one."""
        limits = self._limits.get(principal.roles)
        if limits is None:
            if len(self._limits) >= MAX_REMEMBERED:
                self._limits.clear()
            roles = principal.roles or {ANONYMOUS}
            found = [each for role in roles if (each := self._limits_by_role.get(role)) is not None]
            limits = self._limits[principal.roles] = _most_generous(found)
        return limits

    def may_act_for_tenants(self, principal: Principal) -> bool:
        """Whether a role of `principal` lets its requests name a tenant."""
        return not self._acting.isdisjoint(principal.roles)

    def _made(self, roles: frozenset[str], action: Action, model: str, version: int) -> Decision:
        # What nobody needs to prove anything for, a principal may do as well.
        for role in (*sorted(roles - {ANONYMOUS}), ANONYMOUS):
            for granted in self._granted.get(role, {}).get(action, ()):
                if _covers(granted, action, model, version):
                    return Decision(True, granted.why)
        return Decision(False, _refusal(roles, action, model, version))


def _most_generous(found: list[Limits]) -> Limits:
    """Each limit as in the row where it is largest; none where a row has none."""
    if not found:
        return NO_LIMITS
    values: dict[str, float | None] = {}
    for name in Limits.model_fields:
        rows = [getattr(limits, name) for limits in found]
        values[name] = None if None in rows else max(rows)
    return Limits.model_validate(values)


def _granted(role: str, number: int, rule: Rule) -> _Granted:
    models = None if rule.model == ANY else re.compile(translate(rule.model), re.DOTALL)
    versions = None if rule.versions is None else frozenset(rule.versions)
    return _Granted(models, versions, f"rule {number} of role '{role}'")


def _covers(granted: _Granted, action: Action, model: str, version: int) -> bool:
    if not action.is_of_model or not model:
        return granted.models is None and granted.versions is None
    if granted.models is not None and not granted.models.match(model):
        return False
    return granted.versions is None or version in granted.versions


def _refusal(roles: frozenset[str], action: Action, model: str, version: int) -> str:
    who = f"the role{'s' if len(roles) > 1 else ''} {', '.join(sorted(roles))}" if roles else "a request without a key"
    what = f" on model '{model}'" if model and action.is_of_model else ""
    which = f" version {version}" if what and version else ""
    return f"no rule allows {who} '{action.value}'{what}{which}"
