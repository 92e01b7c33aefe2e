"""Tests of what Triton's clients see; the servers are those of the integration tests."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "integration"))
