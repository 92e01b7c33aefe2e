"""The state of a cluster: collected from all processes, summarised, with its problems."""

import weir.bus.nats.nats_py  # noqa: F401 - ahead of the modules of this package, which import nats-py
