"""serialize: what arrives equals what was sent, and large memory travels beside the pickle, not in it."""

import pickle

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from meshrl.data.serialization import INLINE_BYTES, TensorEnvelope, dumps, loads, seal

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int16,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.float8_e4m3fn,
]


def carried(buffers: list[memoryview]) -> list[bytearray]:
    """What a transport delivers: the bytes, at another address, in writable memory."""
    return [bytearray(view) for view in buffers]


def sample(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 2 if dtype == torch.bool else 100, shape, generator=generator).to(dtype)


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    numbers = torch.complex64 if left.is_complex() else torch.float64
    return left.to(numbers).tolist() == right.to(numbers).tolist()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_and_view_arrives_equal(dtype: torch.dtype) -> None:
    whole = sample(dtype, 37, 211)
    sent = {"whole": whole, "rows": whole[5:30], "columns": whole[:, 3:200:2], "turned": whole.T}
    data, buffers = dumps(sent)
    received = loads(data, carried(buffers))
    for name, tensor in sent.items():
        assert same_bits(received[name], tensor), name
    assert len(buffers) == 4
    assert len(data) < INLINE_BYTES


def test_the_comparison_notices_one_flipped_byte() -> None:
    tensor = sample(torch.int64, 1000)
    data, buffers = dumps(tensor)
    damaged = carried(buffers)
    damaged[0][4321] ^= 1
    assert not same_bits(loads(data, damaged), tensor)


def test_contiguous_tensors_are_not_copied_by_sender_or_receiver() -> None:
    whole = torch.arange(100_000)
    part = whole[20_000:70_000]
    data, [buffer] = dumps(part)
    assert buffer.nbytes == part.numel() * 8
    assert np.frombuffer(buffer, np.int64).ctypes.data == part.data_ptr()
    received = loads(data, [buffer])
    assert received.data_ptr() == part.data_ptr()


def test_a_strided_view_sends_only_its_own_elements() -> None:
    column = torch.arange(60_000.0).view(6000, 10)[:, 4]
    data, [buffer] = dumps(column)
    assert buffer.nbytes == 6000 * 4
    assert torch.equal(loads(data, [buffer]), column)


def test_read_only_buffers_are_copied_so_that_writes_stay_private() -> None:
    data, buffers = dumps(torch.arange(1000))
    shared = [bytes(view) for view in buffers]
    first, second = loads(data, shared), loads(data, shared)
    first.zero_()
    assert torch.equal(second, torch.arange(1000))
    assert shared == [bytes(view) for view in buffers]


@pytest.mark.parametrize("shape", [(), (0,), (0, 7), (3, 0, 2), (1,)], ids=str)
def test_empty_scalar_and_tiny_tensors(shape: tuple[int, ...]) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.bool):
        tensor = torch.ones(shape, dtype=dtype)
        data, buffers = dumps(tensor)
        assert buffers == []
        received = loads(data, buffers)
        assert received.shape == shape
        assert same_bits(received, tensor)
        received.fill_(0)  # arrives writable


def test_gradients_do_not_travel_and_an_object_met_twice_arrives_once() -> None:
    leaf = torch.ones(2000, requires_grad=True)
    result = leaf * 3
    data, buffers = dumps([result, result, leaf])
    first, second, plain = loads(data, carried(buffers))
    assert first is second
    assert not first.requires_grad
    assert not plain.requires_grad
    assert len(buffers) == 2
    assert torch.equal(first, torch.full((2000,), 3.0))


def test_conjugated_view_arrives_resolved() -> None:
    lazy = torch.complex(torch.arange(900.0), torch.ones(900)).conj()
    data, buffers = dumps(lazy)
    assert torch.equal(loads(data, carried(buffers)).imag, -torch.ones(900))


