"""DataProto across process borders and to disk: equal on arrival, tensors' memory beside the stream."""

import multiprocessing
import pickle
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from meshrl.data import plain_data
from meshrl.data.batch import DataProto
from meshrl.data.serialization import dumps, loads


def make() -> DataProto:
    offsets = torch.tensor([0, 600, 600, 1700])
    tensors = {
        "ids": torch.arange(3000).view(3, 1000),
        "half": torch.linspace(-3, 3, 4500).view(3, 1500).bfloat16(),
        "mask": torch.arange(9000).view(3, 3000) % 3 == 0,
        "tokens": torch.nested.nested_tensor_from_jagged(torch.arange(1700), offsets),
        "log_probs": torch.nested.nested_tensor_from_jagged(-torch.arange(1700.0), offsets),
    }
    objects = {"uid": ["a", "b", "c"], "images": [torch.ones(900), {"t": torch.zeros(2)}, None]}
    return DataProto.from_dict(tensors, objects, {"step": 3, "lengths": np.arange(4)})


def assert_equal(got: DataProto, sent: DataProto) -> None:
    assert got.batch is not None
    assert sent.batch is not None
    assert list(got.batch.keys()) == list(sent.batch.keys())
    for key, value in sent.batch.items():
        assert got.batch[key].dtype == value.dtype
        for left, right in zip(got.batch[key].unbind(), value.unbind(), strict=True):
            assert torch.equal(left, right), key
    assert got.non_tensor_batch["uid"].tolist() == sent.non_tensor_batch["uid"].tolist()
    assert torch.equal(got.non_tensor_batch["images"][0], sent.non_tensor_batch["images"][0])
    assert got.meta_info["step"] == sent.meta_info["step"]
    difference = got.batch["log_probs"] + got.batch["tokens"]
    assert difference.values().abs().max() == 0
    got.check_consistency()


TENSOR_BYTES = 3000 * 8 + 4500 * 2 + 9000 + 1700 * 8 + 1700 * 4


@pytest.mark.parametrize("protocol", range(2, 6))
def test_in_band_pickle(protocol: int) -> None:
    got = pickle.loads(pickle.dumps(make(), protocol=protocol))
    assert_equal(got, make())
    got.batch["ids"].zero_()


def test_plain_pickle_moves_tensors_out_of_band_without_a_copy() -> None:
    sent = make()
    buffers: list[pickle.PickleBuffer] = []
    stream = pickle.dumps(sent, protocol=5, buffer_callback=buffers.append)
    got = pickle.loads(stream, buffers=buffers)
    assert_equal(got, sent)
    # what is left in the stream is the tensor inside an object array, which plain pickle cannot see into
    assert len(stream) < 900 * 4 + 4000
    assert sum(buffer.raw().nbytes for buffer in buffers) >= TENSOR_BYTES
    assert sent.batch is not None
    for key in ("ids", "half", "mask"):
        assert got.batch[key].data_ptr() == sent.batch[key].data_ptr()


def test_dumps_moves_also_the_tensors_inside_objects_out_of_band() -> None:
    sent = make()
    data, buffers = dumps(sent)
    assert len(data) < 3000
    assert sum(view.nbytes for view in buffers) == TENSOR_BYTES + 900 * 4
    assert_equal(loads(data, [bytearray(view) for view in buffers]), sent)
    damaged = [bytearray(view) for view in buffers]
    damaged[0][77] ^= 1
    with pytest.raises(AssertionError):
        assert_equal(loads(data, damaged), sent)


def test_a_chunk_sends_only_its_own_rows() -> None:
    data = make()
    for number in range(3):
        part = data.slice(number, number + 1)
        _, buffers = dumps(part)
        jagged = (600, 0, 1100)[number]
        image = 900 * 4 if number == 0 else 0
        assert sum(view.nbytes for view in buffers) == 8000 + 3000 + 3000 + jagged * 12 + image


def test_read_only_memory_as_from_an_object_store_gives_private_tensors() -> None:
    sent = make()
    buffers: list[pickle.PickleBuffer] = []
    stream = pickle.dumps(sent, protocol=5, buffer_callback=buffers.append)
    store = [bytes(buffer) for buffer in buffers]
    first, second = pickle.loads(stream, buffers=store), pickle.loads(stream, buffers=store)
    first.batch["ids"].zero_()
    assert_equal(second, sent)


