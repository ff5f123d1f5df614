"""The engine takes requests and returns events, one step at a time.

`step` is the whole of continuous batching: apply the controllers' answers, plan, compute, branch, sample, commit, ask.
The parts `Scheduler`, `ControllerManager`, `SamplePlanner` and `OutputProcessor` and the `Executor` do the work. The
engine only passes data between its parts. The engine is single-threaded and never sleeps; `AsyncEngine` runs it in a
separate thread.
"""

from __future__ import annotations

import time
from array import array
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import cast

from bridle.config import EngineConfig
from bridle.engine import interfaces
from bridle.engine.active_requests import ActiveRequests
from bridle.engine.control.controller_manager import ControllerManager
from bridle.engine.factory import engine_info, make_scheduler, make_speculation
from bridle.engine.input_processor import ControllerOpenings, InputProcessor
from bridle.engine.kv.stored_blocks import StoredBlocks
from bridle.engine.kv.stored_sequences import StoredSequences
from bridle.engine.multimodal.encoder_scheduler import EncoderScheduler
from bridle.engine.outputs.best_of import BestOf
from bridle.engine.outputs.output_processor import OutputProcessor
from bridle.engine.recovery import Recovery
from bridle.engine.request import Request
from bridle.engine.sampling.padded_vocab import NONE_UNNAMED, PaddedVocab
from bridle.engine.sampling.sample_planner import PlannedSamples, SamplePlanner, draws_next
from bridle.engine.scheduling.async_scheduling import InFlightStep, OverlapScheduler, StepCallbacks
from bridle.engine.scheduling.batching import Batching
from bridle.engine.scheduling.lora_scheduler import LoRAScheduler
from bridle.engine.scheduling.scheduler import Scheduled
from bridle.engine.scheduling.step_plan import SampleBatch, StepPlan, StepResult
from bridle.engine.sequence import Sequence
from bridle.engine.statistics import EngineStatistics
from bridle.errors import EngineClosed, InternalError, InvalidRequest, Overloaded, UnsupportedFeature
from bridle.kv_store import BlockStore
from bridle.outputs import Event, Finished, FinishReason
from bridle.sampling import SamplingParams
from bridle.sampling_values import split_probe