def test_parameters_and_sparse_tensors_take_torchs_own_way() -> None:
    parameter = torch.nn.Parameter(torch.arange(1000.0))
    sparse = torch.eye(5).to_sparse()
    received = loads(*dumps([parameter, sparse]))
    assert isinstance(received[0], torch.nn.Parameter)
    assert torch.equal(received[0], parameter)
    assert torch.equal(received[1].to_dense(), torch.eye(5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
def test_jagged_tensors(dtype: torch.dtype) -> None:
    rows = [sample(dtype, length, 50) for length in (3, 0, 41, 1)]
    jagged = torch.nested.nested_tensor(rows, layout=torch.jagged)
    data, buffers = dumps(jagged)
    received = loads(data, carried(buffers))
    assert len(buffers) == 1
    assert received.layout == torch.jagged
    assert all(same_bits(got, row) for got, row in zip(received.unbind(), rows, strict=True))


def test_jagged_tensors_that_share_offsets_can_still_be_added() -> None:
    offsets = torch.tensor([0, 4, 4, 9])
    left, right = (torch.nested.nested_tensor_from_jagged(torch.arange(9.0) * k, offsets) for k in (1, 10))
    received = loads(*dumps({"left": left, "right": right}))
    assert torch.equal((received["left"] + received["right"]).values(), torch.arange(9.0) * 11)
    apart = [loads(*dumps(left)), loads(*dumps(right))]
    with pytest.raises(RuntimeError):
        apart[0] + apart[1]


def test_transposed_and_holed_jagged_tensors() -> None:
    rows = [torch.randn(3, 5), torch.randn(8, 5)]
    turned = torch.nested.nested_tensor(rows, layout=torch.jagged).transpose(1, 2)
    dense = torch.arange(30.0).view(3, 10)
    holed = torch.nested.narrow(dense, 1, torch.tensor([0, 1, 2]), torch.tensor([3, 4, 2]), layout=torch.jagged)
    received = loads(*dumps([turned, holed]))
    assert all(torch.equal(got, row.T) for got, row in zip(received[0].unbind(), rows, strict=True))
    assert [got.tolist() for got in received[1].unbind()] == [[0, 1, 2], [11, 12, 13, 14], [22, 23]]


def test_tensordict_with_dense_and_jagged_fields() -> None:
    jagged = torch.nested.nested_tensor([torch.arange(n) for n in (700, 2, 5)], layout=torch.jagged)
    batch = TensorDict({"x": torch.randn(3, 400).bfloat16(), "inner": {"y": torch.ones(3, 999)}, "j": jagged}, [3])
    data, buffers = dumps(batch)
    received = loads(data, carried(buffers))
    assert len(buffers) == 3
    assert received.batch_size == (3,)
    assert torch.equal(received["x"], batch["x"])
    assert torch.equal(received["inner", "y"], batch["inner", "y"])
    assert [len(row) for row in received["j"].unbind()] == [700, 2, 5]


def test_numpy_arrays_large_out_of_band_small_and_objects_in_band() -> None:
    big = np.arange(50_000, dtype=np.int32).reshape(200, 250)
    objects = np.array(["a" * 3000, {"k": torch.arange(5000)}, None], dtype=object)
    sent = {
        "big": big,
        "strided": big[::2, 1:200:3],
        "fortran": np.asfortranarray(big),
        "small": big[0, :9],
        "o": objects,
    }
    data, buffers = dumps(sent)
    received = loads(data, carried(buffers))
    assert sorted(view.nbytes for view in buffers) == sorted([200_000, 100 * 67 * 4, 200_000, 5000 * 8])
    for name in ("big", "strided", "fortran", "small"):
        np.testing.assert_array_equal(received[name], sent[name])
    assert received["o"][0] == "a" * 3000
    assert torch.equal(received["o"][1]["k"], torch.arange(5000))


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_envelopes_work_with_plain_pickle_of_any_protocol(protocol: int) -> None:
    jagged = torch.nested.nested_tensor([torch.ones(3), torch.ones(1)], layout=torch.jagged)
    fields = {"dense": sample(torch.bfloat16, 40, 50), "jagged": jagged, "twin": jagged * 2, "text": "as it is"}
    received = pickle.loads(pickle.dumps(seal(fields), protocol=protocol))
    assert same_bits(received["dense"], fields["dense"])
    assert torch.equal((received["jagged"] + received["twin"]).values(), torch.full((4,), 3.0))
    assert received["text"] == "as it is"
    received["dense"].zero_()


def test_envelopes_keep_memory_out_of_the_stream_of_plain_pickle() -> None:
    tensor = torch.randn(300, 300)
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(TensorEnvelope(tensor), protocol=5, buffer_callback=buffers.append)
    assert len(data) < 300
    assert buffers[0].raw().nbytes == 360_000
    assert pickle.loads(data, buffers=buffers).data_ptr() == tensor.data_ptr()
