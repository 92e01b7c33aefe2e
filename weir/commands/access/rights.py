"""What the policy must let the user of each command do.

Commands that reach a gateway (`--url`) send a key (`--api-key`), and the gateway decides. The others use the broker with
the operator's password, which may do everything: for them the table says which right stands for what they do.
"""

from __future__ import annotations

from weir.access.policy.actions import Action

COMMAND_ACTIONS: dict[str, Action | None] = {
    "serve": None,
    "gateway": None,
    "durable": None,
    "scheduler": None,
    "worker": None,
    "console": None,
    "backends": None,
    "init": None,
    "doctor": None,
    "demo": None,
    "nats-permissions": None,
    "access check": None,
    "infer": Action.INFER,
    "perf": Action.INFER,
    "push": Action.LOAD,
    "status": Action.CONSOLE_READ,
    "top": Action.CONSOLE_READ,
    "history": Action.LOAD,
    "rollback": Action.LOAD,
    "batch submit": Action.JOBS,
    "batch list": Action.JOBS,
    "batch status": Action.JOBS,
    "batch watch": Action.JOBS,
    "batch pause": Action.JOBS,
    "batch resume": Action.JOBS,
    "batch cancel": Action.JOBS,
    "batch retry": Action.JOBS,
    "dead list": Action.DEAD_LETTERS,
    "dead show": Action.DEAD_LETTERS,
    "dead replay": Action.DEAD_LETTERS,
    "dead purge": Action.DEAD_LETTERS,
    "traffic show": Action.TRAFFIC,
    "traffic set": Action.TRAFFIC,
    "traffic clear": Action.TRAFFIC,
    "traffic ramp": Action.TRAFFIC,
    "traffic shadow": Action.TRAFFIC,
    "traffic report": Action.TRAFFIC,
    "key create": Action.CONSOLE_CHANGE,
    "key list": Action.CONSOLE_CHANGE,
    "key rotate": Action.CONSOLE_CHANGE,
    "key revoke": Action.CONSOLE_CHANGE,
    "audit": Action.CONSOLE_CHANGE,
}
"""By the name of a command; None for one that asks nothing of a running server."""
