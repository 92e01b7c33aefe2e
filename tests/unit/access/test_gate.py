"""The gate: whom a header or a certificate names, and which error a request gets that the policy does not allow."""

from __future__ import annotations

import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weir.access import gate as module
from weir.access.audit import AuditEvent
from weir.access.gate import Asked, CertificateNames, Gate, Pass, Shown, certificate_names
from weir.access.keys.ring import KeyRing
from weir.access.policy.actions import Action
from weir.access.policy.document import parse_policy
from weir.access.principal import NOBODY, Principal, Proof
from weir.schemas.core.errors import ErrorCode, WeirError
from weir.schemas.wire.calls import ANYBODY, Caller

NOW_S = 1_800_000_000.0

POLICY = parse_policy("""
roles:
  anonymous:
    rules: [{actions: [health]}]
  caller:
    rules:
      - {model: "resnet*", actions: [infer]}
  broker:
    acts_for_tenants: true
certificates:
  - {subject: "CN=camera-7,O=Acme", principal: camera-7, tenant: acme, roles: [caller]}
  - {san: "URI:spiffe://acme/camera", principal: camera, roles: [caller]}
broker_users:
  - {user: orders, tenant: acme, roles: [caller]}
  - {user: relay-1, principal: relay, roles: [broker]}
""")


class Clock:
    now_s = NOW_S

    def __call__(self) -> float:
        return self.now_s


class Tokens:
    """Stands for the verifiers: the token is the name, until ten seconds from the start."""

    checked = 0

    def verify(self, token: str, now_s: float) -> Pass:
        self.checked += 1
        if now_s >= NOW_S + 10 or token.startswith("bad"):
            raise ValueError("the token is bad")
        return Pass(Principal(token, "", frozenset(["caller"]), Proof.TOKEN), NOW_S + 10)


def ring(**more: int) -> tuple[KeyRing, str]:
    return KeyRing().create("alice", ["caller"], NOW_S, tenant="acme", **more)


def gate_with(keys: KeyRing | None = None) -> tuple[Gate, Clock, Tokens]:
    clock, tokens = Clock(), Tokens()
    gate = Gate(clock)
    gate.use_policy(POLICY)
    gate.use_keys(keys or KeyRing())
    gate.use_tokens(tokens)
    return gate, clock, tokens


def refusal(gate: Gate, shown: bytes, certificate: CertificateNames | None = None) -> str:
    with pytest.raises(WeirError) as refused:
        gate.principal_of(Shown(shown, certificate))
    assert refused.value.code is ErrorCode.UNAUTHENTICATED
    assert len(shown) < 30 or shown.decode("latin-1")[7:] not in refused.value.message
    return refused.value.message


def test_without_a_policy_everybody_may_do_everything() -> None:
    gate = Gate(Clock())
    assert not gate.is_on
    for action in Action:
        gate.check(NOBODY, action, "m", "1")
        assert gate.may(NOBODY, action, "m")
    assert gate.may_act_for_tenants(NOBODY)
    assert gate.caller_of(NOBODY) is ANYBODY


def test_requests_of_one_tenant_count_together_and_those_that_show_nothing_too() -> None:
    gate, _, _ = gate_with()
    gate.use_policy(
        parse_policy("""
roles:
  anonymous: {rules: [{actions: [infer]}], limits: {in_flight: 1}}
  caller: {rules: [{actions: [infer]}], limits: {in_flight: 8, weight: 3}}
  other: {rules: [{actions: [infer]}]}
""")
    )
    caller, other = frozenset(["caller"]), frozenset(["other"])
    assert gate.caller_of(Principal("ann", "acme", caller, Proof.KEY)) == Caller("tenant acme", 8, 3)
    assert gate.caller_of(Principal("bob", "acme", caller, Proof.TOKEN)) == Caller("tenant acme", 8, 3)
    assert gate.caller_of(Principal("bob", "", other, Proof.TOKEN)) == Caller("token bob", 0, 1)
    assert gate.caller_of(NOBODY) == Caller("anonymous", 1, 1)


def test_a_key_names_its_principal_as_a_bearer_and_as_a_password() -> None:
    keys, key = ring()
    gate, _, _ = gate_with(keys)
    password = base64.b64encode(f"anything:{key}".encode())
    for shown in (b"Bearer " + key.encode(), b"bearer  " + key.encode(), b"Basic " + password):
        found = gate.principal_of(Shown(shown))
        assert (found.name, found.tenant, found.proof) == ("alice", "acme", Proof.KEY)


def test_a_revoked_and_an_expired_key_let_nobody_in() -> None:
    keys, key = ring(expires_s=int(NOW_S) + 5)
    gate, clock, _ = gate_with(keys)
    shown = f"Bearer {key}".encode()
    assert gate.principal_of(Shown(shown)).name == "alice"
    clock.now_s = NOW_S + 5
    assert "expired" in refusal(gate, shown)
    clock.now_s = NOW_S
    assert gate.principal_of(Shown(shown)).name == "alice"
    gate.use_keys(keys.revoke("alice"))
    assert "revoked" in refusal(gate, shown)


