"""The pretended CUDA device reports everything that it promises to."""

from __future__ import annotations

import gc

import pytest
import torch

from support.pretend_cuda import CudaTensor, pretended_cuda


@pytest.fixture
def device():
    with pretended_cuda() as device:
        yield device


def cuda(*values, dtype=torch.float32):
    return torch.tensor(values, dtype=dtype, device="cuda")


# -- devices


def test_tensors_say_that_they_are_on_the_gpu(device):
    x = torch.ones(2, 3, device="cuda")
    for y in (x, x + 1, x[0], x.to(torch.bfloat16), torch.empty_like(x), torch.ones(2).to("cuda")):
        assert (y.device.type, y.device.index, y.is_cuda) == ("cuda", 0, True)
    assert not x.cpu().is_cuda
    assert torch.cuda.is_available()
    assert torch.cuda.device_count() == 1


@pytest.mark.parametrize(
    "mix",
    [
        lambda gpu, cpu: gpu + cpu,
        lambda gpu, cpu: gpu.add_(cpu),
        lambda gpu, cpu: cpu.add_(gpu),
        lambda gpu, cpu: torch.where(gpu > 0, gpu, cpu),
        lambda gpu, cpu: torch.cat([gpu, cpu]),
        lambda gpu, cpu: torch.nn.functional.linear(gpu, torch.eye(3)),
        lambda gpu, cpu: gpu.index_put_((torch.zeros(3, dtype=torch.long, device="cuda"),), cpu),
    ],
)
def test_mixed_devices_raise(device, mix):
    with pytest.raises(RuntimeError, match="two devices"):
        mix(cuda(1, 2, 3), torch.ones(3))


def test_a_cpu_tensor_takes_no_index_of_the_gpu(device):
    with pytest.raises(RuntimeError, match="indices should be"):
        torch.ones(3)[cuda(0, dtype=torch.long)]


@pytest.mark.parametrize(
    "mix",
    [
        lambda one, other: one + other,
        lambda one, other: one.add_(other.sum()),
        lambda one, other: torch.cat([one, other]),
        lambda one, other: torch.where(one > 0, one, other),
        lambda one, other: one[other.long()],
        lambda one, other: one.index_put_((one.long(),), other),
        lambda one, other: one.index_copy_(0, one.long(), other),
    ],
)
def test_two_gpus_do_not_mix(mix):
    with pretended_cuda(devices=2), pytest.raises(RuntimeError, match=r"two devices, cuda:0 and cuda:1|same device"):
        mix(torch.zeros(1, device="cuda:0"), torch.zeros(1, device="cuda:1"))


def test_two_gpus_have_their_own_tensors_and_memory():
    with pretended_cuda(devices=2) as device:
        first, second = torch.ones(4, device="cuda"), torch.ones(8, device="cuda:1")
        with torch.cuda.device(1):
            third = torch.ones(16, device="cuda")
        copy = first.to("cuda:1")
        target = torch.zeros(4, device="cuda:1").copy_(first * 2)
        assert [str(x.device) for x in (first, second, second + 1, third, third[1:], copy)] == ["cuda:0"] + [
            "cuda:1"
        ] * 5
        assert target.tolist() == [2, 2, 2, 2]
        first.zero_()
        assert copy.sum().item() == 4
        assert (device.memories[0].live(), torch.cuda.memory_allocated(0)) == (16, 16)
        assert torch.cuda.memory_allocated("cuda:1") == 32 + 64 + 16 + 16
        assert torch.cuda.device_count() == 2


def test_a_number_of_the_host_may_join(device):
    assert (cuda(1, 2) * torch.tensor(3.0)).tolist() == [3, 6]


def test_numpy_wants_a_copy(device):
    with pytest.raises(TypeError, match="to numpy"):
        cuda(1).numpy()


def test_a_model_keeps_tied_weights(device):
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(2, 2, bias=False), "b": torch.nn.Linear(2, 2, bias=False)})
    model["b"].weight = model["a"].weight
    x = torch.ones(1, 2)
    want = model["b"](x)
    model.to("cuda")
    assert model["b"].weight is model["a"].weight
    assert model["a"].weight.is_cuda
    assert torch.equal(model["b"](x.to("cuda")).cpu(), want)


def test_all_is_as_before_afterwards():
    before = torch.cuda.is_available, torch.Generator, torch.Tensor.pin_memory
    with pretended_cuda():
        x = cuda(1, 2)
    assert (torch.cuda.is_available, torch.Generator, torch.Tensor.pin_memory) == before
    assert not torch.cuda.is_available()
    assert type(torch.ones(2) + 1) is torch.Tensor
    with pytest.raises(RuntimeError, match="after its block ended"):
        x + 1
    y = torch.ones(2, requires_grad=True)
    (y * 3).sum().backward()
    assert y.grad.tolist() == [3, 3]


