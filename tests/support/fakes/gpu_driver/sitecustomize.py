"""Gives Weir's processes a machine with a driver and one GPU, on which no package for CUDA is installed.

With this folder on `PYTHONPATH`, `weir serve` starts a worker for GPU 0, and workers find that GPU.
"""

import sys

if "weir" in sys.orig_argv:
    from pathlib import Path

    sys.path.insert(0, str(Path(__file__).parents[4]))

    if "worker" in sys.orig_argv:
        from weir.worker.devices import gpus

        found = gpus.HostGpus((gpus.Gpu(0, "GPU-00000000-0000-0000-0000-000000000000", "fake", 1 << 34, (9, 0)),))
        gpus.find_gpus = lambda: found

    if "serve" in sys.orig_argv:
        import weir.commands.serve

        weir.commands.serve.count_gpus = lambda: 1
