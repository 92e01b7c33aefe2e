"""`weir serve` with an unlimited restart budget, for servers that are killed hundreds of times.

`python -m tests.support.durable.tireless serve …` takes the options of `weir serve`. A role that dies is restarted
after 0.1 to 0.5 s, however often it has died. (`weir serve` itself stops after ten deaths within a minute.)
"""

from __future__ import annotations

import functools

from weir.commands import serve as serve_command
from weir.commands.app import main
from weir.runtime.child_processes import RestartPolicy
from weir.supervisor.supervisor import Supervisor

POLICY = RestartPolicy(longest_delay_s=0.5, healthy_s=1.0, budget=None)

if __name__ == "__main__":
    serve_command.Supervisor = functools.partial(Supervisor, policy=POLICY)  # type: ignore[misc]
    main()
