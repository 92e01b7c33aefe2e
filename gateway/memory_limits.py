"""How much memory a gateway spends on requests and responses: the limits of its ledgers."""

from __future__ import annotations

from gateway.grpc.codec import MAX_MESSAGE_BYTES
from gateway.settings import GatewaySettings
from runtime.memory_ledger import DEFAULT_LIMIT_BYTES, MemoryLedger
from runtime.memory_limit import available_memory_bytes

LEAST_LIMIT_BYTES = 16 * 1024 * 1024
"""The least default, in whatever small container."""


def request_ledger(settings: GatewaySettings) -> MemoryLedger:
    """The ledger of what clients have sent and have not read yet.

    One request may be as large as `--http-max-input-size`, or over gRPC as half of the memory there is.
    """
    available_bytes = available_memory_bytes()
    default_bytes = max(LEAST_LIMIT_BYTES, min(DEFAULT_LIMIT_BYTES, available_bytes // 4))
    largest_bytes = max(settings.http_max_input_size, min(MAX_MESSAGE_BYTES, available_bytes // 2))
    return MemoryLedger(settings.gateway_memory_byte_size or default_bytes, largest_bytes)


def arriving_slots_ledger(payload_bytes: int) -> MemoryLedger:
    """The ledger of payload slots in which bodies are still arriving: half of the shared memory for payloads."""
    return MemoryLedger(payload_bytes // 2, payload_bytes // 2)
