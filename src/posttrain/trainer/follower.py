"""A process of rank 1 or above: builds the same policy as rank 0 and then does what it is told. Started by `posttrain.trainer.group`."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections import deque
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

WATCH_S = 1.0
"""How often a follower looks whether rank 0 still lives."""


def main() -> None:
    """Entry of the process; its argument is the descriptor of its socket to rank 0."""
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(ignored, signal.SIG_IGN)  # rank 0 decides what a signal means; the end of the socket ends this process
    connection = Connection(int(sys.argv[1]))
    phase = ["start"]
    try:
        setup = pickle.loads(connection.recv_bytes())
        threading.Thread(target=_watch, args=(setup.parent,), daemon=True).start()
        sys.path.extend(entry for entry in setup.import_path if entry not in sys.path)
        _follow(setup, connection, phase)
    except EOFError:
        pass  # rank 0 is done, or gone
    except BaseException:
        with suppress(OSError):
            connection.send_bytes(pickle.dumps(("error", f"during {phase[0]}:\n{traceback.format_exc()}")))
        os._exit(1)
    os._exit(0)  # threads and process groups have nothing left to do


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(WATCH_S)
    os._exit(1)


def _follow(setup: Any, connection: Connection, phase: list[str]) -> None:
    import torch

    from posttrain.config.grpo import GRPOConfig
    from posttrain.runtime import random_state
    from posttrain.runtime.determinism import make_deterministic
    from posttrain.trainer.assemble import assemble, objective_of, reference_of
    from posttrain.trainer.ranks import join

    def answer(value: Any) -> None:
        connection.send_bytes(pickle.dumps(("answer", value)))

    torch.set_num_threads(setup.threads)
    root, rl = setup.root, setup.root.rl
    assert isinstance(rl, GRPOConfig)
    if rl.deterministic:
        make_deterministic()
    answer("started")
    ranks = join(setup.rank, setup.size, parallelism=setup.parallelism, rendezvous=Path(setup.rendezvous))
    phase[0] = "load"
    reference = reference_of(rl)
    objective = objective_of(rl, root, reference)
    random_state.seed_all(rl.seed)
    parts = assemble(root, rl, objective=objective, reference=reference, ranks=ranks, restored=setup.restored)
    random_state.seed_all(rl.seed + setup.rank)  # dropout must differ between ranks
    if setup.restored is not None:
        saved = setup.restored.trainer.get("random_of_ranks", [])
        if len(saved) == setup.size - 1:
            random_state.restore(saved[setup.rank - 1])
    staged: dict[str, Any] = {}
    while True:
        phase[0] = "wait"
        phase[0], payload = pickle.loads(connection.recv_bytes())
        if phase[0] == "train_step":
            parts.trainer.train_step(payload[0])
        elif phase[0] == "weights":
            _gather(parts.policy, payload[0])
        elif phase[0] == "score_prompt":
            parts.policy.score_prompt(payload[0])
        elif phase[0] == "random":
            answer(random_state.capture())
        elif phase[0] == "stage":
            staged = parts.tensors.staged(payload[0], copy=payload[1])
        elif phase[0] == "write":
            threading.Thread(target=_write, args=(parts.tensors, staged, Path(payload[0])), daemon=True).start()
            staged = {}
        else:
            raise AssertionError(f"rank 0 sent {phase[0]!r}")


def _gather(policy: Any, names: str) -> None:
    """Take part in making tensors whole; rank 0 keeps them."""
    from posttrain.model.converter import hf_named_weights, plain_named_weights

    source = hf_named_weights if names == "hf" else plain_named_weights
    deque(source(policy.module), maxlen=0)


def _write(tensors: Any, staged: Any, folder: Path) -> None:
    """A failure is reported to all ranks by the save itself; rank 0 raises it."""
    from posttrain.errors import CheckpointError

    try:
        tensors.write(staged, folder)
    except (OSError, CheckpointError, RuntimeError):
        traceback.print_exc()


if __name__ == "__main__":
    main()
