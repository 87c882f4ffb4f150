"""Several processes as one run: who joins, who decides, and who holds which rows.

Process 0 decides: it alone has the pool, takes groups, judges them, reads and writes the workdir.
The others do what it asks (load weights, generate a share of the answers), get the rows of the
batch that lie on their devices, and enter the same jitted step. So nothing that one process sees
alone, a reward that is not finite, a full disk, a pool that failed, can lead two of them into
different collectives: the decision, or the error, is everyone's.

What they say to one another goes through the coordination service of ``jax.distributed``, which
also ends all of them when one is gone. Messages are pickled: whoever can write there is a process
of this run.
"""

import dataclasses
import functools
import json
import os
import pickle
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TextIO, TypeVar, cast

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl import mesh
from jaxrl.pool.contract import (
    Completion,
    Generator,
    Group,
    Manifest,
    PoolError,
    Request,
    RolloutPool,
)
from jaxrl.pool.rollout import Version

T = TypeVar("T")

POLL_MS = 10_000  # a wait for a message is renewed so often
RETRY_S = 0.2


class Preempted(Exception):
    """The machine is wanted back; what was trained is in a checkpoint."""


# -- joining


def join(hosts: Sequence[str], process: int, *, port: int, join_s: float, lost_s: int) -> None:
    """Become process ``process`` of as many as there are ``hosts``, the first of which is process
    0, reached at ``port`` (and the one above, where the roll is called).

    TimeoutError after ``join_s`` seconds, naming the hosts that did not come. A process that is
    silent for ``lost_s`` seconds counts as gone, and the others end. ValueError for a process that
    is not one of them.
    """
    if not 0 <= process < len(hosts):
        raise ValueError(f"--process={process}; allowed: 0 to {len(hosts) - 1}, one a host")
    call_roll(hosts, process, port=port + 1, join_s=join_s)
    # What comes now waits for nobody: all are there.
    jax.distributed.initialize(
        f"{hosts[0]}:{port}",
        len(hosts),
        process,
        initialization_timeout=max(int(join_s), 10),
        heartbeat_timeout_seconds=lost_s,
        shutdown_timeout_seconds=lost_s,
    )


def call_roll(hosts: Sequence[str], process: int, *, port: int, join_s: float) -> None:
    """Wait until all processes are there. ``jax.distributed`` itself aborts after a wait, and does
    not say who was missing. TimeoutError naming those, on the processes that came too."""
    deadline = time.monotonic() + join_s
    if process:
        _answer(hosts[0], process, port, deadline)
        return
    came: dict[int, socket.socket] = {}
    with socket.create_server(("", port), reuse_port=False) as server:
        while len(came) < len(hosts) - 1 and (left := deadline - time.monotonic()) > 0:
            server.settimeout(left)
            try:
                connection, _ = server.accept()
                connection.settimeout(max(left, 1))
                came[int(connection.makefile().readline())] = connection
            except (OSError, ValueError):
                continue  # the deadline, or a stranger at the door
        missing = [i for i in range(1, len(hosts)) if i not in came]
        named = ", ".join(f"process {i} ({hosts[i]})" for i in missing)
        for connection in came.values():
            connection.sendall((json.dumps(named) + "\n").encode())
            connection.close()
    if missing:
        raise TimeoutError(f"{len(missing)} of {len(hosts)} did not join in {join_s:g} s: {named}")


def _answer(leader: str, process: int, port: int, deadline: float) -> None:
    error: OSError | None = None
    while (left := deadline - time.monotonic()) > 0:
        try:
            with socket.create_connection((leader, port), timeout=left) as connection:
                connection.sendall(f"{process}\n".encode())
                connection.settimeout(left + 5)  # process 0 speaks at its own deadline
                if line := connection.makefile().readline():
                    if missing := json.loads(line):
                        raise TimeoutError(f"did not join in time: {missing}")
                    return
        except TimeoutError as raised:
            if str(raised).startswith("did not join"):
                raise
            error = raised
        except OSError as raised:
            error = raised
        time.sleep(RETRY_S)
    raise TimeoutError(f"process 0 ({leader}:{port}) did not answer process {process}: {error}")


# -- being told to stop

_STOP = threading.Event()


def heed_sigterm() -> None:
    """Let SIGTERM end the run after the step that is under way, with a checkpoint. With several
    processes jax listens already, and agrees on the step."""
    if jax.process_count() == 1:
        signal.signal(signal.SIGTERM, lambda *_: _STOP.set())


