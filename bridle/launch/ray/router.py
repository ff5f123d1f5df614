"""Ray Serve's hook for choosing a replica. The handle in a front calls the hook to choose the engine for a request.

Ray copies this module by value into other processes, so it contains only the hook.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from bridle.distributed.replica_messages import Submit, read_by_replica
from bridle.launch.ray.affinity import Places


class EngineRouter(RequestRouter):  # type: ignore[misc]  # Ray has no types
    """Sends a request to the engine with its prefix or adapter, and a tool's answer to the engine that waits for it.
    Calls that are neither requests nor answers go to any engine."""

    def initialize_state(self, block_size: int, max_engines: int) -> None:
        """Create the state. Serve calls this method with the `request_router_kwargs` of the deployment."""
        self._places: Places[Any] = Places(block_size, max_engines)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._places.keep([replica.replica_id for replica in replicas])

    def on_replica_actor_died(self, replica_id: Any) -> None:
        super().on_replica_actor_died(replica_id)
        self._places.keep(list(self.curr_replicas))

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the engines that may get the request, best first, each in a separate list."""
        args: Sequence[Any] = () if pending_request is None else pending_request.args
        if len(args) > 1:  # the answer to a tool call, and the address of the engine that waits for it
            home = [replica for replica in candidate_replicas if replica.replica_id.unique_id == args[1]]
            return [home or candidate_replicas]
        message = read_by_replica(args[0]) if args else None
        if not isinstance(message, Submit):
            return [candidate_replicas]
        request = message.request
        by_id = {replica.replica_id: replica for replica in candidate_replicas}
        for replica_id, replica in by_id.items():
            self._places.note_report(replica_id, replica.routing_stats)
        prompt = (*request.prompt, *request.generated)
        return [[by_id[each]] for each in self._places.rank(prompt, request.salt, request.adapter, by_id)]
