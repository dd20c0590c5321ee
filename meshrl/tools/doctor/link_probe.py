"""One rank of the short run that measures links: `python -m meshrl.tools.doctor.link_probe RANK RANKS STORE BACKEND`.

Rank 0 exchanges messages with every other rank in turn and prints the measurements as one line of JSON.
"""

import datetime
import json
import statistics
import sys
import time
from typing import Any

PINGS, REPEATS = 40, 3
MESSAGE_BYTES = 32 * 2**20
SECONDS = 20


def main(rank: int, ranks: int, store: str, backend: str) -> None:
    """Join the process group of `ranks` ranks, then measure (rank 0) or echo messages (every other rank)."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if backend == "auto":  # NCCL if there is a GPU for every rank
        has_gpus = torch.cuda.device_count() >= ranks and dist.is_nccl_available()
        backend = "nccl" if has_gpus else "gloo"
    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend,
        init_method=f"file://{store}",
        rank=rank,
        world_size=ranks,
        timeout=datetime.timedelta(seconds=SECONDS),
    )
    token = torch.zeros(2, dtype=torch.float64, device=device)
    block = torch.zeros(MESSAGE_BYTES // 4, device=device)
    dist.all_reduce(block)  # sets up all connections before anything is timed
    pairs = [with_peer(peer, token, block) for peer in range(1, ranks)] if rank == 0 else []
    if rank != 0:
        answer(token, block)
    dist.barrier()
    dist.destroy_process_group()
    if rank == 0:
        sys.stdout.write(json.dumps({"backend": backend, "pairs": pairs}) + "\n")


def with_peer(peer: int, token: Any, block: Any) -> dict[str, float]:
    """Measure latency (microseconds), bandwidth (10^9 bytes a second) and clock offset (seconds) to rank `peer`.

    A positive clock offset means that the peer's clock is ahead of this rank's clock.
    """
    import torch.distributed as dist

    trips, offsets = [], []
    for _ in range(PINGS):
        before, wall = time.perf_counter(), time.time()
        dist.send(token, peer)
        dist.recv(token, peer)
        theirs = float(token[0])  # reading a GPU tensor also waits for the message
        trip = time.perf_counter() - before
        trips.append(trip)
        offsets.append((trip, theirs - (wall + trip / 2)))
    seconds = []
    for _ in range(REPEATS):
        before = time.perf_counter()
        dist.send(block, peer)
        dist.recv(token, peer)
        float(token[0])
        seconds.append(time.perf_counter() - before)
    half = statistics.median(trips) / 2
    took = max(min(seconds) - half, 1e-9)
    return {
        "peer": peer,
        "latency_us": half * 1e6,
        "gbs": MESSAGE_BYTES / took / 1e9,
        # The quickest round trip gives the tightest bound on the clock error: half its time.
        "clock_offset_s": min(offsets)[1],
        "clock_error_s": min(offsets)[0] / 2,
    }


def answer(token: Any, block: Any) -> None:
    """Echo the messages of `with_peer` from any rank but 0, and reply to each ping with this rank's clock."""
    import torch.distributed as dist

    for _ in range(PINGS):
        dist.recv(token, 0)
        token[0] = time.time()
        dist.send(token, 0)
    for _ in range(REPEATS):
        dist.recv(block, 0)
        dist.send(token, 0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
