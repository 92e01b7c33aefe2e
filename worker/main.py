"""`weir worker`: starts a worker process and runs it until it is told to stop."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import sys
from functools import partial
from typing import Any

from bus.connection import Bus
from bus.desired_models import DesiredModels
from bus.direct_listener import DirectListener
from bus.identity import own_id
from bus.model_files import ModelFiles
from bus.payload_budget import limit_payloads
from bus.payload_fetcher import PayloadFetcher
from bus.payload_server import PayloadServer
from bus.payloads import remove_dead_segments
from bus.presence import Presence
from bus.sequence_states import SequenceStates
from bus.settings import follow_log
from bus.thread_publisher import ThreadPublisher
from calls.cache_config import CacheConfig
from calls.model_operations import ModelOperations
from repository.layout import ModelRepository
from schemas.placement import Amounts, read_resource
from telemetry.log_settings import LogSettings
from telemetry.logs import RoleLog, configure_logging
from telemetry.metrics_config import parse_metrics_config
from telemetry.readiness import announce_failure, announce_ready, watch_parent
from telemetry.role_life import run_role
from worker import mirror_folder, override_folder
from worker.backend_registry import BackendRegistry
from worker.backends.python_calls import PythonCalls
from worker.batch_execution import FinishedBatch
from worker.client_memory import ClientMemoryAccess
from worker.cuda.pinned import PINNED
from worker.cuda_answers import CudaAnswers
from worker.cuda_regions import CudaRegions, gpu_uuids
from worker.device_metrics import DevicePoller, find_nvml
from worker.devices import WorkerDevices
from worker.drains import Drains
from worker.ensembles.backend import EnsembleBackend
from worker.ensembles.following import EnsembleFollower
from worker.execution_turns import execution_turns
from worker.gpu_memory import GpuMemory, gpu_limits
from worker.gpus import find_gpus
from worker.health_reports import HealthReports
from worker.host_policy import HostPolicies
from worker.inner_calls import InnerCalls
from worker.locked_folder import remove_left_folders
from worker.model_control import ModelControl
from worker.model_environment import ModelEnvironment
from worker.model_loader import ModelLoader
from worker.model_metrics import ModelMetrics
from worker.model_placement import ModelPlacement
from worker.readiness_answers import ReadinessAnswers
from worker.repository_mirrors import RepositoryMirrors, open_mirrors
from worker.repository_report import RepositoryReport
from worker.rolling_reload import RollingReload
from worker.service import WorkerService
from worker.settings import WorkerSettings
from worker.startup_models import check_startup_models

logger = logging.getLogger("weir.worker")

SWITCH_INTERVAL_S = 0.0005
"""Instances are threads beside the event loop: the interpreter's default of 5 ms would be their latency."""


def run(settings: WorkerSettings) -> int:
    """Runs a worker; returns the exit status when it has stopped."""
    log = configure_logging("worker", LogSettings.of(settings))
    watch_parent()
    check_startup_models(settings.model_control_mode, settings.load_model)
    PINNED.total_bytes = settings.pinned_memory_pool_byte_size
    # ONNX Runtime's packages report to their maker what is run, unless this says otherwise; Python models inherit it.
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    return run_role(functools.partial(_work, settings, log, _find_devices(settings)))


def _find_devices(settings: WorkerSettings) -> WorkerDevices:
    """Those that the worker is to use. Raises WeirError for a GPU that is not there."""
    host = find_gpus()
    logger.info("GPUs: %s", ", ".join(f"{gpu.ordinal} {gpu.name}" for gpu in host.gpus) or f"none, {host.problem}")
    return WorkerDevices.of([gpu.ordinal for gpu in host.gpus], settings.gpu, settings.cpu_instances)


