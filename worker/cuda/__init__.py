"""Instances on NVIDIA GPUs: their streams, their pinned buffers, and batches on their way through a device.

Nothing of CUDA is imported before an instance on a GPU is made. Of NVIDIA's packages only `cuda.bindings` is used: its
runtime API is that of CUDA itself, which doesn't change its names, reports errors as values, and costs 0.4 us a call.
"""