class Engine:
    """Continuous batching over one `Executor`.

    `pools` run controllers. `decoder` converts tokens to text (None: events have no text). `adapters` loads adapters to
    the device (None: the executor already has all adapters). `media` encodes images (None: requests have no images).
    `draft` computes a smaller model with the same vocabulary, which drafts tokens. `store` keeps KV on disk, if the
    executor implements `KVBlocks` or `SequenceStates`. `vectors` are the control vectors of the executor (None: the
    executor supports none). Ids in `unnamed` are never sampled. Only one thread may call the methods; any thread may
    call `cancel`.
    """

    def __init__(
        self,
        executor: interfaces.Executor,
        config: EngineConfig | None = None,
        *,
        pools: Seq[interfaces.ControllerPool] = (),
        decoder: interfaces.TextDecoder | None = None,
        adapters: interfaces.AdapterStore | None = None,
        draft: interfaces.Executor | None = None,
        media: interfaces.MediaStore | None = None,
        store: BlockStore | None = None,
        vectors: interfaces.VectorStore | None = None,
        unnamed: PaddedVocab = NONE_UNNAMED,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config or EngineConfig()
        self.batching = Batching.of(self.config, executor.info)
        self.info: interfaces.ExecutorInfo = engine_info(executor, self.batching, unnamed)
        self.clock = clock
        self._executor = executor
        self._interruptible = executor if isinstance(executor, interfaces.SupportsReconnect) else None
        self._statistics = EngineStatistics(num_blocks=self.info.num_blocks)
        self._intake = InputProcessor(self.info, self.config)
        self._rotation = LoRAScheduler(self.config.max_step_adapters, adapters)
        self._media = EncoderScheduler(media, self.batching.max_step_tokens, self.batching.max_batch_prefill_tokens)
        speculation = make_speculation(self.info, self.config, draft, clock)
        self._scheduler = scheduler = make_scheduler(
            self.info, self.config, self.batching, clock, self._rotation, self._media, speculation
        )
        self.stored = scheduler.stored = StoredBlocks.over(
            scheduler.blocks, store, executor, self.config.kv_store_format
        )
        self._sequences = scheduler.sequences = StoredSequences.over(store, executor, self.info.block_size)
        self._progress = progress = OutputProcessor(scheduler, self._statistics, decoder, self._on_finish)
        self._vectors = vectors
        self._live = live = ActiveRequests(self._intake, progress, self._rotation, self._media, vectors)
        self._steering = steering = ControllerManager(
            pools, progress, self._statistics, clock, live.end, self.info, self.config, speculation
        )
        self._openings = ControllerOpenings(self._intake, steering, progress, self._begin, clock)
        self._branching = SamplePlanner(
            scheduler,
            steering,
            progress,
            live.outputs,
            live.ids.__next__,
            self.config.max_forks,
            unnamed,
            max_probes=None if self.info.kv == "paged" else max(self.info.max_num_seqs // 2, 1),
        )
        self._best = BestOf(progress, live.outputs)
        self._recovery = Recovery(executor, scheduler, self._branching, progress)
        #: Called when the engine's thread is about to wait, so that other threads can run meanwhile.
        self.on_wait: Callable[[], None] = _do_nothing
        self._ahead = self._make_ahead(executor)
        self._closed = False

    # -- requests ----------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Return True if a request is unfinished, or if events are ready to be returned."""
        return bool(self._live.outputs or self._progress.events) or self._is_steering

    @property
    def _is_steering(self) -> bool:
        """Return True if messages to or from controllers are still outstanding."""
        steering, words = self._steering, self._steering.words
        is_talking = bool(steering.sequences or words.pending_final_asks or words.held)
        return is_talking or any(pool.is_busy for pool in steering.pools)

    @property
    def request_ids(self) -> tuple[str, ...]:
        """The ids of all active requests."""
        return tuple(self._live.outputs)

    @property
    def num_waiting(self) -> int:
        """Return the number of sequences that wait for KV blocks or for the creation of their controller."""
        return len(self._scheduler.waiting) + len(self._openings.waiting)

    @property
    def is_stalled(self) -> bool:
        """Return whether nothing can be computed now, because every sequence waits for its controller."""
        sequences = (*self._scheduler.running.values(), *self._scheduler.waiting)
        can_compute = self.is_up and not self.is_paused and any(seq.is_ready for seq in sequences)
        return not can_compute and not self._openings.is_any_ready

    @property
    def is_parked(self) -> bool:
        """Return True if all sequences wait for work outside of the engine, such as tool calls. While all sequences
        wait, only deadlines and new or cancelled requests change anything."""
        sequences = (*self._scheduler.running.values(), *self._scheduler.waiting)
        words = self._steering.words
        is_quiet = not (self._openings.waiting or words.pending_final_asks or words.held)
        return is_quiet and all(seq.control.is_parked for seq in sequences)

    @property
    def is_up(self) -> bool:
        """Return whether the device is reachable. Safe from any thread."""
        return self._interruptible is None or self._interruptible.is_up

    @property
    def is_paused(self) -> bool:
        """True if the engine is paused. A paused engine computes nothing. While paused, the engine still accepts and
        cancels requests, and deadlines still apply. Safe from any thread."""
        return self._scheduler.is_paused

    @is_paused.setter
    def is_paused(self, value: bool) -> None:
        self._scheduler.is_paused = value

    def watch_device(self, on_change: Callable[[], None]) -> None:
        """Set a function that is called, from any thread, when the device is lost or available again."""
        if self._interruptible is not None:
            self._interruptible.on_change = on_change

    def check(self, request: Request) -> None:
        """Raise the errors of `add` that depend only on the request itself. Safe from any thread."""
        self._intake.check(request)
        if request.controller is not None and self._steering.pool_for(request.controller) is None:
            kind = type(request.controller).__name__
            raise InvalidRequest(f"no controller pool of this engine runs a {kind}", "controller")
        if request.sampling.lookahead:
            self._steering.check_lookahead(request)
        mark = request.sampling.watermark
        if mark is not None and mark.key and self._interruptible is not None:
            raise UnsupportedFeature(
                "policies: a policy has a watermark, whose key is not sent to shards. Run the model in the engine's "
                "process.",
                "policies",
            )
        if request.adapter is not None:
            self._rotation.check(request.adapter)
        if request.sampling.control_vectors or request.sampling.probes:
            self._check_vectors(request.sampling)
        if request.media:
            self._media.check(request)

    def _check_vectors(self, sampling: SamplingParams) -> None:
        if sampling.probes and not self.config.allow_probes:
            raise UnsupportedFeature(
                "probes: this server does not let controllers read hidden states. The operator can allow it with "
                "--allow-probes.",
                "probes",
            )
        if self._vectors is None:
            raise UnsupportedFeature(
                "control_vectors: this model's backend applies no control vectors. Run the model in the engine's "
                "process, with torch.",
                "control_vectors",
            )
        self._vectors.check(sampling.control_vectors)
        for probe in sampling.probes:
            self._vectors.check_probe(*split_probe(probe))

    def add(self, request: Request) -> None:
        """Accept a request; it begins with the next step.

        Raises `InvalidRequest` (`ContextOverflow`, `UnknownAdapter`), `Overloaded` or `EngineClosed`. After an error
        the engine is unchanged.
        """
        self.check(request)
        self.accept(request)

    def accept(self, request: Request) -> None:
        """Add a request that was already checked, possibly by another thread."""
        if self._closed:
            raise EngineClosed("the engine is shut down")
        if self.num_waiting >= self.config.max_waiting:
            raise Overloaded(f"{self.num_waiting} requests wait already; at most {self.config.max_waiting} may wait")
        seq = self._live.open(request)
        if request.sampling.keep_best:
            self._best.open(request)
        self._statistics.num_requests += 1
        if request.trace:
            self._progress.tracer.begin(seq)
        if request.controller is None:
            self._begin(seq)
        else:
            self._openings.open(seq)

    def _begin(self, seq: Sequence) -> None:
        """Pass a sequence to the scheduler once its prompt is final."""
        self._progress.begin(seq)
        self._scheduler.add(seq)
        if self._scheduler.blocks.parking.num_blocks:
            self._scheduler.blocks.renew(seq, self.clock())
        if seq.sampling.max_tokens == 0:
            self._progress.finish(seq, FinishReason.LENGTH)

    def cancel(self, request_id: str) -> None:
        """End all outputs of a request at the next step; unknown ids are ignored. Safe from any thread."""
        self._live.cancel_nowait(request_id)

    def release_retained_kv(self, request_id: str) -> None:
        """Release the retained KV of a finished request; unknown ids are ignored."""
        self._scheduler.blocks.parking.release(request_id)

    def end_parking(self) -> None:
        """Release all retained KV and retain none from now on, because no further request can use it."""
        self._scheduler.blocks.parking.close()

    def expire_retained_kv(self) -> float | None:
        """Release retained KV that has expired. Returns the seconds until the next KV expires, or None if no KV is
        retained."""
        parking = self._scheduler.blocks.parking
        if not parking.num_blocks:
            return None
        now = self.clock()
        until = parking.expire(now, self._rotation.knows)
        return None if until is None else max(until - now, 0.0)

    def rest(self) -> float | None:
        """Do the pending work of an idle engine. Returns the seconds until the next call is needed, or None if only a
        new request makes a call necessary."""
        pauses = [self.expire_retained_kv(), None if self.stored is None else self.stored.rest(self.clock())]
        return min((pause for pause in pauses if pause is not None), default=None)

    def close(self) -> None:
        """Shut down the controller pools and the executor. Active requests get no further events. Idempotent."""
        if not self._closed:
            self._closed = True
            self.end_parking()
            for pool in self._steering.pools:
                pool.shutdown()
            self._rotation.close()
            self._scheduler.speculation.guessing.close()
            self._media.close()
            for stored in (self.stored, self._sequences):
                if stored is not None:
                    stored.close()
            self._executor.close()

    # -- the step ----------------------------------------------------------------------------------------

    def step(self) -> list[Event]:
        """Compute one batch; returns the events, in order."""
        began = self.clock()
        flight = None if self._ahead is None else self._land(self._ahead)
        if self._progress.tracer.num_live:
            self._progress.tracer.begin_step(self._scheduler.step + (flight is None))
        self._live.apply(began)
        if self._scheduler.blocks.parking.num_blocks:
            self.expire_retained_kv()
        if self._openings.waiting:
            self._openings.begin_ready()
        if self._is_steering:
            self._steering.apply_early()
        if flight is not None and self._ahead is not None:
            self._ahead.draw(flight)
            self._statistics.num_steps += 1
        else:
            planned = self.clock()
            plan, scheduled = self._plan()
            if not (plan.rows or plan.forks or plan.freed):  # freed and forked sequences exist only in the executor
                self.on_wait()
                self._steering.gather_any(self.clock() + self.config.step_timeout)
            else:
                compute = self._compute if self._ahead is None else self._ahead.run
                compute(plan, scheduled, planned)
                self._statistics.num_steps += 1
        if self._is_steering and not (self._ahead is not None and self._ahead.is_under_way):
            self._steering.ask()
            self._steering.collect_answers()
        if self._best.live:
            self._best.end_losers(self._progress.events)
        self._statistics.step_seconds += self.clock() - began
        return self._progress.take_events()

    def _land(self, ahead: OverlapScheduler) -> InFlightStep | None:
        """Finish the step whose tokens are being sampled, if there is such a step. Returns the next step if that step
        was already started, else None."""
        if not ahead.is_under_way:
            return None
        flight = ahead.finish_previous_step()
        if self._is_steering:
            self._steering.ask()
            self._steering.collect_answers()
        return flight

    def _plan(self) -> tuple[StepPlan, list[Scheduled]]:
        if self.is_paused:
            return StepPlan(0), []
        return self._scheduler.schedule() if self.is_up else self._wait()

    def _wait(self) -> tuple[StepPlan, list[Scheduled]]:
        """Return an empty plan, because the device cannot be reached."""
        self._recovery.note_away()
        return StepPlan(0), []

    def _compute(self, plan: StepPlan, scheduled: list[Scheduled], planned: float) -> None:
        """Run the forward pass, branch, sample, and commit. An error ends only the request that caused the error.
        Planning began at the time `planned`."""
        branched = PlannedSamples(SampleBatch(plan.step))
        began = self.clock()
        self.on_wait()
        try:
            self._executor.forward(plan)
            computed = self.clock()
            self._scheduler.commit(scheduled)
            if self._steering.sequences:
                self._await_answers(scheduled)
            steered = self.clock()
            branched = self._branching.branch(plan.step, scheduled)
            result = self._executor.sample(branched.batch)
            sampled = self.clock()
            vectors = self._embed(plan.step, branched) if branched.embeds else []
            if result.step != plan.step:
                raise InternalError(f"the executor answered step {result.step} instead of {plan.step}")
        except Exception as error:
            self._recovery.recover(scheduled, branched, error)
            return
        flight = InFlightStep(plan, scheduled, planned, branched, began, computed, steered, scheduled)
        self._conclude(flight, result, vectors, sampled)

    def _conclude(self, flight: InFlightStep, result: StepResult, vectors: list[array[float]], sampled: float) -> None:
        """Count a step and apply its tokens, which were received at the time `sampled`."""
        statistics, speculation, scheduled = self._statistics, self._scheduler.speculation, flight.scheduled
        if self._recovery.num_failed_steps:
            self._recovery.note_success(scheduled)
        num_computed = sum(item.row.num_scheduled for item in scheduled)
        statistics.num_computed_tokens += num_computed
        statistics.forward_seconds += flight.computed - flight.began
        statistics.control_seconds += flight.steered - flight.computed
        statistics.sample_seconds += sampled - flight.steered
        if self._progress.tracer.num_live:
            times = flight.began, flight.computed, flight.steered, sampled
            self._progress.tracer.compute(flight.rows, num_computed, times)
        self._branching.commit(flight.rows, flight.branched, result, vectors)
        self._progress.note_progress([item.seq for item in flight.rows if item.seq.kv.is_prefilling])
        if speculation.is_used:
            sequences, waited = (item.seq for item in scheduled), flight.steered - flight.computed
            speculation.note_step(flight.plan, sequences, waited, sampled - flight.planned)

    def _embed(self, step: int, branched: PlannedSamples) -> list[array[float]]:
        embedder = cast(interfaces.Embedder, self._executor)  # requests for vectors are refused by other executors
        return embedder.embed(step, [row for _, row in branched.embeds])

    def _await_answers(self, scheduled: list[Scheduled]) -> None:
        due = [
            item.seq
            for item in scheduled
            if item.seq.control.pool and item.seq.control.answer is None and draws_next(item)
        ]
        self._steering.collect_answers(due, self.clock() + self.config.step_timeout)

    def _make_ahead(self, executor: interfaces.Executor) -> OverlapScheduler | None:
        """Return the scheduler of overlapping steps, or None for a synchronous executor."""
        late = interfaces.find_async(executor)
        if late is None:
            return None
        ends = StepCallbacks(self._conclude, self._recovery.recover, self._embed, lambda: self.on_wait())
        parts = self._scheduler, self._steering, self._branching
        return OverlapScheduler(late, *parts, ends, self.clock, self.config.step_timeout)

    def _on_finish(self, seq: Sequence, event: Finished) -> None:
        """Send the `Finished` event of an output, either now or after the last logs of its controller."""
        if seq.is_probe:
            self._branching.choices.fail(seq, event.error)
            return
        if seq.control.pool is not None:
            self._branching.choices.end(seq)
        if seq.control.pool is None or not self._steering.end(seq, event):
            self._live.end(seq, event)

    # -- statistics and checks ---------------------------------------------------------------------------

    def statistics(self) -> EngineStatistics:
        """Return a snapshot of all counters and gauges. Safe from any thread."""
        scheduler, blocks = self._scheduler, self._scheduler.blocks
        running = list(scheduler.running.values())
        return replace(
            self._statistics,
            finished=Counter(self._statistics.finished),
            policies=Counter(self._statistics.policies),
            tenant_blocks=self._live.blocks_by_tenant(),
            num_cached_tokens=scheduler.num_cached_tokens,
            num_preemptions=scheduler.num_preemptions,
            num_failed_steps=self._recovery.num_failed_steps,
            num_evicted_blocks=blocks.num_evicted,
            num_copied_blocks=blocks.num_copied,
            num_running=len(running),
            num_waiting=self.num_waiting,
            num_prefilling=sum(seq.kv.is_prefilling for seq in running),
            num_suspended=sum(seq.control.is_suspended for seq in running),
            num_free_blocks=blocks.num_free,
            num_cached_blocks=blocks.num_cached,
            num_states=blocks.states.num_slots,
            num_free_states=blocks.states.num_free,
            num_kept_states=blocks.states.num_frozen,
            num_recomputed_tokens=blocks.states.num_rewound_tokens,
            num_traced=self._progress.tracer.num_live,
            num_trace_records=self._progress.tracer.num_records,
            num_cut_trace_records=self._progress.tracer.num_cut,
            num_parked=len(blocks.parking),
            num_parked_blocks=blocks.parking.num_blocks,
            num_retained=blocks.parking.num_retained,
            num_park_hits=blocks.parking.num_hits,
            num_parks_expired=blocks.parking.num_expired,
            num_parks_given_way=blocks.parking.num_given_way,
            **self._rotation.counts(),
            **self._media.counts(),
            **({} if self.stored is None else self.stored.counts()),
            **({} if self._sequences is None else self._sequences.counts()),
        )

    def check_integrity(self) -> None:
        """Raise `InternalError` if blocks, queues and active requests are inconsistent. This check is for tests, and
        for times without load."""
        queued = [*self._scheduler.running.values(), *self._scheduler.waiting]
        self._scheduler.blocks.check_integrity(queued)
        known = {seq_id for outputs in self._live.outputs.values() for seq_id in outputs.sequences}
        known |= self._branching.choices.probe_ids
        lost = [seq.id for seq in queued if seq.id not in known or seq.is_finished]
        if lost:
            raise InternalError(f"sequences {lost[:8]} are queued, but belong to no live request")


def _do_nothing() -> None:
    """Do nothing: the default of `on_wait`, which is called before the engine waits for the device."""