def test_a_token_is_checked_once_until_it_expires() -> None:
    gate, clock, tokens = gate_with()
    for _ in range(3):
        assert gate.principal_of(Shown(b"Bearer bob")).name == "bob"
    assert tokens.checked == 1
    clock.now_s = NOW_S + 10
    assert "bad" in refusal(gate, b"Bearer bob")
    gate.use_tokens(None)
    assert "no key of this server" in refusal(gate, b"Bearer carol")


def test_what_is_shown_takes_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_REMEMBERED", 3)
    gate, _, _ = gate_with()
    for number in range(8):
        gate.principal_of(Shown(f"Bearer {number}".encode()))
        assert len(gate._passes) <= 3
    assert "too long" in refusal(gate, b"Bearer " + b"x" * module.MAX_SHOWN_BYTES)


@given(st.binary(min_size=1, max_size=200))
def test_any_other_header_is_refused(shown: bytes) -> None:
    gate, _, _ = gate_with()
    gate.use_tokens(None)
    refusal(gate, shown)


def test_a_certificate_names_its_principal_unless_there_is_a_header() -> None:
    gate, _, _ = gate_with()
    subject = ((("organizationName", "Acme"),), (("commonName", "camera-7"),))
    other = certificate_names(subject[::-1], [("DNS", "x"), ("URI", "spiffe://acme/camera")])
    assert gate.principal_of(Shown(b"", other)).name == "camera-7"
    assert gate.principal_of(Shown(b"", other._replace(subject="CN=z"))).name == "camera"
    assert gate.principal_of(Shown(b"", certificate_names(subject, []))) == NOBODY
    assert gate.principal_of(Shown(b"Bearer bob", other)).name == "bob"
    refusal(gate, b"Bearer bad one", other)


def test_a_broker_user_names_its_principal_unless_there_is_a_header() -> None:
    gate, _, _ = gate_with()
    orders = Principal("orders", "acme", frozenset(["caller"]), Proof.BROKER_USER, "orders")
    assert gate.principal_of(Shown(b"", broker_user="orders")) == orders
    assert gate.principal_of(Shown(b"", tenant=b"other", broker_user="orders")) == orders
    relay = gate.principal_of(Shown(b"", tenant=b"other", broker_user="relay-1"))
    assert (relay.name, relay.owner) == ("relay", "tenant other")
    assert gate.principal_of(Shown(b"Bearer bob", broker_user="orders")).name == "bob"
    for unknown in ("", "relay", "ORDERS", "orders "):
        assert gate.principal_of(Shown(b"", broker_user=unknown)) == NOBODY
    with pytest.raises(WeirError):
        gate.principal_of(Shown(b"Bearer bad one", broker_user="orders"))
    gate.use_policy(parse_policy("roles: {}"))
    assert gate.principal_of(Shown(b"", broker_user="orders")) == NOBODY


def test_errors_tell_who_may_know_the_model() -> None:
    keys, key = ring()
    gate, _, _ = gate_with(keys)
    alice = gate.principal_of(Shown(f"Bearer {key}".encode()))
    gate.check(alice, Action.INFER, "resnet50", "1")
    gate.check(NOBODY, Action.HEALTH)
    for who, action, model, code in (
        (NOBODY, Action.INFER, "resnet50", ErrorCode.UNAUTHENTICATED),
        (NOBODY, Action.INFER, "nothing", ErrorCode.UNAUTHENTICATED),
        (alice, Action.LOAD, "resnet50", ErrorCode.PERMISSION_DENIED),
        (alice, Action.LOGS, "", ErrorCode.PERMISSION_DENIED),
    ):
        with pytest.raises(WeirError) as refused:
            gate.check(who, action, model, "1")
        assert refused.value.code is code
    for action in (Action.INFER, Action.METADATA, Action.LOAD):
        with pytest.raises(WeirError, match="Request for unknown model: 'bert' is not found") as hidden:
            gate.check(alice, action, "bert", "1")
        assert hidden.value.code is ErrorCode.NOT_FOUND


def test_only_some_roles_name_the_tenant_of_a_request() -> None:
    gate, _, _ = gate_with()
    assert gate.may_act_for_tenants(Principal("b", "", frozenset(["broker"]), Proof.KEY))
    assert not gate.may_act_for_tenants(Principal("c", "", frozenset(["caller"]), Proof.KEY))


