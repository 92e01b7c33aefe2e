"""`weir status`: collects the state of a cluster, derives its problems and displays both."""

import weir.bus.nats.nats_py  # noqa: F401 - ahead of the modules of this package, which import nats-py
