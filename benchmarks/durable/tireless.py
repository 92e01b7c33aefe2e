"""`weir`, whose supervisor never gives up: for servers that are killed hundreds of times.

`python -m benchmarks.durable.tireless serve …` takes the options of `weir serve` and does the same, but for the
supervisor's patience: a role that dies is started again after 0.1 to 0.5 s, however often it has died. (`weir serve`
gives up after ten deaths within a minute, for what dies so often by itself is broken.)
"""

from __future__ import annotations

import functools

from bus.restarts import RestartPolicy
from weir import serve_command
from weir.cli import main
from weir.supervisor import Supervisor

POLICY = RestartPolicy(longest_delay_s=0.5, healthy_s=1.0, budget=None)

if __name__ == "__main__":
    serve_command.Supervisor = functools.partial(Supervisor, policy=POLICY)  # type: ignore[misc]
    main()
