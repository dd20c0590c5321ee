"""Importing this imports Megatron-Core as the CPU needs it; see megatron_cpu.py."""

import importlib.util

import megatron_cpu

if importlib.util.find_spec("megatron") is not None:
    megatron_cpu.import_without_fusion()
