"""What a client does that publishes on a subject: the action that the policy decides about."""

from __future__ import annotations

from weir.access.policy.actions import Action
from weir.bus.naming.subjects import publisher

_INFERENCE = ("infer", "event", "batch")
"""The first tokens of subjects whose messages are requests to a model, answered at once or later."""

_ABOUT_OWN_REQUESTS = ("flow", "$JS", "$O", "$SRV", "_INBOX")
"""The first tokens of subjects on which a client acknowledges responses, stores the body of a request or reads its result:
nothing is asked of a model there, and nats-server's own permissions are what guards them."""


def action_of_subject(subject: str) -> Action | None:
    """The action of a message on `subject`; None where nothing is asked of a model. Raises KeyError for an unknown one."""
    first = publisher(subject)[1].partition(".")[0]
    if first in _INFERENCE:
        return Action.INFER
    if first in _ABOUT_OWN_REQUESTS:
        return None
    raise KeyError(subject)
