"""`InferenceTrace` of `triton_python_backend_utils`."""

from __future__ import annotations


class InferenceTrace:
    """The trace that a request belongs to, if it is traced. `context` is JSON, "" where there is none."""

    __slots__ = ("_context",)

    def __init__(self, context: str = "") -> None:
        self._context = context

    def get_context(self) -> str | None:
        """The place in the trace, for spans of the model's own: JSON with W3C's `traceparent`, and `tracestate` if any.

        None unless traces are exported by OpenTelemetry and this request is traced.
        """
        return self._context or None
