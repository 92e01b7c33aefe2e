"""`Gate`: who sends a request, and whether the policy lets it. Each door of a process asks the one gate of the process.

Without a policy the gate is open: everybody may do everything. With one, a request names its principal by a key or a token
(`Authorization: Bearer …`, or `Basic …` with a key as the password, for browsers), by the certificate of its connection, or
by the user of the message broker that has published it.
Sans-IO: `weir.cluster.access` reads the policy, the keys and the key sets of issuers, and sets them here.
"""

from __future__ import annotations

import base64
import binascii
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from typing import NamedTuple, Protocol

from weir.access.audit import NO_AUDIT, Audits, event_of, is_audited
from weir.access.keys.ring import PREFIX, KeyRing
from weir.access.limits.refusals import TokensPending, body_too_large
from weir.access.policy.actions import Action
from weir.access.policy.decision import Decision, Decisions
from weir.access.policy.rules import ANONYMOUS, NO_LIMITS, AccessPolicy, Limits
from weir.access.principal import NOBODY, Principal, Proof
from weir.schemas.core.errors import ErrorCode, WeirError, unknown_model
from weir.schemas.core.names import plain_name
from weir.schemas.wire.calls import ANYBODY, Caller

MAX_REMEMBERED = 10_000
"""Keys and tokens whose check is remembered."""

MAX_SHOWN_BYTES = 16 * 1024
"""A longer header lets nobody in, and is not hashed."""

MAX_TENANT_CHARACTERS = 256

TENANT_HEADER = b"weir-tenant"
"""The header in which a request names the tenant that it is for."""

_FOREVER = float("inf")


class CertificateNames(NamedTuple):
    """The names in a client's certificate: the subject as in "CN=a,O=b", and "DNS:a", "URI:b" …"""

    subject: str
    alternatives: tuple[str, ...]


class Pass(NamedTuple):
    """A principal, and until when (in Unix seconds) what it has shown lets it in."""

    principal: Principal
    until_s: float


class VerifiesTokens(Protocol):
    """Checks the tokens of some issuers (`weir.access.tokens.verifier.TokenVerifiers`)."""

    def verify(self, token: str, now_s: float) -> Pass:
        """Whom the token names. Raises ValueError with the reason for one that lets nobody in."""


class Shown(NamedTuple):
    """What a request shows: its `Authorization` header, the client's certificate, and the tenant that it names.

    `at_s` is when it was shown, in Unix seconds, 0 for now: what has expired since then still counts, what was revoked does
    not. `broker_user` is the user of the message broker on whose subject it came, "" for none.
    """

    authorization: bytes
    certificate: CertificateNames | None = None
    tenant: bytes = b""
    at_s: float = 0.0
    broker_user: str = ""


class Asked(NamedTuple):
    """What a request asks for, and at which door (the fields are those of `AuditEvent`).

    `version` is "" for the latest. With `is_list` it concerns several models, about each of which the door asks later.
    What only `reads` is no event of the audit log where it is allowed. Inference, and what `submits` it for later, counts
    towards the limits of its owner, with a body of `size` bytes (0: not known yet), unless it `is_counted` already.
    """

    door: str
    operation: str
    action: Action
    model: str = ""
    version: str = ""
    client: str = ""
    is_list: bool = False
    reads: bool = False
    size: int = 0
    submits: bool = False
    is_counted: bool = False


class Kept(NamedTuple):
    """What a connection keeps of an admitted request: the next one like it is decided by comparing (`Gate.holds`)."""

    epoch: object
    until_s: float
    authorization: bytes
    tenant: bytes
    model: str
    version: str
    principal: Principal
    caller: Caller


class TakesTokens(Protocol):
    """Counts requests against the rates of their owners (`weir.cluster.access.rate_limits.RateLimits`)."""

    def take(self, principal: Principal, limits: Limits, size_bytes: int) -> None:
        """Takes a token for a request, and those for its bytes.

        Raises WeirError (RESOURCE_EXHAUSTED), which is `TokensPending` where the request may wait for tokens.
        """

    def spend(self, principal: Principal, size_bytes: int) -> None:
        """Counts bytes that were received before anybody knew how many they are."""


