"""`Principal`: who sends a request, as a key, a token, a certificate or a user of the broker has proved."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class Proof(Enum):
    """How a principal has proved who it is."""

    NONE = "none"
    KEY = "key"
    TOKEN = "token"  # noqa: S105 - a kind of proof
    CERTIFICATE = "certificate"
    BROKER_USER = "broker user"


class Principal(NamedTuple):
    """Who sends a request. `name` and `credential` may be logged; neither lets anybody in.

    `tenant` shares queues and stored results with all principals of the same name, "" with nobody. `credential` names the
    key or token that was shown. Two principals are equal if the policy treats them alike and they own the same things.
    """

    name: str
    tenant: str
    roles: frozenset[str]
    proof: Proof
    credential: str = ""

    @property
    def owner(self) -> str:
        """Whose jobs, results and sequences its requests make and see: its tenant's, else its own; "" for nobody."""
        if self.tenant:
            return f"tenant {self.tenant}"
        return f"{self.proof._value_} {self.name}" if self.name else ""

    @property
    def shown_owner(self) -> str:
        """The same for people."""
        return self.tenant or self.name or "anonymous"


NOBODY = Principal("", "", frozenset(), Proof.NONE)
"""Who has shown nothing: it has the role `anonymous` alone."""
