"""One thread for every test: tiny products are slower on two, and another cut of a sum has other last bits."""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported; subprocesses of tests inherit it
