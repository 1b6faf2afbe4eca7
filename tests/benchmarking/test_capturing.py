"""Calls as CUDA graphs: the order of steps, with stand-ins for CUDA; `test_graphs_gpu.py` has the rest."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from ecoformer.benchmarking import capturing
from ecoformer.benchmarking.capturing import Room, captured, waits


class Device:
    """Writes down what it is told; captures end badly if they were spoilt."""

    def __init__(self):
        self.log, self.streams, self.spoilt, self.sync_mode = [], ["default"], False, 0

    def tell(self, what):
        return lambda *args: self.log.append((what, *args))

    @contextmanager
    def stream(self, stream):
        self.streams.append(stream.name)
        try:
            yield
        finally:
            self.streams.pop()

    def new_stream(self, index=None):
        name = f"side of {index}"
        return SimpleNamespace(name=name, wait_stream=lambda other: self.log.append(("wait", name)))

    def graph(self):
        device = self

        class Graph:
            def capture_begin(self, pool):
                device.log.append(("begin", pool, device.streams[-1]))

            def capture_end(self):
                device.log.append(("end", device.streams[-1]))
                if device.spoilt:
                    device.spoilt = False
                    raise RuntimeError("operation failed due to a previous error during capture")

            replay = "replay"

        return Graph()


@pytest.fixture
def device(monkeypatch):
    made = Device()
    pools = iter(range(1, 10))
    fakes = {
        "device": lambda index: made.stream(SimpleNamespace(name="default")),
        "stream": made.stream,
        "Stream": made.new_stream,
        "CUDAGraph": made.graph,
        "current_device": lambda: 3,
        "current_stream": lambda: SimpleNamespace(name="default", wait_stream=lambda other: None),
        "synchronize": made.tell("synchronize"),
        "empty_cache": made.tell("empty"),
        "graph_pool_handle": lambda: (0, next(pools)),
        "get_sync_debug_mode": lambda: made.sync_mode,
        "set_sync_debug_mode": made.tell("mode"),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
        monkeypatch.setattr(torch._C, name, made.tell(name), raising=False)
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *size, device: zeros(*size))
    monkeypatch.setattr(capturing, "_abandoned", [])
    return made


def test_warm_up_and_capture_on_one_stream(device):
    assert captured(lambda: device.log.append(("work", device.streams[-1]))) == "replay"
    work = ("work", "side of 3")
    assert device.log == [
        ("wait", "side of 3"),
        *[work] * 3,
        ("synchronize",),
        ("empty",),
        ("begin", (0, 1), "side of 3"),
        work,
        ("end", "side of 3"),
    ]


def test_graphs_of_a_room_share_it(device):
    room = Room(torch.device("cuda", 1))
    for _ in range(2):
        captured(lambda: None, room)
    assert [entry for entry in device.log if entry[0] == "begin"] == [("begin", (0, 1), "side of 1")] * 2


class Breaks:
    """Fails in the capture, not in the warm-up."""

    def __init__(self, device, spoils):
        self.device, self.spoils, self.calls = device, spoils, 0

    def __call__(self):
        self.calls += 1
        if self.calls == 4:
            self.device.spoilt = self.spoils
            raise ValueError("not while capturing")


def test_an_invalid_capture_is_ended(device):
    with pytest.raises(ValueError, match="not while capturing"):
        captured(Breaks(device, True), Room(torch.device("cuda", 2)))
    assert device.streams == ["default"]
    begun = device.log.index(("begin", (0, 1), "side of 2"))
    assert device.log[begun + 1 :] == [
        ("end", "side of 2"),
        ("_cuda_endAllocateToPool", 2, (0, 1)),
        ("_cuda_releasePool", 2, (0, 1)),
        ("synchronize",),
        ("begin", (0, 2), "side of 2"),  # one that ends well, for the generator
        ("end", "side of 2"),
    ]
    assert len(capturing._abandoned) == 1


def test_a_capture_that_is_still_valid_is_ended_by_pytorch(device):
    with pytest.raises(ValueError, match="not while capturing"):
        captured(Breaks(device, False))
    assert device.log[-1] == ("end", "side of 3")
    assert not capturing._abandoned


def test_names_before_pytorch_2_8(device, monkeypatch):
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", None)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateCurrentStreamToPool", device.tell("ended"), raising=False)
    with pytest.raises(ValueError, match="not while capturing"):
        captured(Breaks(device, True))
    assert ("ended", 3, (0, 1)) in device.log


def test_waits(device):
    def synchronises():
        raise RuntimeError("called a synchronizing CUDA operation")

    assert waits(synchronises)
    assert not waits(lambda: None)
    assert device.log == [("mode", "error"), ("mode", 0)] * 2
