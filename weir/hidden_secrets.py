"""Hides what opens the broker from those who can look at a process, among them the code of models that runs on its host.

What a process was started with stands under /proc for as long as it lives: its environment for all processes of its user,
its command line for all of the host. And what is in `os.environ` can be read by all code that it runs.
Source: Linux's proc(5), `cmdline` and `environ`.
"""

from __future__ import annotations

import os
import re
import sys

from bus.broker_access import PASSWORD_VARIABLE
from weir import NATS_URL_VARIABLE

_IDENTITY = re.compile(r"(?<=://)[^\s,/@]*@")


def hide_secrets() -> None:
    """Takes passwords and tokens of the broker out of this process's command line and environment, as others see them."""
    if _secret_variables() or any(map(_IDENTITY.search, (*sys.orig_argv, *sys.argv))):
        from setproctitle import getproctitle, setproctitle  # it writes over both, in their place

        setproctitle(_IDENTITY.sub("", getproctitle()))


def forget_secrets() -> None:
    """Takes them out of `os.environ`, for what has read its options and starts no roles."""
    for name in _secret_variables():
        del os.environ[name]


def _secret_variables() -> list[str]:
    has_identity = _IDENTITY.search(os.environ.get(NATS_URL_VARIABLE, ""))
    return [
        *([PASSWORD_VARIABLE] if PASSWORD_VARIABLE in os.environ else []),
        *([NATS_URL_VARIABLE] if has_identity else []),
    ]
