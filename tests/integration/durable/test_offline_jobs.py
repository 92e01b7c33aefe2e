"""Offline jobs through a whole server: after any kill each item is in the output once, in order."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.interrupts import accept_interrupts
from tests.support.models.zoo import write_identity, write_python_model, write_slow
from tests.support.servers.weir_server import Server
from tests.support.waiting import wait_until
from weir.commands.app import main


class JobServer:
    """A server, its batch root, and what its jobs are asked."""

    def __init__(self, server: Server, root: Path) -> None:
        self.server = server
        self.root = root
        self._made = 0

    def ask(self, method: str, path: str, document: Any = None) -> tuple[int, Any]:
        data = None if document is None else json.dumps(document).encode()
        request = urllib.request.Request(f"http://{self.server.http_place}{path}", data, method=method)
        try:
            with urllib.request.urlopen(request, timeout=15) as answer:
                return answer.status, json.loads(answer.read() or b"null")
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.loads(error.read())

    def lines(self, rows: list[Any]) -> Path:
        """A file of JSON Lines."""
        self._made += 1
        path = self.root / f"in{self._made}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    def output(self) -> Path:
        """A folder that is not there yet."""
        self._made += 1
        return self.root / f"out{self._made}"

    def submit(self, model: str, source: Path, output: Path, **more: Any) -> str:
        status, told = self.ask(
            "POST", "/v2/jobs", {"model": model, "input": str(source), "output": str(output), **more}
        )
        assert status == 202, told
        return str(told["id"])

    def told(self, id: str) -> dict[str, Any]:
        """The job; waits for a server that is away."""

        def try_it() -> Any:
            try:
                asked = self.ask("GET", f"/v2/jobs/{id}")
            except OSError:
                return None
            return asked if asked[0] != 503 else None

        status, told = wait_until(try_it, 30)
        assert status == 200, told
        return dict(told)

    def wait_state(self, id: str, *states: str, timeout_s: float = 40.0) -> dict[str, Any]:
        return dict(wait_until(lambda: told if (told := self.told(id))["state"] in states else None, timeout_s))

    def wait_done(self, id: str, count: int) -> None:
        wait_until(lambda: self.told(id)["done"] >= count, 40)

    def weir(self, *arguments: str) -> int:
        """The exit status of `weir batch`, in this process."""
        with pytest.raises(SystemExit) as ended:
            main(["batch", *arguments, f"--url={self.server.http_place}"])
        return ended.value.code or 0  # type: ignore[return-value]


def results(output: Path) -> list[dict[str, Any]]:
    """All lines of the shards, in the order of their names."""
    return [json.loads(line) for path in sorted(output.glob("part-*")) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[JobServer]:
    folder = tmp_path_factory.mktemp("jobs")
    (folder / "models").mkdir()
    write_identity(folder / "models", "fast", "INT64", "dynamic_batching { }")
    write_slow(folder / "models")
    write_python_model(
        folder / "models", "gate_file", "gate_file", {"PATH": ("BYTES", [1])}, {"FOUND": ("BYTES", [1])}, 4
    )
    (folder / "root").mkdir()
    server = Server(folder, folder / "models", f"--batch-root={folder / 'root'}")
    try:
        yield JobServer(server, folder / "root")
        assert server.in_flight() == 0
        assert server.stop() == 0
    finally:
        server.close()


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("count", "moments"),
    [(1200, (200, 200, 200)), pytest.param(2000, (200, 600, 1010), marks=pytest.mark.slow)],
    ids=["together", "one after the other"],
)
def test_each_item_is_once_in_the_output_whatever_dies(
    jobs: JobServer, count: int, moments: tuple[int, int, int]
) -> None:
    source = jobs.lines([{"VALUE": [number], "DELAY_MS": [5.0]} for number in range(count)])
    output = jobs.output()
    id = jobs.submit("slow", source, output)
    for role, moment in zip(("worker", "scheduler", "durable"), moments, strict=True):
        if role == "worker" or len(set(moments)) > 1:
            jobs.wait_done(id, moment)
        jobs.server.kill(role)
    told = jobs.wait_state(id, "succeeded", "failed", "cancelled", timeout_s=60)
    assert (told["state"], told["total"], told["done"], told["failed"]) == ("succeeded", count, count, 0), told
    rows = results(output)
    assert [row["item"] for row in rows] == list(range(count))
    assert [row["outputs"]["VALUE_OUT"] for row in rows] == [[number] for number in range(count)]
    assert json.loads((output / "summary.json").read_text())["succeeded"] == count
    jobs.server.wait_ready()


def test_a_job_is_paused_goes_on_and_is_cancelled(jobs: JobServer) -> None:
    source = jobs.lines([{"VALUE": [number], "DELAY_MS": [20.0]} for number in range(4000)])
    output = jobs.output()
    id = jobs.submit("slow", source, output)
    jobs.wait_done(id, 20)
    assert jobs.ask("POST", f"/v2/jobs/{id}/pause")[0] == 200
    paused = jobs.wait_state(id, "paused")
    done = len(results(output))
    assert 20 <= done == paused["done"] < 4000
    assert jobs.ask("POST", f"/v2/jobs/{id}/resume")[1]["state"] in ("queued", "running")
    jobs.wait_done(id, done + 20)
    assert jobs.ask("POST", f"/v2/jobs/{id}/cancel")[1]["state"] in ("cancelling", "cancelled")
    cancelled = jobs.wait_state(id, "cancelled")
    rows = results(output)
    assert [row["item"] for row in rows] == list(range(len(rows)))
    assert done <= len(rows) == cancelled["done"] < 4000
    status, refusal = jobs.ask("POST", f"/v2/jobs/{id}/resume")
    assert (status, refusal["error"]) == (400, f"job '{id}' has ended: it is cancelled")
    assert jobs.ask("DELETE", f"/v2/jobs/{id}")[0] == 204
    assert jobs.ask("GET", f"/v2/jobs/{id}")[0] == 404
    assert id not in [job["id"] for job in jobs.ask("GET", "/v2/jobs")[1]["jobs"]]


def test_failures_are_tried_again_in_their_places(jobs: JobServer, capsys: pytest.CaptureFixture[str]) -> None:
    gate = jobs.root / "gate"
    source = jobs.lines([{"PATH": [str(jobs.root if number % 3 else gate)]} for number in range(60)])
    output = jobs.output()
    assert jobs.weir("submit", "--model=gate_file", f"--input={source}", f"--output={output}") == 3
    assert "60 items, 20 failed" in capsys.readouterr().err
    (job,) = [job for job in jobs.ask("GET", "/v2/jobs")[1]["jobs"] if job["output"] == str(output)]
    assert [row["item"] for row in results(output) if row.get("error") == "there is no such file"] == list(
        range(0, 60, 3)
    )
    gate.touch()
    assert jobs.weir("retry", job["id"]) == 0
    rows = results(output)
    assert [row["item"] for row in rows] == list(range(60))
    assert not [row for row in rows if "error" in row]
    assert jobs.told(job["id"])["failed"] == 0


def test_a_job_stops_after_too_many_failures(jobs: JobServer) -> None:
    source = jobs.lines([{"PATH": ["nowhere"]} for _ in range(500)])
    id = jobs.submit("gate_file", source, jobs.output(), max_failures=10)
    told = jobs.wait_state(id, "failed", "succeeded")
    assert told["state"] == "failed"
    assert "items failed, and max_failures is 10; the first was " in told["error"]


def test_a_job_whose_items_all_fail_has_failed(jobs: JobServer) -> None:
    source, output = jobs.lines([{"PATH": ["nowhere"], "id": f"no-{number}"} for number in range(7)]), jobs.output()
    told = jobs.wait_state(jobs.submit("gate_file", source, output), "failed", "succeeded")
    assert (told["state"], told["done"], told["failed"]) == ("failed", 7, 7)
    assert told["error"].startswith("all 7 items failed; the first was no-0: ")
    assert [row["source"] for row in results(output)] == [f"no-{number}" for number in range(7)]
    # Who says how many may fail means it.
    told = jobs.wait_state(jobs.submit("gate_file", source, jobs.output(), max_failures=7), "failed", "succeeded")
    assert (told["state"], told["failed"]) == ("succeeded", 7)
    assert told["error"].startswith("all 7 items failed; the first was no-0: ")
    # Without an end in sight it ends early.
    source = jobs.lines([{"PATH": ["nowhere"]} for _ in range(200_000)])
    told = jobs.wait_state(jobs.submit("gate_file", source, jobs.output()), "failed", "succeeded")
    assert told["state"] == "failed"
    assert "items failed, and no item succeeded; the first was " in told["error"]
    assert told["done"] < 200_000


def test_jobs_are_listed_by_state_and_model(jobs: JobServer) -> None:
    id = jobs.submit("fast", jobs.lines([{"IN": [1]}]), jobs.output())
    jobs.wait_state(id, "succeeded")
    for filters, is_listed in (
        ("state=succeeded&model=fast", True), ("model=slow", False), ("state=failed", False), ("", True),
    ):  # fmt: skip
        status, told = jobs.ask("GET", f"/v2/jobs?{filters}")
        assert (status, id in [job["id"] for job in told["jobs"]]) == (200, is_listed)
    status, told = jobs.ask("GET", "/v2/jobs?status=failed")
    assert (status, told["error"]) == (400, "unknown filter 'status' of jobs; expected one of model, state")
    status, told = jobs.ask("GET", "/v2/jobs?state=done")
    assert status == 400
    assert "expected one of queued, running, " in told["error"]


def test_the_command_line_tells_of_jobs(
    jobs: JobServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = jobs.lines([{"IN": [number]} for number in range(300)])
    output = jobs.output()
    monkeypatch.chdir(jobs.root)
    assert jobs.weir("submit", "-m", "fast", "-o", output.name, "--no-wait", "-i", source.name) == 0
    id = capsys.readouterr().out.strip()
    assert jobs.weir("watch", id) == 0
    assert f"job {id} succeeded: 300 items" in capsys.readouterr().err
    assert len(results(output)) == 300
    assert jobs.weir("list") == 0
    assert f"{id}  fast" in capsys.readouterr().out
    assert jobs.weir("status", id.removeprefix("batch-")[:10]) == 0
    assert "state    succeeded" in capsys.readouterr().out
    assert jobs.weir("status", id, "--json") == 0
    assert json.loads(capsys.readouterr().out)["done"] == 300
    assert jobs.weir("cancel", id) == 0
    assert capsys.readouterr().out == f"{id}: succeeded\n"
    assert jobs.weir("status", "batch-0123456789abcdef") == 1
    assert capsys.readouterr().err == "error: there is no job 'batch-0123456789abcdef'\n"


def test_items_may_be_sent_along(jobs: JobServer) -> None:
    body = "".join(f'{{"IN": [{number}]}}\n' for number in range(500)).encode()
    url = f"http://{jobs.server.http_place}/v2/jobs"
    kind = {"Content-Type": "application/jsonl"}
    with urllib.request.urlopen(
        urllib.request.Request(f"{url}?model=fast&priority=0", body, kind), timeout=15
    ) as answer:
        assert answer.status == 202
        id = json.loads(answer.read())["id"]
        assert answer.headers["Location"] == f"/v2/jobs/{id}"
    told = jobs.wait_state(id, "succeeded")
    with urllib.request.urlopen(f"{url}/{id}/result", timeout=15) as answer:
        assert answer.headers["Content-Type"] == "application/jsonl"
        rows = [json.loads(line) for line in answer.read().splitlines()]
    assert [row["outputs"]["OUT"] for row in rows] == [[number] for number in range(500)]
    assert jobs.ask("DELETE", f"/v2/jobs/{id}")[0] == 204
    assert not Path(told["output"]).parent.exists()
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(urllib.request.Request(f"{url}?model=fast&priority=x", body, kind), timeout=15)
    with refused.value as answer:
        assert json.loads(answer.read())["error"] == "field 'priority' of a job must be an integer"


def test_who_watches_may_leave_and_come_back(jobs: JobServer) -> None:
    source = jobs.lines([{"VALUE": [number], "DELAY_MS": [20.0]} for number in range(200)])
    command = [sys.executable, "-P", "-m", "weir", "batch", "submit", "--model=slow", f"--input={source}"]
    watching = subprocess.Popen(
        [*command, f"--output={jobs.output()}", f"--url={jobs.server.http_place}"],
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=accept_interrupts,
    )
    assert watching.stderr is not None
    id = watching.stderr.readline().split()[-1]
    watching.stderr.readline()
    watching.send_signal(signal.SIGINT)
    said = watching.stderr.read()
    assert watching.wait(20) == 130
    assert f"the job continues; watch it again with: weir batch watch {id} --url {jobs.server.http_place}" in said
    assert jobs.wait_state(id, "succeeded")["done"] == 200


def is_parquet_reader(process: psutil.Process) -> bool:
    try:
        return any("parquet_process" in text for text in process.cmdline())
    except psutil.Error:  # it ends just now
        return False


def test_a_file_that_expands_fails_alone_and_its_reader_ends_with_the_job(jobs: JobServer) -> None:
    source, output = jobs.root / "large.parquet", jobs.output()
    schema = pa.schema({"IN": pa.list_(pa.int64())})
    with pq.ParquetWriter(source, schema) as writer:
        for row in (np.zeros((8 << 20) + 1, np.int64), [7]):
            writer.write_table(pa.table({"IN": pa.array([row], schema.field("IN").type)}))
    assert source.stat().st_size < 100_000
    told = jobs.wait_state(jobs.submit("fast", source, output, output_format="jsonl"), "failed", "succeeded")
    assert (told["state"], told["done"], told["failed"]) == ("succeeded", 2, 1), told
    why = "'large.parquet': row group 0 has 67108872 bytes of values in a row, and an item may have 67108864"
    assert told["error"] == f"1 items failed; the first was large.parquet[0]: {why}"
    failure, success = results(output)
    assert failure["error"].endswith(why)
    assert success["outputs"]["OUT"] == [7]
    durable = psutil.Process(jobs.server.pids()["durable"])
    wait_until(lambda: not any(is_parquet_reader(child) for child in durable.children()))


def test_results_repeat_the_columns_that_a_job_chooses(jobs: JobServer, capsys: pytest.CaptureFixture[str]) -> None:
    source, output = jobs.root / "labelled.parquet", jobs.output()
    pq.write_table(pa.table({"id": ["a", "b"], "IN": pa.array([1, 2], pa.int64()), "note": ["x", "y"]}), source)
    refused = jobs.weir("submit", "-m", "fast", "-i", str(source), "-o", str(output))
    assert refused == 1
    said = capsys.readouterr().err
    assert "column 'id' is not an input of the model; its inputs are ['IN']" in said
    assert "--columns=IN,id,note" in said
    assert "weir batch retry" not in said, "that would fail as well"
    output = jobs.output()
    assert jobs.weir("submit", "-m", "fast", "-i", str(source), "-o", str(output), "--columns=IN,id") == 0
    (shard,) = output.glob("part-*")
    rows = pq.read_table(shard).select(["id", "OUT", "error"]).to_pylist()
    assert rows == [{"id": "a", "OUT": [1], "error": None}, {"id": "b", "OUT": [2], "error": None}]


def test_what_is_not_allowed_is_refused(jobs: JobServer, tmp_path: Path) -> None:
    source = jobs.lines([{"IN": [1]}])
    good = {"model": "fast", "input": str(source), "output": str(jobs.output())}
    outside = tmp_path / "in.jsonl"
    outside.touch()
    (jobs.root / "escape").symlink_to(tmp_path)
    (jobs.root / "full").mkdir()
    (jobs.root / "full" / "file").touch()
    below = "is not below a folder that the server was started with as --batch-root"
    for changed, status, why in (
        ({"input": str(outside)}, 400, f"input '{outside}' {below}"),
        ({"input": str(jobs.root / "escape" / "in.jsonl")}, 400, below),
        ({"input": str(jobs.root / ".." / "models")}, 400, below),
        ({"input": str(jobs.root / "nowhere.jsonl")}, 400, "does not exist"),
        ({"input": str(jobs.root / "no*.jsonl")}, 400, "no input matches"),
        ({"input": "in.jsonl"}, 400, "is not an absolute path"),
        ({"output": str(tmp_path / "out")}, 400, below),
        ({"output": str(jobs.root / "escape" / "out")}, 400, below),
        ({"output": str(jobs.root)}, 400, "name a folder below it"),
        ({"output": str(jobs.root / "full")}, 400, "is not empty: files are not overwritten"),
        ({"output": str(source)}, 400, "is not a folder"),
        ({"model": "nobody"}, 404, "Request for unknown model: 'nobody' is not found"),
        ({"version": "7"}, 404, "unknown"),
        ({"input_format": "xml"}, 400, "unknown input format 'xml'"),
        ({"output_format": "xml"}, 400, "unknown output format 'xml'"),
        ({"what": 1}, 400, "unknown field 'what' of a job"),
        ({"priority": "high"}, 400, "field 'priority' of a job must be an integer"),
        ({"model": ""}, 400, "a job needs field 'model'"),
    ):
        told = jobs.ask("POST", "/v2/jobs", {**good, **changed})
        assert told[0] == status, (changed, told)
        assert why in told[1]["error"], (changed, told)
    assert jobs.ask("GET", "/v2/jobs/batch-1")[0] == 404
    assert jobs.ask("POST", "/v2/jobs", [1])[0] == 400


def test_an_output_folder_is_one_job_s(jobs: JobServer) -> None:
    source, output = jobs.lines([{"IN": [1]}]), jobs.output()
    id = jobs.submit("fast", source, output)
    jobs.wait_state(id, "succeeded")
    status, told = jobs.ask("POST", "/v2/jobs", {"model": "fast", "input": str(source), "output": str(output)})
    assert status == 400
    assert f"belongs to job {id}: files are not overwritten" in told["error"]


@pytest.mark.slow
def test_a_job_continues_after_its_process_was_stopped(jobs: JobServer) -> None:
    done_before = jobs.submit("fast", jobs.lines([{"IN": [1]}]), jobs.output())
    jobs.wait_state(done_before, "succeeded")
    source = jobs.lines([{"VALUE": [number], "DELAY_MS": [20.0]} for number in range(1000)])
    output = jobs.output()
    id = jobs.submit("slow", source, output)
    jobs.wait_done(id, 10)
    os.kill(jobs.server.pids()["durable"], signal.SIGTERM)
    began_s = time.monotonic()
    assert jobs.wait_state(id, "succeeded")["done"] == 1000
    print(f"done {time.monotonic() - began_s:.1f} s after its process was stopped")
    assert [row["item"] for row in results(output)] == list(range(1000))
    log = jobs.server.log()
    assert log.count(f"job {done_before}: started in this process") == 1, "what has ended ran again"
    assert len(list(output.glob("part-*"))) > 1, "what was done when it stopped was not kept"
    jobs.server.wait_ready()
