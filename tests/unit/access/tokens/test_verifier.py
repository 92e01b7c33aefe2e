"""Tokens: one that its issuer has signed for us names its bearer; the classic attacks let nobody in."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from hypothesis import given
from hypothesis import strategies as st
from jwt.algorithms import ECAlgorithm, OKPAlgorithm, RSAAlgorithm

from weir.access.principal import Principal, Proof
from weir.access.tokens.signing_keys import MAX_SET_BYTES, MalformedKeySet, SigningKeys
from weir.access.tokens.verifier import MAX_TOKEN_CHARACTERS, TokenRefused, TokenVerifier, TokenVerifiers, Trust

NOW_S = 1_800_000_000
TRUST = Trust("https://issuer", "weir", tenant_claim="org")
RSA = rsa.generate_private_key(65537, 2048)
EC = ec.generate_private_key(ec.SECP256R1())
ED = ed25519.Ed25519PrivateKey.generate()
FOREIGN = rsa.generate_private_key(65537, 2048)
SIGNERS: dict[str, Any] = {"RS256": RSA, "ES256": EC, "EdDSA": ED}


def row(key: Any, kid: str, **more: Any) -> dict[str, Any]:
    kinds = {"RSA": RSAAlgorithm, "EC": ECAlgorithm, "OKP": OKPAlgorithm}
    kind = "RSA" if isinstance(key, rsa.RSAPublicKey) else "EC" if isinstance(key, ec.EllipticCurvePublicKey) else "OKP"
    return {**kinds[kind].to_jwk(key, as_dict=True), "kid": kid, **more}


ROWS = [row(key.public_key(), name) for name, key in SIGNERS.items()]


def key_set(*rows: object) -> bytes:
    return json.dumps({"keys": rows}).encode()


def verifier() -> TokenVerifier:
    made = TokenVerifier(TRUST)
    made.use(SigningKeys.parse(key_set(*ROWS)))
    return made


CLAIMS = {"iss": "https://issuer", "aud": "weir", "sub": "alice", "org": "acme", "roles": ["caller"], "exp": NOW_S + 60}


def token(algorithm: str = "RS256", key: Any = None, headers: dict[str, Any] | None = None, **claims: Any) -> str:
    said = {name: value for name, value in {**CLAIMS, **claims}.items() if value is not ...}
    named = {"kid": algorithm} if headers is None else headers
    return jwt.encode(said, SIGNERS[algorithm] if key is None else key, algorithm, named)


@pytest.mark.parametrize("algorithm", SIGNERS)
@pytest.mark.parametrize("headers", [None, {}], ids=["named key", "no key named"])
def test_a_token_names_its_bearer(algorithm: str, headers: dict[str, Any] | None) -> None:
    shown = token(algorithm, headers=headers, jti="t-1")
    alice = Principal("alice", "acme", frozenset(["caller"]), Proof.TOKEN, "t-1")
    assert verifier().verify(shown, NOW_S) == (alice, NOW_S + 90)


def part(value: object) -> str:
    return base64.urlsafe_b64encode(json.dumps(value).encode()).rstrip(b"=").decode()


def by_hand(head: dict[str, Any], secret: bytes | None) -> str:
    signed = f"{part(head)}.{part(CLAIMS)}"
    code = b"" if secret is None else hmac.new(secret, signed.encode(), hashlib.sha256).digest()
    return f"{signed}.{base64.urlsafe_b64encode(code).rstrip(b'=').decode()}"


PEM = RSA.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)

ATTACKS = {
    "none": (lambda: by_hand({"alg": "none"}, None), "not signed with one of RS256"),
    "None": (lambda: by_hand({"alg": "None", "kid": "RS256"}, None), "not signed with one of RS256"),
    "key confusion": (lambda: by_hand({"alg": "HS256", "kid": "RS256"}, PEM), "not signed with one of RS256"),
    "key of another type": (lambda: token("RS256", headers={"kid": "ES256"}), "no key of the issuer"),
    "foreign key": (lambda: token(key=FOREIGN), "no key of the issuer"),
    "foreign key without a name": (lambda: token(key=FOREIGN, headers={}), "no key of the issuer"),
    "kid as a path": (lambda: token(headers={"kid": "../../dev/null"}), "no key of the issuer"),
    "kid as a query": (lambda: token(headers={"kid": "' UNION SELECT 'x"}), "no key of the issuer"),
    "kid as a number": (lambda: by_hand({"alg": "RS256", "kid": 1}, b"x"), "the token"),
    "jku": (lambda: token(key=FOREIGN, headers={"kid": "RS256", "jku": "https://attacker"}), "no key of the issuer"),
    "jwk": (
        lambda: token(key=FOREIGN, headers={"kid": "x", "jwk": row(FOREIGN.public_key(), "x")}),
        "no key of the issuer",
    ),
    "crit": (lambda: token(headers={"kid": "RS256", "crit": ["exp"]}), "the token"),
    "expired": (lambda: token(exp=NOW_S - 31), "has expired"),
    "future": (lambda: token(nbf=NOW_S + 31), "not valid yet"),
    "issued in the future": (lambda: token(iat=NOW_S + 31), "not valid yet"),
    "no end": (lambda: token(exp=...), "lacks a claim"),
    "infinite": (lambda: token(exp=float("inf")), "the token"),
    "true": (lambda: token(exp=True), "no time"),
    "wrong audience": (lambda: token(aud="other"), "another audience"),
    "no audience": (lambda: token(aud=...), "lacks a claim"),
    "wrong issuer": (lambda: token(iss="https://issuer/"), "another issuer"),
    "no name": (lambda: token(sub=""), "names its bearer"),
    "name of several lines": (lambda: token(sub="alice\nadmin"), "no printable text"),
    "roles of another type": (lambda: token(roles={"admin": True}), "no list"),
    "many roles": (lambda: token(roles=["r"] * 65), "no list"),
    "huge": (lambda: token(pad="x" * MAX_TOKEN_CHARACTERS), f"may have {MAX_TOKEN_CHARACTERS}"),
    "deep": (lambda: f"{part({'alg': 'RS256'})}.{'W1tb' * 2000}.x", "the token"),
    "empty": (lambda: "", "malformed"),
    "dots": (lambda: "." * 8000, "malformed"),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_an_attack_lets_nobody_in(attack: str) -> None:
    make, reason = ATTACKS[attack]
    shown = make()
    checks = verifier()
    for _ in range(2):  # also when it is shown again
        with pytest.raises(TokenRefused) as refused:
            checks.verify(shown, NOW_S)
        assert reason in str(refused.value)
        assert not shown or shown not in str(refused.value)


def test_a_signature_covers_each_character() -> None:
    shown, checks = token("EdDSA"), verifier()
    for position in range(0, len(shown), 7):
        other = shown[:position] + ("A" if shown[position] != "A" else "B") + shown[position + 1 :]
        with pytest.raises(TokenRefused):
            checks.verify(other, NOW_S)
    assert checks.verify(shown, NOW_S).principal.name == "alice"


@given(st.text() | st.binary().map(lambda data: data.decode("latin-1")))
def test_any_text_is_refused(shown: str) -> None:
    with pytest.raises(TokenRefused):
        verifier().verify(shown, NOW_S)


def test_a_token_expires_and_goes_with_its_key() -> None:
    shown, checks = token(), verifier()
    assert checks.verify(shown, NOW_S).principal.name == "alice"
    assert checks.verify(shown, NOW_S + 89).principal.name == "alice"
    with pytest.raises(TokenRefused, match="expired"):
        checks.verify(shown, NOW_S + 90)
    checks.use(SigningKeys.parse(key_set(ROWS[1])))
    with pytest.raises(TokenRefused, match="no key"):
        checks.verify(shown, NOW_S)


def test_the_issuer_of_a_token_chooses_its_keys() -> None:
    other = TokenVerifier(Trust("https://other", "weir"))
    other.use(SigningKeys.parse(key_set(row(FOREIGN.public_key(), "RS256"))))
    checks = TokenVerifiers([verifier(), other])
    assert checks.verify(token(), NOW_S).principal.name == "alice"
    assert checks.verify(token(iss="https://other", key=FOREIGN, sub="bob"), NOW_S).principal.name == "bob"
    for shown in (
        token(iss="https://other"),
        token(key=FOREIGN),
        token(iss="https://third"),
        token(iss=...),
        "x.y.z",
        "",
    ):
        with pytest.raises(TokenRefused):
            checks.verify(shown, NOW_S)


@pytest.mark.parametrize(
    "document",
    [b"", b"{", b"[]", b"{}", b'{"keys": {}}', key_set(), b" " * (MAX_SET_BYTES + 1)],
)
def test_what_is_no_key_set_is_named(document: bytes) -> None:
    with pytest.raises(MalformedKeySet):
        SigningKeys.parse(document)


def test_keys_that_can_t_be_trusted_are_left_out() -> None:
    small = rsa.generate_private_key(65537, 1024)
    others = [
        row(small.public_key(), "small"),
        row(RSA.public_key(), "for encryption", use="enc"),
        row(RSA.public_key(), "of another algorithm", alg="PS256"),
        row(ec.generate_private_key(ec.SECP384R1()).public_key(), "another curve"),
        {"kty": "oct", "k": "c2VjcmV0", "kid": "a secret"},
        {"kty": "RSA", "n": "AQAB", "kid": "half"},
        {**RSAAlgorithm.to_jwk(RSA, as_dict=True), "kid": "private"},
        {"kty": 1},
        "x",
        None,
    ]
    assert len(SigningKeys.parse(key_set(*others, ROWS[0]))) == 1
    with pytest.raises(MalformedKeySet, match="none of 10 keys"):
        SigningKeys.parse(key_set(*others))
