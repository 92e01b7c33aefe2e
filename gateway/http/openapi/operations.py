"""`OPERATIONS`: what each route of the HTTP API does, and which of `SCHEMAS` its bodies have.

Source: KServe v2 and Triton's extensions for the routes that are theirs.
"""

from __future__ import annotations

from typing import NamedTuple


class Operation(NamedTuple):
    """One operation: its tag, a summary, the names of its request and response schemas, and its statuses.

    `errors` are the statuses of errors besides those that every operation may have, `bare` those without a body. `query`
    has the names of its query parameters.
    """

    tag: str
    summary: str
    request: str = ""
    response: str = ""
    status: int = 200
    errors: tuple[int, ...] = ()
    bare: tuple[int, ...] = ()
    query: tuple[str, ...] = ()


OPERATIONS: dict[tuple[str, str], Operation] = {
    ("GET", "/openapi.json"): Operation(
        "server", "This document: the HTTP API, and the tensors of each model", "", "OpenApi"
    ),
    ("GET", "/v2"): Operation("server", "Server metadata: name, version, extensions, durability", "", "ServerMetadata"),
    ("GET", "/v2/health/live"): Operation("server", "Whether the gateway is running"),
    ("GET", "/v2/health/ready"): Operation("server", "Whether the server and all its models are ready", bare=(400,)),
    ("GET", "/v2/models/stats"): Operation("statistics", "Statistics of all models", "", "Statistics"),
    ("GET", "{model}"): Operation("models", "Model metadata", "", "ModelMetadata"),
    ("GET", "{model}/ready"): Operation("models", "Whether the model is ready"),
    ("GET", "{model}/config"): Operation("models", "The model's configuration", "", "ModelConfig"),
    ("GET", "{model}/stats"): Operation("statistics", "Statistics of one model", "", "Statistics"),
    ("POST", "{model}/infer"): Operation(
        "inference", "Run the model", "InferRequest", "InferResponse", errors=(408, 409, 410, 422, 429, 501)
    ),
    ("POST", "{model}/generate"): Operation("inference", "Run the model with plain JSON", "Generate", "Generate"),
    ("POST", "{model}/generate_stream"): Operation(
        "inference", "Run the model and stream its responses as server-sent events", "Generate", "Events"
    ),
    ("POST", "/v2/repository/index"): Operation("repository", "All models of the repositories", "Index", "IndexRows"),
    ("POST", "/v2/repository/{repository}/index"): Operation(
        "repository", "As /v2/repository/index", "Index", "IndexRows"
    ),
    ("POST", "/v2/repository/models/{model}/load"): Operation("repository", "Load or reload a model", "Load"),
    ("POST", "/v2/repository/models/{model}/unload"): Operation("repository", "Unload a model", "Unload"),
    ("POST", "/v2/repository/{repository}/models/{model}/load"): Operation(
        "repository", "Not supported: a repository cannot be chosen", "Load", "Error", 501
    ),
    ("POST", "/v2/repository/{repository}/models/{model}/unload"): Operation(
        "repository", "Not supported: a repository cannot be chosen", "Unload", "Error", 501
    ),
    ("GET", "/v2/logging"): Operation("settings", "Log settings", "", "Settings"),
    ("POST", "/v2/logging"): Operation("settings", "Change log settings", "Settings", "Settings"),
    ("GET", "{model}/traffic"): Operation("traffic", "How requests are split among versions", "", "Traffic"),
    ("PUT", "{model}/traffic"): Operation("traffic", "Split requests among versions", "TrafficRule", "Traffic"),
    ("DELETE", "{model}/traffic"): Operation("traffic", "Remove the rule that was set", "", "Traffic"),
    ("POST", "{model}/traffic/ramp"): Operation("traffic", "Raise the share of a version by steps", "Ramp", "Traffic"),
    ("GET", "{model}/traffic/shadow"): Operation(
        "traffic", "How responses of copies differ from the live ones", "", "ShadowReport"
    ),
    ("GET", "{model}/traffic/shadow/{sample}"): Operation(
        "traffic", "A request whose copy gave another response", "", "ShadowSample"
    ),
    ("PUT", "{model}/traffic/shadow"): Operation("traffic", "Run copies of requests on a version", "Shadow", "Traffic"),
    ("DELETE", "{model}/traffic/shadow"): Operation("traffic", "Make no more copies", "", "Traffic"),
    ("GET", "{model}/history"): Operation("traffic", "The last changes of the model, newest first", "", "History"),
    ("POST", "{model}/rollback"): Operation("traffic", "Undo the last change of the model", "", "Rollback"),
    ("GET", "/v2/trace/setting"): Operation("settings", "Trace settings", "", "Settings"),
    ("POST", "/v2/trace/setting"): Operation("settings", "Change trace settings", "Settings", "Settings"),
    ("GET", "/v2/models/{model}/trace/setting"): Operation("settings", "Trace settings of a model", "", "Settings"),
    ("POST", "/v2/models/{model}/trace/setting"): Operation(
        "settings", "Change trace settings of a model", "Settings", "Settings"
    ),
    ("POST", "/v2/jobs"): Operation("jobs", "Start a batch job", "JobSpec", "Job", 202),
    ("GET", "/v2/jobs"): Operation("jobs", "List batch jobs", "", "Jobs", query=("model", "state")),
    ("GET", "/v2/jobs/batch-{rest}"): Operation("jobs", "State of a batch job", "", "Job"),
    ("DELETE", "/v2/jobs/batch-{rest}"): Operation("jobs", "Forget a batch job", "", "", 204),
    ("GET", "/v2/jobs/batch-{rest}/result"): Operation(
        "jobs", "Results of items that were sent along, as JSON Lines", "", "Lines"
    ),
    ("POST", "/v2/jobs/batch-{rest}/cancel"): Operation("jobs", "Cancel a batch job", "", "Job"),
    ("POST", "/v2/jobs/batch-{rest}/pause"): Operation("jobs", "Pause a batch job", "", "Job"),
    ("POST", "/v2/jobs/batch-{rest}/resume"): Operation("jobs", "Resume a batch job", "", "Job"),
    ("POST", "/v2/jobs/batch-{rest}/retry"): Operation("jobs", "Run the failed items again", "", "Job"),
    ("GET", "/v2/jobs/{id}"): Operation("asynchronous requests", "State of a request", "", "AsyncRequest"),
    ("GET", "/v2/jobs/{id}/result"): Operation(
        "asynchronous requests", "Its response", "", "InferResponse", errors=(409, 410, 501)
    ),
    ("POST", "/v2/jobs/{id}/cancel"): Operation(
        "asynchronous requests", "Cancel a request", "", "AsyncRequest", errors=(409, 410)
    ),
    ("DELETE", "/v2/jobs/{id}"): Operation("asynchronous requests", "Cancel and forget a request", "", "", 204),
    **{
        ("GET", f"/v2/{kind}sharedmemory{region}/status"): Operation(
            "shared memory", f"Registered regions of {kind} shared memory", "", "Regions", errors=(501,)
        )
        for kind in ("system", "cuda")
        for region in ("", "/region/{region}")
    },
    **{
        ("POST", f"/v2/{kind}sharedmemory{region}/unregister"): Operation(
            "shared memory", f"Unregister {kind} shared memory", errors=(501,)
        )
        for kind in ("system", "cuda")
        for region in ("", "/region/{region}")
    },
    **{
        ("POST", f"/v2/{kind}sharedmemory/region/{{region}}/register"): Operation(
            "shared memory", f"Register {kind} shared memory", f"{kind.title()}Region", errors=(501,)
        )
        for kind in ("system", "cuda")
    },
}
"""By method and path. `{model}` at the beginning stands for a model's path, without and with a version."""
