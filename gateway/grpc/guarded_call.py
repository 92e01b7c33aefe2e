"""`GuardedCall`: the part of a gRPC call that asks the gate: by its head when it begins, and for each message."""

from __future__ import annotations

from typing import Any

from weir.access.gate import TENANT_HEADER, Asked, Gate, Kept, Shown
from weir.access.policy.actions import Action
from weir.access.principal import NOBODY, Principal, Proof
from weir.gateway.grpc.status import CallError
from weir.gateway.http2.stream import Stream
from weir.schemas.core.errors import WeirError


class GuardedCall:
    """`gate` is None where there is no policy. `principal` makes the call; `refusal` is why the gate refuses it.

    `head` is the meaning of the headers (`weir.gateway.grpc.call.CallMetadata`).
    """

    __slots__ = ("_stream", "gate", "head", "principal", "refusal")

    _stream: Stream
    gate: Gate | None
    head: Any
    principal: Principal
    refusal: CallError | None

    def enter(self, gate: Gate) -> None:
        """Asks the gate, which is on, by the head of the call.

        Whoever proves nothing, and may use its method for no model, is refused before its request arrives.
        """
        self.gate = gate
        handler, kept = self.head.handler, self._stream.connection.kept
        if handler is None:
            return
        if kept is not None and handler.action is Action.INFER and self._holds(gate, kept, kept.model, kept.version):
            self.principal = kept.principal
            return
        try:
            self.principal = gate.principal_of(self._shown())
        except WeirError:
            self.principal = NOBODY  # the gate raises it again below, and records it
        if self.principal.proof is Proof.NONE:
            try:
                self.admit_any()
            except WeirError as error:
                self.refusal = CallError.of(error)

    def admit_any(self) -> None:
        """Asks the gate about a list of models. Raises WeirError for whoever may do this to none."""
        if self.gate is not None:
            asked = Asked("grpc", self.head.method, self.head.handler.action, is_list=True, reads=True)
            self.principal = self.gate.admit(self._shown(), asked)

    def admit(self, model: str, version: str = "", size: int = 0, is_counted: bool = False) -> None:
        """Asks the gate about the model of a message of `size` bytes. What the head shows is checked each time.

        Raises WeirError, as `Gate.admit`. `is_counted`: the message counts already towards the limits of its owner.
        """
        gate, head = self.gate, self.head
        if gate is None:
            return
        action, connection = head.handler.action, self._stream.connection
        kept = connection.kept if action is Action.INFER else None
        is_kept = kept is not None and self._holds(gate, kept, model, version)
        if kept is not None and is_kept and not gate.limits_requests:
            self.principal = kept.principal
            return
        reads = head.reads
        asked = Asked("grpc", head.method, action, model, version, reads=reads, size=size, is_counted=is_counted)
        if kept is not None and is_kept:
            self.principal = kept.principal
            if not is_counted:
                gate.count(kept.principal, asked)
            return
        shown = self._shown()
        self.principal = gate.admit(shown, asked)
        if action is Action.INFER:
            connection.kept = gate.keep(shown, model, version, self.principal)

    def may_see(self, model: str) -> bool:
        """Whether the caller may do what the method does to this model, for lists."""
        return self.gate is None or self.gate.may(self.principal, self.head.handler.action, model)

    def _holds(self, gate: Gate, kept: Kept, model: str, version: str) -> bool:
        fields = self.head.fields
        authorization, tenant = fields.get(b"authorization", b""), fields.get(TENANT_HEADER, b"")
        return gate.holds(kept, authorization, tenant, model, version)

    def _shown(self) -> Shown:
        fields = self.head.fields
        certificate = self._stream.connection.certificate
        return Shown(fields.get(b"authorization", b""), certificate, fields.get(TENANT_HEADER, b""))
