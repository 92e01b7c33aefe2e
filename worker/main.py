"""`weir worker`: connects the components of a worker process, starts them, serves, and stops them."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import sys
from collections.abc import Collection
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from weir.bus.kv.desired_models import DesiredModels
from weir.bus.kv.model_files import ModelFiles
from weir.bus.kv.presence import Presence
from weir.bus.kv.sequence_states import SequenceStates
from weir.bus.kv.settings import follow_log
from weir.bus.links.tcp import TcpListener
from weir.bus.naming.identity import own_id
from weir.bus.nats.connection import Bus
from weir.bus.nats.remote_links import listen_for_links
from weir.bus.nats.thread_publisher import ThreadPublisher
from weir.bus.payloads.arena import limit_payloads, process_budget, remove_dead_segments
from weir.bus.payloads.fetcher import PayloadFetcher
from weir.bus.payloads.reach import process_reach
from weir.bus.payloads.server import PayloadServer
from weir.calls.cache.config import CacheConfig
from weir.calls.model_control import ModelControl
from weir.repository.layout import ModelRepository
from weir.runtime.folders.locked import remove_abandoned_folders
from weir.runtime.limits.process_limits import computing_threads, find_limits, log_limits, show_bytes
from weir.runtime.process_memory import available_memory_bytes
from weir.runtime.processes.state import own_identity
from weir.runtime.readiness import announce_failure, announce_ready, watch_parent
from weir.runtime.role_life import run_role
from weir.schemas.config.parameters import ResourceAmounts, read_resource
from weir.schemas.core.errors import invalid
from weir.schemas.wire.registry import WorkerRecord
from weir.telemetry.log_settings import LogSettings
from weir.telemetry.logs import RoleLog, configure_logging
from weir.telemetry.metrics_config import MetricsConfig, parse_metrics_config
from weir.worker.backend_api.custom_metrics import ModelMetrics
from weir.worker.backend_api.inference_client import ClientOptions, InferenceClient
from weir.worker.backends.python.calls import ProcessCallServer
from weir.worker.backends.registry import BackendRegistry
from weir.worker.batch_dispatch import BatchDispatcher
from weir.worker.cuda.ipc_memory import IpcAllocation, pinned_array
from weir.worker.cuda.pinned import PINNED, default_pool_bytes
from weir.worker.devices.cuda_shared_memory import CudaRegions, CudaSharedMemoryService, gpu_uuids
from weir.worker.devices.gpus import GpuMemory, WorkerDevices, find_gpus, gpu_limits
from weir.worker.devices.host_policy import HostPolicies
from weir.worker.devices.metrics import DevicePoller, find_nvml
from weir.worker.direct_dispatch import DirectDispatcher
from weir.worker.ensembles.backend import EnsembleBackend
from weir.worker.ensembles.dependencies import DependencyWatcher
from weir.worker.execution.instance import ModelEnvironment
from weir.worker.execution.rate_limiter import rate_limiter_permits
from weir.worker.execution.shared_memory import SharedMemoryAccess
from weir.worker.lifecycle import model_cache, override_folder
from weir.worker.lifecycle.coordination import DrainCoordinator, RollingReload
from weir.worker.lifecycle.loader import LoadPolicy, ModelLoader
from weir.worker.lifecycle.mirror import CacheOptions, open_mirrors
from weir.worker.lifecycle.model_state import ManagedModels, RecordPublisher
from weir.worker.lifecycle.placement import ModelPlacement
from weir.worker.lifecycle.reconciler import ModelReconciler, check_startup_models
from weir.worker.lifecycle.transitions import LifecycleContext
from weir.worker.queries import QueryService
from weir.worker.repository_agents import agents
from weir.worker.sequence_reports import SequenceReporter
from weir.worker.service import CounterSources, WorkerService
from weir.worker.settings import WorkerSettings

logger = logging.getLogger("weir.worker")

SWITCH_INTERVAL_S = 0.0005
"""The interpreter's thread switch interval. Instances are threads beside the event loop: the default of 5 ms would be added
to their latency.
"""


EARLY_READY_S = 2.0
"""Downloads that take longer than this after the listing do not delay the start of gateways."""


def run(settings: WorkerSettings) -> int:
    """Runs a worker until SIGTERM or SIGINT; returns the exit status."""
    log = configure_logging("worker", LogSettings.of(settings))
    watch_parent()
    check_startup_models(settings.model_control_mode, settings.load_model)
    chosen = settings.pinned_memory_pool_byte_size
    PINNED.total_bytes = default_pool_bytes(available_memory_bytes()) if chosen is None else chosen
    # ONNX Runtime's packages send usage data to their maker unless this is set. Python models inherit it.
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    _limit_threads_of_libraries()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    return run_role(functools.partial(_work, settings, log, _find_devices(settings)))


def _limit_threads_of_libraries() -> None:
    """Keeps libraries of linear algebra, in this process and in those of Python models, within the container's limits.

    They know the affinity mask, but neither a CPU quota nor a limit of threads. A value of the user's stays.
    """
    threads = computing_threads()
    if threads < len(os.sched_getaffinity(0)):
        os.environ.setdefault("OMP_NUM_THREADS", str(threads))


def _find_devices(settings: WorkerSettings) -> WorkerDevices:
    """The devices that the worker uses. Raises WeirError for a GPU that the host does not have."""
    host = find_gpus()
    logger.info("GPUs: %s", ", ".join(f"{gpu.ordinal} {gpu.name}" for gpu in host.gpus) or f"none, {host.problem}")
    return WorkerDevices.of([gpu.ordinal for gpu in host.gpus], settings.gpu, settings.cpu_instances)


async def _work(
    settings: WorkerSettings, log: RoleLog, devices: WorkerDevices, stop: asyncio.Event, background: asyncio.TaskGroup
) -> int:
    remove_dead_segments()
    limit_payloads(settings.payload_memory_byte_size)
    log_limits(
        logger,
        find_limits(),
        threads_of_a_pool=str(computing_threads()),
        payloads=show_bytes(process_budget().total_bytes),
    )
    for prefix in (override_folder.PREFIX, model_cache.PREFIX, agents.PREFIX):
        remove_abandoned_folders(prefix)
    worker_id = own_id("worker", settings.worker_id)
    async with AsyncExitStack() as shutdown:
        try:
            try:
                context = await _connect(settings, worker_id, devices, background, shutdown)
            except (OSError, ValueError) as error:
                logger.error("%s", error)
                announce_failure(str(error))
                return 1
            worker = _Worker(context)
            await worker.start(shutdown, log)
            return await worker.serve(stop)
        except BaseException:
            # After an unexpected exception the process ends at once, without an orderly shutdown: it is started again.
            shutdown.pop_all()
            raise


@dataclass(frozen=True, slots=True, kw_only=True)
class _Context:
    """The settings of a worker, read and checked, and its connections to the broker and to readers of payloads."""

    settings: WorkerSettings
    metrics: MetricsConfig
    cache_config: CacheConfig | None
    backends: BackendRegistry
    devices: WorkerDevices
    worker_id: str
    bus: Bus
    listener: TcpListener | None
    background: asyncio.TaskGroup


async def _connect(
    settings: WorkerSettings,
    worker_id: str,
    devices: WorkerDevices,
    background: asyncio.TaskGroup,
    shutdown: AsyncExitStack,
) -> _Context:
    """Checks the settings and connects. Raises ValueError for settings that are invalid, OSError if it can't connect."""
    metrics, cache_config = parse_metrics_config(settings.metrics_config), CacheConfig.parse(settings.cache_config)
    backends = BackendRegistry(settings.backend_config, settings.backend_directories)
    bus = await Bus.connect(settings.nats_url, worker_id, background, access=settings.nats_access, role="worker")
    shutdown.push_async_callback(bus.close)
    bus.live_layout.wanted = settings.live_streams
    bus.links.listen()
    listener = await listen_for_links(bus, settings.payload_listen)
    process_reach().set(bus, listener is not None)
    return _Context(
        settings=settings,
        metrics=metrics,
        cache_config=cache_config,
        backends=backends,
        devices=devices,
        worker_id=worker_id,
        bus=bus,
        listener=listener,
        background=background,
    )