def test_rays_pickler_moves_tensors_out_of_band() -> None:
    cloudpickle = pytest.importorskip("ray.cloudpickle")
    sent = make()
    buffers: list[pickle.PickleBuffer] = []
    stream = cloudpickle.dumps(sent, protocol=5, buffer_callback=buffers.append)
    assert sum(buffer.raw().nbytes for buffer in buffers) >= TENSOR_BYTES
    assert_equal(pickle.loads(stream, buffers=[bytes(buffer) for buffer in buffers]), sent)


def send(connection: Connection, data: DataProto) -> None:
    stream, buffers = dumps(data)
    connection.send((stream, len(buffers)))
    for view in buffers:
        connection.send_bytes(view)


def receive(connection: Connection) -> DataProto:
    stream, count = connection.recv()
    return loads(stream, [bytearray(connection.recv_bytes()) for _ in range(count)])


def answer(connection: Connection) -> None:
    data = receive(connection)
    assert data.batch is not None
    data.batch["ids"] += 1
    send(connection, data)


def test_there_and_back_through_another_process() -> None:
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    process = context.Process(target=answer, args=(there,))
    process.start()
    send(here, make())
    assert here.poll(60)
    got = receive(here)
    process.join(60)
    assert process.exitcode == 0
    assert got.batch is not None
    got.batch["ids"] -= 1
    assert_equal(got, make())


def test_save_and_load(tmp_path: Path) -> None:
    path = tmp_path / "batch.dataproto"
    make().save_to_disk(path)
    assert_equal(DataProto.load_from_disk(str(path)), make())
    assert [entry.name for entry in tmp_path.iterdir()] == ["batch.dataproto"]
    plain_data.save({"not": "a proto"}, tmp_path / "other")
    with pytest.raises(ValueError, match="holds a dict, not a DataProto"):
        DataProto.load_from_disk(tmp_path / "other")
    inner = DataProto.from_dict({"x": torch.arange(2), "nested": TensorDict({"y": torch.ones(2, 3)}, [2])})
    inner.save_to_disk(path)
    assert torch.equal(DataProto.load_from_disk(path).batch["nested", "y"], torch.ones(2, 3))


def test_a_pickle_is_not_loaded(tmp_path: Path) -> None:
    path = tmp_path / "batch.dataproto"
    for protocol in range(2, 6):
        path.write_bytes(pickle.dumps(make(), protocol))
        with pytest.raises(ValueError, match=r"is a pickle, .*'meshrl convert .*batch.dataproto NEW --trust-pickle'"):
            DataProto.load_from_disk(path)
    path.write_bytes(pickle.dumps(make(), 0))
    with pytest.raises(ValueError, match=r"no whole file of DataProto.save_to_disk: .* cannot be read"):
        DataProto.load_from_disk(path)


def test_a_failed_save_leaves_the_old_file_and_no_rest(tmp_path: Path) -> None:
    path = tmp_path / "batch.dataproto"
    make().save_to_disk(path)
    broken = make()
    broken.meta_info["calls"] = [1, {"back": lambda: None}]
    with pytest.raises(ValueError, match=r"DataProto\['meta_info'\]\['calls'\]\[1\]\['back'\] is a builtins.function"):
        broken.save_to_disk(path)
    assert_equal(DataProto.load_from_disk(path), make())
    assert len(list(tmp_path.iterdir())) == 1


class Rollouts(DataProto):
    """A subclass, to see that it survives."""


def test_subclasses_and_empty_protos_survive() -> None:
    got = pickle.loads(pickle.dumps(Rollouts.from_dict({"a": torch.ones(2)})))
    assert type(got) is Rollouts
    assert type(got[:1]) is Rollouts
    empty = loads(*dumps(DataProto(meta_info={"k": 1})))
    assert (len(empty), empty.batch, empty.meta_info) == (0, None, {"k": 1})


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda_tensors_arrive_on_the_cpu() -> None:
    sent = make().to("cuda")
    got = loads(*dumps(sent))
    assert all(value.device.type == "cpu" for value in got.batch.values())
    assert_equal(got, make())
