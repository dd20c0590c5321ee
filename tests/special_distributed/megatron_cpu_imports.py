"""Importing this imports Megatron-Core as the CPU needs it, and our engine on it; see megatron_cpu.py."""

import importlib
import importlib.util

import megatron_cpu

if importlib.util.find_spec("megatron") is not None:
    megatron_cpu.import_without_fusion()
    importlib.import_module("meshrl.engines.megatron.megatron_engine")
    importlib.import_module("meshrl.engines.megatron.megatron_state")
