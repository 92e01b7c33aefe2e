"""`weir infer` against a running server: what it sends, what it prints, and its exit statuses."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.models.zoo import write_add_sub, write_identity, write_streamer
from tests.support.servers.forked_commands import COMMAND
from tests.support.servers.weir_server import Server, clean_environment

PLAN = json.dumps({"responses": 3})


class Asked:
    """A server, and `weir infer` against it."""

    def __init__(self, server: Server, folder: Path) -> None:
        self.server = server
        self.folder = folder

    def infer(self, *words: str, text: str = "", url: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*COMMAND, "infer", *words, f"--url={url or self.server.http_place}"],
            cwd=self.folder,
            env=clean_environment(self.folder),
            input=text,
            capture_output=True,
            text=True,
        )

    def answers(self, *words: str, text: str = "") -> list[dict[str, object]]:
        """The responses as JSON."""
        done = self.infer(*words, "--json", text=text)
        assert (done.returncode, done.stderr) == (0, "")
        return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Asked]:
    folder = tmp_path_factory.mktemp("infer")
    models = folder / "models"
    write_add_sub(models)
    write_identity(models, "text", "BYTES", "dynamic_batching { }")
    write_identity(models, "halves", "FP16", "dynamic_batching { }")
    write_streamer(models, "streamer", "")
    with Server(folder, models) as server:
        (client := folder / "client").mkdir()
        yield Asked(server, client)
        assert server.in_flight() == 0


def test_a_sample_is_sent_and_the_response_printed(asked: Asked) -> None:
    done = asked.infer("add_sub")
    assert (done.returncode, done.stderr) == (0, "")
    title, first, second, response, total, difference = done.stdout.splitlines()
    assert title == "request"
    assert first.split()[:4] == ["A", "INT32", "[1,", "4]"]
    assert second.split()[:4] == ["B", "INT32", "[1,", "4]"]
    assert response.startswith("response of add_sub, version 1, after ")
    a, b, s, d = (json.loads(row.partition("]  ")[2])[0] for row in (first, second, total, difference))
    assert s == [one + other for one, other in zip(a, b, strict=True)]
    assert d == [one - other for one, other in zip(a, b, strict=True)]


def test_given_inputs_are_sent_and_the_others_have_as_many_rows(asked: Asked) -> None:
    (answer,) = asked.answers(
        "add_sub", "--input", "A=[[1,2,3,4],[5,6,7,8]]", "--input=B=[0,0,0,0,0,0,0,1]", "--version=1"
    )
    assert answer["model_version"] == "1"
    assert answer["outputs"][0]["data"] == [1, 2, 3, 4, 5, 6, 7, 9]
    (answer,) = asked.answers("add_sub", "--input", "A=[[1,2,3,4],[5,6,7,8]]")
    assert answer["outputs"][0]["shape"] == [2, 4]


def test_text_is_sent_as_it_is(asked: Asked) -> None:
    done = asked.infer("text", "--input", "IN=Grüß Gott")
    assert done.stdout.count('["Grüß Gott"]') == 2


def test_tensors_that_json_does_not_carry(asked: Asked) -> None:
    (answer,) = asked.answers("halves")
    (output,) = answer["outputs"]
    assert (output["datatype"], output["shape"]) == ("FP16", [1, 8])
    assert all(0 <= value <= 1 for value in output["data"])


@pytest.mark.parametrize("source", ["file", "stdin"])
def test_a_request_from_a_file_or_from_stdin(source: str, asked: Asked) -> None:
    rows = [{"name": name, "datatype": "INT32", "shape": [1, 4], "data": [1, 2, 3, 4]} for name in ("A", "B")]
    text = json.dumps({"id": "mine", "inputs": rows, "outputs": [{"name": "SUM"}]})
    (asked.folder / "request.json").write_text(text)
    (answer,) = asked.answers("add_sub", "--data", "request.json" if source == "file" else "-", text=text)
    assert (answer["id"], [one["data"] for one in answer["outputs"]]) == ("mine", [[2, 4, 6, 8]])


def test_each_response_of_a_decoupled_model_is_printed(asked: Asked) -> None:
    done = asked.infer("streamer", f"--input=PLAN={PLAN}")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert sum(line.startswith("response of streamer, version 1, after ") for line in lines) == 3
    assert [line.split()[2] for line in lines if line.startswith("  NUMBER")] == ["0", "1", "2"]
    assert lines[-1] == "3 responses"
    assert [answer["NUMBER"] for answer in asked.answers("streamer", f"--input=PLAN={PLAN}")] == [0, 1, 2]


@pytest.mark.parametrize(
    ("words", "status", "text"),
    [
        (("nothing",), 1, "nothing"),
        (("add_sub", "--version=7"), 1, "7"),
        (("add_sub", "--input=A=[1,2,3]"), 2, "--input A: "),
        (("add_sub", "--input=A=some"), 2, "is not JSON"),
        (("add_sub", "--input=C=1"), 2, "inputs (A, B)"),
        (("add_sub", "--data=absent.json"), 1, "absent.json can't be read"),
    ],
)
def test_a_failure_is_one_line_and_an_exit_status(words: tuple[str, ...], status: int, text: str, asked: Asked) -> None:
    done = asked.infer(*words)
    assert done.returncode == status
    assert text in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_model_that_fails(asked: Asked) -> None:
    done = asked.infer("streamer", "--input=PLAN=no plan")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: Failed to process the request(s) for model 'streamer_0'")


def test_a_server_that_does_not_run(asked: Asked) -> None:
    done = asked.infer("add_sub", url="127.0.0.1:1")
    assert done.returncode == 1
    assert "127.0.0.1:1 is not reachable" in done.stderr
