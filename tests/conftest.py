"""What holds for every test."""

import os

import hypothesis

# Tests tell nobody what they run; ONNX Runtime's packages would.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

# Tests start processes while clients of gRPC are at work: what gRPC does at a fork, for who forks and goes on, hangs then.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

# How long an example takes says nothing on machines that do other work too.
hypothesis.settings.register_profile("weir", deadline=None)
hypothesis.settings.load_profile("weir")
