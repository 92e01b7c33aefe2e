"""`weir top`: the load of a cluster in the terminal, live."""

import weir.bus.nats.nats_py  # noqa: F401 - ahead of the modules of this package, which import nats-py
