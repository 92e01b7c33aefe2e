"""JetStream key-value buckets: the registry, settings, known and desired models, leases, presence."""

import weir.bus.nats.nats_py  # noqa: F401 - ahead of the modules of this package, which import nats-py
