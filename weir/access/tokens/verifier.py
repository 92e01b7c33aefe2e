"""`TokenVerifier`: the principal that a bearer token names, once its signature, its issuer and its times are checked.

Source: RFC 7519 (JWT), RFC 8725 (best practices). The headers `jku`, `x5u`, `jwk` and `x5c`, with which a token brings keys
of its own, have no effect; `crit` is refused, since nothing critical is understood.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jwt

from weir.access.gate import Pass
from weir.access.principal import Principal, Proof
from weir.access.tokens.signing_keys import ALGORITHMS, SigningKeys

MAX_TOKEN_CHARACTERS = 8192
"""A longer token is refused before it is decoded."""

MAX_NAME_CHARACTERS = 256
MAX_ROLES = 64

_TIMES_ARE_CHECKED_HERE = {
    "verify_exp": False,
    "verify_nbf": False,
    "verify_iat": False,
    "require": ["exp", "iss", "aud"],
}


class TokenRefused(ValueError):
    """A token that lets nobody in. The text says why without quoting it."""


class Trust(NamedTuple):
    """What a token must say. Claims are names at the top of the token; `tenant_claim` may be "".

    Times may differ by `leeway_s` seconds.
    """

    issuer: str
    audience: str
    principal_claim: str = "sub"
    tenant_claim: str = ""
    roles_claim: str = "roles"
    leeway_s: float = 30.0


class TokenVerifier:
    """Checks the tokens of one issuer. `on_unknown_key` is called for a token whose key is not among the issuer's."""

    def __init__(self, trust: Trust, on_unknown_key: Callable[[], None] = lambda: None) -> None:
        self.trust = trust
        self._on_unknown_key = on_unknown_key
        self._keys = SigningKeys([])

    def use(self, keys: SigningKeys) -> None:
        """Verifies with these keys from now on."""
        self._keys = keys

    def verify(self, token: str, now_s: float) -> Pass:
        """The principal that `token` names, and until when. Raises TokenRefused."""
        if len(token) > MAX_TOKEN_CHARACTERS:
            raise TokenRefused(f"the token has {len(token)} characters, and may have {MAX_TOKEN_CHARACTERS}")
        claims = self._claims(token)
        until_s = _time(claims, "exp") + self.trust.leeway_s
        if now_s >= until_s:
            raise TokenRefused("the token has expired")
        if now_s < _latest(claims, "nbf", "iat") - self.trust.leeway_s:
            raise TokenRefused("the token is not valid yet")
        return Pass(self._principal(claims), until_s)

    def _claims(self, token: str) -> dict[str, Any]:
        """What the token says, once one of the issuer's keys has verified it."""
        try:
            head = jwt.get_unverified_header(token)
        except (jwt.PyJWTError, ValueError, TypeError, RecursionError):
            raise TokenRefused("the token is malformed") from None
        algorithm, id = head.get("alg"), head.get("kid")
        if algorithm not in ALGORITHMS:
            raise TokenRefused(f"the token is not signed with one of {', '.join(ALGORITHMS)}")
        if "crit" in head or not (id is None or isinstance(id, str)):
            raise TokenRefused("the token's header asks for what is not known")
        keys = self._keys.for_token(id, algorithm)
        if not keys:
            self._on_unknown_key()
        for key in keys:
            try:
                claims: dict[str, Any] = jwt.decode(
                    token,
                    key.key,
                    algorithms=[algorithm],
                    audience=self.trust.audience,
                    issuer=self.trust.issuer,
                    options=_TIMES_ARE_CHECKED_HERE,  # type: ignore[arg-type]
                )
            except jwt.InvalidSignatureError:
                continue
            except jwt.InvalidAudienceError:
                raise TokenRefused("the token is for another audience") from None
            except jwt.InvalidIssuerError:
                raise TokenRefused("the token has another issuer") from None
            except (jwt.PyJWTError, ValueError, TypeError, RecursionError):
                raise TokenRefused("the token lacks a claim, or one is malformed") from None
            return claims
        raise TokenRefused("no key of the issuer verifies the token")

    def _principal(self, claims: dict[str, Any]) -> Principal:
        trust = self.trust
        name = _text(claims, trust.principal_claim)
        if not name:
            raise TokenRefused(f"the token has no claim '{trust.principal_claim}' that names its bearer")
        tenant = _text(claims, trust.tenant_claim) if trust.tenant_claim in claims else ""
        roles = claims.get(trust.roles_claim, [])
        if isinstance(roles, str):
            roles = roles.split()
        if not isinstance(roles, list) or len(roles) > MAX_ROLES or not all(isinstance(role, str) for role in roles):
            raise TokenRefused(f"the claim '{trust.roles_claim}' of the token is no list of at most {MAX_ROLES} roles")
        id = claims.get("jti")
        credential = id if isinstance(id, str) and id.isprintable() and len(id) <= MAX_NAME_CHARACTERS else ""
        return Principal(name, tenant, frozenset(roles), Proof.TOKEN, credential)


def _text(claims: dict[str, Any], claim: str) -> str:
    value = claims.get(claim)
    if not isinstance(value, str) or len(value) > MAX_NAME_CHARACTERS or not value.isprintable():
        raise TokenRefused(
            f"the claim '{claim}' of the token is no printable text of at most {MAX_NAME_CHARACTERS} characters"
        )
    return value


def _time(claims: dict[str, Any], claim: str) -> float:
    value = claims[claim]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e12:
        raise TokenRefused(f"the claim '{claim}' of the token is no time")
    return float(value)


def _latest(claims: dict[str, Any], *names: str) -> float:
    """The latest of these times that the token has; 0 for a token with none of them."""
    return max((_time(claims, name) for name in names if name in claims), default=0.0)


class TokenVerifiers:
    """Checks the tokens of several issuers, by the issuer that a token names."""

    def __init__(self, verifiers: Sequence[TokenVerifier]) -> None:
        self._by_issuer: dict[str, list[TokenVerifier]] = {}
        for verifier in verifiers:
            self._by_issuer.setdefault(verifier.trust.issuer, []).append(verifier)

    def verify(self, token: str, now_s: float) -> Pass:
        """Implements `VerifiesTokens.verify`."""
        if len(token) > MAX_TOKEN_CHARACTERS:
            raise TokenRefused(f"the token has {len(token)} characters, and may have {MAX_TOKEN_CHARACTERS}")
        refusal = TokenRefused("the token is malformed, or has an issuer that is not trusted")
        for verifier in self._by_issuer.get(_issuer(token), ()):
            try:
                return verifier.verify(token, now_s)
            except TokenRefused as error:
                refusal = error
        raise refusal


def _issuer(token: str) -> str:
    """The issuer that a token names, unproven; "" for what is no token."""
    try:
        claims = jwt.decode(token, options={"verify_signature": False})
    except (jwt.PyJWTError, ValueError, TypeError, RecursionError):
        return ""
    issuer = claims.get("iss")
    return issuer if isinstance(issuer, str) else ""
