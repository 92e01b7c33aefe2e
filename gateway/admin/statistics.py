"""Statistics of Triton's API."""

from __future__ import annotations

from typing import Any

from weir.calls.catalog import Catalog, check_version
from weir.cluster.counters.collection import Statistics
from weir.schemas.core.errors import invalid


async def model_statistics(catalog: Catalog, statistics: Statistics, name: str, version: str) -> dict[str, Any]:
    """`model_stats` of the READY versions of model `name` ("": of all models), or of `version` alone.

    Raises WeirError (INVALID_ARG), with Triton's texts, for a model or version that is not served.
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
        raise catalog.warmup_error(name) or invalid(f"requested model '{name}' is not available")
    if version and int(version) not in served.versions:
        raise invalid(f"requested model version is not available for model '{name}'")
