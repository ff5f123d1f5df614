"""A worker process: hosts sequences, runs their callbacks, and copies sequences that fork, but compiles no modules.

Steps arrive through the ring, all other messages through the side socket. The answers of a step are sent together once
every sequence has been called. A sequence that is still running answers separately later. If the supervisor dies, the
worker ends at once.
"""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections import deque
from functools import partial

import msgspec
import wasmtime

from bridle.aici.runtime import messages as m
from bridle.aici.runtime.component import make_instance
from bridle.aici.runtime.guest_sequence import GuestSequence
from bridle.aici.runtime.instance import Instance
from bridle.aici.runtime.leader_followers import LeaderFollowers, WorkItem
from bridle.aici.runtime.loaded_module import GuestEnvironment, LoadedModule
from bridle.aici.runtime.module_loader import Sandbox
from bridle.aici.runtime.module_metadata import ModuleMetadata
from bridle.aici.runtime.op_executor import Op, OperationBatch, SequenceSlot, failed, run_op, start
from bridle.aici.runtime.parent_watch import fork_watched
from bridle.aici.runtime.remote import RemoteVariables
from bridle.aici.runtime.ring import PeerGone, Port, receive_frame, send_frame
from bridle.aici.runtime.storage import SharedVariables, Variables
from bridle.aici.runtime.wasm import GuestStopped
from bridle.errors import BridleError, ControllerError, ControllerTrap

_MAX_PROGRAMS = 32
#: Number of bytes of masks after which the answers so far are sent.
_FLUSH_BYTES = 1 << 20

_batches = m.decoder(m.WorkerBatch)
_sides = m.decoder(m.Create | m.Drop | m.ForkWorker)
_facts = msgspec.json.Decoder(ModuleMetadata)


