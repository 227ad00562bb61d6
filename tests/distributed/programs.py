"""One rank of a distributed job: `python -m tests.distributed.programs RANK RANKS STORE DEVICE CASE...`; all: `all`.

Each case trains or runs something twice, compiled and in eager, and compares. Prints a line of JSON: None or what went
wrong for each case, and what the kernels of this rank cost. RANKS processes meet by the file STORE.
"""

from __future__ import annotations

import json
import os
import pathlib
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import fuser
import fuser.debug
from fuser.kernel_cache import REGISTRY

SECONDS = 120  # that a collective waits for another rank
WIDTH = 16


class Block(nn.Module):
    """A feed-forward block with its norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x)), approximate="tanh"))


def model(device: str) -> nn.Module:
    """The same weights on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(Block()).to(device)


def compiled(what: Any) -> Any:
    return torch.compile(what, backend=fuser.backend)


def data(device: str, seed: int, rows: int = 6) -> torch.Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed)).to(device)


def whole(t: torch.Tensor) -> torch.Tensor:
    return t.full_tensor() if isinstance(t, DTensor) else t


def train(m: nn.Module, batches: list[torch.Tensor]) -> list[torch.Tensor]:
    """Losses, gradients of the last step and weights after it."""
    optimizer = torch.optim.SGD(m.parameters(), lr=0.1, foreach=False)  # weights may be of several types
    found = []
    for x in batches:
        optimizer.zero_grad()
        loss = (m(x) - 1).square().mean()
        loss.backward()
        found.append(loss.detach())
        optimizer.step()
    parameters = list(m.parameters())
    gradients = [p.grad for p in parameters if p.grad is not None]
    return [whole(t).detach().clone() for t in (*found, *gradients, *parameters)]