class Gate:
    """The decisions of one process. `clock` returns Unix seconds. Doors record what is decided in `audits`.

    `latest_version` returns the version of a model that serves requests which name none; 0 if that depends on the request.
    """

    def __init__(self, clock: Callable[[], float], latest_version: Callable[[str], int] = lambda _model: 0) -> None:
        self.audits: Audits = NO_AUDIT
        self.isolates_cache = False
        """Whether a cached response is for requests of the same owner alone."""
        self.is_on = False
        """Whether there is a policy."""
        self._clock = clock
        self._epoch = object()  # another one after each change of what the gate goes by
        self._decisions: Decisions | None = None
        self._keys = KeyRing()
        self._tokens: VerifiesTokens | None = None
        self._by_certificate: Mapping[str, Principal] = {}
        self._by_broker_user: Mapping[str, Principal] = {}
        self._passes: dict[bytes, Pass] = {}
        self.latest_version = latest_version
        self.rates: TakesTokens | None = None
        self.limits_rates = self.limits_requests = False
        """Whether the policy limits the rates of anybody, and whether it limits rates or sizes of requests."""
        self.refused: Counter[str] = Counter()
        """Requests beyond a limit, by its kind: "requests", "bytes", "body", …"""
        self.on_policy: Callable[[], None] = lambda: None
        """Called after a policy is in force."""

    # What it goes by

    def use_policy(self, policy: AccessPolicy) -> None:
        """Decides by this policy from now on."""
        self._decisions = Decisions(policy)
        self.is_on = True
        self.isolates_cache = policy.response_cache == "owner"
        limits = [role.limits for role in policy.roles.values() if role.limits is not None]
        self.limits_rates = any(each.requests_per_s or each.bytes_per_s for each in limits)
        self.limits_requests = self.limits_rates or any(each.body_bytes for each in limits)
        self._by_certificate = {
            row.subject or f"{row.san}": Principal(
                row.principal, row.tenant, frozenset(row.roles), Proof.CERTIFICATE, row.subject or f"{row.san}"
            )
            for row in policy.certificates
        }
        self._by_broker_user = {
            row.user: Principal(
                row.principal or row.user, row.tenant, frozenset(row.roles), Proof.BROKER_USER, row.user
            )
            for row in policy.broker_users
        }
        self._forget()
        self.on_policy()

    def use_keys(self, keys: KeyRing) -> None:
        """Lets these keys in from now on, and no others."""
        self._keys = keys
        self._forget()

    def use_tokens(self, tokens: VerifiesTokens | None) -> None:
        """Verifies tokens by these issuers' keys from now on; without, no token lets anybody in."""
        self._tokens = tokens
        self._forget()

    def _forget(self) -> None:
        self._passes.clear()
        self._epoch = object()

    # Admission

    def holds(self, kept: Kept, authorization: bytes, tenant: bytes, model: str, version: str) -> bool:
        """Whether what admitted the request of `kept` admits this one of the same connection, for the same action, too."""
        return (
            kept.epoch is self._epoch
            and kept.model == model
            and kept.version == version
            and kept.authorization == authorization
            and kept.tenant == tenant
            and self._clock() < kept.until_s
        )

    def keep(self, shown: Shown, model: str, version: str, principal: Principal) -> Kept:
        """What to keep of a request that was admitted, whose principal this is."""
        decisions, until_s = self._decisions, _FOREVER
        if shown.authorization:
            known = self._passes.get(sha256(shown.authorization).digest())
            until_s = 0.0 if known is None else known.until_s
        name = plain_name(model)
        if decisions is not None and not version and decisions.depends_on_version(principal, Action.INFER, name):
            until_s = 0.0  # the latest version may be another one by then
        caller = self.caller_of(principal)
        return Kept(self._epoch, until_s, shown.authorization, shown.tenant, model, version, principal, caller)

    def admit(self, shown: Shown, asked: Asked) -> Principal:
        """Who sends a request that the policy allows. Raises WeirError for one that it does not, as `check`.

        Raises WeirError, too, for one that is beyond a limit: `TokensPending` if it may wait until it is known.

        The decision goes to the audit log, if it is an event of it.
        """
        principal = NOBODY
        try:
            principal = self.principal_of(shown)
            if asked.is_list:
                self.check_any(principal, asked.action)
            else:
                self.check(principal, asked.action, asked.model, asked.version)
            if self.limits_requests and not asked.is_counted:
                self._count(principal, asked)
        except TokensPending as pending:
            pending.principal = principal
            pending.on_refused = lambda error: self._record(principal, asked, error.message)
            raise
        except WeirError as error:
            self._record(principal, asked, error.message)
            raise
        if not asked.reads and is_audited(asked.action, allowed=True):
            self._record(principal, asked, "")
        return principal

    def count(self, principal: Principal, asked: Asked) -> None:
        """Counts an admitted request against the limits of its owner. Raises WeirError, as `admit`, and records it."""
        try:
            self._count(principal, asked)
        except TokensPending as pending:
            pending.principal = principal
            pending.on_refused = lambda error: self._record(principal, asked, error.message)
            raise
        except WeirError as error:
            self._record(principal, asked, error.message)
            raise

    def _count(self, principal: Principal, asked: Asked) -> None:
        if not asked.submits and (asked.action is not Action.INFER or asked.is_list):
            return
        limits = self.limits_of(principal)
        self._check_body(principal, limits, asked.size)
        if self.rates is not None and (limits.requests_per_s or limits.bytes_per_s):
            self.rates.take(principal, limits, asked.size)

    def count_body(self, principal: Principal, size_bytes: int, is_complete: bool) -> None:
        """Counts what is received of a body that was not announced. Raises WeirError if it is too large."""
        limits = self.limits_of(principal)
        self._check_body(principal, limits, size_bytes)
        if is_complete and self.rates is not None and limits.bytes_per_s:
            self.rates.spend(principal, size_bytes)

    def used_up(self, principal: Principal, kind: str, what: str) -> WeirError:
        """The error for a request beyond a limit of what its owner may keep, which it counts; `what` is the limit."""
        self.refused[kind] += 1
        return WeirError(ErrorCode.RESOURCE_EXHAUSTED, f"limit of {what} of '{principal.shown_owner}' is used up")

    def _check_body(self, principal: Principal, limits: Limits, size_bytes: int) -> None:
        if limits.body_bytes is not None and size_bytes > limits.body_bytes:
            self.refused["body"] += 1
            raise body_too_large(size_bytes, limits.body_bytes, principal.shown_owner)

    def _record(self, principal: Principal, asked: Asked, refusal: str) -> None:
        door, operation, action, model, version, client, *_ = asked
        number = int(version) if version.isascii() and version.isdigit() and len(version) < 20 else 0
        event = event_of(
            self._clock(),
            door,
            operation,
            principal,
            action,
            allowed=not refusal,
            why=refusal,
            model=model,
            version=number,
            client=client,
        )
        self.audits.record(event)

    # Who

    def principal_of(self, shown: Shown) -> Principal:
        """Who shows the header (b"" for none), or else the certificate, or else the user of the broker.

        The tenant that the request names counts where a role of the principal acts for tenants. Raises WeirError
        (UNAUTHENTICATED) for a header that lets nobody in, whatever else there is.
        """
        tenant = shown.tenant
        principal = self._shown_by(shown.authorization, shown)
        if tenant and self.may_act_for_tenants(principal):
            return principal._replace(tenant=tenant.decode("latin-1")[:MAX_TENANT_CHARACTERS])
        return principal

    def _shown_by(self, authorization: bytes, shown: Shown) -> Principal:
        if not authorization:
            if shown.certificate is not None:
                return self._of_certificate(shown.certificate)
            return self._by_broker_user.get(shown.broker_user, NOBODY)
        if len(authorization) > MAX_SHOWN_BYTES:
            raise unauthenticated("the Authorization header is too long")
        digest = sha256(authorization).digest()
        now_s = shown.at_s or self._clock()
        known = self._passes.get(digest)
        if known is None or now_s >= known.until_s:
            known = self._check(authorization, now_s)
            if len(self._passes) >= MAX_REMEMBERED:
                self._passes.clear()
            self._passes[digest] = known
        return known.principal

    def _check(self, authorization: bytes, now_s: float) -> Pass:
        shown = _credential(authorization)
        if shown.startswith(PREFIX):
            record = self._keys.find(shown, now_s)
            if record is None:
                raise unauthenticated("the key is unknown, revoked or expired")
            principal = Principal(record.name, record.tenant, frozenset(record.roles), Proof.KEY, record.id)
            return Pass(principal, record.expires_s or _FOREVER)
        if self._tokens is None:
            raise unauthenticated("the Authorization header holds no key of this server")
        try:
            return self._tokens.verify(shown, now_s)
        except ValueError as error:
            raise unauthenticated(str(error)) from None

    def _of_certificate(self, certificate: CertificateNames) -> Principal:
        for name in (certificate.subject, *certificate.alternatives):
            principal = self._by_certificate.get(name)
            if principal is not None:
                return principal
        return NOBODY

    # What

    def decide(self, principal: Principal, action: Action, model: str = "", version: str = "") -> Decision:
        """Whether `principal` may do this to `model` ("": to the server), and why. The `version` "" is the latest.

        Rules match plain names: they hold in each namespace.
        """
        decisions = self._decisions
        if decisions is None:
            return _OPEN
        number = 0
        if decisions.has_versions and model:
            number = int(version) if version.isascii() and version.isdigit() and len(version) < 20 else 0
            number = number or (self.latest_version(model) if not version else 0)
        return decisions.decide(principal, action, plain_name(model), number)

    def may(self, principal: Principal, action: Action, model: str = "", version: str = "") -> bool:
        """Whether `principal` may do this, for lists, which leave out what it may not see."""
        return self._decisions is None or self.decide(principal, action, model, version).is_allowed

    def check(self, principal: Principal, action: Action, model: str = "", version: str = "") -> None:
        """Raises the error for a request that `principal` may not send.

        UNAUTHENTICATED for one who has shown nothing. NOT_FOUND where it may do nothing at all with the model, whether or
        not there is one of this name; else PERMISSION_DENIED.
        """
        if self._decisions is None:
            return
        decision = self.decide(principal, action, model, version)
        if decision.is_allowed:
            return
        if principal.proof is Proof.NONE:
            raise unauthenticated(f"{decision.why}; show a key or a token in the header Authorization")
        if model and action.is_of_model and not self._decisions.knows(principal, plain_name(model)):
            raise unknown_model(model)
        raise WeirError(ErrorCode.PERMISSION_DENIED, decision.why)

    def check_any(self, principal: Principal, action: Action) -> None:
        """As `check`, for a list: raises if `principal` may do this to no model at all."""
        if not self.may_any(principal, action):
            self.check(principal, action)

    def may_any(self, principal: Principal, action: Action) -> bool:
        """Whether `principal` may do this to some model."""
        return self._decisions is None or self._decisions.is_any_allowed(principal, action)

    def limits_of(self, principal: Principal) -> Limits:
        """What the owner of the principal's requests may take; without limits where there is no policy."""
        return NO_LIMITS if self._decisions is None else self._decisions.limits_of(principal)

    def caller_of(self, principal: Principal) -> Caller:
        """For whom the principal's requests count at schedulers: its owner; without a policy nobody.

        Requests that show nothing count together.
        """
        if self._decisions is None:
            return ANYBODY
        limits = self._decisions.limits_of(principal)
        return Caller(principal.owner or ANONYMOUS, limits.in_flight or 0, limits.weight)

    def may_act_for_tenants(self, principal: Principal) -> bool:
        """Whether the principal's requests may name a tenant. True without a policy: the header is all that there is."""
        return self._decisions is None or self._decisions.may_act_for_tenants(principal)


