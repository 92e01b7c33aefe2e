"""The subjects of answers that are to be posted to URLs, and the stream that keeps them until they are.

Such a subject is the `Weir-Reply-To` of a request, so unlike other subjects of ours it is not reserved: whoever may publish
requests may also name a URL, which is looked at when the answer is posted.
"""

from __future__ import annotations

import base64

from bus.subjects import token

STREAM = "CALLBACKS"
SUBJECTS = "callback.>"
CONSUMER = "callbacks"


def callback(id: str, url: str) -> str:
    """The `Weir-Reply-To` of a request whose terminal record is to be posted to `url`."""
    return f"callback.{token(id)}.{base64.urlsafe_b64encode(url.encode()).decode()}"


def callback_url(subject: str) -> str:
    """The URL of such a subject. Raises ValueError where there is none."""
    tokens = subject.split(".")
    if len(tokens) != 3:
        raise ValueError("not the subject of a callback")
    return base64.b64decode(tokens[2].encode(), b"-_", validate=True).decode()
