"""What holds for every test."""

import os

# Tests tell nobody what they run; ONNX Runtime's packages would.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
