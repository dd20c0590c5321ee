"""Times DataProto's operations against the same work done the plain way, and against verl's DataProto if installed.

    python benchmarks/dataproto.py [--rows 1024] [--cols 8192] [--repeats 5]

The batch has 3 int64 fields, 4 float32 fields and 2 object fields. "Plain" is a dict of tensors and lists with torch's
own operations, and in-band pickle. Every figure is the best of `--repeats` runs, the sides taking turns, in one process
but for the row that dispatches.
A ratio above 1 means that DataProto is faster.
"""

import argparse
import gc
import io
import itertools
import multiprocessing
import pickle
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from meshrl.controller import ClassWithInitArgs, Dispatch, ResourcePool, Worker, create_worker_group, register
from meshrl.data.batch import DataProto
from meshrl.data.serialization import dumps, loads

PARTS = 4


@dataclass
class Row:
    """One line of the table: the seconds of each side, by the side's name; the first is ours."""

    work: str
    seconds: dict[str, float]


@dataclass
class Sides:
    """The same batch in the hands of each side."""

    ours: DataProto
    plain: dict[str, Any]
    verl: Any | None
    repeats: int

    def measure(self, work: str, **sides: Callable[[], Any] | None) -> Row:
        """Time the sides in turns, so that a disturbance of the machine hits all of them; keep each one's best."""
        best = {name: float("inf") for name, function in sides.items() if function is not None}
        for _ in range(self.repeats):
            for name in best:
                function = sides[name]
                assert function is not None
                gc.collect()
                gc.disable()  # a collection of the whole heap, set off by chance, takes longer than some of the work
                start = time.perf_counter()
                result = function()
                best[name] = min(best[name], time.perf_counter() - start)
                gc.enable()
                del result
        return Row(work, best)


def container_rows(sides: Sides) -> list[Row]:
    """chunk, concat, union and repeat."""
    ours, plain, verl = sides.ours, sides.plain, sides.verl
    our_parts, plain_parts = ours.chunk(PARTS), plain_chunk(plain)
    verl_parts = verl and verl.chunk(PARTS)
    new_field = {"values": torch.ones_like(plain["float0"])}
    our_extra, verl_extra = DataProto.from_dict(new_field), verl and type(verl).from_dict(dict(new_field))
    # pickling in band is a deep copy that every side can do
    our_twin, plain_twin, verl_twin = (pickle.loads(pickle.dumps(side)) for side in (ours, plain, verl))
    return [
        sides.measure(
            f"chunk into {PARTS}",
            ours=lambda: ours.chunk(PARTS),
            plain=lambda: plain_chunk(plain),
            verl=verl and (lambda: verl.chunk(PARTS)),
        ),
        sides.measure(
            f"concat {PARTS}",
            ours=lambda: DataProto.concat(our_parts),
            plain=lambda: plain_concat(plain_parts),
            verl=verl and (lambda: type(verl).concat(verl_parts)),
        ),
        sides.measure(
            "union, new field",
            ours=lambda: ours.select().union(our_extra),
            plain=lambda: plain_union(plain, new_field),
            verl=verl and (lambda: verl.select().union(verl_extra)),
        ),
        sides.measure(
            "union, equal fields",
            ours=lambda: ours.select().union(our_twin),
            plain=lambda: plain_union(plain, plain_twin),
            verl=verl and (lambda: verl.select().union(verl_twin)),
        ),
        sides.measure(
            "repeat 2, interleaved",
            ours=lambda: ours.repeat(2),
            plain=lambda: plain_repeat(plain, 2),
            verl=verl and (lambda: verl.repeat(2)),
        ),
    ]


