"""The application of Ray Serve: a deployment of fronts, and a deployment of engines behind them."""

from __future__ import annotations

from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig
from ray.serve.schema import LoggingConfig

from bridle.launch.ray.engine_deployment import EngineReplica
from bridle.launch.ray.files import OperatorFiles
from bridle.launch.ray.ingress import Front
from bridle.launch.ray.settings import RaySettings
from bridle.launch.replica_process import ReplicaConfig

#: Ray Serve's limit of requests per replica. It is never reached, because bridle limits running and waiting requests.
_MANY = 100_000
_HEALTH_PERIOD, _HEALTH_TIMEOUT = 5.0, 10.0
#: Turns off Serve's access log, which has a line for every call between fronts and engines and for every probe. Fronts
#: log each request of a client, as `bridle serve` does.
_QUIET = LoggingConfig(enable_access_log=False)
#: The block size of the router's prefixes if engines choose their own block size. The router only estimates what
#: engines have cached.
_BLOCK_SIZE = 16


def build(settings: RaySettings, files: OperatorFiles) -> Application:
    """Return the application of fronts and engines. `files` are the operator's files that the settings name."""
    told = ReplicaConfig(
        settings.to_model(), settings.to_engine(), settings.shards, settings.to_control(), files.tools, "json"
    ).encode()
    engines = serve.deployment(EngineReplica).options(
        name="engines",
        # One bundle for the whole engine, because a model's processes are children of the replica's process and need
        # the GPUs of its machine.
        placement_group_bundles=[settings.bundle],
        placement_group_strategy="STRICT_PACK",
        ray_actor_options={"num_cpus": settings.bundle["CPU"], "num_gpus": settings.bundle.get("GPU", 0)},
        autoscaling_config=_autoscaling(settings),
        request_router_config=RequestRouterConfig(
            request_router_class="bridle.launch.ray.router.EngineRouter",
            request_router_kwargs={
                "block_size": settings.to_model().block_size or _BLOCK_SIZE,
                # During an update, there may be twice as many engines.
                "max_engines": 2 * settings.max_engines,
            },
            request_routing_stats_period_s=1.0,
            request_routing_stats_timeout_s=5.0,
        ),
        max_ongoing_requests=_MANY,
        health_check_period_s=_HEALTH_PERIOD,
        health_check_timeout_s=_HEALTH_TIMEOUT,
        graceful_shutdown_timeout_s=settings.drain,
        graceful_shutdown_wait_loop_s=0.5,
        logging_config=_QUIET,
    )
    fronts = serve.deployment(serve.ingress()(Front)).options(
        name="fronts",
        num_replicas=settings.fronts,
        ray_actor_options={"num_cpus": settings.front_cpus},
        max_ongoing_requests=_MANY,
        graceful_shutdown_timeout_s=settings.drain,
        logging_config=_QUIET,
    )
    bound = engines.bind(told, settings.adapters)
    app: Application = fronts.bind(settings.for_fronts().model_dump_json(), bound, files.version)
    return app


def _autoscaling(settings: RaySettings) -> AutoscalingConfig:
    return AutoscalingConfig(
        min_replicas=settings.min_engines,
        max_replicas=settings.max_engines,
        initial_replicas=settings.initial_engines,
        upscale_delay_s=settings.upscale_delay,
        downscale_delay_s=settings.downscale_delay,
        policy=AutoscalingPolicy(
            policy_function="bridle.launch.ray.autoscaling.QueuedTokens",
            policy_kwargs={"target_tokens": settings.target_queued_tokens, "target_busy": settings.target_busy},
        ),
    )
