"""The contract over NATS as an AsyncAPI 3.0 document: `docs/reference/asyncapi.json`.

Subjects and headers come from the modules that read and write them, so a name that changes there changes here.
Source: AsyncAPI 3.0 for the document; docs/nats.md and docs/events.md for the contract in words.
"""

from __future__ import annotations

from typing import Any

from weir.bus.naming import durable_subjects, subjects

_MODEL = "{model}"
_ID = "{id}"

REQUEST_HEADERS = {
    "Content-Type": "application/msgpack for msgpack; otherwise JSON",
    "Inference-Header-Content-Length": "bytes of JSON before the binary tensors",
    "Weir-Deadline-Ms": "unix time in milliseconds after which the request is not run",
    "Weir-Priority": "as the parameter `priority`",
    "Weir-Sequence-Id": "as the parameter `sequence_id`",
    "Weir-Sequence-Start": "as the parameter `sequence_start`",
    "Weir-Sequence-End": "as the parameter `sequence_end`",
    "Authorization": "`Bearer KEY`: a key or a token of the sender, with an access policy",
    "traceparent": "the caller's trace (W3C)",
    "tracestate": "the caller's trace (W3C)",
}
LIVE_HEADERS = {"Weir-Window": "how many responses may be unacknowledged"}
DURABLE_HEADERS = {
    "Nats-Msg-Id": "the request's id: printable text of at most 128 characters",
    "Weir-Reply-To": "a subject that also gets the record",
    "Weir-Tenant": "the tenant whose share the request uses",
    "Weir-Result-Ttl-Secs": "how long the record is kept",
    "Weir-Object": "the object of store `requests` that is the body",
}
RESPONSE_HEADERS = {
    "Weir-Final": "`true` on the last message",
    "Weir-Outcome": "`succeeded`, `failed` or `cancelled`",
    "Content-Type": "as in HTTP",
    "Inference-Header-Content-Length": "as in HTTP",
    "Nats-Service-Error-Code": "of an error: its HTTP status",
    "Nats-Service-Error": "of an error: its text",
}
RECORD_HEADERS = {
    "Weir-Id": "the request's id",
    "Weir-Model": "its model",
    "Weir-Model-Version": "the version that ran it",
    "Weir-Model-Digest": "a digest of that version's files and configuration, as its worker loaded them",
    "Weir-Outcome": "`succeeded`, `failed`, `expired`, `cancelled` or `dead-lettered`",
    "Weir-Status": "the HTTP status of the outcome",
    "Weir-Attempts": "how often it was started",
    "Weir-History": "attempts without a result: [[unix ms, reason], …]",
    "Weir-Accepted-Ms": "when it was stored, in unix milliseconds",
    "Weir-Ended-Ms": "when it ended, in unix milliseconds",
    "Weir-Tenant": "as in the request",
    "Weir-Responses": "of a decoupled model: how many responses there were",
    "Weir-Object": "the object of store `results` that is the body",
}
DEAD_HEADERS = {
    "Weir-Dead-Reason": "why it could not be done",
    "Weir-Dead-Subject": "where it was published",
    "Weir-Dead-Id": "its id",
    "Weir-Dead-Ms": "when it was dead-lettered, in unix milliseconds",
}


def document() -> dict[str, Any]:
    """The AsyncAPI document."""
    infer = subjects.INFER.replace("*", _MODEL)
    event, batch = (
        subject("m").replace(".m", f".{_MODEL}") for subject in (durable_subjects.event, durable_subjects.batch)
    )
    result = durable_subjects.result("m", "i").replace(".m.i", f".{_MODEL}.{_ID}")
    dead = durable_subjects.dead("m").replace(".m", f".{_MODEL}")
    channels = {
        "infer": _channel(infer, "A request that is answered on its reply subject", "inferRequest", ["model"]),
        "reply": {
            "address": None,
            "description": "Responses to a request on `infer.{model}`",
            "messages": {"response": _message("response")},
        },
        "event": _channel(
            event, f"A durable request, in stream {durable_subjects.QUEUE_STREAM}", "durableRequest", ["model"]
        ),
        "batch": _channel(batch, "The same, run after all other requests", "durableRequest", ["model"]),
        "result": _channel(
            result,
            f"The record of a durable request, in stream {durable_subjects.RESULT_STREAM}",
            "record",
            ["model", "id"],
        ),
        "dead": _channel(
            dead, f"A request that could not be done, in stream {durable_subjects.DEAD_STREAM}", "deadLetter", ["model"]
        ),
    }
    operations = {
        "infer": {
            "action": "send",
            "channel": _channel_ref("infer"),
            "summary": "Run a model; nothing is stored",
            "reply": {
                "address": {"location": "$message.header#/reply"},
                "channel": _channel_ref("reply"),
            },
        },
        **{
            name: {"action": "send", "channel": _channel_ref(name), "summary": text}
            for name, text in (
                ("event", "Store a request; it ends in one record"),
                ("batch", "The same, with the lowest precedence"),
            )
        },
        "result": {"action": "receive", "channel": _channel_ref("result"), "summary": "Read or follow records"},
        "dead": {"action": "receive", "channel": _channel_ref("dead"), "summary": "Read dead letters"},
    }
    return {
        "asyncapi": "3.0.0",
        "info": {
            "title": "Weir over NATS",
            "version": "1",
            "description": "Requests, durable requests and records. In a subject every byte of a name or an id except "
            "letters, digits, `_` and `-` is written `=XX`.",
            "license": {"name": "Apache 2.0"},
        },
        "defaultContentType": "application/json",
        "servers": {"nats": {"host": "localhost:4222", "protocol": "nats"}},
        "channels": channels,
        "operations": operations,
        "components": {
            "messages": {
                "inferRequest": _described("A KServe v2 request", {**REQUEST_HEADERS, **LIVE_HEADERS}),
                "response": _described("A KServe v2 response, or an error", RESPONSE_HEADERS),
                "durableRequest": _described("A KServe v2 request", {**REQUEST_HEADERS, **DURABLE_HEADERS}),
                "record": _described("A KServe v2 response, or an error", RECORD_HEADERS),
                "deadLetter": _described("The request as it was published", DEAD_HEADERS),
            }
        },
    }


def _channel(address: str, text: str, message: str, parameters: list[str]) -> dict[str, Any]:
    return {
        "address": address,
        "description": text,
        "messages": {message: _message(message)},
        "parameters": {name: {"description": f"the {name} as one token"} for name in parameters},
    }


def _message(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/messages/{name}"}


def _channel_ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/channels/{name}"}


def _described(title: str, headers: dict[str, str]) -> dict[str, Any]:
    properties = {name: {"type": "string", "description": text} for name, text in headers.items()}
    return {"title": title, "headers": {"type": "object", "properties": properties}, "payload": {"type": "object"}}


def channels() -> str:
    """Markdown: a table of the channels, and one of the headers of each message."""
    made = document()
    rows = [
        f"| {(channel['address'] and '`' + channel['address'] + '`') or 'reply subject'} | {channel['description']} |"
        for channel in made["channels"].values()
    ]
    parts = ["| subject | what |\n| --- | --- |\n" + "\n".join(rows)]
    for name, message in made["components"]["messages"].items():
        headers = message["headers"]["properties"]
        table = "\n".join(f"| `{header}` | {about['description']} |" for header, about in headers.items())
        parts.append(f"## Headers of {name}\n\n| header | meaning |\n| --- | --- |\n{table}")
    return "\n\n".join(parts)
