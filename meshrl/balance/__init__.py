"""Load balancing: equal work for every data-parallel rank, and micro-batches under a hard token cap.

partitions:     split items into k parts of nearly equal work; workload functions (tokens, squared, FLOPs)
micro_batches:  plan micro-batches, cut batches into them, restore the order, order a batch for data parallelism
"""

from meshrl.balance.micro_batches import (
    SORT_STRATEGIES,
    log_seqlen_unbalance,
    order_for_data_parallel,
    order_micro_batches,
    pad_sequences_to_fixed_length,
    plan_micro_batches,
    prepare_dynamic_batch,
    rearrange_micro_batches,
    restore_dynamic_batch,
    select_samples,
    seqlen_metrics,
    sequence_lengths,
)
from meshrl.balance.partitions import (
    ALGORITHMS,
    balanced_partition,
    flops_workload,
    get_seqlen_balanced_partitions,
    get_workload,
    squared_workload,
    tokens_workload,
)

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
