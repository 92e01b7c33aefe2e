"""`limits_of`: the limits that control groups (cgroups) set for this process.

Source: Linux, Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
"""Where control groups are mounted."""

OWN_CGROUPS = Path("/proc/self/cgroup")
"""The control groups of this process."""


def limits_of(
    controller: str,
    version_2: Sequence[str],
    version_1: Sequence[str],
    cgroups: Path = CGROUPS,
    own_cgroups: Path = OWN_CGROUPS,
) -> Iterator[tuple[str, ...]]:
    """The content of these files in each of this process's control groups and their ancestors that has all of them.

    `version_2` and `version_1` are the names of the files of `controller` in either version of control groups.
    """
    try:
        lines = own_cgroups.read_text().splitlines()
    except OSError:
        return  # no Linux, or no /proc
    for line in lines:
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if not controllers:  # version 2
            for mount in (cgroups, cgroups / "unified"):
                yield from _read_up(mount, path, version_2)
        elif controller in controllers.split(","):  # version 1
            yield from _read_up(cgroups / controller, path, version_1)


def _read_up(mount: Path, path: str, names: Sequence[str]) -> Iterator[tuple[str, ...]]:
    # Inside a container the path may name a folder of the host that is not mounted here; the mount itself is then the
    # container's own control group.
    folder = mount / path.lstrip("/")
    while folder.is_relative_to(mount):
        try:
            yield tuple((folder / name).read_text().strip() for name in names)
        except OSError:
            pass
        if folder == mount:
            return
        folder = folder.parent
