"""The benchmarks are scripts of one folder that import each other by name, as Python runs them."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))
