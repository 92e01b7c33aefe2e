"""`model_statistics`: the answer of Triton's statistics extension, the same over HTTP and gRPC."""

from __future__ import annotations

from typing import Any

from calls.catalog import Catalog, check_version
from gateway.statistics import Statistics
from schemas.errors import invalid


async def model_statistics(catalog: Catalog, statistics: Statistics, name: str, version: str) -> dict[str, Any]:
    """`model_stats` of a model's READY versions, or of one of them; name "" asks for all models.

    Raises WeirError (INVALID_ARG) with Triton's texts for what is not served.
    """
    _check_served(catalog, name, version)
    await statistics.refresh()
    _check_served(catalog, name, version)
    totals = statistics.versions()
    wanted = [key for key in sorted(totals) if not name or (key[0] == name and (not version or key[1] == int(version)))]
    return {"model_stats": [totals[key].triton_row() for key in wanted]}


def _check_served(catalog: Catalog, name: str, version: str) -> None:
    check_version(version)
    if not name:
        return
    served = catalog.served_model(name)
    if served is None:
        raise catalog.not_known_yet(name) or invalid(f"requested model '{name}' is not available")
    if version and int(version) not in served.versions:
        raise invalid(f"requested model version is not available for model '{name}'")