def unauthenticated(message: str) -> WeirError:
    """An error of the code UNAUTHENTICATED (HTTP 401)."""
    return WeirError(ErrorCode.UNAUTHENTICATED, message)


def _credential(authorization: bytes) -> str:
    """The key or token in an Authorization header. Raises WeirError (UNAUTHENTICATED). Source: RFC 6750, RFC 7617."""
    scheme, _, rest = authorization.decode("latin-1").strip().partition(" ")
    rest = rest.strip()
    if scheme.lower() == "bearer" and rest:
        return rest
    if scheme.lower() == "basic":
        try:
            return base64.b64decode(rest, validate=True).decode("latin-1").partition(":")[2]
        except binascii.Error:
            pass
    raise unauthenticated("the Authorization header is not of the form 'Bearer <key or token>'")


def certificate_names(
    subject: Sequence[Sequence[tuple[str, str]]], alternatives: Sequence[tuple[str, str]]
) -> CertificateNames:
    """The names in a certificate, as Python's `ssl` tells its `subject` and `subjectAltName`."""
    short = {
        "commonName": "CN",
        "organizationName": "O",
        "organizationalUnitName": "OU",
        "countryName": "C",
        "stateOrProvinceName": "ST",
        "localityName": "L",
    }
    parts = [f"{short.get(name, name)}={value}" for row in subject for name, value in row]
    return CertificateNames(",".join(parts), tuple(f"{kind}:{value}" for kind, value in alternatives))


_OPEN = Decision(True, "no policy is set")
