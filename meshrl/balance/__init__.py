"""Balancing: equal work for every rank, and micro-batches under a hard cap of tokens."""

from meshrl.balance.batch_order import log_seqlen_unbalance, order_for_data_parallel, seqlen_metrics
from meshrl.balance.dynamic_batch import (
    pad_sequences_to_fixed_length,
    prepare_dynamic_batch,
    rearrange_micro_batches,
    restore_dynamic_batch,
    select_samples,
    sequence_lengths,
)
from meshrl.balance.micro_batches import SORT_STRATEGIES, order_micro_batches, plan_micro_batches
from meshrl.balance.partitions import ALGORITHMS, balanced_partition, get_seqlen_balanced_partitions
from meshrl.balance.workload import flops_workload, get_workload, squared_workload, tokens_workload

__all__ = [
    "ALGORITHMS",
    "SORT_STRATEGIES",
    "balanced_partition",
    "flops_workload",
    "get_seqlen_balanced_partitions",
    "get_workload",
    "log_seqlen_unbalance",
    "order_for_data_parallel",
    "order_micro_batches",
    "pad_sequences_to_fixed_length",
    "plan_micro_batches",
    "prepare_dynamic_batch",
    "rearrange_micro_batches",
    "restore_dynamic_batch",
    "select_samples",
    "seqlen_metrics",
    "sequence_lengths",
    "squared_workload",
    "tokens_workload",
]