# -- counts


@pytest.mark.parametrize(
    ("work", "launches", "syncs"),
    [
        (lambda x: x + 1, 1, 0),
        (lambda x: x.view(2, 2)[0].transpose(0, 0).expand(3, 2), 0, 0),
        (lambda x: torch.empty(5, device="cuda"), 0, 0),
        (lambda x: torch.nn.functional.linear(x.view(2, 2), torch.ones(2, 2, device="cuda")), 2, 0),  # ones, linear
        (lambda x: x.sum().item(), 1, 1),
        (lambda x: bool(x.any()), 1, 1),
        (lambda x: x.tolist(), 1, 1),
        (lambda x: x.nonzero(), 1, 1),
        (lambda x: x[x > 1], 2, 1),
        (lambda x: x.masked_select(x > 1), 2, 1),
        (lambda x: x.unique(), 1, 1),
        (lambda x: x[[0, 1]], 2, 1),  # copies the index
        (lambda x: x.repeat_interleave(torch.ones(4, dtype=torch.long, device="cuda")), 3, 1),
        (lambda x: torch.tensor([1, 2], device="cuda"), 1, 1),
        (lambda x: torch.equal(x, x), 1, 1),
        (lambda x: torch.cuda.synchronize(), 0, 1),
        (lambda x: torch.cuda.current_stream().synchronize(), 0, 1),
    ],
)
def test_launches_and_host_synchronisations(device, work, launches, syncs):
    x = cuda(0, 1, 2, 3)
    with device.count() as count:
        work(x)
    assert (count.launches, count.syncs) == (launches, syncs), count


def test_the_report_names_file_and_line_of_a_sync(device):
    class Engine:
        def step(self, x):
            self.grow(x)
            return x.sum().item()

        def grow(self, x):
            return (x + 1) * 2

    steps, inner = device.watch(Engine, "step"), device.watch(Engine, "grow")
    engine, x = Engine(), cuda(1, 2)
    for _ in range(3):
        engine.step(x)
    assert [(c.launches, c.syncs) for c in steps] == [(1, 1)] * 3  # without what the other watched function costs
    assert [(c.launches, c.syncs) for c in inner] == [(2, 0)] * 3
    line = Engine.step.__wrapped__.__code__.co_firstlineno + 2
    assert f"syncs a call  _local_scalar_dense  support/test_pretend_cuda.py:{line}" in device.report()
    assert device.launches >= 9


# -- copies


def test_copies_to_the_gpu(device):
    target, pageable = torch.zeros(2, device="cuda"), torch.ones(2)
    pinned = torch.ones(2).pin_memory()
    assert pinned.is_pinned()
    assert torch.empty(2, pin_memory=True).is_pinned()
    assert not pageable.is_pinned()
    for source, later, syncs in ((pageable, False, 1), (pageable, True, 1), (pinned, False, 1), (pinned, True, 0)):
        with device.count() as count:
            target.copy_(source, non_blocking=later)
            source.to("cuda", non_blocking=later)
        assert (count.h2d, count.d2h, count.syncs) == (2, 0, 2 * syncs)


def test_events_give_the_time_between_them_after_a_wait(device):
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    end.record()
    with pytest.raises(RuntimeError, match="not ready"):
        begin.elapsed_time(end)
    end.synchronize()
    assert begin.elapsed_time(end) > 0
    plain = torch.cuda.Event()
    plain.record()
    with pytest.raises(ValueError, match="enable_timing"):
        begin.elapsed_time(plain)


def test_a_copy_to_the_host_arrives_after_a_wait(device):
    x, target, event = cuda(1, 2), torch.zeros(2).pin_memory(), torch.cuda.Event()
    with device.count() as count:
        target.copy_(x, non_blocking=True)
        other = x.to("cpu", non_blocking=True)
        event.record()
        later = x.to("cpu", torch.int64, non_blocking=True)
        x += 5
        assert target.tolist() == [0, 0]
        assert other.isnan().all()
        event.synchronize()
    assert target.tolist() == other.tolist() == [1, 2]
    assert (count.d2h, count.syncs, count.waits) == (3, 0, 1)
    assert later.tolist() != [1, 2]
    torch.cuda.synchronize()
    assert later.tolist() == [1, 2]


