"""Rank 0 of a policy that several processes train: it starts the others, tells them what to do, and notices when one fails.

Commands travel over a socket pair per follower, in order; tensors travel through collectives that all ranks enter together. A
follower that ends closes its sockets, so nobody waits for it: rank 0's collective fails, and the follower's own report (or its
exit code) is raised as the one root cause. Followers end when their socket does, whatever happens to rank 0.
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from posttrain.config.model import ParallelismConfig
from posttrain.config.root import RootConfig
from posttrain.errors import PosttrainError, TrainingError
from posttrain.model.converter import hf_named_weights, plain_named_weights
from posttrain.model.policy import CausalPolicy
from posttrain.records import Score, StepResult, TrainGroup
from posttrain.trainer.assemble import Restored
from posttrain.trainer.core import Trainer
from posttrain.trainer.ranks import START_DEADLINE_S, Ranks, check_devices, join, leave
from posttrain.trainer.saved import TrainerState

BLAME_S = 5.0
"""How long a failed collective waits for the report of the rank that broke it."""
STOP_S = 10.0
"""How long a follower may take to end when it is told to."""
LOG_TAIL = 2000
"""Characters of a dead follower's output that its error shows."""


@dataclass(frozen=True, slots=True)
class Setup:
    """What a follower is told first."""

    root: RootConfig
    rank: int
    size: int
    parallelism: ParallelismConfig
    rendezvous: str
    threads: int
    restored: Restored | None
    import_path: list[str]
    parent: int


@dataclass(slots=True)
class _Follower:
    rank: int
    process: subprocess.Popen[bytes]
    connection: Connection
    log: Path
    report: str | None = None


