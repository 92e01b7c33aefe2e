"""`RegionDirectory`: finds the regions that gateways of this host have registered."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from weir.bus.naming import subjects
from weir.bus.naming.identity import host
from weir.calls.regions import RegionDirectory
from weir.schemas.core.errors import WeirError
from weir.schemas.kserve.regions import SYSTEM, Region


def directory(shares_memory: bool = True) -> RegionDirectory:
    registry: Any = SimpleNamespace(model_shares_memory=lambda model: shares_memory)
    return RegionDirectory(cast(Any, SimpleNamespace(jetstream=None)), registry, True)


def test_a_registered_region_is_found_until_it_is_unregistered() -> None:
    regions, region = directory(), Region(SYSTEM, "r", 64, "/key", 0, "key", 1)
    key = subjects.region_key(host(), "r")
    regions._view._take(key, region.pack())
    assert regions.find("r", 8, 16) == region.place(8, 16)
    regions._view._take(key, b"")
    with pytest.raises(WeirError, match="Unable to find shared memory region: 'r'"):
        regions.find("r", 8, 16)


def test_a_model_on_another_host_takes_no_regions() -> None:
    directory().hold("m", ["r"]).free()
    with pytest.raises(WeirError, match="not served on this host alone"):
        directory(shares_memory=False).hold("m", ["r"])