def test_a_blocking_copy_waits(device):
    x, target = cuda(1, 2), torch.zeros(2)
    with device.count() as count:
        target.copy_(x, non_blocking=True)  # pageable memory
        assert x.cpu().tolist() == target.tolist() == [1, 2]
    assert (count.d2h, count.syncs) == (2, 2)


# -- graphs


def test_a_graph_repeats_its_calls_on_new_inputs(device):
    graph, x, total = torch.cuda.CUDAGraph(), torch.zeros(3, device="cuda"), torch.zeros(3, device="cuda")
    scale = torch.tensor(2.0)  # a number of the host
    with torch.cuda.graph(graph):
        assert torch.cuda.is_current_stream_capturing()
        y = (x + 1) * scale
        total.add_(y)
    assert total.tolist() == [0] * 3
    assert y.isnan().all()
    scale.fill_(100)
    for value in (1, 2):
        x.fill_(value)
        with device.count() as count:
            graph.replay()
        assert (count.launches, count.syncs) == (1, 0)
        assert y.tolist() == [2 * (value + 1)] * 3
    assert total.tolist() == [4 + 6] * 3


@pytest.mark.parametrize(
    "forbidden",
    [
        lambda x: x.sum().item(),
        lambda x: x.cpu(),
        lambda x: x.to("cpu", non_blocking=True),
        lambda x: x.copy_(torch.ones(3)),
        lambda x: torch.tensor([1.0], device="cuda"),
        lambda x: x[x > 0],
        lambda x: torch.cuda.synchronize(),
        lambda x: torch.cuda.Event().synchronize(),
    ],
)
def test_a_capture_refuses_syncs_and_host_copies(device, forbidden):
    x = torch.zeros(3, device="cuda")
    with pytest.raises(RuntimeError, match="previous error during capture") as raised:  # noqa: SIM117
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            forbidden(x)
    assert "not permitted when stream is capturing" in str(raised.value.__context__)
    assert x.sum().item() == 0  # capturing has ended


def test_waits_are_refused_on_request(device):
    x = torch.zeros(3, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    x += 1
    torch.cuda.synchronize()
    with pytest.raises(RuntimeError, match="called a synchronizing CUDA operation"):
        x.cpu()
    assert torch.cuda.get_sync_debug_mode() == 2
    torch.cuda.set_sync_debug_mode(0)
    assert x.tolist() == [1, 1, 1]


# -- memory


def test_live_and_peak_bytes(device):
    start = torch.cuda.memory_allocated()
    x = torch.zeros(1000, device="cuda")
    view = x[:10]
    y = x + 1
    assert torch.cuda.memory_allocated() - start == 8000
    del x, y
    gc.collect()
    assert torch.cuda.memory_allocated() - start == 4000  # the view keeps the storage
    assert torch.cuda.max_memory_allocated() - start == 8000
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.max_memory_allocated() - start == 4000
    assert view.sum().item() == 0


def test_a_full_device_raises():
    with pretended_cuda(memory=10_000):
        assert torch.cuda.get_device_properties(0).total_memory == 10_000
        x = torch.zeros(2000, device="cuda")
        with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate 8000 bytes; 8000 of 10000 are in use"):
            x + 1
        del x
        gc.collect()
        assert torch.ones(2000, device="cuda").sum().item() == 2000


# -- training, Triton


def test_gradients_are_zeros_on_the_gpu(device):
    layer = torch.nn.Linear(3, 1).to("cuda")
    layer(torch.ones(2, 3, device="cuda")).sum().backward()
    assert layer.weight.grad.is_cuda
    assert layer.weight.grad.tolist() == [[0, 0, 0]]


def test_triton_kernels_run_in_the_interpreter(device, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    triton = pytest.importorskip("triton", reason="triton is not installed")
    from support import triton_kernel

    assert triton.knobs.runtime.interpret
    x, out = cuda(1, 2, 3), torch.zeros(3, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with device.count() as count, torch.cuda.graph(graph):
        triton_kernel.double[(1,)](x, out, 3, BLOCK=4)
    assert count.launches == 1
    assert out.tolist() == [0, 0, 0]
    x.add_(1)
    graph.replay()
    assert out.tolist() == [4, 6, 8]
    with pytest.raises(ValueError, match="cannot be accessed from Triton"):
        triton_kernel.double[(1,)](x, torch.zeros(3), 3, BLOCK=4)


def test_wrapped_tensors_are_plain_inside(device):
    x = cuda(1)
    assert isinstance(x, CudaTensor)
    assert type(x.inner) is torch.Tensor
    assert x.inner.device.type == "cpu"
