"""JetStream streams and consumers: declarations, pulls, acknowledged publishes, stored messages and objects."""

import weir.bus.nats.nats_py  # noqa: F401 - ahead of the modules of this package, which import nats-py
