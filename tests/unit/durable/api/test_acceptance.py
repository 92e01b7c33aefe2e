"""Ids of requests that are answered later: who has none from a gateway reads and deletes nothing."""

from __future__ import annotations

import hashlib

import nats

from tests.support.gateway.async_frontend import Door, run
from weir.bus.naming import durable_subjects as subjects
from weir.durable.api.acceptance import ID_DIGITS, AsyncRequestIds


def test_an_id_proves_that_a_gateway_has_made_it() -> None:
    ids, others = AsyncRequestIds(lambda: b"a" * 32), AsyncRequestIds(lambda: b"b" * 32)
    made = ids.new()
    assert made != ids.new()
    assert ids.is_genuine(made)
    assert not others.is_genuine(made)
    changed = f"{made[:-1]}{'0' if made[-1] != '0' else '1'}"
    for id in ("", "x", made[:-1], made.upper(), changed, "é" * ID_DIGITS, "0" * ID_DIGITS):
        assert id == made or not ids.is_genuine(id)


def test_the_id_of_a_key_follows_from_the_secret_alone() -> None:
    ids, same, others = (AsyncRequestIds(lambda secret=secret: secret * 32) for secret in (b"a", b"a", b"b"))  # type: ignore[misc]
    parts = ("m", "1", "acme", "order-1")
    assert ids.of_key(*parts) == same.of_key(*parts) != others.of_key(*parts)
    assert ids.is_genuine(ids.of_key(*parts))
    assert (
        len({ids.of_key(*parts), ids.of_key("m", "1", "acmeo", "rder-1"), ids.of_key("m", "", "acme", "order-1")}) == 3
    )
    plain = hashlib.sha256()
    for part in (b"weir-idempotency", *(part.encode() for part in parts)):
        plain.update(len(part).to_bytes(8, "big") + part)
    assert ids.of_key(*parts)[:32] != plain.hexdigest()[:32]


def test_records_of_nats_producers_are_neither_told_nor_deleted(nats_url: str) -> None:
    async def scenario(door: Door) -> None:
        jetstream = door.client.jetstream()
        told = {"Weir-Id": "invoice-1", "Weir-Model": "m", "Weir-Outcome": "succeeded"}
        await jetstream.publish(subjects.result("m", "invoice-1"), b"{}", headers=told)
        door.intake.takes.clear()
        await jetstream.publish(subjects.job_event("m", "invoice-2"), b"{}", headers={"Nats-Msg-Id": "invoice-2"})
        unknown = await door.ask("GET", "/v2/jobs/invoice-3")
        for id in ("invoice-1", "invoice-2"):
            for method, path in (("GET", ""), ("GET", "/result"), ("POST", "/cancel")):
                answer = await door.ask(method, f"/v2/jobs/{id}{path}")
                assert (answer.status, answer.headers.keys()) == (404, unknown.headers.keys())
                assert answer.body == unknown.body.replace(b"invoice-3", id.encode())
            assert (await door.ask("DELETE", f"/v2/jobs/{id}")).status == 204
        assert (await jetstream.get_last_msg(subjects.RESULT_STREAM, subjects.result("m", "invoice-1"))).data == b"{}"
        assert await door.queued() == 1
        await jetstream.purge_stream(subjects.QUEUE_STREAM)
        door.intake.takes.set()

    run(nats_url, scenario)


def test_a_gateway_that_starts_later_has_the_same_secret(nats_url: str) -> None:
    secrets: list[bytes] = []

    async def scenario(door: Door) -> None:
        secrets.append(door.later.secret.value)

    run(nats_url, scenario)
    run(nats_url, scenario)
    assert len(set(secrets)) == 1
    assert len(secrets[0]) >= 32


def test_a_secret_that_was_lost_is_stored_again(nats_url: str) -> None:
    async def scenario(door: Door) -> None:
        before = door.later.secret.value
        await door.client.jetstream().delete_stream(f"KV_{subjects.SECRETS_BUCKET}")
        door.later.bus.suspect_loss("the test has removed a stream")
        while True:
            try:
                found = await door.client.jetstream().get_last_msg(
                    f"KV_{subjects.SECRETS_BUCKET}", "$KV.secrets.job-ids"
                )
                break
            except nats.js.errors.NotFoundError:
                continue
        assert found.data == before == door.later.secret.value

    run(nats_url, scenario)