def serialise_rows(sides: Sides) -> list[Row]:
    """There and back, in one process: with and without one copy of the memory on the way, as shared memory costs it."""
    ours, plain, verl = sides.ours, sides.plain, sides.verl
    size = sum(-(-view.nbytes // 64) * 64 for view in dumps(ours)[1])
    block = bytearray(size)

    def carried() -> DataProto:
        data, buffers = dumps(ours)
        target, start, arrived = memoryview(block), 0, []
        for view in buffers:
            arrived.append(target[start : start + view.nbytes])
            np.frombuffer(arrived[-1], np.uint8)[:] = np.frombuffer(view, np.uint8)
            start += -(-view.nbytes // 64) * 64
        return loads(data, arrived)

    def in_band(value: Any) -> Any:
        stream = io.BytesIO()
        pickle.dump(value, stream, protocol=5)
        return pickle.loads(stream.getbuffer())

    there = {"plain": lambda: in_band(plain), "verl": verl and (lambda: in_band(verl))}
    return [
        sides.measure("serialise", ours=lambda: loads(*dumps(ours)), **there),
        sides.measure("serialise, memory carried", ours=carried, **there),
        sides.measure("serialise, in-band pickle", ours=lambda: in_band(ours), **there),
    ]


class Echo(Worker):
    """Returns what it gets."""

    @register(Dispatch.DP_COMPUTE_PROTO)
    def echo(self, data: DataProto) -> DataProto:
        """The shard itself."""
        return data


def plain_echo(connection: Connection) -> None:
    """The plain way's worker: pickles through a pipe."""
    while (received := connection.recv_bytes()) != b"":
        connection.send_bytes(pickle.dumps(pickle.loads(received)))


def plain_dispatch(connections: list[Connection], batch: dict[str, Any]) -> dict[str, Any]:
    """Chunk, send, receive, concatenate. Rows are cloned: torch pickles the whole storage of a view."""
    for connection, part in zip(connections, plain_chunk(batch), strict=True):
        own = {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in part.items()}
        connection.send_bytes(pickle.dumps(own))
    return plain_concat([pickle.loads(connection.recv_bytes()) for connection in connections])


def dispatch_rows(sides: Sides) -> list[Row]:
    """Dispatch to worker processes that return what they get, and collect."""
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in range(PARTS)]
    processes = [context.Process(target=plain_echo, args=(theirs,), daemon=True) for _, theirs in pipes]
    for process in processes:
        process.start()
    connections = [ours for ours, _ in pipes]
    pool = ResourcePool([PARTS], use_gpu=False)
    try:
        with create_worker_group(pool, ClassWithInitArgs(Echo)) as group:
            result = group.echo(sides.ours)  # both sides warm, and nothing lost on the way
            plain = plain_dispatch(connections, sides.plain)
            tensors = [key for key, value in sides.plain.items() if isinstance(value, torch.Tensor)]
            assert all(torch.equal(result.batch[key], sides.plain[key]) for key in tensors)
            assert all(torch.equal(plain[key], sides.plain[key]) for key in tensors)
            del result, plain
            return [
                sides.measure(
                    f"dispatch to {PARTS} workers, collect",
                    ours=lambda: group.echo(sides.ours),
                    plain=lambda: plain_dispatch(connections, sides.plain),
                )
            ]
    finally:
        for connection in connections:
            connection.send_bytes(b"")


# The sections of the table.
SECTIONS: tuple[Callable[[Sides], list[Row]], ...] = (container_rows, serialise_rows, dispatch_rows)


def make_fields(rows: int, cols: int) -> tuple[dict[str, torch.Tensor], dict[str, list[Any]]]:
    """3 int64 fields, 4 float32 fields, 2 object fields (short strings and small dicts)."""
    torch.manual_seed(0)
    tensors = {f"int{number}": torch.randint(0, 150_000, (rows, cols)) for number in range(3)}
    tensors |= {f"float{number}": torch.randn(rows, cols) for number in range(4)}
    objects: dict[str, list[Any]] = {
        "uid": [f"sample-{number}" for number in range(rows)],
        "reward_model": [{"style": "rule", "ground_truth": str(number)} for number in range(rows)],
    }
    return tensors, objects


def make_verl(tensors: dict[str, torch.Tensor], objects: dict[str, list[Any]]) -> Any | None:
    """verl's DataProto of the same fields, or None where verl is not installed."""
    try:
        from verl import DataProto as VerlDataProto
    except ImportError:
        return None
    arrays = {key: np.array(value, dtype=object) for key, value in objects.items()}
    return VerlDataProto.from_dict(tensors=dict(tensors), non_tensors=arrays)


def plain_chunk(batch: dict[str, Any]) -> list[dict[str, Any]]:
    size = len(batch["uid"]) // PARTS
    return [{key: value[size * n : size * (n + 1)] for key, value in batch.items()} for n in range(PARTS)]


def plain_concat(parts: list[dict[str, Any]]) -> dict[str, Any]:
    columns = {key: [part[key] for part in parts] for key in parts[0]}
    return {
        key: torch.cat(column) if isinstance(column[0], torch.Tensor) else list(itertools.chain.from_iterable(column))
        for key, column in columns.items()
    }


def plain_union(left: dict[str, Any], right: dict[str, Any]) -> dict[str, Any]:
    for key in left.keys() & right.keys():
        value = left[key]
        if not (torch.equal(value, right[key]) if isinstance(value, torch.Tensor) else value == right[key]):
            raise ValueError(key)
    return {**left, **right}


def plain_repeat(batch: dict[str, Any], times: int) -> dict[str, Any]:
    return {
        key: value.repeat_interleave(times, dim=0)
        if isinstance(value, torch.Tensor)
        else [entry for entry in value for _ in range(times)]
        for key, value in batch.items()
    }


def print_table(console: Console, title: str, rows: list[Row]) -> None:
    names = list(dict.fromkeys(name for row in rows for name in row.seconds))
    table = Table(title=title)
    table.add_column("work")
    for name in names:
        table.add_column(f"{name} ms", justify="right")
    for name in names[1:]:
        table.add_column(f"{name} / ours", justify="right")
    for row in rows:
        times = [f"{row.seconds[name] * 1e3:.3f}" if name in row.seconds else "" for name in names]
        ours = row.seconds["ours"]
        ratios = [f"{row.seconds[name] / ours:.2f}x" if name in row.seconds else "" for name in names[1:]]
        table.add_row(row.work, *times, *ratios)
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1024, help=f"samples, divisible by {PARTS}")
    parser.add_argument("--cols", type=int, default=8192, help="tokens of a sample")
    parser.add_argument("--repeats", type=int, default=5, help="runs of each piece of work; the best one counts")
    options = parser.parse_args()
    if options.rows % PARTS:
        parser.error(f"--rows ({options.rows}) must be divisible by {PARTS}")
    tensors, objects = make_fields(options.rows, options.cols)
    ours = DataProto.from_dict(tensors, objects)
    sides = Sides(ours, {**tensors, **objects}, make_verl(tensors, objects), options.repeats)
    rows = [row for section in SECTIONS for row in section(sides)]
    size = ours.print_size()["batch"] / 2**20
    title = f"DataProto, {options.rows} x {options.cols} ({size:.0f} MiB), {torch.get_num_threads()} thread(s)"
    print_table(Console(), title, rows)


if __name__ == "__main__":
    main()
