"""Shared by every test: no real GPU in a process that may hold the simulated one."""

import os

# The simulated accelerator takes precedence over CUDA in torch.accelerator: the two never share a process.
os.environ["CUDA_VISIBLE_DEVICES"] = ""

pytest_plugins = ["tests.simulator.fixtures"]