def told_to_stop(step: int) -> bool:
    """Whether all processes are to stop before this step; each asks at each step."""
    if jax.process_count() == 1:
        return _STOP.is_set()
    return bool(multihost_utils.reached_preemption_sync_point(step))


# -- saying and asking


class Crew:
    """The processes of this run. ``lead`` is entered by all of them, in the same order."""

    def __init__(self) -> None:
        self.index, self.count = jax.process_index(), jax.process_count()
        self.seconds: dict[str, list[float]] = {}  # of each process, since the take began
        self._serve: Mapping[str, Callable[[Any], Any]] = {}
        self._leading = False
        self._messages: Counter[str] = Counter()  # said or heard so far, by their way

    def attend(self, serve: Mapping[str, Callable[[Any], Any]]) -> None:
        """What a process does when it is asked, by the name of the question."""
        self._serve = serve

    def lead(self, work: Callable[[], T], share: Callable[[T, int], Any] | None = None) -> T:
        """``work()`` of process 0; what it returned, or raised, on every process. The others serve
        it meanwhile. ``share(result, process)`` is what another process gets in its place.
        """
        if self.count == 1 or self._leading:
            return work()
        if self.index:
            return self._follow()
        self._leading, error, result = True, None, None
        try:
            result = work()
        except Exception as raised:  # everyone's now
            error = raised
        finally:
            self._leading = False
        for process in range(1, self.count):
            mine = share(result, process) if share and error is None else result  # pyright: ignore
            self._say(process, ("raise", _sendable(error)) if error else ("return", mine))
        if error is not None:
            raise error
        return result  # pyright: ignore[reportReturnType]  # T may itself hold None

    def ask(self, what: str, shares: Sequence[Any]) -> list[Any]:
        """What each process answers to its share; asked by process 0 inside ``lead``. PoolError
        naming the process that failed."""
        for process in range(1, self.count):
            self._say(process, (what, shares[process]))
        began = time.monotonic()
        answers = [self._serve[what](shares[0])]
        seconds = [time.monotonic() - began]
        for process in range(1, self.count):
            answer, error, spent = self._hear(f"from/{process}")
            if error is not None:
                raise PoolError(f"process {process}: {error}")
            answers.append(answer)
            seconds.append(spent)
        earlier = self.seconds.get(what, [0.0] * self.count)
        self.seconds[what] = [a + b for a, b in zip(earlier, seconds, strict=True)]
        return answers

    def _follow(self) -> Any:
        while True:
            what, payload = self._hear(f"to/{self.index}")
            if what == "return":
                return payload
            if what == "raise":
                raise payload
            began, answer, error = time.monotonic(), None, None
            try:
                answer = self._serve[what](payload)
            except Exception as raised:  # process 0 decides what becomes of it
                error = f"{type(raised).__name__}: {raised}"
            spent = time.monotonic() - began
            self._put(f"from/{self.index}", (answer, error, spent))

    def _say(self, process: int, message: Any) -> None:
        self._put(f"to/{process}", message)

    def _key(self, way: str) -> str:
        self._messages[way] += 1
        return f"jaxrl/{way}/{self._messages[way]}"

    def _put(self, way: str, message: Any) -> None:
        _service().key_value_set_bytes(self._key(way), pickle.dumps(message))

    def _hear(self, way: str) -> Any:
        """The next message on its way. A sender that died ends this process too, by the
        coordination service; one that is busy may take its time."""
        key = self._key(way)
        while True:
            try:
                message = _service().blocking_key_value_get_bytes(key, POLL_MS)
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" in str(error):
                    continue
                raise
            _service().key_value_delete(key)
            return pickle.loads(message)


@functools.cache
def crew() -> Crew:
    """Of this process; it starts jax."""
    return Crew()


def _service() -> Any:
    from jax._src import distributed  # there is no public name for it

    return distributed.global_state.client


def _sendable(error: Exception) -> Exception:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # an error with arguments of its own; its text is what matters
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


# -- generating together