def same(got: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(got) == len(expected)
    for a, b in zip(got, expected):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


# -- cases -------------------------------------------------------------------------------------------------------------
def ddp_around(device: str, rank: int, ranks: int) -> None:
    """A compiled model in DDP."""
    batches = [data(device, ranks * n + rank) for n in range(2)]
    expected = train(DistributedDataParallel(model(device)), batches)
    same(train(DistributedDataParallel(compiled(model(device))), batches), expected)


def ddp_inside(device: str, rank: int, ranks: int) -> None:
    """DDP in what is compiled, whose graphs are split at its buckets. Each rank has another size of batch."""
    batches = [data(device, ranks * n + rank, rows=5 + rank) for n in range(2)]
    dist._DEFAULT_FIRST_BUCKET_BYTES = 1 << 12  # Dynamo wants the first one to be no larger than the others
    small = {"bucket_cap_mb": 0.005}
    expected = train(DistributedDataParallel(model(device), **small), batches)
    same(train(compiled(DistributedDataParallel(model(device), **small)), batches), expected)


def spread(device: str, ranks: int, wrap: Callable[[Any], Any] = lambda block: block) -> nn.Module:
    m, mesh = model(device), init_device_mesh(device, (ranks,))
    for at, block in enumerate(m):
        m[at] = fully_shard(wrap(block), mesh=mesh)
    return fully_shard(m, mesh=mesh)


def sharded(device: str, rank: int, ranks: int) -> None:
    """FSDP2: each compiled block's weights are spread over the ranks, and gathered for its call."""
    batches = [data(device, ranks * n + rank) for n in range(2)]
    same(train(spread(device, ranks, compiled), batches), train(spread(device, ranks), batches))


def sharded_whole(device: str, rank: int, ranks: int) -> None:
    """FSDP2 inside of what is compiled."""
    batches = [data(device, ranks * n + rank) for n in range(2)]
    same(train(compiled(spread(device, ranks)), batches), train(spread(device, ranks), batches))


def tensor_parallel(device: str, rank: int, ranks: int) -> None:
    """Weights are split by columns, then by rows; all ranks have the same batch."""
    batches = [data(device, n) for n in range(2)]
    mesh = init_device_mesh(device, (ranks,))
    plan = {"0.up": ColwiseParallel(), "0.down": RowwiseParallel()}
    expected = train(model(device), batches)
    same(train(parallelize_module(model(device), mesh, plan), batches), expected)
    same(train(compiled(parallelize_module(model(device), mesh, plan)), batches), expected)


def tensors_in_parts(device: str, rank: int, ranks: int) -> None:
    """Functions of DTensors, with a change of how they are spread between."""
    mesh = init_device_mesh(device, (ranks,))

    def function(a: DTensor, b: DTensor) -> DTensor:
        c = torch.relu(a * 2 + b).redistribute(placements=[Replicate()])
        return (torch.softmax(c, -1) * c).redistribute(placements=[Shard(1)]) + 1

    parts = [distribute_tensor(data(device, n, rows=4 * ranks), mesh, [Shard(0)]) for n in (0, 1)]
    same([whole(compiled(function)(*parts))], [whole(function(*parts))])


def in_a_graph(device: str, rank: int, ranks: int) -> None:
    """Functional collectives between fused operators."""
    group = list(range(ranks))

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        total = collectives.all_reduce(torch.tanh(x) * 2 + 1, "sum", group)
        parts = collectives.all_gather_tensor(torch.exp(-total.square()), 0, group)
        part = collectives.reduce_scatter_tensor(parts * 0.5 + parts.sigmoid(), "sum", 0, group)
        return total / ranks, parts.relu() + 1, part - x

    x = data(device, rank)
    same(list(compiled(function)(x)), list(function(x)))


ALWAYS = (ddp_inside, sharded)  # in CI
IN_FULL = (ddp_around, tensor_parallel, in_a_graph, sharded_whole, tensors_in_parts)
CASES: dict[str, Callable[[str, int, int], None]] = {f.__name__: f for f in ALWAYS + IN_FULL}


# -- one rank ----------------------------------------------------------------------------------------------------------
def cold_start(device: str) -> tuple[float, float]:
    """When the ranks began a first call of kernels that none has, and when this one had its result."""
    m, x = compiled(model(device)), data(device, 0)
    dist.barrier()
    began = time.time()
    with torch.no_grad():
        m(x).sum().item()
    return began, time.time()


Calls = dict[int, tuple[int, int]]


def served() -> Calls:
    """Of each group that is alive: the calls that a kernel answered at once, and all others."""
    handles = {r.key: r.runner.handle for r in REGISTRY.registrations()}
    return {key: (int(h.hits), int(h.misses)) for key, h in handles.items()}


def why_unserved(before: Calls, after: Calls) -> str | None:
    """None if every group that was called in between was answered by kernels, and there was one; else what is wrong."""
    called = [key for key, calls in after.items() if calls != before.get(key, (0, 0))]
    left = [key for key in called if after[key][0] == before.get(key, (0, 0))[0]]
    if left:
        return "no kernel answered calls of " + "; ".join(fuser.debug.explain(key) for key in left)
    return None if called else "no group was called"


def main(rank: int, ranks: int, store: str, device: str, names: list[str]) -> None:
    torch.set_num_threads(1)
    how: dict[str, Any] = {"backend": "gloo"}
    if device == "cuda":
        torch.cuda.set_device(rank)
        how = {"backend": "nccl", "device_id": torch.device("cuda", rank)}  # else NCCL guesses a device at a barrier
    dist.init_process_group(  # the store is a file: no port has to be free
        **how, init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=timedelta(seconds=SECONDS)
    )
    began, ended = cold_start(device)
    failed: dict[str, str | None] = {}
    for name in names:
        torch._dynamo.reset()
        try:
            before = served()
            CASES[name](device, rank, ranks)
            failed[name] = why_unserved(before, served())
        except Exception:
            failed[name] = traceback.format_exc()
            break  # the other ranks may have gone on: nothing that follows would meet
    print(json.dumps({"failed": failed, "began": began, "ended": ended, "stats": fuser.stats()}), flush=True)
    dist.destroy_process_group()


def fork(ranks: int, folder: pathlib.Path, *rest: Any) -> None:
    """All ranks as forks of this process, which share its imports; what rank 0 says is in `0.out` and `0.err`."""
    for rank in range(ranks):
        if not os.fork():
            for file, name in ((1, "out"), (2, "err")):
                os.dup2(os.open(folder / f"{rank}.{name}", os.O_WRONLY | os.O_CREAT), file)
            try:
                main(rank, ranks, *rest)
            except BaseException:
                traceback.print_exc()
            sys.stderr.flush()
            os._exit(0)
    for _ in range(ranks):
        os.wait()


if __name__ == "__main__":
    rank, ranks, store, *rest = sys.argv[1:]
    if rank == "all":
        fork(int(ranks), pathlib.Path(store).parent, store, rest[0], rest[1:])
    else:
        main(int(rank), int(ranks), store, rest[0], rest[1:])
