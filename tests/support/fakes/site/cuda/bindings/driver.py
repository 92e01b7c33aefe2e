"""The part of `cuda.bindings.driver` that Weir uses; `tests/support/fakes/README.md` describes the model."""


class cuuint64_t(int):
    """A number of 64 bits."""
