"""Real ranks for tests: processes forked from a server that has torch loaded already, over gloo on the loopback."""

import multiprocessing
import os
import pickle
import socket
import traceback
from collections.abc import Callable
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "torch.distributed", "greylag.train.launch"])


def _child(pipe: Any, function: Callable, rank: int, world: int, port: int, arguments: tuple) -> None:
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="False",
    )
    try:
        import torch

        torch.set_num_threads(1)
        result = (True, function(rank, world, *arguments))
    except BaseException:
        result = (False, traceback.format_exc())
    pipe.send_bytes(pickle.dumps(result))
    pipe.close()
    os._exit(0)


def run_ranks(world: int, function: Callable, *arguments: Any, timeout: float = 240.0) -> list[Any]:
    """Call `function(rank, world, *arguments)` in `world` processes; their results by rank."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    pipes, processes = [], []
    for rank in range(world):
        here, there = _context.Pipe(duplex=False)
        process = _context.Process(target=_child, args=(there, function, rank, world, port, arguments))
        process.start()
        there.close()
        pipes.append(here)
        processes.append(process)
    results = []
    try:
        for rank, pipe in enumerate(pipes):
            assert pipe.poll(timeout), f"rank {rank} gave no result in {timeout} s"
            done, value = pickle.loads(pipe.recv_bytes())
            assert done, f"rank {rank}:\n{value}"
            results.append(value)
    finally:
        for process in processes:
            if process.is_alive():
                process.join(5)
                process.kill()
    return results
