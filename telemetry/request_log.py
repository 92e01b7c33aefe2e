"""One line for each request in each role, where details are logged: so a request is followed from its door on.

`<gateway>/<key>` names a request on the bus, and all lines have it; the client's own id is known at the door and in the
worker. JSON entries have both as fields, and the model.
"""

from __future__ import annotations

import logging


def logs_requests(logger: logging.Logger) -> bool:
    """Whether there is to be a line for each request."""
    return logger.isEnabledFor(logging.DEBUG)


def log_request(
    logger: logging.Logger, step: str, model: str, gateway: str, key: int, request_id: str | None = None
) -> None:
    """Tells that the request `gateway`/`key` for `model` has come to `step`; `request_id` is None where it is not known."""
    name = f"{gateway}/{key}"
    fields = {"key": name, "model": model}
    prefix = ""
    if request_id is not None:
        fields["request_id"] = request_id
        prefix = f"[request id: {request_id or '<id_unknown>'}] "
    logger.debug("%s%s, model '%s': %s", prefix, name, model, step, extra=fields, stacklevel=2)
