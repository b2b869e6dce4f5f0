"""The stream between two GPUs of one host: bit for bit, its rate beside NCCL's, and what receiving costs the student's GEMMs. Run with -s to see the figures."""

import os
import socket
import time

import pytest
import torch

from megatron_kd.rows import RowBlock, TokenBlock
from megatron_kd.stream import sizes
from megatron_kd.stream.wire import Agreement
from tests.stream_peers import AGREED, TOKEN, teacher_spec
from tests.stream_process import Child

pytest.importorskip("nixl")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]

HIDDEN, LENGTH, STEPS = 4096, 8192, 60  # 64 MiB a block


def block(step: int) -> TokenBlock:
    """Every position is a row."""
    return TokenBlock(tokens_bs=torch.full((1, LENGTH), step), loss_mask_bs=torch.ones(1, LENGTH), step=step, micro_batch=0)


def rows_on(device: str, step: int) -> torch.Tensor:
    """bfloat16 [LENGTH, HIDDEN] that tell steps and rows apart."""
    row_L = torch.arange(LENGTH, device=device) % 127 + step % 8
    return (row_L[:, None] * torch.arange(1, HIDDEN + 1, device=device)[None] % 251).bfloat16()


def gpu_teacher(report, *, hub):
    """Serves prepared rows from GPU 0."""
    from megatron_kd.stream.nixl import NixlOutbox
    from megatron_kd.stream.publisher import Publisher, serve_single
    from megatron_kd.stream.route import Side
    from megatron_kd.stream.sender import RowSender

    torch.cuda.set_device(0)
    agreement = Agreement(fingerprint=AGREED.fingerprint, head_transform="none", hidden_size=HIDDEN)
    prepared = [rows_on("cuda:0", i) for i in range(8)]
    torch.cuda.synchronize()
    publisher = Publisher(teacher_spec(hub, agreement=agreement, context_length=LENGTH))
    sender = RowSender(NixlOutbox(), agreement, teacher=Side(), teacher_rank=0)
    serve_single(publisher, sender, lambda b: RowBlock(hidden_NH=prepared[b.step % 8], row_ids_N=b.row_ids_N, hash=b.hash), stop=lambda: False)


def gpu_student(report, *, checksum, gemms):
    """Receives on GPU 1; with `gemms`, multiplies matrices all the while."""
    from megatron_kd.stream.nixl import NixlInbox
    from megatron_kd.stream.receiver import Receiver
    from megatron_kd.stream.rendezvous import Hub
    from megatron_kd.stream.spec import StudentSpec

    torch.cuda.set_device(1)
    hub = Hub(("127.0.0.1", 0), TOKEN, "gpu")
    report("hub", hub.address)
    spec = StudentSpec(rendezvous=hub.address, token=TOKEN, hidden_size=HIDDEN, fingerprint=AGREED.fingerprint, sequence_length=LENGTH, ring_depth=4,
                       device=torch.device("cuda", 1), checksum=checksum, deadline_s=60.0, join_deadline_s=60.0)
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)

    def multiply(count):
        """TFLOP/s of `count` products."""
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(count):
            a @ a
        torch.cuda.synchronize()
        return count * 2 * 8192**3 / (time.perf_counter() - began) / 1e12

    multiply(10)
    alone = multiply(100)
    with Receiver(spec, NixlInbox()) as receiver:
        receiver.wait_for_teachers(1)
        for step in range(3):
            receiver.post(block(step))
        wrong, speeds = 0, []
        for step in range(STEPS):
            if step == 10:
                torch.cuda.synchronize()
                receiver.metrics()
                began = time.perf_counter()
            rows = receiver.take(block(step))
            if step < 10:
                wrong += int((rows.hidden_NH != rows_on("cuda:1", step % 8)).sum())
            elif gemms:
                speeds.append(multiply(2))
            receiver.release(block(step))
            if step + 3 < STEPS:
                receiver.post(block(step + 3))
        seconds = time.perf_counter() - began
        sent = (STEPS - 10) * sizes.wire_payload_bytes(LENGTH, HIDDEN)
        report("done", {"wrong": wrong, "gb_per_s": sent / seconds / 1e9, "alone": alone, "beside": sum(speeds) / len(speeds) if speeds else 0.0, **receiver.metrics()})
    hub.close()


def nccl(report, *, rank, port):
    """Send and receive blocks of the same size."""
    import torch.distributed as dist

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE="2")
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    x = torch.ones(LENGTH, HIDDEN, device="cuda", dtype=torch.bfloat16)
    for _ in range(3):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(50):
            dist.send(x, 1) if rank == 0 else dist.recv(x, 0)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - began
    report("done", 50 * x.nbytes / seconds / 1e9)
    dist.destroy_process_group()


def stream(**options) -> dict:
    """One student and one teacher."""
    with Child(gpu_student, **options) as s, Child(gpu_teacher, hub=s.wait("hub", timeout_s=120)):
        return s.wait("done", timeout_s=180)


@pytest.mark.parametrize("checksum", ["none", "sum64"])
def test_rows_from_gpu_to_gpu_are_bitwise_and_their_rate_is_shown(checksum):
    done = stream(checksum=checksum, gemms=False)
    print(f"\nring GPU to GPU, checksum {checksum}: {done['gb_per_s']:.0f} GB/s, occupancy {done['stream/occupancy']:.2f}")
    assert done["wrong"] == 0 and done["late_parts" if "late_parts" in done else "stream/late_parts"] == 0


def test_rate_of_nccl_in_the_same_place():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with Child(nccl, rank=0, port=port), Child(nccl, rank=1, port=port) as receiver:
        print(f"\nNCCL p2p: {receiver.wait('done', timeout_s=120):.0f} GB/s")


def test_receiving_costs_the_students_gemms_under_three_percent():
    done = stream(checksum="none", gemms=True)
    print(f"\nGEMMs alone {done['alone']:.0f}, while receiving {done['beside']:.0f} TFLOP/s; student waited {done['stream/wait_share']:.1%}")
    assert done["beside"] > 0.97 * done["alone"]
