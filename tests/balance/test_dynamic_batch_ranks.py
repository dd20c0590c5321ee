"""The same number of micro-batches on every rank of a real process group, and one rank's failure on all of them.

A file of its own: the spawned processes import it, and need little else.
"""

import gc
import json
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch

from meshrl.balance import rearrange_micro_batches


def _rank(rank: int, directory: str) -> None:
    gc.disable()  # what is kept by a cycle stays kept, so that the count of threads at the end shows it
    threads = _threads()
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{directory}/init", rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    lengths = [[4, 4, 4, 4, 4], [9, 8, 9, 8, 7]][rank]
    mask = (torch.arange(9) < torch.tensor(lengths)[:, None]).long()
    outcome = {}
    for cap, fixed in ((17, None), (8, None), (18, 2)):
        try:
            parts, _ = rearrange_micro_batches(
                {"attention_mask": mask}, cap, torch.distributed.group.WORLD, fixed_num_micro_batches=fixed
            )
            outcome[cap] = [int(part["attention_mask"].sum()) for part in parts]
        except ValueError as error:
            outcome[cap] = str(error)
    torch.distributed.destroy_process_group()
    outcome["threads"] = _threads() - threads
    Path(directory, f"rank{rank}.json").write_text(json.dumps(outcome))


def _threads() -> int:
    """Count this process's threads, also those of C++; 0 where the system does not list them."""
    return len(os.listdir("/proc/self/task")) if sys.platform == "linux" else 0


def test_ranks_agree_on_the_count_and_on_failure(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(_rank, args=(str(tmp_path),), nprocs=2)
    light, heavy = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1))
    # Alone the light rank needs 2 micro-batches; the heavy one needs 3.
    assert len(light["17"]) == len(heavy["17"]) == 3
    assert all(0 < load <= 17 for load in light["17"] + heavy["17"])
    assert "sample 0 has 9 tokens" in heavy["8"]
    assert "another data-parallel rank" in light["8"]
    assert "5 samples with 41 tokens do not fit into fixed_num_micro_batches=2" in heavy["18"]
    assert "another data-parallel rank" in light["18"]
    # A failure that kept the group alive left gloo's threads to free tensors while Python ended: sometimes SIGABRT.
    assert (light["threads"], heavy["threads"]) == (0, 0)
