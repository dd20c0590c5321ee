"""Plans carried out on NumPy arrays by plain loops: what the real transports are measured against."""

from __future__ import annotations

import numpy as np

from meshrl.models.names import matrix


def full_tensors(placement, seed=0):
    """A different number in every element of every tensor."""
    rng = np.random.default_rng(seed)
    sizes = [int(np.prod(matrix(shape))) for shape in placement.tensors.values()]
    values = rng.permutation(sum(sizes)).astype(np.int64)
    parts = np.split(values, np.cumsum(sizes)[:-1])
    return [part.reshape(matrix(shape)) for part, shape in zip(parts, placement.tensors.values(), strict=True)]


def element_addresses(piece):
    """Where each element of a slice lies in its local parameter."""
    rows, cols = np.arange(piece["rows"]), np.arange(piece["cols"])
    return piece["offset"] + rows[:, None] * piece["row_stride"] + cols * piece["col_stride"]


def memories(placement, tensors=None):
    """Each rank's local parameters as flat arrays (-1 where nothing lies), filled from whole tensors if given."""
    found = [{} for _ in range(placement.world_size)]
    for piece in placement.slices:
        where = element_addresses(piece)
        own = found[piece["rank"]]
        name = placement.parameters[piece["parameter"]]
        size = max(len(own.get(name, ())), int(where.max()) + 1)
        grown = np.full(size, -1, np.int64)
        grown[: len(own.get(name, ()))] = own.get(name, ())
        if tensors is not None:
            box = tensors[piece["tensor"]][
                piece["row"] : piece["row"] + piece["rows"], piece["col"] : piece["col"] + piece["cols"]
            ]
            grown[where] = box
        own[name] = grown
    return found


def part_address(held, piece):
    """Addresses of a rectangle inside a slice."""
    where = element_addresses(held)
    row, col = piece["row"] - held["row"], piece["col"] - held["col"]
    assert row >= 0
    assert col >= 0
    assert row + piece["rows"] <= held["rows"]
    assert col + piece["cols"] <= held["cols"]
    return where[row : row + piece["rows"], col : col + piece["cols"]]


def carry_out(plan, source_memory):
    """The destination's memory after the plan, with a count of writes to every element."""
    target = memories(plan.destination)
    writes = [{name: np.zeros(len(v), int) for name, v in own.items()} for own in target]

    def write(number, piece, values):
        held = plan.destination.slices[number]
        name = plan.destination.parameters[held["parameter"]]
        where = part_address(held, piece)
        target[held["rank"]][name][where] = values
        writes[held["rank"]][name][where] += 1

    def read(number, piece):
        held = plan.source.slices[number]
        return source_memory[held["rank"]][plan.source.parameters[held["parameter"]]][part_address(held, piece)]

    for piece, ours, theirs in zip(plan.copies, plan.copy_source, plan.copy_destination, strict=True):
        write(theirs, piece, read(ours, piece))
    packed = {}
    for piece in plan.packs:
        packed[piece["message"], piece["place"]] = read(piece["slice"], piece)
    holders = {message: {int(plan.senders[message])} for message in range(len(plan.senders))}
    for message, origin, to in plan.hops.tolist():
        assert origin in holders[message], "a rank passes on what it does not have yet"
        holders[message].add(to)
    for piece in plan.drops:
        rank = plan.destination_ranks[plan.destination.slices["rank"][piece["slice"]]]
        assert int(rank) in holders[piece["message"]]
        write(piece["slice"], piece, packed[piece["message"], piece["place"]])
    return target, writes
