"""Options of repositories and models: Triton's names, meanings and defaults.

One default differs on purpose: a model that fails to load doesn't end the server unless `--exit-on-error` is given.
"""

from __future__ import annotations

from typing import Any

from weir.options.forms import backend_setting, device_pair, host_policy, rate_limit_resource, worker_resource
from weir.options.option import BACKENDS, SCHEDULER, SERVE, WORKER, Option, switch
from weir.options.values import Checked, Choice, Integer, NotEmpty, Number, Switch, Text

_IN_WORKER = (SERVE, WORKER)


def _models() -> tuple[Option, ...]:
    panel: dict[str, Any] = {"panel": "Models", "commands": _IN_WORKER}
    return (
        Option(
            names=("--model-repository", "--model-store"),
            value=Text("FOLDER"),
            help="Folder of models, or nats://NAME for what `weir push` has put into NATS; may be repeated. A scheduler "
            "looks into folders for batchstrategy.py and may do without.",
            differs="Remote repositories (s3, gs, as) are refused; nats://NAME is ours.",
            repeatable=True,
            field="model_repositories",
            panel="Models",
            commands=(SERVE, SCHEDULER, WORKER),
        ),
        Option(
            names=("--model-cache-dir",),
            value=Text("FOLDER"),
            shown_default="a temporary one",
            help="Where a worker keeps the files of models that it gets from NATS.",
            ours=True,
            **panel,
        ),
        Option(
            names=("--model-config-name",),
            value=NotEmpty("NAME", "Error: empty argument for --model-config-name"),
            help="Read configs/NAME.pbtxt of a model, where it has one.",
            **panel,
        ),
        switch(
            "--disable-auto-complete-config",
            False,
            "Take configurations as they are written.",
            differs="It may have a value.",
            **panel,
        ),
        switch(
            "--model-namespacing",
            False,
            "Models of different folders may have the same name: each folder is a namespace.",
            **panel,
        ),
        Option(
            names=("--model-control-mode",),
            value=Choice(("none", "poll", "explicit"), "invalid argument for --model-control-mode"),
            default="none",
            help="none: load all at the start and keep to that; poll: follow the folders; explicit: load and unload "
            "when told to. Workers tell it to all others.",
            **panel,
        ),
        Option(
            names=("--repository-poll-secs",),
            value=Number(0),
            default=15.0,
            help="Time between two looks at the folders, in seconds, with --model-control-mode=poll.",
            differs="Fractions of a second are taken too.",
            **panel,
        ),
        Option(
            names=("--load-model",),
            value=Text("NAME"),
            help="Load this model at the start, with --model-control-mode=explicit; may be repeated. * alone: all.",
            repeatable=True,
            **panel,
        ),
        Option(
            names=("--model-load-thread-count",),
            value=Integer(1),
            default=4,
            help="Models loaded at a time.",
            **panel,
        ),
        Option(
            names=("--model-load-retry-count",),
            value=Integer(0),
            default=0,
            help="Further attempts to load a model that can't be loaded.",
            **panel,
        ),
        Option(
            names=("--model-load-gpu-limit",),
            value=Checked("DEVICE:FRACTION", device_pair),
            help="Load nothing more on a GPU of whose memory more than this fraction is in use; may be repeated.",
            repeatable=True,
            **panel,
        ),
        Option(
            names=("--exit-on-error",),
            value=Switch(),
            shown_default="false for models, true for folders",
            bare="true",
            help="true: end when a model can't be loaded at the start, or a folder is missing. false: serve what there is, "
            "even where a folder is missing.",
            differs="The default is false for models, so that the others serve; Triton ends.",
            **panel,
        ),
        Option(
            names=("--backend-config",),
            value=Checked("BACKEND,KEY=VALUE", backend_setting),
            help="A setting of a backend, or KEY=VALUE for all; may be repeated.",
            repeatable=True,
            **panel,
        ),
        Option(
            names=("--host-policy",),
            value=Checked("POLICY,SETTING=VALUE", host_policy),
            help="Where instances run whose group names the policy, or without one `cpu`, `model` or `gpu_ID`: on which "
            "cores (cpu-cores=0-3,6), with memory of which node (numa-node=0); may be repeated.",
            differs="A core may be named alone.",
            repeatable=True,
            **panel,
        ),
        Option(
            names=("--backend-directory",),
            value=Text("FOLDER"),
            help="Folder of backends of one's own, each in a folder of its name; may be repeated.",
            differs="Backends are Python files: model.py as in Triton, or backend.py. It may be repeated.",
            repeatable=True,
            field="backend_directories",
            panel="Models",
            commands=(SERVE, WORKER, BACKENDS),
        ),
        Option(
            names=("--json",),
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
            help="Memory of a worker for models that declare weir_memory_bytes, together; 0: as much as they like.",
            **panel,
        ),
        Option(
            names=("--worker-resource",),
            value=Checked("NAME=COUNT", worker_resource),
            help="A resource of a worker for models that declare weir_requires; may be repeated.",
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
            help="execution_count: instances execute when the resources are free that their group names, those first that "
            "have had the fewest turns; off: whenever they like.",
            differs="Resources are those of one worker; who waits for some holds up only those that need them too.",
            **panel,
        ),
        Option(
            names=("--rate-limit-resource",),
            value=Checked("NAME:COUNT[:DEVICE]", rate_limit_resource),
            help="How much there is of a resource, with --rate-limit=execution_count; may be repeated. Without it there is "
            "as much of each as the most needy instance needs.",
            repeatable=True,
            **panel,
        ),
    )


def _devices() -> tuple[Option, ...]:
    panel: dict[str, Any] = {"panel": "Devices", "commands": (WORKER,), "ours": True}
    return (
        Option(
            names=("--gpu",),
            value=Integer(0, metavar="ORDINAL"),
            shown_default="all of the host's",
            help="Run the instances of this GPU alone. `weir serve` starts a worker for each GPU.",
            **panel,
        ),
        Option(
            names=("--cpu-instances",),
            value=Switch(),
            default=True,
            bare="true",
            help="Run the instances that need no GPU, too: of several workers on one host, one should.",
            **panel,
        ),
        Option(
            names=("--pinned-memory-pool-byte-size",),
            value=Integer(0, metavar="BYTES"),
            default=256 << 20,
            help="Host memory that may be pinned for copies to and from GPUs; beyond it they use ordinary memory.",
            differs="It is that of one worker, and is pinned as it is needed, not at the start.",
            panel="Devices",
            commands=_IN_WORKER,
        ),
    )


MODEL_OPTIONS: tuple[Option, ...] = (*_models(), *_placement(), *_rate_limiter(), *_devices())
"""Those of this module."""
