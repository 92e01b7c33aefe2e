"""`BatchJobs`: what the routes of jobs ask of whoever runs offline batch jobs.

`/v2/jobs/<id>` tells of both kinds of jobs: a request that is answered later, and an offline job over many items, whose id
begins with `batch-`.
"""

from __future__ import annotations

from typing import Any, Protocol

BATCH_PREFIX = "batch-"
"""How the ids of offline jobs begin."""

Document = dict[str, Any]
"""What a client is told, in JSON."""


class BatchJobs(Protocol):
    """Offline jobs. Each method raises WeirError: with HTTP status 404 for a job that there isn't, 400 for a bad spec."""

    async def submit(self, spec: Any) -> Document:
        """Begins the job that `spec`, a JSON document from outside, describes; tells of it, with its `id`."""

    async def list(self) -> list[Document]:
        """All jobs, the newest first."""

    async def status(self, id: str) -> Document:
        """How far a job is."""

    async def result(self, id: str) -> Document:
        """Where its output lies."""

    async def cancel(self, id: str) -> Document:
        """Ends a job before its time."""

    async def delete(self, id: str) -> None:
        """Cancels a job that is not done, and forgets it; one that isn't there is no error."""

    async def pause(self, id: str) -> Document:
        """Submits no more of its items until it is resumed."""

    async def resume(self, id: str) -> Document:
        """Goes on with a job that was paused."""

    async def retry(self, id: str) -> Document:
        """Does those items again that failed."""
