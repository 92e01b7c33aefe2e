"""A backend of Weir's form: returns its input times two."""

from weir.backend import ArrayBackend, ArrayFunction, ModelVersion


class Backend(ArrayBackend):
    """One object serves all versions of the model. docs/backends.md describes what else it can implement."""

    def open(self, model: ModelVersion) -> ArrayFunction:
        """The function of this version, whose folder is `model.directory`. The first dimension of arrays is the batch."""
        return lambda inputs: {"OUTPUT": inputs["INPUT"] * 2}
