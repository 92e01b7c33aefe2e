"""`SignalQueue`: signals arrive on a file descriptor, and the previous handlers come back."""

import os
import select
import signal

from weir.supervisor.supervisor import SignalQueue


def test_signals_are_queued_in_order() -> None:
    with SignalQueue((signal.SIGUSR1, signal.SIGUSR2)) as queue:
        assert queue.take() == []
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGUSR2)
        assert select.select([queue], [], [], 5)[0] == [queue]
        assert queue.take() == [signal.SIGUSR1, signal.SIGUSR2]
        assert queue.take() == []


def test_the_previous_handlers_are_restored() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    with SignalQueue((signal.SIGUSR1,)):
        assert signal.getsignal(signal.SIGUSR1) != before
    assert signal.getsignal(signal.SIGUSR1) == before