class Worker:
    """The worker process. If the worker serves a single request, `storage` is the socket to the request's variables."""

    def __init__(
        self,
        surroundings: GuestEnvironment,
        sandbox: Sandbox,
        port: Port,
        side: socket.socket,
        storage: socket.socket | None = None,
    ) -> None:
        self._surroundings = surroundings
        self._sandbox = sandbox
        self._port, self._side = port, side
        self._remote = RemoteVariables(storage) if storage is not None else None
        self._seats: dict[int, SequenceSlot] = {}
        self._variables: dict[int, tuple[SharedVariables, int]] = {}
        self._programs: dict[str, LoadedModule] = {}
        self._step: OperationBatch | None = None
        self._tasks: deque[WorkItem] = deque()
        self._mutex = threading.Lock()
        self._side_lock = threading.Lock()
        self._watch()
        self._crew = LeaderFollowers(sandbox.engine, self._next_task)

    def run(self) -> None:
        """Serve until the supervisor has ended. Does not return."""
        try:
            self._crew.run()
        except PeerGone:
            pass
        finally:
            os._exit(0)

    # -- the leader's loop ---------------------------------------------------------------------------------

    def _watch(self) -> None:
        self._poll = select.poll()
        self._poll.register(self._port.bell, select.POLLIN)
        self._poll.register(self._side, select.POLLIN)

    def _next_task(self) -> WorkItem:
        try:
            while True:
                if self._tasks:
                    return self._tasks.popleft()
                step = self._step
                if step is not None:
                    if step.queue:
                        return WorkItem(partial(self._run_op, step, step.queue.popleft()))
                    self._flush(step)
                    self._step = None
                self._read()
        except PeerGone:
            os._exit(0)  # no process is left to read the answers of running guests

    def _read(self) -> None:
        ready = {descriptor for descriptor, _ in self._poll.poll()}
        if self._side.fileno() in ready:
            data, descriptors = receive_frame(self._side, 8)
            self._take_side(_sides.decode(data), descriptors)
        elif self._port.bell.fileno() in ready:
            for message in self._port.receive():
                self._take_batch(_batches.decode(message))

    def _take_side(self, message: m.Create | m.Drop | m.ForkWorker, descriptors: list[int]) -> None:
        if isinstance(message, m.Create):
            self._tasks.append(WorkItem(partial(self._create, message)))
        elif isinstance(message, m.Drop):
            self._drop(message.keys, GuestStopped(message.reason))
        else:
            self._split(message, descriptors)

    def _take_batch(self, batch: m.WorkerBatch) -> None:
        step = OperationBatch(batch)
        if self._step is not None:  # the supervisor no longer waits for the last step; finish it first
            self._tasks.extend(self._leftovers(self._step))
        self._step = step
        for op in list(step.queue):
            if not isinstance(op, m.PostPre) and op.parent is not None:
                self._fork(step, op)

    def _leftovers(self, step: OperationBatch) -> list[WorkItem]:
        tasks = [WorkItem(partial(self._run_op, step, op)) for op in step.queue]
        step.queue.clear()
        self._flush(step)
        return tasks

    def _flush(self, step: OperationBatch) -> None:
        """Send the answers that are ready. Later answers of this step are sent one by one."""
        with self._mutex:
            answers, step.answers = step.answers, []
            step.is_flushed, step.num_bytes = True, 0
        if answers:
            self._send(step.number, answers)

    def _send(self, number: int, answers: list[m.SequenceAnswer]) -> None:
        data = m.encode(m.Answers(number, answers))
        if len(data) <= self._port.max_message:
            self._port.send(data)
        elif len(answers) > 1:
            for answer in answers:
                self._send(number, [answer])
        else:
            text = f"answer of {len(data)} bytes exceeds the {self._port.max_message} that a worker can send"
            self._port.send(m.encode(m.Answers(number, [failed(answers[0].key, text)])))

    # -- callbacks -----------------------------------------------------------------------------------------

    def _run_op(self, step: OperationBatch, op: Op) -> None:
        with self._mutex:
            seat = self._seats.get(op.key)
            if seat is not None:
                seat.is_running = True
        if seat is None:
            self._answer(step, failed(op.key, "Worker: the sequence is not here"))
            return
        begin = time.perf_counter_ns()
        answer = run_op(seat, op, step.budget_ms, step.patience_ms)
        answer.micros = (time.perf_counter_ns() - begin) // 10_000 * 10
        if isinstance(op, m.Step2) and op.ahead and not answer.error and not seat.is_dropped:
            answer.ahead = seat.ahead.tell(seat.hosted, op.ahead, is_alone=self._is_alone(seat))
        if not self._leave(seat):
            self._answer(step, answer)

    def _leave(self, seat: SequenceSlot) -> bool:
        """Record that a callback has ended. Returns True, and frees the sequence's memory, if the sequence was dropped
        meanwhile."""
        with self._mutex:
            seat.is_running = False
            is_dropped = seat.is_dropped
        if is_dropped:
            seat.close()
        return is_dropped

    def _is_alone(self, seat: SequenceSlot) -> bool:
        """Return whether no other sequence in this process shares its variables."""
        with self._mutex:
            return self._variables.get(seat.request, (None, 0))[1] == 1

    def _answer(self, step: OperationBatch, answer: m.SequenceAnswer) -> None:
        with self._mutex:
            if not step.is_flushed:
                step.answers.append(answer)
                step.num_bytes += answer.num_mask_bytes
                if step.num_bytes < _FLUSH_BYTES:
                    return
                answers, step.answers, step.num_bytes = step.answers, [], 0
            else:
                answers = [answer]
        self._send(step.number, answers)

    # -- creating and dropping -----------------------------------------------------------------------------

    def _create(self, message: m.Create) -> None:
        """Create an instance and run its first callbacks."""
        created = m.Created(message.rid, "", "", [], 0, message.prompt)
        begin = time.perf_counter_ns()
        try:
            instance = self._instance(message)
            try:
                self._first_callbacks(instance, message, created)
            finally:
                if created.error or not message.keep_logs:
                    created.logs = instance.log.drain()
                    created.storage, instance.writes = instance.writes, []
        except ControllerError as error:
            created.error = str(error)
        except BridleError as error:
            created.error, created.is_refused = str(error), True
        except wasmtime.WasmtimeError as error:
            created.error, created.is_unreadable = f"compiled code cannot be loaded: {error}", True
        created.micros = (time.perf_counter_ns() - begin) // 10_000 * 10
        with self._side_lock:
            send_frame(self._side, m.encode(created))

    def _instance(self, message: m.Create) -> Instance:
        program = self._program(message)
        variables = self._lease_variables(message.request)
        try:
            return make_instance(program)(program, self._surroundings, message.argument.encode(), variables)
        except BaseException:
            self._release_variables(message.request)
            raise

    def _first_callbacks(self, instance: Instance, message: m.Create, created: m.Created) -> None:
        """Run the first callbacks of an instance. As in any callback, the sequence can be dropped while the first
        callbacks run."""
        seat = SequenceSlot(GuestSequence(message.key, instance), message.request)
        seat.is_running = True
        self._seats[message.key] = seat
        try:
            budget = self._surroundings.limits.max_init_time
            created.prompt, created.pre = start(seat.hosted, message, budget)
        except ControllerError as error:
            created.error = str(error)
        self._leave(seat)
        if created.error:
            self._drop([message.key], GuestStopped("instantiation failed"))

    def _program(self, message: m.Create) -> LoadedModule:
        program = self._programs.get(message.module)
        if program is None:
            facts = _facts.decode(message.facts)
            if len(self._programs) >= _MAX_PROGRAMS:
                self._programs.pop(next(iter(self._programs)))
            program = self._programs[message.module] = self._sandbox.load(message.path, facts)
        return program

    def _lease_variables(self, request: int) -> Variables:
        if self._remote is not None:
            return self._remote
        with self._mutex:
            variables, count = self._variables.get(request, (None, 0))
            variables = variables or SharedVariables(self._surroundings.limits)
            self._variables[request] = (variables, count + 1)
        return variables

    def _release_variables(self, request: int) -> None:
        with self._mutex:
            variables, count = self._variables.get(request, (None, 0))
            if variables is not None and count > 1:
                self._variables[request] = (variables, count - 1)
            else:
                self._variables.pop(request, None)

    def _fork(self, step: OperationBatch, op: m.Step2 | m.Mid1) -> None:
        """Fork an op's sequence by copying its parent, before any callback of this step runs."""
        assert op.parent is not None
        seat = self._seats.get(op.parent)
        try:
            if seat is None or seat.is_running:
                raise ControllerTrap(
                    "cannot fork: the parent sequence is not in this worker process, or its callback still runs"
                )
            seat.ahead.forget()
            hosted = seat.hosted.fork(op.key, op.branch)
        except ControllerError as error:
            step.queue.remove(op)
            self._answer(step, failed(op.key, str(error)))
            return
        self._seats[op.key] = SequenceSlot(hosted, seat.request)
        self._lease_variables(seat.request)

    def _drop(self, keys: list[int], reason: ControllerError) -> None:
        for key in keys:
            with self._mutex:
                seat = self._seats.pop(key, None)
                if seat is None:
                    continue
                seat.hosted.instance.cancel(reason)
                seat.is_dropped = True
                is_running = seat.is_running
            self._release_variables(seat.request)
            if not is_running:
                seat.close()

    # -- forking the process -------------------------------------------------------------------------------

    def _split(self, message: m.ForkWorker, descriptors: list[int]) -> None:
        """Fork this process. The child becomes the worker of the new sequence, with the file descriptors that came with
        the message."""
        seat = self._seats.get(message.key)
        if seat is None or seat.is_running or len(self._seats) != 1:
            for descriptor in descriptors:
                os.close(descriptor)
            text = "Worker: only an idle sequence alone in its process can be forked with it"
            send_frame(self._side, m.encode(m.SplitDone(message.rid, text)))
            return
        self._crew.ticker.stop()
        pid, handle = fork_watched()
        if pid == 0:
            self._adopt(message, descriptors, seat)
            return
        for descriptor in descriptors:
            os.close(descriptor)
        self._crew.ticker.start()
        with self._side_lock:
            send_frame(self._side, m.encode(m.SplitDone(message.rid, "", pid)), [handle])
        os.close(handle)

    def _adopt(self, message: m.ForkWorker, descriptors: list[int], seat: SequenceSlot) -> None:
        """Set up the forked child: close the parent's connections, and start the child's own threads."""
        memory, bell, side, storage = descriptors
        self._port.bell.close()
        self._side.close()
        assert self._remote is not None
        self._remote.close()
        self._port = Port(memory, socket.socket(fileno=bell), is_worker=True)
        os.close(memory)
        self._side = socket.socket(fileno=side)
        self._remote = RemoteVariables(socket.socket(fileno=storage))
        seat.hosted.instance.variables = self._remote
        seat.ahead.close()
        seat.hosted.become(message.new_key, message.branch)
        self._seats = {message.new_key: seat}
        self._mutex, self._side_lock = threading.Lock(), threading.Lock()
        self._watch()
        self._crew.reset_after_fork()
        self._crew.ticker.start()
