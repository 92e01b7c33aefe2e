"""Workers: they load models, keep their instances, and run the batches that schedulers send.

- `main`, `settings`: one worker process; `service`: its records, heartbeats and counters; `batch_dispatch`: its batches;
  `queries`: its replies to gateways.
- `lifecycle`: which models are loaded, and how they are loaded, reloaded and unloaded.
- `execution`: how a batch runs on an instance.
- `ensembles`: models that are made of other models.
- `backend_api`: what a backend implements, and what it may use; `backends`: the backends; `python_stub`: what runs in the
  process of a Python model.
- `devices`: GPUs and their metrics, host policies, GPU memory shared with clients; `cuda`: instances on NVIDIA GPUs.

Rooms import in one direction: `devices`, `backend_api`, `execution`, then `cuda` and `ensembles`, `backends`,
`lifecycle`, and last the modules of this folder.
"""
