"""The scheduler role: it owns the queues of models, forms batches and sends them to workers.

Rooms, lowest first: `placement` (which instance), `batching` (which requests run together, and when), `sequences`
(models that keep state between requests), `model_scheduler` (one model: routes requests to its versions), `service` (the
shell on the bus) and `ownership` (which scheduler owns which queue).

Every policy is a plain state machine: events and the time go in, actions come out. Only `service` and `ownership` use
the bus, the clock or asyncio.
"""
