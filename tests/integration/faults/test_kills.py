"""Roles killed with kill -9 at random times under load: every request gets its own correct response."""

import numpy as np
import psutil
import pytest

from tests.support.clients.request_ledger import Ledger, assert_nothing_lost, rounds
from tests.support.clients.stock import http_inputs
from tests.support.servers.weir_server import Server
from tests.support.waiting import wait_until

KILLS = 2


@pytest.mark.timeout(150)
@pytest.mark.parametrize("role", ["worker", "scheduler", "nats"])
def test_a_killed_role_costs_no_request(hurt: Server, role: str) -> None:
    ledger = Ledger(hurt)
    pids = hurt.pids()
    with ledger.sending():
        recoveries = rounds(ledger, lambda: hurt.kill(role) and None, KILLS)
    print(ledger.summary(f"kill -9 {role}", KILLS, recoveries))
    assert_nothing_lost(ledger)
    hurt.wait_ready()
    others = {name: pid for name, pid in hurt.pids().items() if name != role}
    assert others == {name: pid for name, pid in pids.items() if name != role}
    assert hurt.in_flight() == 0


@pytest.mark.timeout(150)
def test_killed_python_models_cost_no_request(hurt: Server) -> None:
    ledger = Ledger(hurt)
    pids = hurt.pids()

    def kill_all_children() -> None:
        for pid in hurt.python_children():
            psutil.Process(pid).kill()

    with ledger.sending():
        recoveries = rounds(ledger, kill_all_children, KILLS)
    print(ledger.summary("kill -9 Python models", KILLS, recoveries))
    assert_nothing_lost(ledger)
    assert hurt.pids() == pids
    assert hurt.in_flight() == 0


@pytest.mark.timeout(150)
def test_a_killed_gateway_is_back_on_its_ports(hurt: Server) -> None:
    ledger = Ledger(hurt)
    pids = hurt.pids()
    with ledger.sending():
        recoveries = rounds(ledger, lambda: hurt.kill("gateway") and None, KILLS)
    print(ledger.summary("kill -9 gateway", KILLS, recoveries))
    # Who waited saw the connection end, or nobody to connect to; nobody got what was another's.
    assert ledger.unanswered == 0
    assert not [fault for fault in ledger.faults if fault.startswith("wrong")]
    assert {"scheduler", "worker", "nats"} <= {role for role in pids if hurt.pids().get(role) == pids[role]}
    hurt.wait_ready()
    with hurt.http() as client:
        value = np.array([[7]], np.int64)
        assert client.infer("fast", http_inputs({"IN": value})).as_numpy("OUT").item() == 7
    # What the dead gateway had asked for is forgotten with it.
    wait_until(lambda: hurt.in_flight() == 0)