class Followers:
    """The processes of ranks 1 and up."""

    def __init__(self, root: RootConfig, *, parallelism: ParallelismConfig, restored: Restored | None = None) -> None:
        """Start them; they import, and wait for each other in `join`."""
        size = root.grid.ranks
        check_devices(size)
        self._scratch = tempfile.TemporaryDirectory(prefix="posttrain-ranks-")
        self._size, self._parallelism = size, parallelism
        self._rendezvous = Path(self._scratch.name) / "rendezvous"
        self._all_threads = torch.get_num_threads()
        self._threads = max(1, self._all_threads // size)
        self._lock = threading.Lock()
        self._closed = False
        self._members: list[_Follower] = []
        try:
            for rank in range(1, size):
                self._members.append(self._start(rank))
                setup = Setup(root, rank, size, parallelism, str(self._rendezvous), self._threads, restored, list(sys.path), os.getpid())
                self._members[-1].connection.send_bytes(pickle.dumps(setup))
        except BaseException:
            self.close()
            raise

    def _start(self, rank: int) -> _Follower:
        ours, theirs = socket.socketpair()
        log = Path(self._scratch.name) / f"rank{rank}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "posttrain.trainer.follower", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": str(self._threads), "GOMP_SPINCOUNT": "0"},
            )
        theirs.close()
        return _Follower(rank, process, Connection(ours.detach()), log)

    @property
    def processes(self) -> list[int]:
        """Process ids."""
        return [member.process.pid for member in self._members]

    def join(self) -> Ranks:
        """Become rank 0."""
        deadline = time.monotonic() + START_DEADLINE_S
        for member in self._members:  # a follower that cannot even import must not cost the whole rendezvous deadline
            self._receive(member, "start", deadline=deadline)
        with self.blame("start"):
            return join(0, self._size, parallelism=self._parallelism, rendezvous=self._rendezvous)

    @contextmanager
    def together(self, phase: str, *payload: Any) -> Iterator[None]:
        """Tell every follower to do `phase`, and do rank 0's part in the body.

        Raises:
            TrainingError: another rank failed; names it and shows its traceback.
        """
        self.tell(phase, *payload)
        with self.sharing_threads(), self.blame(phase):
            yield

    @contextmanager
    def building(self) -> Iterator[None]:
        """Rank 0's part of what followers do on their own after the start."""
        with self.sharing_threads(), self.blame("load"):
            yield

    @contextmanager
    def sharing_threads(self) -> Iterator[None]:
        """The cores are shared with the followers meanwhile; alone, rank 0 takes them all."""
        torch.set_num_threads(self._threads)
        try:
            yield
        finally:
            torch.set_num_threads(self._all_threads)

    def tell(self, phase: str, *payload: Any) -> None:
        """Send a command; every failure so far is raised here."""
        message = pickle.dumps((phase, payload))
        self._check(phase)
        with self._lock:
            for member in self._members:
                try:
                    member.connection.send_bytes(message)
                except OSError as error:
                    raise self._error(member, phase) from error

    def ask(self, phase: str, *payload: Any) -> list[Any]:
        """Send a command and wait for every follower's answer, in the order of ranks."""
        self.tell(phase, *payload)
        deadline = time.monotonic() + START_DEADLINE_S
        return [self._receive(member, phase, deadline=deadline) for member in self._members]

    def close(self) -> None:
        """End all followers: kindly, then firmly. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        for member in self._members:
            member.connection.close()  # its end of the socket reports the end of the file: the follower leaves
        deadline = time.monotonic() + STOP_S
        for member in self._members:
            try:
                member.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                member.process.kill()
                member.process.wait()
        leave()
        self._scratch.cleanup()

    def __enter__(self) -> Followers:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close() if kind is None else self.kill()

    def kill(self) -> None:
        """End all followers now: rank 0 has failed, and what they compute is of no use."""
        for member in self._members:
            if member.process.poll() is None:
                member.process.send_signal(signal.SIGKILL)
        self.close()

    def _receive(self, member: _Follower, phase: str, *, deadline: float) -> Any:
        while time.monotonic() < deadline:
            try:
                if not member.connection.poll(0.5):
                    if member.process.poll() is not None and not member.connection.poll(0):
                        break
                    continue
                kind, value = pickle.loads(member.connection.recv_bytes())
            except (EOFError, OSError):
                break
            if kind == "error":
                member.report = value
                break
            return value
        raise self._error(member, phase)

    def _check(self, phase: str) -> None:
        for member in self._members:
            self._read_report(member)
            if member.report is not None or member.process.poll() is not None:
                raise self._error(member, phase)

    def _read_report(self, member: _Follower) -> None:
        try:
            while member.report is None and member.connection.poll(0):
                kind, value = pickle.loads(member.connection.recv_bytes())
                if kind == "error":
                    member.report = value
        except (EOFError, OSError):
            return

    @contextmanager
    def blame(self, phase: str) -> Iterator[None]:
        """A collective that fails on rank 0 is a consequence: raise the cause."""
        try:
            yield
        except PosttrainError:
            raise
        except RuntimeError as error:
            deadline = time.monotonic() + BLAME_S
            while time.monotonic() < deadline:
                self._check_or_chain(phase, error)
                time.sleep(0.05)
            raise

    def _check_or_chain(self, phase: str, error: BaseException) -> None:
        try:
            self._check(phase)
        except TrainingError as cause:
            raise cause from error

    def _error(self, member: _Follower, phase: str) -> TrainingError:
        self._read_report(member)
        if member.report is not None:
            return TrainingError(f"rank {member.rank} failed {member.report}")
        try:
            code: int | None = member.process.wait(BLAME_S)
        except subprocess.TimeoutExpired:
            return TrainingError(f"rank {member.rank} did not answer during {phase}")
        how = f"was killed by signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"ended with exit code {code}"
        tail = member.log.read_text(encoding="utf-8", errors="replace")[-LOG_TAIL:].strip() if member.log.exists() else ""
        return TrainingError(f"rank {member.rank} (process {member.process.pid}) {how} during {phase}{': ' + tail if tail else ''}")


def bare(group: TrainGroup) -> TrainGroup:
    """What training needs of a group: texts, references and reward parts stay where they are."""
    scored, rollout = group.scored, group.scored.rollout
    return replace(
        group,
        scored=replace(
            scored,
            rollout=replace(
                rollout,
                prompt=replace(rollout.prompt, content="", text="", reference=None, representations={}),
                completions=tuple(replace(completion, text="") for completion in rollout.completions),
            ),
            scores=tuple(Score(score.total, {}) for score in scored.scores),
        ),
    )


class LeadTrainer(Trainer):
    """Rank 0's trainer: what it does, the followers do."""

    def __init__(self, *arguments: Any, followers: Followers, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._followers = followers

    def train_step(self, groups: Sequence[TrainGroup]) -> StepResult:
        """See `Trainer.train_step`."""
        with self._followers.together("train_step", [bare(group) for group in groups]):
            return super().train_step(groups)

    def state(self) -> dict[str, Any]:
        """See `Trainer.state`; with the random states of the other ranks."""
        return {**super().state(), "random_of_ranks": self._followers.ask("random")}


class LeadState(TrainerState):
    """Rank 0's part of saving: every rank writes its own shards."""

    def __init__(self, module: torch.nn.Module, optimizer: torch.optim.Optimizer, ranks: Ranks, *, followers: Followers) -> None:
        super().__init__(module, optimizer, ranks)
        self._followers = followers

    def staged(self, components: Sequence[str], *, copy: bool = True) -> dict[str, dict[str, Any]]:
        """See `SavedState.staged`."""
        with self._followers.together("stage", tuple(components), copy):
            return super().staged(components, copy=copy)

    def write(self, staged: dict[str, dict[str, Any]], folder: Path) -> None:
        """See `SavedState.write`; called from a background thread under `rl.save_async`."""
        self._followers.tell("write", str(folder))
        with self._followers.blame("write"):
            super().write(staged, folder)


class GroupWeights:
    """The whole weights of a sharded policy, tensor after tensor, for whoever publishes them."""

    def __init__(self, followers: Followers, policy: CausalPolicy) -> None:
        self._followers, self._policy = followers, policy

    def hf(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Under the names of a Hugging Face checkpoint."""
        with self._followers.together("weights", "hf"):
            yield from hf_named_weights(self._policy.module)

    def plain(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Under the module's own names."""
        with self._followers.together("weights", "plain"):
            yield from plain_named_weights(self._policy.module)

    def score_prompt(self, token_ids: Sequence[int]) -> list[float]:
        """See `CausalPolicy.score_prompt`."""
        with self._followers.together("score_prompt", list(token_ids)):
            return self._policy.score_prompt(token_ids)
