"""The devices of a worker: GPUs and their metrics, host policies, and GPU memory that clients share."""
