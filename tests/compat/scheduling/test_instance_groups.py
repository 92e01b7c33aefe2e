"""Instance groups: which instances run on which device, and what a change of the groups alone does."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from tritonclient.http import InferenceServerClient
from tritonclient.utils import InferenceServerException

from tests.support.clients.stock import http_inputs
from tests.support.models.zoo import config_text, write_python_model
from tests.support.servers.weir_server import Server
from tests.support.waiting import wait_until

INPUTS = {"DELAY_MS": ("INT32", [1])}
OUTPUTS = {
    "NAME": ("BYTES", [1]),
    "KIND": ("BYTES", [1]),
    "PID": ("INT64", [1]),
    "CORES": ("BYTES", [1]),
    "SUM": ("INT64", [1]),
}
CORE = max(os.sched_getaffinity(0))
POLICIES = [f"--host-policy={name},cpu-cores={CORE}-{CORE}" for name in ("model", "mine")]
LOST = "was lost with its instance: start the sequence again"


class Answer(NamedTuple):
    name: str
    kind: str
    pid: int
    cores: str
    sum: int


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("groups")
    (models := folder / "models").mkdir()
    for name in ("who", "busy", "ending", "sums", "broken"):
        write_python_model(models, name, "whoami", INPUTS, OUTPUTS, 4)
    with Server(folder, models, "--model-control-mode=explicit", *POLICIES) as started:
        yield started
        assert started.in_flight() == 0


@pytest.fixture
def client(server: Server) -> Iterator[InferenceServerClient]:
    with server.http() as opened:
        yield opened


def load(server: Server, model: str, groups: str, more: str = "") -> None:
    """Has the model loaded with these instance groups."""
    text = config_text(model, "python", INPUTS, OUTPUTS, 4, f"instance_group [ {groups} ]\n{more}")
    (server.folder / "models" / model / "config.pbtxt").write_text(text)
    with server.http() as control:
        control.load_model(model)


def ask(client: InferenceServerClient, model: str, delay_ms: int = 0, **options: Any) -> Answer:
    result = client.infer(model, http_inputs({"DELAY_MS": np.array([[delay_ms]], np.int32)}), **options)
    name, kind, pid, cores, total = (result.as_numpy(output)[0, 0] for output in OUTPUTS)
    return Answer(name.decode(), kind.decode(), int(pid), cores.decode(), int(total))


def instances(server: Server, model: str, count: int) -> dict[str, Answer]:
    """What each of the `count` instances says, by name; all are kept busy until they have been met."""
    met: dict[int, Answer] = {}

    def look(_: int) -> None:
        with server.http() as client:
            answer = ask(client, model, 20)
            met[answer.pid] = answer

    with ThreadPoolExecutor(2 * count) as pool:

        def all_are_met() -> bool:
            list(pool.map(look, range(2 * count)))
            return len(met) >= count

        wait_until(all_are_met)
    assert len(met) == count
    return {answer.name: answer for answer in met.values()}


def test_names_kinds_and_cores(server: Server, client: InferenceServerClient) -> None:
    groups = (
        "{ kind: KIND_CPU }, { kind: KIND_AUTO count: 2 host_policy: 'mine' }, { name: 'm' kind: KIND_MODEL count: 2 }"
    )
    load(server, "who", groups.replace("'", '"'))
    found = instances(server, "who", 5)
    assert {name: answer.kind for name, answer in found.items()} == {
        "who_0_0": "CPU",
        "who_1_0": "CPU",
        "who_1_1": "CPU",
        "m_0": "MODEL",
        "m_1": "MODEL",
    }
    everywhere = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    cores = {name: answer.cores for name, answer in found.items()}
    bound = [name for name in cores if name != "who_0_0"]
    assert cores == {"who_0_0": everywhere, **dict.fromkeys(bound, str(CORE))}
    worker = server.pids()["worker"]
    threads = [os.sched_getaffinity(int(task.name)) for task in Path(f"/proc/{worker}/task").iterdir()]
    assert threads.count({CORE}) >= len(bound)
    assert os.sched_getaffinity(worker) == os.sched_getaffinity(0)
    written = client.get_model_config("who")["instance_group"]
    assert [(group["name"], group["kind"], group["count"], group["host_policy"]) for group in written] == [
        ("who_0", "KIND_CPU", 1, ""),
        ("who_1", "KIND_CPU", 2, "mine"),
        ("m", "KIND_MODEL", 2, ""),
    ]


def test_an_update_under_load_loses_nothing_and_keeps_processes(server: Server, client: InferenceServerClient) -> None:
    load(server, "busy", "{ count: 2 kind: KIND_CPU }")
    before = {answer.pid for answer in instances(server, "busy", 2).values()}
    over = threading.Event()
    answered = [0] * 6

    def keep_asking(number: int) -> None:
        with server.http() as own:
            while not over.is_set():
                ask(own, "busy", 1)
                answered[number] += 1

    def more() -> bool:
        reached = sum(answered) + 40
        wait_until(lambda: sum(answered) >= reached or any(future.done() for future in asking))
        return True

    with ThreadPoolExecutor(len(answered)) as pool:
        asking = [pool.submit(keep_asking, number) for number in range(len(answered))]
        try:
            more()
            load(server, "busy", "{ count: 4 kind: KIND_CPU }")
            more()
            load(server, "busy", "{ count: 1 kind: KIND_CPU }")
            more()
            override = client.get_model_config("busy")
            override["instance_group"][0]["count"] = 2
            client.load_model("busy", config=json.dumps(override))
            more()
        finally:
            over.set()
        for future in asking:
            future.result()
    after = {answer.pid for answer in instances(server, "busy", 2).values()}
    assert len(after & before) == 1
    (row,) = client.get_inference_statistics("busy")["model_stats"]
    assert row["inference_stats"]["success"]["count"] > sum(answered), "one that was loaded again would count anew"
    log = server.log()
    assert log.count("successfully loaded 'busy'") == 4
    assert "successfully unloaded 'busy'" not in log


def test_a_load_that_removes_instances_ends_after_them(server: Server, client: InferenceServerClient) -> None:
    # As in Triton: what instances hold is free for whatever the client loads next.
    folder = server.folder / "models" / "ending"
    ends, gate = server.folder / "ends", server.folder / "gate"
    finalize = f"""
    def finalize(self):
        open({str(ends)!r}, "a").close()
        while not os.path.exists({str(gate)!r}):
            time.sleep(0.01)
