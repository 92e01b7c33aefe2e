"""`benchmarks` is no part of what is installed: it is found from the root of the repository."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[3]))