async def _work(
    settings: WorkerSettings,
    log: RoleLog,
    own_devices: WorkerDevices,
    stop: asyncio.Event,
    background: asyncio.TaskGroup,
) -> int:
    remove_dead_segments()
    limit_payloads(settings.payload_memory_byte_size)
    for prefix in (override_folder.PREFIX, mirror_folder.PREFIX):
        remove_left_folders(prefix)
    worker_id = own_id("worker", settings.worker_id)
    try:
        metrics = parse_metrics_config(settings.metrics_config)
        cache_config = CacheConfig.parse(settings.cache_config)
        backends = BackendRegistry(settings.backend_config, settings.backend_directories)
        bus = await Bus.connect(settings.nats_url, worker_id, background, access=settings.nats_access, role="worker")
        bus.live_layout.wanted = settings.live_streams
    except (OSError, ValueError) as error:
        logger.error("%s", error)
        announce_failure(str(error))
        return 1
    try:
        listener = await DirectListener.opened(bus, worker_id, settings.payload_listen)
    except (OSError, ValueError) as error:
        logger.error("%s", error)
        announce_failure(str(error))
        await bus.close()
        return 1
    publisher = ThreadPublisher(bus, worker_id)
    publisher.start(background)
    devices = DevicePoller(settings.allow_cpu_metrics, find_nvml() if settings.allow_gpu_metrics else None)
    gpus = gpu_uuids() if settings.allow_client_shm else []
    client_memory = ClientMemoryAccess(settings.allow_client_shm, CudaRegions() if gpus else None)
    fetcher, payload_server = PayloadFetcher(bus, worker_id), PayloadServer(bus, worker_id, listener)
    inner_calls = InnerCalls(bus, worker_id, background, cache_config, metrics.summary_latencies, fetcher)
    model_metrics = ModelMetrics()
    capacity = Amounts(settings.model_memory_bytes, dict(map(read_resource, settings.worker_resource)))
    mode = settings.model_control_mode
    counts = (inner_calls.cache_counters, model_metrics.snapshot)
    service = WorkerService(bus, publisher, worker_id, devices, gpus, *counts, capacity, fetcher, payload_server, mode)
    paths, mirrors = open_mirrors(bus, settings, background)
    repository = ModelRepository(paths, settings.model_config_name, settings.model_namespacing)
    readiness_answers = ReadinessAnswers(bus, worker_id, service.models)
    ensembles = EnsembleBackend(repository, inner_calls, asyncio.get_running_loop())
    desired, drains = DesiredModels(bus), Drains(bus, worker_id)
    inner_calls.catalog.ask_whether_unwanted(desired.is_unwanted)
    operations = ModelOperations(inner_calls.registry, desired, ModelFiles(bus), mode)
    process_calls = PythonCalls(inner_calls, operations, model_metrics)
    process_calls.on_asking = service.asks
    health = HealthReports()
    environment = ModelEnvironment(
        arena_prefix=worker_id,
        on_finished=service.finished,
        metrics=metrics,
        client_memory=client_memory,
        turns=execution_turns(settings.rate_limit, settings.rate_limit_resource),
        checkpoints=SequenceStates(bus),
        ensembles=ensembles,
        process_calls=process_calls,
        devices=own_devices,
        gpu_memory=GpuMemory(gpu_limits(settings.model_load_gpu_limit)),
        on_device_lost=partial(_end_for_another, service),
        host_policies=HostPolicies(settings.host_policy),
        on_health_change=health.changed,
    )
    auto_complete = not settings.disable_auto_complete_config
    loader = ModelLoader(repository, environment, auto_complete, settings.model_load_retry_count, backends)
    control = ModelControl(
        service,
        loader,
        desired,
        ModelFiles(bus),
        drains,
        EnsembleFollower(inner_calls, ensembles.circle),
        ModelPlacement(service.describe, inner_calls, worker_id, capacity, environment.devices),
        RollingReload(inner_calls, worker_id),
        mirrors.refresh,
        mode,
        settings.load_model,
        settings.model_load_thread_count,
    )
    health.listener = control.tell_health
    if client_memory.cuda is not None:
        await CudaAnswers(bus, worker_id, client_memory.cuda).start(background)
    await fetcher.start(background)
    await service.start(background)
    presence = Presence(bus, "worker", worker_id)
    presence_task = await presence.start(background)
    polling = background.create_task(devices.run(settings.metrics_interval_ms))
    await follow_log(bus, log)
    await drains.start()
    await readiness_answers.start(background)
    await RepositoryReport(bus, worker_id, loader.repository, background, mirrors.problems).start()
    if mode == "explicit":
        await desired.start()
        bus.on_reconnect(control.restore_files)
    loading = background.create_task(_load(mirrors, control, settings, background))
    stopping = background.create_task(stop.wait())
    await asyncio.wait({loading, stopping}, return_when=asyncio.FIRST_COMPLETED)
    status = 0
    if loading.done():
        problems = loading.result()
        if problems and settings.exit_on_error:
            announce_failure("; ".join(problems))
            status = 1
            stopping.cancel()
        else:
            await service.settle()
            announce_ready(worker=worker_id)
            if mode == "poll":
                mirrors.on_change(control.poll_once)
            await _until(stopping, control, settings, background)
            await control.hand_over(settings.exit_timeout_secs / 2)
    loading.cancel()
    await control.stop(settings.exit_timeout_secs)
    await mirrors.stop()
    polling.cancel()
    await service.stop(settings.exit_timeout_secs)
    presence_task.cancel()
    presence.tell(leaving=True)
    await inner_calls.close()
    fetcher.close()
    payload_server.close()
    control.remove_folders()
    mirrors.remove_folders()
    await publisher.close()
    await bus.close()
    devices.close()
    model_metrics.close()
    return status


def _end_for_another(service: WorkerService, reason: str, batch: FinishedBatch | None) -> None:
    """Ends this process at once: CUDA works in none that has seen an error that stays. Its supervisor starts another."""
    service.device_lost(reason, batch)
    logging.shutdown()
    os._exit(1)


async def _load(
    mirrors: RepositoryMirrors, control: ModelControl, settings: WorkerSettings, background: asyncio.TaskGroup
) -> list[str]:
    """Fetches what lies in NATS, then loads what is to be there at the start."""
    await mirrors.start(follows=settings.model_control_mode != "none")
    return await control.start(background)


async def _until(
    stopping: asyncio.Task[Any], control: ModelControl, settings: WorkerSettings, background: asyncio.TaskGroup
) -> None:
    """Serves until it is told to stop, looking at the repositories meanwhile where they are to be polled."""
    polling = None
    if settings.model_control_mode == "poll" and settings.repository_poll_secs > 0:
        polling = background.create_task(control.poll(settings.repository_poll_secs))
    await stopping
    if polling is not None:
        polling.cancel()
