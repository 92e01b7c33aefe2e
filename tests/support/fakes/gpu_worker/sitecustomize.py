"""Gives workers GPU 0 of the fake CUDA runtime, and a backend that runs models on it.

With this folder on `PYTHONPATH`, `weir serve` runs models of backend `made_up` there: OUT is twice IN and one more. The
value 666 makes the kernel read outside any allocation, and so does one batch once the file `MADE_UP_GPU_FAULT` exists.
Processes other than workers are not affected.
"""

import sys

if "worker" in sys.orig_argv and "weir" in sys.orig_argv:
    from pathlib import Path

    fakes = Path(__file__).parents[1]
    sys.path[:0] = [str(fakes / "site"), str(fakes.parents[2])]

    from tests.support.fakes import worker_gpu

    worker_gpu.install()

if "serve" in sys.orig_argv and "weir" in sys.orig_argv:
    import weir.commands.serve

    weir.commands.serve.count_gpus = lambda: 1