"""
    (folder / "1" / "model.py").write_text((folder / "1" / "model.py").read_text() + finalize)
    load(server, "ending", "{ count: 2 kind: KIND_CPU }")
    with ThreadPoolExecutor(1) as pool:
        loading = pool.submit(load, server, "ending", "{ count: 1 kind: KIND_CPU }")
        try:
            wait_until(ends.exists)
            for _ in range(20):
                ask(client, "ending")
            assert not loading.done()
        finally:
            gate.touch()
        loading.result()
    load(server, "ending", "{ count: 2 kind: KIND_CPU }")


def test_what_can_t_be_updated_goes_on(server: Server, client: InferenceServerClient) -> None:
    load(server, "broken", "{ count: 1 kind: KIND_CPU }")
    pid = ask(client, "broken").pid
    with pytest.raises(InferenceServerException, match="has kind KIND_CPU but specifies one or more GPUs"):
        load(server, "broken", "{ count: 2 kind: KIND_CPU gpus: [0] }")
    with pytest.raises(InferenceServerException, match="not under this name"):
        load(server, "broken", '{ count: 2 kind: KIND_CPU }, { name: "refused" kind: KIND_CPU }')
    assert ask(client, "broken").pid == pid


def test_sequences_on_instances_that_stay_go_on(server: Server, client: InferenceServerClient) -> None:
    sequences = "sequence_batching { oldest { max_candidate_sequences: 2 } max_sequence_idle_microseconds: 60000000 }"
    load(server, "sums", "{ count: 2 kind: KIND_CPU }", sequences)
    pids = {number: ask(client, "sums", number, sequence_id=number, sequence_start=True).pid for number in range(1, 5)}
    assert len(set(pids.values())) == 2
    load(server, "sums", "{ count: 3 kind: KIND_CPU }", sequences)
    for number, pid in pids.items():
        answer = ask(client, "sums", 1, sequence_id=number)
        assert (answer.pid, answer.sum) == (pid, number + 1)
    newcomers = {number: ask(client, "sums", number, sequence_id=number, sequence_start=True).pid for number in (5, 6)}
    assert not set(newcomers.values()) & set(pids.values())
    # The first of them stays, with what it holds.
    load(server, "sums", "{ count: 1 kind: KIND_CPU }", sequences)
    stays = pids[1]
    for number, pid in (pids | newcomers).items():
        if pid == stays:
            answer = ask(client, "sums", 1, sequence_id=number, sequence_end=True)
            assert (answer.pid, answer.sum) == (stays, number + 2)
        else:
            with pytest.raises(InferenceServerException, match=LOST):
                ask(client, "sums", 1, sequence_id=number)
    # Grown again it has another instance, which knows nothing of those sequences.
    load(server, "sums", "{ count: 2 kind: KIND_CPU }", sequences)
    again = {number: ask(client, "sums", 7, sequence_id=number, sequence_start=True) for number in range(1, 5)}
    assert {answer.sum for answer in again.values()} == {7}
    assert len({answer.pid for answer in again.values()} - set(pids.values()) - set(newcomers.values())) == 1
    for number in again:
        ask(client, "sums", 1, sequence_id=number, sequence_end=True)
