"""The replicas of the active layout: their requests, their steps in flight, their outputs."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import TYPE_CHECKING

from vllm.logger import init_logger
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine import FinishReason
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT

from pat_vllm.executor.messages import PATSchedulerOutput
from pat_vllm.patches.schedulers import preempt_carried
from pat_vllm.scheduler.replica import Replica, ReplicaFactory, is_empty_step
from pat_vllm.scheduler.requests import prompt_key
from pat_vllm.scheduler.routing import Router
from pat_vllm.scheduler.stats import mean_of_gpus, merge_outputs
from pat_vllm.scheduler.switching.chains import Chains
from pat_vllm.scheduler.switching.prefix_cache import num_cached

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.request import Request, RequestStatus

    from pat_vllm.drafts.shelf import RowUpdate
    from pat_vllm.executor.executor import PATExecutorMixin, StepResult
    from pat_vllm.executor.messages import EncoderInputs
    from pat_vllm.layout import Layout
    from pat_vllm.scheduler.monitor import Monitor


logger = init_logger(__name__)


class ReplicaSet:
    """What runs in the active layout. A switch exchanges the replicas and keeps the rest.

    Attributes:
        layout: the active layout.
        replicas: its replicas, by index.
        executor: runs their steps.
        factory: makes the replicas of a layout.
        chains: block hashes of ended requests, by which a switch finds the cached prefixes to
            carry.
        pause_state: vLLM's, of all replicas alike.
    """

    def __init__(
        self,
        layout: Layout,
        *,
        factory: ReplicaFactory,
        executor: PATExecutorMixin,
        monitor: Monitor,
        depth: int,
    ) -> None:
        """Make the replicas of `layout`, each with at most `depth` steps in flight."""
        self.layout = layout
        self.factory = factory
        self.executor = executor
        self.replicas = factory.make(layout)
        self.chains = Chains()
        self.pause_state = PauseState.UNPAUSED
        self._monitor = monitor
        self._depth = depth
        self._router = Router(self.replicas[0].scheduler.block_size)
        self._cached_with: int | None = None
        """Version of the weights when the caches began to fill; None while they are empty."""
        self._takes_images = factory.takes_images
        self._encoded_with = executor.weights_version
        """Version of the weights that made what caches of towers hold."""
        self._retired: Sequence[Replica] = ()
        """Replicas of the layout that the last switch left, until they are shut down."""
        self._empty_steps: list[tuple[Replica, SchedulerOutput]] = []
        """Steps that were scheduled and not sent, as they hold nothing for a worker."""
        self._outputs: dict[int, EngineCoreOutputs] = {}
        """What goes to each front end, by vLLM's index of clients."""

    # ---------------------------------------------------------------- state

    @property
    def num_seqs(self) -> int:
        """Unfinished requests."""
        return sum(replica.num_seqs for replica in self.replicas)

    @property
    def in_flight(self) -> bool:
        """Whether a step is in flight."""
        return any(replica.in_flight for replica in self.replicas)

    @property
    def has_work(self) -> bool:
        """Whether there are requests, steps in flight, or outputs that nobody has taken."""
        return bool(self._outputs) or any(
            replica.in_flight or replica.scheduler.has_requests() for replica in self.replicas
        )

    def set_pause_state(self, pause_state: PauseState) -> None:
        """Pause or resume all replicas."""
        self.pause_state = pause_state
        for replica in self.replicas:
            replica.scheduler.set_pause_state(pause_state)

    # ---------------------------------------------------------------- requests

    def add(self, request: Request) -> None:
        """Route a request to a replica: prefix affinity first, then least load.

        Later inputs of a streaming-input session go where its first one went.
        """
        replica = self._monitor.requests.replica_of(request.request_id)
        if replica is None:
            prompt = prompt_key(request)
            replica = self._route(request, prompt)
            self._monitor.arrived(request, replica, prompt)
        replica.scheduler.add_request(request)
        if request.request_id not in replica.scheduler.requests:
            # It said that a streaming-input session has no more inputs, and vLLM ended that.
            self._ended(request.request_id, FinishReason.ABORT)

    def _route(self, request: Request, prompt: int) -> Replica:
        if self._cached_with is None:
            self._cached_with = self.executor.weights_version
        chain = request.block_hashes
        cached = [num_cached(replica, chain) for replica in self.replicas]
        self.chains.arrived(chain)
        prefixes: list[Hashable] = [prompt, *reversed(chain)]
        loads = [replica.num_seqs for replica in self.replicas]
        return self.replicas[self._router.route(prefixes, loads, cached)]

    def finish_requests(
        self, request_ids: Iterable[str] | None, status: RequestStatus
    ) -> list[Request]:
        """End requests from outside; None ends all. Returns those that vLLM ended."""
        requests = self._monitor.requests
        by_replica: dict[int, list[str]] = {}
        for request_id in tuple(requests) if request_ids is None else request_ids:
            if (replica := requests.replica_of(request_id)) is not None:
                by_replica.setdefault(replica.index, []).append(request_id)
                self._ended(request_id, FinishReason.ABORT)
        return [
            request
            for index, ids in by_replica.items()
            for request in self.replicas[index].scheduler.finish_requests(ids, status)
        ]

    def _ended(self, request_id: str, reason: FinishReason) -> None:
        tracked = self._monitor.ended(request_id, reason)
        if tracked is not None:
            self.chains.ended(tuple(tracked.request.block_hashes))

    # ---------------------------------------------------------------- prefix caches

    @property
    def may_carry_caches(self) -> bool:
        """Whether no new weights have come in since the replicas' caches began to fill."""
        return self._cached_with in (None, self.executor.weights_version)

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """As vLLM's, of all replicas. No switch carries what was cached before."""
        self._router.forget()
        self.chains.forget()
        if reset_running_requests:
            # Preempting a request drops what its step in flight samples: a seeded one would go on
            # from another random number. vLLM, too, has no step in flight here.
            self.drain()
            for replica in self.replicas:  # vLLM preempts none that has not run since a switch
                preempt_carried(replica.scheduler)
        reset = all(
            [  # a list, so that every replica is reset, whatever another says
                replica.scheduler.reset_prefix_cache(reset_running_requests, reset_connector)
                for replica in self.replicas
            ]
        )
        if reset:
            # Trainers may also reset before they send new weights, not only after.
            self._cached_with = self.executor.weights_version if self.num_seqs else None
        return reset

    def reset_encoder_cache(self) -> None:
        """As vLLM's, of all replicas: images are encoded again. Workers have another call."""
        for replica in self.replicas:
            replica.scheduler.reset_encoder_cache()

    def _forget_stale_images(self) -> None:
        """Have no image of other weights in a step, also if a trainer resets no encoder cache."""
        if self._encoded_with == self.executor.weights_version or not self._takes_images:
            return
        self._encoded_with = self.executor.weights_version
        self.reset_encoder_cache()
        self.executor.reset_encoder_cache()

    # ---------------------------------------------------------------- steps

    def schedule(self, throttle_prefills: bool) -> PATSchedulerOutput:
        """Start a step in every replica that is ready for one.

        In the middle of a weight update, requests wait for the rest of the weights.
        """
        steps: dict[int, SchedulerOutput] = {}
        paused = self.pause_state == PauseState.PAUSED_ALL or not self.num_seqs
        waits = not paused and self.executor.waits_for_weights()
        if self.executor.kv_is_void:
            logger.info("PAT: k_scale or v_scale has changed: all KV is dropped and computed again")
            self.executor.kv_is_void = False
            self.reset_prefix_cache(reset_running_requests=True)
        self._forget_stale_images()
        draft_rows: dict[int, RowUpdate] = {}
        images: dict[int, EncoderInputs] = {}
        for replica in self.replicas:
            if not replica.may_step(self._depth) or (waits and replica.num_seqs):
                continue
            step = replica.schedule(throttle_prefills)
            if is_empty_step(step):
                replica.in_flight.pop()
                self._empty_steps.append((replica, step))
            else:
                steps[replica.index] = step
                ranks = self.layout.ranks_of(replica.index)
                rows = self._monitor.draft_rows  # earlier responses that drafters copy from
                if (update := rows.update(step, replica.scheduler.requests, ranks)) is not None:
                    draft_rows[replica.index] = update
                if (inputs := replica.encoder_inputs_to_send(step)) is not None:
                    images[replica.index] = inputs
        return PATSchedulerOutput.of(steps, self.in_flight, draft_rows, images)

    def finish(self, results: Iterable[StepResult]) -> None:
        """Update the replicas whose steps have finished, and keep their outputs."""
        for replica, step in self._empty_steps:
            # No worker was told of it, but requests may have failed in it.
            self._collect(replica.scheduler.update_from_output(step, EMPTY_MODEL_RUNNER_OUTPUT))
        self._empty_steps.clear()
        for result in results:
            replica = self.replicas[result.replica]
            busy = sum(bool(r.in_flight) for r in self.replicas)
            self._monitor.stepped(self.layout, replica, replica.in_flight[0], busy, result)
            self._collect(replica.finish(result.output, result.drafts))

    def drain(self) -> None:
        """Finish the steps in flight. Their outputs go out with the next update.

        An exception ends the engine: the results that it leaves are known to nobody any more, and
        a call of the front end, in which vLLM's engine core goes on, may have come here.
        """
        self.finish(())
        try:
            self.finish(self.executor.finished(wait_for_all=True))
        except Exception as error:
            self.executor.fail(error)
            raise

    def take_outputs(self) -> dict[int, EngineCoreOutputs]:
        """The outputs since the last call, by client."""
        outputs, self._outputs = self._outputs, {}
        return outputs

    def _collect(self, outputs: dict[int, EngineCoreOutputs]) -> None:
        for of_client in outputs.values():
            if of_client.scheduler_stats is not None:
                mean_of_gpus(of_client.scheduler_stats, len(self.replicas))
            for output in of_client.outputs:
                # A streaming-input session has a reason for the end of each of its parts.
                if output.finish_reason is not None and self._monitor.requests.is_over(
                    output.request_id
                ):
                    self._ended(output.request_id, output.finish_reason)
        merge_outputs(self._outputs, outputs)

    # ---------------------------------------------------------------- layouts

    def make(self, layout: Layout) -> list[Replica]:
        """The replicas of another layout, without requests."""
        self.discard_retired()  # the block pools of the last layout but one serve again
        return self.factory.make(layout)

    def replace(self, layout: Layout, replicas: list[Replica]) -> None:
        """Go on in another layout, whose replicas have the requests now."""
        self.layout = layout
        self._retired, self.replicas = self.replicas, replicas
        self._router.forget()
        if self._cached_with is not None:
            self._cached_with = self.executor.weights_version
        if self.pause_state != PauseState.UNPAUSED:
            self.set_pause_state(self.pause_state)

    def discard_retired(self) -> None:
        """Shut the replicas of the layout that was left down, and keep their block pools."""
        self.factory.discard(self._retired)
        self._retired = ()

    def shutdown(self) -> None:
        """Shut all schedulers down."""
        for replica in (*self._retired, *self.replicas):
            replica.scheduler.shutdown()
