"""What a model is known by among the roles: its name, or with its namespace before it where the name is not enough.

Source: `--model-namespacing`. A model's namespace is the repository it lies in, as its path was given. A name that lies in
one repository alone stays what it is; one that lies in several becomes `<namespace>::<name>`, as Triton's log has it.
"""

from __future__ import annotations

_SEPARATOR = ":" * 2  # not an address to listen at


def model_identity(name: str, namespace: str = "") -> str:
    """The identity of the model `name` that is told from others of its name by `namespace`; "" where there are none."""
    return f"{namespace}{_SEPARATOR}{name}" if namespace else name


def plain_name(identity: str) -> str:
    """The model's own name, by which clients ask for it: without the namespace."""
    return identity.rpartition(_SEPARATOR)[2]


def namespace_of(identity: str) -> str:
    """The namespace that is part of an identity, "" for a name that needs none."""
    return identity.rpartition(_SEPARATOR)[0]
