"""The part of `cuda.bindings.driver` that is used beside the runtime. See the README of `tests/fakes`."""


class cuuint64_t(int):
    """A number of 64 bits."""
