"""Who runs when, and with whom: queues, batchers, placement and retries (floor 2).

Everything that decides is a plain state machine, fed with the time and events; `service.py` is the only module of the
request's way that knows of the bus, the clock or asyncio. What is fed can be recorded (`event_log.py`) and replayed
(`replay.py`).
"""
