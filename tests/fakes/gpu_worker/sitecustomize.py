"""Makes a worker whose interpreter finds this file have GPU 0 of the made-up runtime, and a backend that runs models on it.

With this folder on `PYTHONPATH`, `weir serve` runs models of backend `made_up` there: OUT is twice IN and one more. A value
of 666 makes the kernel read where nothing is, and so does any batch while the file `MADE_UP_GPU_FAULT` exists, once. Other
processes than workers are left alone.
"""

import sys

if "worker" in sys.orig_argv and "weir" in sys.orig_argv:
    from pathlib import Path

    tests = Path(__file__).parents[2]
    sys.path[:0] = [str(tests / "fakes"), str(tests / "unit" / "worker")]

    import worker_with_gpu

    worker_with_gpu.install()

if "serve" in sys.orig_argv and "weir" in sys.orig_argv:
    import weir.gpu_count

    weir.gpu_count.count_gpus = lambda: 1
