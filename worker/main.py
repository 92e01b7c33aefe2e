"""`weir worker`: starts a worker process and runs it until it is told to stop."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys

import uvloop

from bus.connection import Bus
from bus.identity import new_id
from bus.payloads import remove_dead_segments
from bus.thread_publisher import ThreadPublisher
from repository.layout import ModelRepository
from telemetry.logs import configure_logging
from telemetry.metrics_config import parse_metrics_config
from telemetry.readiness import announce_failure, announce_ready, watch_parent
from worker.client_memory import ClientMemoryAccess
from worker.cuda_answers import CudaAnswers
from worker.cuda_regions import CudaRegions, gpu_uuids
from worker.device_metrics import DevicePoller, find_nvml
from worker.model_loader import ModelLoader
from worker.service import WorkerService
from worker.settings import WorkerSettings

logger = logging.getLogger("weir.worker")

SWITCH_INTERVAL_S = 0.0005
"""Instances are threads beside the event loop: the interpreter's default of 5 ms would be their latency."""


def run(settings: WorkerSettings) -> int:
    """Runs a worker; returns the exit status when it has stopped."""
    configure_logging("worker", settings.log_format, settings.log_verbose)
    watch_parent()
    # ONNX Runtime's packages report to their maker what is run, unless this says otherwise; Python models inherit it.
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    return uvloop.run(_serve(settings))


async def _serve(settings: WorkerSettings) -> int:
    # A task of the group that fails takes the role down with it: better a restart than half a worker.
    async with asyncio.TaskGroup() as background:
        return await _work(settings, background)


async def _work(settings: WorkerSettings, background: asyncio.TaskGroup) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    remove_dead_segments()
    worker_id = settings.worker_id or new_id("worker")
    try:
        metrics = parse_metrics_config(settings.metrics_config)
        bus = await Bus.connect(settings.nats_url, worker_id, background)
    except (OSError, ValueError) as error:
        announce_failure(str(error))
        return 1
    publisher = ThreadPublisher(bus, settings.nats_url, worker_id)
    publisher.start(background)
    devices = DevicePoller(settings.allow_cpu_metrics, find_nvml() if settings.allow_gpu_metrics else None)
    gpus = gpu_uuids() if settings.allow_client_shm else []
    client_memory = ClientMemoryAccess(settings.allow_client_shm, CudaRegions() if gpus else None)
    service = WorkerService(bus, publisher, worker_id, devices, gpus)
    loader = ModelLoader(
        ModelRepository(list(settings.model_repositories), settings.model_config_name),
        not settings.disable_auto_complete_config,
        worker_id,
        service.finished,
        metrics,
        client_memory,
    )
    if client_memory.cuda is not None:
        await CudaAnswers(bus, worker_id, client_memory.cuda).start(background)
    await service.start(background)
    polling = background.create_task(devices.run(settings.metrics_interval_ms))
    loading = background.create_task(service.load_all(loader, settings.model_load_thread_count))
    stopping = background.create_task(stop.wait())
    await asyncio.wait({loading, stopping}, return_when=asyncio.FIRST_COMPLETED)
    status = 0
    if loading.done():
        failed = [f"'{name}': {reason}" for name, reason in service.failures().items()]
        if failed and settings.exit_on_error:
            announce_failure(f"failed to load {', '.join(failed)}")
            status = 1
            stopping.cancel()
        else:
            announce_ready(worker=worker_id)
            await stopping
    loading.cancel()
    polling.cancel()
    await service.stop(settings.exit_timeout_secs)
    await publisher.close()
    await bus.close()
    devices.close()
    return status
