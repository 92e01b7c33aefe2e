"""Instances on NVIDIA GPUs: streams, pinned buffers, CUDA graphs, and how a batch runs on a device.

CUDA is not imported before an instance on a GPU is created. Of NVIDIA's packages only `cuda.bindings` is used: its runtime
API is that of CUDA itself, has stable names, returns errors as values, and costs 0.4 us for each call.
"""
