"""Options of repositories and models: Triton's names, meanings and defaults.

One default differs on purpose: a model that fails to load does not stop the server unless `--exit-on-error` is given.
"""

from __future__ import annotations

from typing import Any

from weir.options.option import BACKENDS, SCHEDULER, SERVE, WORKER, Option, switch
from weir.options.secret import Secret
from weir.options.values import (
    Checked,
    Choice,
    Integer,
    NotEmpty,
    Number,
    Switch,
    Text,
    backend_setting,
    device_pair,
    host_policy,
    rate_limit_resource,
    worker_resource,
)

_IN_WORKER = (SERVE, WORKER)


def _models() -> tuple[Option, ...]:
    panel: dict[str, Any] = {"panel": "Models", "commands": _IN_WORKER}
    return (
        Option(
            names=("--model-repository", "--model-store"),
            is_common=True,
            value=Text("FOLDER"),
            help="Folder of models, an object store (s3://BUCKET/PATH, gs://BUCKET/PATH, as://ACCOUNT/CONTAINER/PATH), or "
            "nats://NAME for models stored in NATS by `weir push`; may be repeated. A scheduler needs it only for models "
            "with a batchstrategy.py.",
            differs="nats://NAME is Weir's own.",
            repeatable=True,
            field="model_repositories",
            panel="Models",
            commands=(SERVE, SCHEDULER, WORKER),
        ),
        Option(
            names=("--model-cache-dir",),
            value=Text("FOLDER"),
            shown_default="a temporary folder; with object stores, in the data folder",
            help="Folder in which workers store model files downloaded from NATS or an object store. The workers of a host "
            "may share it.",
            ours=True,
            **panel,
        ),
        Option(
            names=("--model-cache-byte-size",),
            value=Integer(0, metavar="BYTES"),
            default=0,
            help="Most that the model files in the cache may take: unused ones are removed, and a model that does not fit "
            "is not fetched. 0: nine tenths of the disk.",
            ours=True,
            **panel,
        ),
        Option(
            names=("--model-config-name",),
            value=NotEmpty("NAME", "Error: empty argument for --model-config-name"),
            help="Use configs/NAME.pbtxt of a model instead of config.pbtxt, if it exists.",
            **panel,
        ),
        switch(
            "--disable-auto-complete-config",
            False,
            "Use model configurations as written, without completing them.",
            differs="A value is accepted.",
            **panel,
        ),
        switch(
            "--model-namespacing",
            False,
            "Make each repository a namespace, so that models in different repositories may have the same name.",
            **panel,
        ),
        Option(
            names=("--model-control-mode",),
            is_common=True,
            value=Choice(("none", "poll", "explicit"), "invalid argument for --model-control-mode"),
            default="none",
            help="none: load all models at startup; poll: follow changes of the repositories; explicit: load and "
            "unload on request.",
            **panel,
        ),
        Option(
            names=("--repository-poll-secs",),
            is_common=True,
            value=Number(0),
            default=15.0,
            help="Interval at which the repositories are polled, in seconds, with --model-control-mode=poll.",
            differs="Fractions of a second are accepted.",
            **panel,
        ),
        Option(
            names=("--load-model",),
            is_common=True,
            value=Text("NAME"),
            help="Load this model at startup, with --model-control-mode=explicit; may be repeated. * alone: all models.",
            repeatable=True,
            **panel,
        ),
        Option(
            names=("--model-load-thread-count",),
            value=Integer(1),
            default=4,
            help="Number of models loaded at the same time.",
            **panel,
        ),
        Option(
            names=("--model-load-retry-count",),
            value=Integer(0),
            default=0,
            help="Number of retries for a model that fails to load.",
            **panel,
        ),
        Option(
            names=("--model-load-gpu-limit",),
            value=Checked("DEVICE:FRACTION", device_pair),
            help="Load no further models on a GPU once this fraction of its memory is in use; may be repeated.",
            repeatable=True,
            **panel,
        ),
        Option(
            names=("--exit-on-error",),
            is_common=True,
            value=Switch(),
            shown_default="false for models, true for folders",
            bare="true",
            help="true: exit if a model fails to load at startup or a folder is missing. false: serve the models that "
            "loaded, even if a folder is missing.",
            differs="The default is false for models: the others are served. Triton exits.",
            **panel,
        ),
        Option(
            names=("--backend-config",),
            is_common=True,
            # What is secret is for the backend to know: only what comes from a file is treated so.
            value=Secret(Checked("BACKEND,KEY=VALUE", backend_setting), lambda text: False),
            help="A setting for one backend, or KEY=VALUE for all backends; may be repeated.",
            repeatable=True,
            **panel,
        ),
        Option(
            names=("--host-policy",),
            value=Checked("POLICY,SETTING=VALUE", host_policy),
            help="Placement of instances whose group names this policy (`cpu`, `model` or `gpu_ID` for groups that "
            "name none): CPU cores (cpu-cores=0-3,6), memory node (numa-node=0); may be repeated.",
            differs="A single core number is accepted too.",
            repeatable=True,
            **panel,
        ),
        Option(
            names=("--backend-directory",),
            is_common=True,
            value=Text("FOLDER"),
            help="Folder of custom backends, each in a folder of its name; may be repeated.",
            differs="Backends are Python files: model.py as in Triton, or backend.py. The option may be repeated.",
            repeatable=True,
            field="backend_directories",
            panel="Models",
            commands=(SERVE, WORKER, BACKENDS),
        ),
        Option(
            names=("--repoagent-directory",),
            value=Text("FOLDER"),
            help="Folder of repository agents, each in a folder of its name.",
            differs="Agents are Python files (agent.py); checksum is built in. There is no default folder.",
            panel="Models",
            commands=(SERVE, WORKER),
        ),
        Option(
            names=("--json",),
            is_common=True,
            value=Switch(),
            default=False,
            bare="true",
            help="Print JSON.",
            panel="Output",
            ours=True,
            commands=(BACKENDS,),
        ),
    )


