"""The optional packages of Weir by extra: whether they are installed, and what is said where they are missing.

An extra is what `pip install 'weir-serve[NAME]'` adds. Those that are here serve a purpose beside models; a backend reports
its own packages itself.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import NamedTuple


class Extra(NamedTuple):
    """The modules that an extra adds, and what they are for."""

    modules: tuple[str, ...]
    purpose: str


EXTRAS = {
    "access": Extra(("jwt", "cryptography", "yaml"), "--access-policy and --tls-self-signed"),
    "cloud": Extra(("obstore",), "models from S3, Google Cloud Storage and Azure Blob Storage"),
    "nkeys": Extra(("nkeys",), "--nats-nkey and --nats-credentials"),
    "parquet": Extra(("pyarrow",), "Parquet files of batch jobs"),
    "tools": Extra(("plotext", "textual"), "the live table of weir top, the plot of weir perf"),
    "tracing": Extra(("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http"), "traces to a collector"),
}
"""The extras by name."""


def is_installed(extra: str) -> bool:
    """Whether all modules of this extra are installed. Imports none of them."""
    return all(map(_is_there, EXTRAS[extra].modules))


def missing_extra(what: str, extra: str) -> str:
    """The sentence, without its full stop, that says what to install: `what` is what can't be done without it."""
    return f"{what} needs the extra {extra}: pip install 'weir-serve[{extra}]'"


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # the package that it would lie in
        return False