class _Worker:
    """The components of one worker process: how they are connected, started and stopped."""

    def __init__(self, context: _Context) -> None:
        settings, bus, worker_id = context.settings, context.bus, context.worker_id
        self._settings = settings
        self._bus = bus
        self._worker_id = worker_id
        self._background = context.background
        self._loop = asyncio.get_running_loop()
        mode = settings.model_control_mode
        self.publisher = ThreadPublisher(bus)
        self.device_metrics = DevicePoller(
            settings.allow_cpu_metrics, find_nvml() if settings.allow_gpu_metrics else None
        )
        gpus = gpu_uuids() if settings.allow_client_shm else []
        regions = CudaRegions(IpcAllocation, context.devices.own_gpus, pinned_array) if gpus else None
        self.shared_memory = SharedMemoryAccess(settings.allow_client_shm, regions)
        self.fetcher = PayloadFetcher(bus, worker_id)
        self.payload_server = PayloadServer(bus, worker_id, context.listener)
        direct = DirectDispatcher(bus, worker_id)
        options = ClientOptions(
            cache=context.cache_config,
            summary_latencies=context.metrics.summary_latencies,
            fetcher=self.fetcher,
            direct=direct,
        )
        self.client = InferenceClient(bus, worker_id, context.background, options)
        self.custom_metrics = ModelMetrics()
        self.dispatcher = BatchDispatcher(bus, self.publisher, worker_id, self.fetcher, direct)
        process = own_identity()
        capacity = ResourceAmounts(settings.model_memory_bytes, dict(map(read_resource, settings.worker_resource)))
        self.service = WorkerService(
            bus,
            self.dispatcher,
            WorkerRecord(
                worker_id,
                process.pid,
                gpus=gpus,
                capacity=capacity,
                model_control_mode=mode,
                pid_namespace=process.namespace,
                started_ticks=process.started,
                link=bus.links.address,
            ),
            CounterSources(
                payload_server=self.payload_server,
                fetcher=self.fetcher,
                devices=self.device_metrics,
                cache_counters=self.client.cache_counters,
                custom_metrics=self.custom_metrics.snapshot,
            ),
        )
        if settings.model_namespacing and not all(isinstance(one, Path) for one in settings.model_repositories):
            raise invalid(
                "--model-namespacing requires folders: a repository in NATS or in an object store has another folder on "
                "each worker"
            )
        folder = None if settings.model_cache_dir is None else Path(settings.model_cache_dir)
        paths, self.mirrors = open_mirrors(
            bus,
            settings.model_repositories,
            CacheOptions(folder, settings.model_cache_byte_size),
            follows=mode == "poll",
            poll_s=settings.repository_poll_secs or None,
        )
        repository = ModelRepository(paths, settings.model_config_name, settings.model_namespacing)
        ensembles = EnsembleBackend(repository, self.client, self._loop)
        self.desired, self.drains = DesiredModels(bus), DrainCoordinator(bus, worker_id)
        self.client.catalog.set_unwanted_check(self.desired.is_unwanted)
        model_control = ModelControl(self.client.registry, self.desired, ModelFiles(bus), mode)
        process_calls = ProcessCallServer(self.client, model_control, self.custom_metrics)
        process_calls.on_first_call = self.dispatcher.model_calls
        environment = ModelEnvironment(
            arena_prefix=worker_id,
            on_update=self.dispatcher.publish,
            metrics=context.metrics,
            shared_memory=self.shared_memory,
            permits=rate_limiter_permits(settings.rate_limit, settings.rate_limit_resource),
            checkpoints=SequenceStates(bus),
            process_calls=process_calls,
            devices=context.devices,
            gpu_memory=GpuMemory(gpu_limits(settings.model_load_gpu_limit)),
            on_device_lost=self._exit_without_device,
            host_policies=HostPolicies(settings.host_policy),
            on_health_change=self._on_health_change,
        )
        loader = ModelLoader(
            repository,
            environment,
            context.backends,
            ensembles,
            LoadPolicy(
                not settings.disable_auto_complete_config,
                settings.model_load_retry_count,
                settings.repoagent_directory,
            ),
        )
        models = ManagedModels(RecordPublisher(self.service))
        self.reconciler = ModelReconciler(
            LifecycleContext(
                host=self.dispatcher,
                models=models,
                loader=loader,
                desired=self.desired,
                files=ModelFiles(bus),
                drains=self.drains,
                dependencies=DependencyWatcher(self.client, ensembles.find_circle),
                placement=ModelPlacement(models, self.client, worker_id, capacity, context.devices),
                rolling=RollingReload(self.client, worker_id),
                mirrors=self.mirrors,
                control_mode=mode,
                startup=settings.load_model,
                threads=settings.model_load_thread_count,
            )
        )
        self.mirrors.on_status(self.reconciler.publish_repositories)
        self.sequence_reporter = SequenceReporter(
            bus, worker_id, self.dispatcher.sequences, lambda: self.dispatcher.held
        )
        self.queries = QueryService(bus, worker_id, self.dispatcher.models, repository, self._unfetched)

    async def start(self, shutdown: AsyncExitStack, log: RoleLog) -> None:
        """Starts everything but the models. `shutdown` stops it in the opposite order."""
        bus, background, timeout_s = self._bus, self._background, self._settings.exit_timeout_secs
        shutdown.callback(self.custom_metrics.close)
        shutdown.callback(self.device_metrics.close)
        shutdown.callback(self.mirrors.remove_folders)
        shutdown.callback(self.reconciler.remove_folders)
        if self.shared_memory.cuda is not None:
            await CudaSharedMemoryService(bus, self._worker_id, self.shared_memory.cuda).start(background)
        shutdown.callback(self.payload_server.close)
        await self.fetcher.start(background)
        shutdown.callback(self.fetcher.close)
        shutdown.push_async_callback(self.client.close)
        presence = Presence(bus, "worker", self._worker_id)
        shutdown.callback(presence.publish, leaving=True)
        await self.service.start(background)
        shutdown.callback((await presence.start(background)).cancel)
        shutdown.push_async_callback(self.service.stop, timeout_s)
        polling = background.create_task(self.device_metrics.run(self._settings.metrics_interval_ms))
        shutdown.callback(polling.cancel)
        await follow_log(bus, log)
        await self.drains.start()
        await self.queries.start(background)
        await self.sequence_reporter.start(background)
        if self._settings.model_control_mode == "explicit":
            await self.desired.start()
            bus.on_reconnect(self.reconciler.restore_files)
        shutdown.push_async_callback(self.mirrors.stop)
        shutdown.push_async_callback(self.reconciler.stop, timeout_s)

    async def serve(self, stop: asyncio.Event) -> int:
        """Loads the models of the start, then serves until `stop` is set; returns the exit status."""
        settings = self._settings
        loading = self._background.create_task(self._load())
        stopping = self._background.create_task(stop.wait())
        announcing = self._background.create_task(self._announce_early())
        await asyncio.wait({loading, stopping}, return_when=asyncio.FIRST_COMPLETED)
        announcing.cancel()
        if not loading.done():
            loading.cancel()
            return 0
        problems = loading.result()
        if settings.exit_on_error is None:  # as for folders, the default differs for repositories and for models
            problems = self.mirrors.unusable()
        if problems and settings.exit_on_error is not False:
            announce_failure("; ".join(problems))
            stopping.cancel()
            return 1
        await self.service.describe(settled=True)
        announce_ready(worker=self._worker_id)
        polling = None
        if settings.model_control_mode == "none":
            self.mirrors.follow(self._background, self._load_fetched)
        if settings.model_control_mode == "poll":
            self.mirrors.follow(self._background, self._poll_fetched)
            has_folders = any(isinstance(repository, Path) for repository in settings.model_repositories)
            if settings.repository_poll_secs > 0 and has_folders:
                polling = self._background.create_task(self.reconciler.poll(settings.repository_poll_secs))
        await stopping
        if polling is not None:
            polling.cancel()
        await self.reconciler.hand_over(settings.exit_timeout_secs / 2)
        return 0

    async def _load(self) -> list[str]:
        """Lists the repositories that are not local, and loads the models of the start. Returns the problems."""
        settings = self._settings
        await self.mirrors.start()
        if self.mirrors.unusable() and settings.exit_on_error is not False:
            return self.mirrors.unusable()
        return await self.reconciler.start(self._background)

    async def _announce_early(self) -> None:
        """Reports that the worker is ready while it still downloads: gateways start, and models that are loaded serve.

        With `exit_on_error` the outcome of all loads comes first.
        """
        await self.mirrors.is_listed.wait()
        await asyncio.sleep(EARLY_READY_S)
        if self.mirrors.is_fetching and not self._settings.exit_on_error:
            logger.info("models are still downloading; those that are loaded are served meanwhile")
            announce_ready(worker=self._worker_id)

    async def _load_fetched(self, names: Collection[str]) -> None:
        await self.reconciler.load_fetched(names)

    async def _poll_fetched(self, names: Collection[str]) -> None:
        await self.reconciler.poll_once()

    async def _unfetched(self) -> dict[str, str]:
        return await self.mirrors.contents(looks=self._settings.model_control_mode == "explicit")

    def _on_health_change(self, identity: str) -> None:
        """Publishes the health of a model; called in any thread."""
        try:
            self._loop.call_soon_threadsafe(self.reconciler.publish_health, identity)
        except RuntimeError:
            pass  # the event loop has been closed

    def _exit_without_device(self, reason: str) -> None:
        """Ends the process after an error that makes CUDA unusable in it; its supervisor starts another one."""
        logger.error("the worker exits, so that another one can take its place: %s", reason)
        logging.shutdown()
        os._exit(1)
