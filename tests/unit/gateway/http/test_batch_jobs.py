"""The routes of batch jobs, over a service that records what it is called with."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
from starlette.exceptions import HTTPException

from tests.support.access.doors import application
from weir.gateway.http.batch_jobs import batch_job_routes
from weir.http_server.responses import error_response, weir_error_response
from weir.jobs.api.service import Asker
from weir.schemas.core.errors import WeirError
from weir.schemas.core.request_limits import RequestLimits


class Jobs:
    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.lines: list[bytes] | None = None

    async def submit(self, document: Any, _asker: Asker) -> dict[str, Any]:
        self.calls.append(("submit", document))
        return {"id": "batch-1"}

    async def submit_items(self, body: bytes, fields: dict[str, Any], _asker: Asker) -> dict[str, Any]:
        self.calls.append(("submit_items", body, fields))
        return {"id": "batch-2"}

    async def list(self, _asker: Asker) -> list[dict[str, Any]]:
        return [
            {"id": "batch-1", "model": "a", "state": "running"},
            {"id": "batch-2", "model": "b", "state": "running"},
        ]

    async def result(self, id: str, _asker: Asker) -> dict[str, Any]:
        return {"id": id, "files": []}

    async def result_lines(self, _id: str, _asker: Asker) -> Any:
        lines = self.lines
        if lines is None:
            return None

        async def chunks() -> Any:
            for line in lines:
                yield line

        return chunks()

    async def delete(self, id: str, _asker: Asker) -> None:
        self.calls.append(("delete", id))

    def __getattr__(self, name: str) -> Any:
        async def operation(id: str, _asker: Asker) -> dict[str, Any]:
            self.calls.append((name, id))
            return {"id": id, "state": name}

        return operation


class Client:
    """Sends requests to an application."""

    def __init__(self, app: Any) -> None:
        self._app = app

    def request(self, method: str, path: str, **named: Any) -> httpx.Response:
        async def send() -> httpx.Response:
            async with httpx.AsyncClient(transport=httpx.ASGITransport(self._app), base_url="http://x") as client:
                return await client.request(method, path, **named)

        return asyncio.run(send())

    def get(self, path: str) -> httpx.Response:
        return self.request("GET", path)

    def post(self, path: str, **named: Any) -> httpx.Response:
        return self.request("POST", path, **named)


def client(jobs: Jobs | None) -> Client:
    context = SimpleNamespace(batch_jobs=jobs, limits=RequestLimits(input_size=1000))

    async def on_weir_error(_request: Any, error: Exception) -> Any:
        return weir_error_response(cast(WeirError, error))

    async def on_http_error(_request: Any, error: Exception) -> Any:
        return error_response(cast(HTTPException, error).status_code, "")

    handlers: Any = {WeirError: on_weir_error, HTTPException: on_http_error}
    return Client(application(batch_job_routes(cast(Any, context)), exception_handlers=handlers))


def test_without_a_service_there_are_no_routes() -> None:
    assert client(None).get("/v2/jobs").status_code == 404


def test_a_job_is_submitted_as_json() -> None:
    jobs = Jobs()
    response = client(jobs).post("/v2/jobs", json={"model": "a"})
    assert (response.status_code, response.headers["location"]) == (202, "/v2/jobs/batch-1")
    assert jobs.calls == [("submit", {"model": "a"})]


def test_items_in_the_body_come_with_fields_in_the_query() -> None:
    jobs = Jobs()
    response = client(jobs).post(
        "/v2/jobs?model=a&window=8", content=b'{"x":1}\n', headers={"Content-Type": "application/jsonl; charset=utf-8"}
    )
    assert (response.status_code, response.json()) == (202, {"id": "batch-2"})
    assert jobs.calls[0][:2] == ("submit_items", b'{"x":1}\n')
    assert jobs.calls[0][2]["model"] == "a"


def test_items_beyond_the_limit_are_rejected() -> None:
    response = client(Jobs()).post("/v2/jobs", content=b"x" * 1001, headers={"Content-Type": "application/jsonl"})
    assert response.status_code == 400
    assert response.json() == {"error": "the body of a job exceeds 1000 bytes; put larger input into files"}


@pytest.mark.parametrize(
    ("query", "ids"), [("", ["batch-1", "batch-2"]), ("?model=b", ["batch-2"]), ("?model=b&state=done", None)]
)
def test_jobs_are_listed_by_filters(query: str, ids: list[str] | None) -> None:
    response = client(Jobs()).get(f"/v2/jobs{query}")
    if ids is None:
        assert response.status_code == 400
        assert "expected one of" in response.json()["error"]
    else:
        assert [job["id"] for job in response.json()["jobs"]] == ids


def test_an_unknown_filter_is_rejected() -> None:
    response = client(Jobs()).get("/v2/jobs?color=red")
    assert response.json() == {"error": "unknown filter 'color' of jobs; expected one of model, state"}


@pytest.mark.parametrize("verb", ["cancel", "pause", "resume", "retry"])
def test_operations_name_their_job(verb: str) -> None:
    jobs = Jobs()
    assert client(jobs).post(f"/v2/jobs/batch-7/{verb}").json() == {"id": "batch-7", "state": verb}
    assert jobs.calls == [(verb, "batch-7")]


def test_a_result_is_a_document_or_lines() -> None:
    jobs = Jobs()
    assert client(jobs).get("/v2/jobs/batch-7/result").json() == {"id": "batch-7", "files": []}
    jobs.lines = [b"1\n", b"2\n"]
    response = client(jobs).get("/v2/jobs/batch-7/result")
    assert (response.content, response.headers["content-type"]) == (b"1\n2\n", "application/jsonl")


def test_a_job_is_deleted() -> None:
    jobs = Jobs()
    assert client(jobs).request("DELETE", "/v2/jobs/batch-7").status_code == 204
    assert jobs.calls == [("delete", "batch-7")]