def test_a_request_without_a_version_is_for_the_latest() -> None:
    gate = Gate(Clock())
    gate.use_policy(parse_policy("roles: {anonymous: {rules: [{model: m, versions: [2], actions: [infer]}]}}"))
    assert [gate.may(NOBODY, Action.INFER, "m", version) for version in ("2", "02", "1", "", "x", "9" * 30)] == [
        True,
        True,
        False,
        False,
        False,
        False,
    ]
    gate.latest_version = {"m": 2}.__getitem__
    assert gate.may(NOBODY, Action.INFER, "m", "")


def test_a_list_is_for_whoever_may_see_some_of_it() -> None:
    keys, key = ring()
    gate, _, _ = gate_with(keys)
    gate.check_any(gate.principal_of(Shown(f"Bearer {key}".encode())), Action.INFER)
    with pytest.raises(WeirError, match="no rule allows"):
        gate.check_any(NOBODY, Action.INFER)


class Recorded:
    """An audit log in memory."""

    def __init__(self) -> None:
        self.events: list[AuditEvent] = []

    def record(self, event: AuditEvent) -> None:
        self.events.append(event)


def test_what_is_refused_or_changes_something_is_recorded() -> None:
    keys, key = ring()
    gate, _, _ = gate_with(keys)
    gate.use_policy(parse_policy("roles: {caller: {rules: [{actions: [infer, load]}]}}"))
    gate.audits = recorded = Recorded()
    shown = Shown(f"Bearer {key}".encode())
    asked = Asked("http", "POST /x", Action.LOAD, "m", "3", "192.0.2.1")
    assert gate.admit(shown, asked).name == "alice"
    gate.admit(shown, asked._replace(reads=True))
    gate.admit(shown, asked._replace(action=Action.INFER))
    for refused in (shown, Shown(b""), Shown(b"Bearer bad")):
        with pytest.raises(WeirError):
            gate.admit(refused, asked._replace(action=Action.LOGS))
    facts = [(event.allowed, event.action, event.principal, event.model, event.version) for event in recorded.events]
    assert facts == [
        (True, "load", "alice", "m", 3),
        (False, "logs", "alice", "m", 3),
        (False, "logs", "", "m", 3),
        (False, "logs", "", "m", 3),
    ]
    assert all(event.client == "192.0.2.1" and key not in str(event) for event in recorded.events)


def test_the_tenant_of_a_request_counts_where_its_sender_acts_for_tenants() -> None:
    gate, _, _ = gate_with()
    gate.use_policy(parse_policy("roles: {caller: {}, broker: {acts_for_tenants: true}}"))
    gate.use_keys((two := KeyRing().create("a", ["caller"], NOW_S, tenant="own"))[0])
    assert gate.principal_of(Shown(f"Bearer {two[1]}".encode(), tenant=b"other")).owner == "tenant own"
    gate.use_keys((one := KeyRing().create("b", ["broker"], NOW_S))[0])
    shown = Shown(f"Bearer {one[1]}".encode())
    assert gate.principal_of(shown).owner == "key b"
    assert gate.principal_of(shown._replace(tenant=b"acme")).owner == "tenant acme"


def test_what_a_connection_keeps_holds_until_something_changes() -> None:
    keys, key = ring(expires_s=int(NOW_S) + 5)
    gate, clock, _ = gate_with(keys)
    shown = Shown(f"Bearer {key}".encode(), tenant=b"x")

    def kept() -> bool:
        found = gate.keep(shown, "resnet50", "", gate.principal_of(shown))
        assert found.caller.owner == "tenant acme"
        same = gate.holds(found, shown.authorization, b"x", "resnet50", "")
        others = [
            gate.holds(found, shown.authorization, b"x", "resnet51", ""),
            gate.holds(found, shown.authorization, b"x", "resnet50", "1"),
            gate.holds(found, shown.authorization, b"y", "resnet50", ""),
            gate.holds(found, b"", b"x", "resnet50", ""),
        ]
        assert not any(others)
        for change in (
            lambda: gate.use_keys(keys),
            lambda: gate.use_policy(POLICY),
            lambda: gate.use_tokens(None),
        ):
            before = gate.keep(shown, "resnet50", "", gate.principal_of(shown))
            change()
            assert not gate.holds(before, shown.authorization, b"x", "resnet50", "")
        return same

    assert kept()
    late = gate.keep(shown, "resnet50", "", gate.principal_of(shown))
    clock.now_s = NOW_S + 5
    assert not gate.holds(late, shown.authorization, b"x", "resnet50", "")


def test_the_latest_version_is_asked_about_each_time() -> None:
    gate = Gate(Clock(), {"m": 2}.__getitem__)
    gate.use_policy(parse_policy("roles: {anonymous: {rules: [{model: m, versions: [2], actions: [infer]}]}}"))
    assert not gate.holds(gate.keep(Shown(b""), "m", "", NOBODY), b"", b"", "m", "")
    assert gate.holds(gate.keep(Shown(b""), "m", "2", NOBODY), b"", b"", "m", "2")
