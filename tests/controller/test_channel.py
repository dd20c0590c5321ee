import os
import socket
import threading
from contextlib import suppress

import numpy as np
import pytest
import torch

from meshrl.controller.worker_process import INLINE_BYTES, MAX_FDS, Parcel, receive_message, send_message
from meshrl.data.batch import DataProto


def open_fds():
    """The numbers of open files and what each is."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the listing's own
            found.add((number, os.readlink(f"/proc/self/fd/{number}")))
    return found


def carry(header, parcels):
    """Send over a socket pair, with a thread on the other side."""
    ours, theirs = socket.socketpair()
    got = []
    reader = threading.Thread(target=lambda: got.append(receive_message(theirs)))
    reader.start()
    send_message(ours, header, parcels)
    reader.join(10)
    ours.close()
    theirs.close()
    return got[0]


@pytest.mark.parametrize("size", [0, 1, 1000, INLINE_BYTES, 100_003, 3_000_001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_objects_arrive_equal_and_writable(size, dtype):
    tensor = torch.arange(size).to(dtype)
    obj = {"t": tensor, "a": np.arange(size // 2), "text": "x" * (size // 3), "n": None}
    before = open_fds()
    parcel = Parcel.pack(obj)
    header, (arrived,) = carry(("call", 7), [parcel])
    parcel.close()
    got = arrived.unpack()
    assert header == ("call", 7)
    assert torch.equal(got["t"], tensor)
    assert got["t"].dtype == dtype
    assert np.array_equal(got["a"], obj["a"])
    assert got["text"] == obj["text"]
    if size:
        got["t"].zero_()
        assert not got["t"].any()
        assert torch.equal(tensor, torch.arange(size).to(dtype))
    del got
    assert not open_fds() - before  # what tests before have left may be closed meanwhile


def test_large_text_does_not_go_through_the_socket():
    parcel = Parcel.pack(["word " * 100_000])
    assert parcel.fd is not None
    assert parcel.inline == []
    assert parcel.unpack() == ["word " * 100_000]


def test_one_parcel_for_many_is_written_once_and_writes_stay_private():
    source = torch.arange(50_000)
    parcel = Parcel.pack(source, receivers=3)
    copies = [carry(None, [parcel])[1][0].unpack() for _ in range(3)]
    parcel.close()
    copies[0].fill_(-1)
    copies[1][:10] = 5
    assert torch.equal(copies[2], source)
    assert copies[1][10:].equal(source[10:])
    assert int(copies[0].sum()) == -50_000


def test_only_a_slice_of_a_big_storage_travels():
    big = DataProto.from_dict({"x": torch.zeros(64, 10_000)})
    whole, part = Parcel.pack(big), Parcel.pack(big.chunk(8)[3])
    assert os.fstat(part.fd).st_size < os.fstat(whole.fd).st_size / 7
    whole.close()
    part.close()


def test_many_parcels_in_one_message():
    values = [torch.full((20_000,), index) for index in range(MAX_FDS)]
    parcels = [Parcel.pack(value) for value in values]
    _, arrived = carry(None, parcels)
    for parcel in parcels:
        parcel.close()
    assert all(torch.equal(parcel.unpack(), value) for parcel, value in zip(arrived, values, strict=True))


def test_end_of_stream():
    ours, theirs = socket.socketpair()
    with theirs:
        ours.sendall(b"abc")
        ours.close()
        assert receive_message(theirs) is None
