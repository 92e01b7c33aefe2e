"""`AccessPolicy`: what a policy says: roles and their rules, and which tokens, certificates and users name principals."""

from __future__ import annotations

import ipaddress
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from weir.access.policy.actions import ALL_ACTIONS, Action

ANONYMOUS = "anonymous"
"""The role of whoever shows nothing."""

ANY = "*"
"""Every model, version or action."""

MAX_RULES = 1000
"""Rules of one role: a decision that is not remembered reads them all."""

Name = Annotated[str, Field(min_length=1, max_length=256)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Rule(_Strict):
    """Allows `actions` on the models whose names match `model`, and on these `versions` of them.

    `model` is a pattern with `*`, `?` and `[…]`. What concerns the whole server is allowed only by a rule for every model.
    """

    model: Name = ANY
    versions: tuple[Annotated[int, Field(ge=1)], ...] | None = None
    actions: frozenset[Action]

    @field_validator("actions", mode="before")
    @classmethod
    def _known_actions(cls, value: Any) -> Any:
        if not isinstance(value, list) or not value:
            raise ValueError(f"expected a list of actions, as [infer, metadata], or ['{ANY}'] for all")
        if ANY in value:
            return ALL_ACTIONS
        known = {action.value: action for action in Action}
        for word in value:
            if word not in known:
                raise ValueError(f"unknown action {word!r}; expected '{ANY}' or one of {', '.join(known)}")
        return frozenset(known[word] for word in value)


class Limits(_Strict):
    """What one owner (`Principal.owner`) may take. None is without a limit.

    `requests_per_s` and `bytes_per_s` (of bodies) are over all gateways, with a burst of one second. `in_flight` are the
    requests that wait or run at one model. `weight` is its part of each batch while others wait too. `body_bytes` is the
    largest body, `shared_memory_bytes` the size of the regions that it keeps, and `stored_results` the number of requests
    that wait to be answered later and of results that are kept for it.
    """

    requests_per_s: Annotated[float, Field(gt=0, le=1e9)] | None = None
    bytes_per_s: Annotated[float, Field(gt=0, le=1e15)] | None = None
    in_flight: Annotated[int, Field(ge=1, le=1 << 31)] | None = None
    weight: Annotated[int, Field(ge=1, le=1000)] = 1
    body_bytes: Annotated[int, Field(ge=1)] | None = None
    shared_memory_bytes: Annotated[int, Field(ge=0)] | None = None
    stored_results: Annotated[int, Field(ge=0)] | None = None


NO_LIMITS = Limits()


class Role(_Strict):
    """What principals of this role may do. With `acts_for_tenants` they may name the tenant of a request in its header."""

    rules: Annotated[tuple[Rule, ...], Field(max_length=MAX_RULES)] = ()
    acts_for_tenants: bool = False
    limits: Limits | None = None


class Claims(_Strict):
    """The claims of a token that name its bearer; `tenant` and `roles` may be missing in a token."""

    principal: Name = "sub"
    tenant: Name = "tenant"
    roles: Name = "roles"


class Issuer(_Strict):
    """Whose tokens are taken. `keys` is the file or the URL (https, or http on this host) of its JSON web key set."""

    issuer: Name
    audience: Name
    keys: Annotated[str, Field(min_length=1, max_length=2048)]
    leeway_s: Annotated[float, Field(ge=0, le=300)] = 30.0
    claims: Claims = Claims()

    @property
    def has_url(self) -> bool:
        """Whether `keys` is a URL, and not a file."""
        return "://" in self.keys

    @field_validator("keys")
    @classmethod
    def _safe_url(cls, value: str) -> str:
        if "://" not in value:
            return value
        url = urlsplit(value)
        is_safe = url.scheme == "https" or (url.scheme == "http" and _is_loopback(url.hostname or ""))
        if not is_safe or not url.hostname or url.username is not None:
            raise ValueError("expected a file, an https:// URL without a user, or an http:// URL of this host")
        return value


class Certificate(_Strict):
    """Who shows a client certificate with this `subject` ("CN=a,O=b") or with this name (`san`: "DNS:a", "URI:b")."""

    subject: Name | None = None
    san: Name | None = None
    principal: Name
    tenant: Annotated[str, Field(max_length=256)] = ""
    roles: tuple[Name, ...]

    @model_validator(mode="after")
    def _one_name(self) -> Certificate:
        if (self.subject is None) == (self.san is None):
            raise ValueError("expected one of 'subject' and 'san'")
        return self


class BrokerUser(_Strict):
    """Who publishes on the subjects of this `user` of the message broker, which has checked the user's credentials.

    `principal` is the user's name unless it is set.
    """

    user: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]+$", max_length=256)]
    principal: Annotated[str, Field(max_length=256)] = ""
    tenant: Annotated[str, Field(max_length=256)] = ""
    roles: tuple[Name, ...]


class AccessPolicy(_Strict):
    """A principal may do what any of its roles allows; nothing else. Whoever shows nothing has the role `anonymous`.

    `response_cache` is "shared", or "owner": a response that the cache has kept is for requests of the same owner alone.
    """

    roles: dict[str, Role] = {}
    tokens: Annotated[tuple[Issuer, ...], Field(max_length=16)] = ()
    response_cache: Literal["shared", "owner"] = "shared"
    certificates: Annotated[tuple[Certificate, ...], Field(max_length=10_000)] = ()
    broker_users: Annotated[tuple[BrokerUser, ...], Field(max_length=10_000)] = ()

    @field_validator("broker_users")
    @classmethod
    def _each_user_once(cls, value: tuple[BrokerUser, ...]) -> tuple[BrokerUser, ...]:
        seen: set[str] = set()
        for row in value:
            if row.user in seen:
                raise ValueError(f"the user '{row.user}' stands twice")
            seen.add(row.user)
        return value


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
