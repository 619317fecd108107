"""Hands tasks to free workers: in this process, in others, or in the ranks of an MPI job.

Knows nothing of what a task is. All three ways run one worker: a factory gives a handler, a handler
turns one task into messages, and all messages arrive at the one caller that iterates.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

from sgt_ds.config import launcher_number
from sgt_ds.errors import SgtError, UserError

Handler = Callable[[Any], Iterator[Any]]
Factory = Callable[[], Handler]

_TASK, _STOP = 1, 2  # MPI tags, coordinator to worker
_MESSAGE, _IDLE = 3, 4  # worker to coordinator


@dataclass(frozen=True)
class _Failed:
    """An error on its way between processes; of others than this package's, what it says."""

    error: SgtError

    @classmethod
    def of(cls, error: Exception) -> _Failed:
        if isinstance(error, SgtError):
            return cls(error)
        return cls(SgtError("".join(traceback.format_exception(error))))


def run_here(factory: Factory, tasks: Sequence[Any]) -> Iterator[Any]:
    """Work through the tasks in this process."""
    handler = factory()
    for task in tasks:
        yield from handler(task)


def run_processes(factory: Factory, tasks: Sequence[Any], workers: int) -> Iterator[Any]:
    """Work through the tasks in `workers` processes, each taking the next when it is free.

    `factory` and tasks must pickle.
    Raises: the first error of a worker, after the others were ended; SgtError where one died.
    """
    context = multiprocessing.get_context("spawn")
    waiting = deque(tasks)
    processes: dict[Connection, Any] = {}
    try:
        for _ in range(min(workers, len(tasks))):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(there, factory), daemon=True)
            process.start()
            there.close()
            processes[here] = process
            here.send(waiting.popleft())
        busy = set(processes)
        while busy:
            for connection in wait(list(busy)):
                assert isinstance(connection, Connection)
                try:
                    tag, content = connection.recv()
                except (EOFError, OSError):
                    raise _died(processes[connection]) from None
                if isinstance(content, _Failed):
                    raise content.error
                if tag == _MESSAGE:
                    yield content
                elif waiting:
                    connection.send(waiting.popleft())
                else:
                    busy.discard(connection)
    finally:
        for connection, process in processes.items():
            connection.close()
            # Idle ones end by themselves at the closed pipe; the others are in mid-task.
            process.terminate()
            process.join()


def run_mpi(factory: Factory, tasks: Sequence[Any], communicator: Any) -> Iterator[Any]:
    """Work through the tasks in all ranks; call it on each. Messages arrive at rank 0 only.

    Rank 0 works too, and answers the others between two messages of its own work.
    Raises: an error of any rank, on rank 0 (its caller ends the job: the others are in mid-task).
    """
    if communicator.Get_rank() != 0:
        _serve_mpi(factory, communicator)
        return
    waiting, idle = deque(tasks), 0
    others = communicator.Get_size() - 1

    def answers(block: bool) -> Iterator[Any]:
        nonlocal idle
        from mpi4py import MPI

        status = MPI.Status()
        while block or communicator.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG, status):
            content = communicator.recv(source=MPI.ANY_SOURCE, tag=MPI.ANY_TAG, status=status)
            block = False
            if isinstance(content, _Failed):
                raise content.error
            if status.Get_tag() == _MESSAGE:
                yield content
            elif waiting:
                communicator.send(waiting.popleft(), dest=status.Get_source(), tag=_TASK)
            else:
                communicator.send(None, dest=status.Get_source(), tag=_STOP)
                idle += 1

    handler = factory()
    yield from answers(block=False)
    while waiting:
        for message in handler(waiting.popleft()):
            yield message
            yield from answers(block=False)
    while idle < others:
        yield from answers(block=True)


def mpi_communicator() -> Any:
    """The world communicator where this process is one of several ranks, else None.

    Raises: UserError where it was started by mpirun but mpi4py is missing, or a size is no number.
    """
    sizes = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_SIZE")
    if not any((launcher_number(name) or 1) > 1 for name in sizes):
        return None
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise UserError(
            "mpirun", None, f"mpi4py cannot be loaded ({error}); pip install 'sgt-ds[mpi]'"
        ) from None
    return MPI.COMM_WORLD


def _serve(connection: Connection, factory: Factory) -> None:
    try:
        handler = factory()
        while True:
            for message in handler(connection.recv()):
                connection.send((_MESSAGE, message))
            connection.send((_IDLE, None))
    except (EOFError, BrokenPipeError, ConnectionResetError, KeyboardInterrupt):
        return  # the coordinator is gone, or has nothing more to do
    except Exception as error:
        with contextlib.suppress(OSError):  # no one is left to hear it
            connection.send((_MESSAGE, _Failed.of(error)))


def _serve_mpi(factory: Factory, communicator: Any) -> None:
    from mpi4py import MPI

    status = MPI.Status()
    try:
        handler = factory()
        while True:
            communicator.send(None, dest=0, tag=_IDLE)
            task = communicator.recv(source=0, tag=MPI.ANY_TAG, status=status)
            if status.Get_tag() == _STOP:
                return
            for message in handler(task):
                communicator.send(message, dest=0, tag=_MESSAGE)
    except Exception as error:
        communicator.send(_Failed.of(error), dest=0, tag=_MESSAGE)


def _died(process: Any) -> SgtError:
    process.join()
    return SgtError(
        f"a worker died (exit status {process.exitcode}); possibly killed for lack of memory; the "
        "same command continues where it stopped"
    )