def _placement() -> tuple[Option, ...]:
    panel: dict[str, Any] = {"panel": "Placement", "commands": _IN_WORKER, "ours": True}
    return (
        Option(
            names=("--model-memory-bytes",),
            value=Integer(0),
            default=0,
            help="Total memory of a worker for models that declare weir_memory_bytes; 0: no limit.",
            **panel,
        ),
        Option(
            names=("--worker-resource",),
            value=Checked("NAME=COUNT", worker_resource),
            help="A resource that a worker offers to models that declare weir_requires; may be repeated.",
            repeatable=True,
            **panel,
        ),
    )


def _rate_limiter() -> tuple[Option, ...]:
    panel: dict[str, Any] = {"panel": "Rate limiter", "commands": _IN_WORKER}
    return (
        Option(
            names=("--rate-limit",),
            value=Choice(("execution_count", "off"), "invalid argument for --rate-limit"),
            default="off",
            help="execution_count: an instance executes once the resources of its group are free, the instance with "
            "the fewest executions first; off: no limit.",
            differs="Resources are counted per worker; a waiting instance delays only those that need the same resource.",
            **panel,
        ),
        Option(
            names=("--rate-limit-resource",),
            value=Checked("NAME:COUNT[:DEVICE]", rate_limit_resource),
            help="Amount of a resource, with --rate-limit=execution_count; may be repeated. The default for each "
            "resource is the largest amount that one instance needs.",
            repeatable=True,
            **panel,
        ),
    )


def _devices() -> tuple[Option, ...]:
    panel: dict[str, Any] = {"panel": "Devices", "commands": (WORKER,), "ours": True}
    return (
        Option(
            names=("--gpu",),
            is_common=True,
            value=Integer(0, metavar="ORDINAL"),
            shown_default="all GPUs of the host",
            help="Run only the instances of this GPU. `weir serve` starts one worker for each GPU.",
            **panel,
        ),
        Option(
            names=("--cpu-instances",),
            value=Switch(),
            default=True,
            bare="true",
            help="Also run the instances that need no GPU. Enable it for one worker per host.",
            **panel,
        ),
        Option(
            names=("--pinned-memory-pool-byte-size",),
            value=Integer(0, metavar="BYTES"),
            shown_default="a sixteenth of the memory, 256 MiB to 4 GiB",
            help="Host memory that may be pinned for copies to and from GPUs; further copies use pageable memory.",
            differs="By default it is a sixteenth of the memory of the machine or container, 256 MiB at least and 4 GiB at "
            "most, where Triton has 256 MiB. It applies to one worker, and to each process of an isolated instance. Both "
            "pin memory on demand instead of at startup.",
            panel="Devices",
            commands=_IN_WORKER,
        ),
    )


MODEL_OPTIONS: tuple[Option, ...] = (*_models(), *_placement(), *_rate_limiter(), *_devices())
"""The options declared in this module."""