class Shared:
    """A Generator on all processes: each has the weights on its own devices and generates a part
    of the requests, which says nothing in the samples (see ``Request``)."""

    def __init__(self, own: Generator) -> None:
        self._crew = crew()
        self._crew.attend({"generate": own.generate, "load": lambda said: own.load(*said)})

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """One completion for each request, in the order of the requests."""
        cuts = [len(requests) * i // self._crew.count for i in range(self._crew.count + 1)]
        parts = [list(requests[a:b]) for a, b in zip(cuts, cuts[1:], strict=False)]
        return [one for part in self._crew.ask("generate", parts) for one in part]

    def load(self, version: Version, path: str) -> None:
        """Have all processes take new weights."""
        self._crew.ask("load", [(version, path)] * self._crew.count)


class Led:
    """A RolloutPool that process 0 holds. Its verbs are entered by all processes."""

    def __init__(self, pool: Callable[[], RolloutPool]) -> None:
        self._crew = crew()
        self._pool: Any = None

        def make() -> None:
            self._pool = pool()

        self._crew.lead(make)

    def take(self, n: int, step: int) -> tuple[list[Group], Manifest]:
        """As the pool's; everyone gets all groups. The loop asks inside ``lead``, for shares."""
        return self._crew.lead(lambda: self._pool.take(n, step))

    def commit(self, step: int) -> None:
        """As the pool's."""
        self._crew.lead(lambda: self._pool.commit(step))

    def state(self) -> dict[str, Any]:
        """As the pool's."""
        return self._crew.lead(lambda: self._pool.state())

    def restore(self, state: Mapping[str, Any]) -> None:
        """As the pool's."""
        self._crew.lead(lambda: self._pool.restore(state))

    def publish(self, version: Version, path: str) -> None:
        """As the pool's."""
        self._crew.lead(lambda: self._pool.publish(version, path))

    def weigh(self, probabilities: Mapping[str, float]) -> None:
        """As the pool's."""
        self._crew.lead(lambda: self._pool.weigh(probabilities))

    def close(self) -> None:
        """As the pool's, where it is held: at the end nobody waits for anybody."""
        if self._pool is not None:
            self._pool.close()


# -- arrays


@dataclasses.dataclass(frozen=True)
class Blocks:
    """The parts of one array that lie on one process's devices."""

    shape: tuple[int, ...]
    parts: Mapping[tuple[tuple[int, int], ...], np.ndarray]


def _key(index: Any, shape: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    return tuple(s.indices(n)[:2] for s, n in zip(index, shape, strict=True))


def portion(tree: Any, process: int, where: NamedSharding) -> Any:
    """A tree of numpy arrays -> the blocks of each that lie on the devices of a process."""

    def one(x: np.ndarray) -> Blocks:
        found = {}
        for device, index in where.devices_indices_map(x.shape).items():
            if device.process_index == process:
                found[_key(index, x.shape)] = np.ascontiguousarray(x[index])
        return Blocks(x.shape, found)

    return jax.tree.map(one, tree)


def place(tree: Any, where: NamedSharding) -> Any:
    """Numpy arrays, or this process's blocks of them, on the mesh. ValueError naming the array
    whose rows do not divide."""
    if jax.process_count() == 1:
        return mesh.place(tree, cast(Mesh, where.mesh), where.spec)

    def one(x: Blocks) -> jax.Array:
        return jax.make_array_from_callback(
            x.shape, where, lambda index: x.parts[_key(index, x.shape)]
        )

    return jax.tree.map(one, tree, is_leaf=lambda x: isinstance(x, Blocks))


def gathered(arrays: Mapping[str, jax.Array]) -> dict[str, Any]:
    """Arrays whole in the memory of process 0, one after another; elsewhere nothing is kept. With
    one process they stay where they are."""
    if jax.process_count() == 1:
        return dict(arrays)
    held = {}
    for name, x in sorted(arrays.items()):
        everywhere = NamedSharding(cast(NamedSharding, x.sharding).mesh, PartitionSpec())
        whole = _replicate(everywhere)(x)
        if not jax.process_index():
            held[name] = np.asarray(whole.addressable_data(0))
    return held


@functools.cache
def _replicate(where: NamedSharding) -> Callable[[jax.Array], jax.Array]:
    """One jitted function a mesh: a new one at each call would compile each time."""
    return jax.jit(lambda x: x, out_shardings=where)


def own_mesh(whole: Mesh) -> Mesh:
    """A mesh of this process's devices alone, each with all weights and a part of the rows; the
    whole mesh where there is one process."""
    if jax.process_count() == 1:
        return whole
    return mesh.make_mesh({"data": jax.local_device_count()}, jax.local_devices())


def stream() -> TextIO:
    """Where a process prints its progress: the first one's is the run's."""
    return open(os.devnull, "w") if jax.process_index() else sys.stdout
