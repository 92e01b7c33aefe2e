"""Faults of roles under load: several deaths at once, a pause, an orderly stop, a poisonous request."""

import signal
import time

import numpy as np
import pytest
import tritonclient.http

from tests.support.clients.request_ledger import Ledger, assert_nothing_lost, rounds
from tests.support.clients.stock import http_inputs
from tests.support.servers.weir_server import Server
from tests.support.waiting import wait_until


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_all_roles_but_the_gateway_killed_at_once(hurt: Server) -> None:
    ledger = Ledger(hurt)

    def kill_three() -> None:
        for role in ("worker", "scheduler", "nats"):
            hurt.kill(role)

    with ledger.sending():
        recoveries = rounds(ledger, kill_three, 2)
    print(ledger.summary("kill -9 worker, scheduler and nats-server at once", 2, recoveries))
    assert_nothing_lost(ledger)


@pytest.mark.timeout(150)
def test_a_worker_that_is_paused_comes_back(hurt: Server) -> None:
    ledger = Ledger(hurt)
    worker = hurt.pids()["worker"]
    with ledger.sending():
        wait_until(lambda: len(ledger.entries) > 50)
        hurt.kill("worker", signal.SIGSTOP)
        try:
            wait_until(lambda: not hurt.is_ready(), 10)
            time.sleep(1.5)  # longer silent than it takes to be taken for dead
        finally:
            hurt.kill("worker", signal.SIGCONT)
        recovery = ledger.wait_for_answers(time.monotonic())
    print(ledger.summary("SIGSTOP of the worker until after it was given up", 1, [recovery]))
    assert_nothing_lost(ledger)
    assert hurt.pids()["worker"] == worker
    hurt.wait_ready()


@pytest.mark.timeout(150)
@pytest.mark.parametrize("role", ["worker", "scheduler"])
def test_a_role_told_to_end_ends_its_work_first(hurt: Server, role: str) -> None:
    ledger = Ledger(hurt)
    first = hurt.pids()[role]
    with ledger.sending():
        wait_until(lambda: len(ledger.entries) > 50)
        moment = time.monotonic()
        hurt.kill(role, signal.SIGTERM)
        wait_until(lambda: hurt.pids().get(role) not in (None, first), 20)
        recovery = ledger.wait_for_answers(moment)
        hurt.wait_ready()
    print(ledger.summary(f"SIGTERM {role}", 1, [recovery]))
    assert_nothing_lost(ledger)


@pytest.mark.slow
def test_a_request_that_kills_its_model_fails_alone(hurt: Server) -> None:
    def say(word: str) -> str:
        with hurt.http() as client:
            answer = client.infer("faulty", http_inputs({"WHAT": np.array([[word]], np.object_)}))
            return answer.as_numpy("SAID").item().decode()

    for word in ("kill", "exit"):
        with pytest.raises(tritonclient.utils.InferenceServerException) as failed:
            say(word)
        assert failed.value.status() in ("500", "503")
        assert say("fine") == "fine"
    assert hurt.in_flight() == 0
