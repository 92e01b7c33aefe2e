# ruff: noqa: E501 - a row of the table is a line
"""The bounds of `reference/bounds.md`, by package: module, constant, what it bounds, what happens beyond it."""

from typing import NamedTuple


class Bound(NamedTuple):
    """One bound: the module and the constant that hold its value, what it bounds, and what happens beyond it."""

    module: str
    constant: str
    what: str
    beyond: str


_TABLE = """
# Gateway
weir.gateway.grpc.offload:LONG_BYTES | a gRPC message parsed in the event loop | in a helper process
weir.gateway.http2.headers:MAX_FIELDS | fields of a header block of gRPC | its connection ends
weir.gateway.grpc.codec:MAX_FIELDS | fields of a gRPC infer request | 400
weir.schemas.kserve.sample_inputs:MAX_SAMPLE_BYTES | inputs that are made for a request | refused
weir.schemas.kserve.sample_inputs:MAX_JSON_ELEMENTS | elements of such inputs as JSON | the request has binary tensors
weir.gateway.http.openapi.models:MAX_DIMENSIONS | tensors of a model in `/openapi.json`, and their dimensions | the model has no paths of its own
weir.gateway.http.openapi.description:MAX_MODEL_BYTES | part of one model in `/openapi.json` | the model has no paths of its own
weir.gateway.http.openapi.models:MAX_EXAMPLE_BYTES | inputs of the example of a model in `/openapi.json` | the model has no example
weir.gateway.http.openapi.description:MAX_MODELS_BYTES | parts of all models in `/openapi.json` | further models have no paths of their own
weir.gateway.http.routing:MAX_SHORT_BODY_BYTES | body of a request that changes settings | 400
weir.http_server.stall_detection:STALL_PERIOD_S | time in which the next 16 KiB of a request must arrive | 408; the connection is closed
weir.http_server.stall_detection:UNREAD_PERIOD_S | time in which the next 16 KiB of a response must be read; 30 s when memory is short | the stream or connection is closed
weir.calls.payload_store:SLOT_FROM_BYTES | an HTTP body received in ordinary memory | received in a payload slot
weir.gateway.http.body:SLOT_AFTER_BYTES | part of a body that arrives before it gets a payload slot | ordinary memory
weir.http_server.body_reader:DIRECT_FROM_BYTES | rest of a body that the parser passes on in copies | received directly in its payload slot
weir.gateway.http2.send_buffer:MAX_SENT_FRAME_BYTES | a frame sent over gRPC | several frames
weir.http_server.connection_cap:MAX_CONNECTIONS | connections of clients to a gateway, over all its ports; at most three quarters of its open files, and of one address three quarters of that | an idle connection ends; without one the new connection is rejected: 503
weir.http_server.client_connection:FIRST_REQUEST_S | a new HTTP connection without the beginning of a request | closed
weir.http_server.client_connection:KEEP_ALIVE_S | an HTTP connection that is idle between two requests | closed
weir.gateway.http2.keepalive:HANDSHAKE_TIMEOUT_S | a new gRPC connection without the settings of its client | closed
weir.http_server.connection:MAX_HEAD_BYTES | URL and headers of a request | 400, and the connection ends
weir.gateway.grpc.stream_infer:MAX_STREAM_REQUESTS | requests without a response on a gRPC stream | the stream is not read further
weir.gateway.grpc.stream_infer:MAX_STREAM_REQUEST_BYTES | their messages together | the stream is not read further
weir.gateway.grpc.messages:MAX_EXPANDED_BYTES | a compressed gRPC message, decompressed | RESOURCE_EXHAUSTED
weir.http_server.connection:MAX_CHUNKS | chunks of a request's body | 400, and the connection ends
weir.calls.inference.call:MAX_WAITING_BYTES | responses of one request that wait for a client that does not read | the request ends: over HTTP its connection is closed, a gRPC stream is reset, NATS: 503
weir.calls.inference.call:DRAIN_BYTES | waiting responses that are written in one turn of the event loop | the next turn
weir.gateway.grpc.stream_infer:_TURN_REQUESTS | requests of a stream whose waiting responses are sent in one turn | the next turn
weir.gateway.nats.call:ACKNOWLEDGEMENT_TIMEOUT_S | wait for a NATS caller's next acknowledgement | the request ends: 503
weir.gateway.nats.call:FULL_ACKNOWLEDGEMENT_TIMEOUT_S | the same while more than 16 MiB wait for it | the request ends: 503
weir.gateway.nats.call:STOP_ACKNOWLEDGEMENT_TIMEOUT_S | the same while the gateway stops | the request ends: 503
weir.gateway.nats.api_bridge:MAX_IN_FLIGHT | requests to the HTTP API over the bus that a gateway answers at a time | 503
weir.gateway.nats.api_bridge:MAX_POLLS | long polls over the bus that wait in a gateway | they are answered at once
weir.schemas.wire.gateway_api:MAX_HEADERS | headers of such a request | 400
weir.cluster.counters.collection:MAX_DEPARTED | ended workers with counters of their own | summed up
weir.cluster.counters.collection:MAX_GATEWAYS | gateways whose counters a gateway keeps | ignored
weir.cluster.counters.collection:MAX_SCHEDULERS | schedulers whose counters a gateway keeps | ignored
weir.gateway.admin.peers:ANSWER_TIMEOUT_S | wait of a change for the other gateways | it is in effect there later
weir.cluster.counters.collection:QUERY_TIMEOUT_S | wait for counters | the last received ones are used
weir.gateway.admin.shared_memory:MAX_REGIONS | shared-memory regions registered on a host | 503
weir.gateway.http.admin:MAX_BODY_BYTES | body that registers a region | 400
weir.console.main:MAX_MEMORY_BYTES | what clients of a console have sent, or have not read | 503
# Observation of batches and requests
weir.bus.observation:MAX_LEASES | observers of a gateway or a scheduler, each of one model or of all | ignored
weir.schemas.wire.observation:LEASE_S | an observation that is not renewed | it ends
weir.schemas.wire.observation:MAX_TRACES_PER_S | requests a second of one gateway that an observer may ask for | ignored
weir.schemas.wire.observation:MAX_BATCHES_PER_S | batches a second of one model that an observer may ask for | ignored
weir.schemas.wire.observation:MAX_IDS | request ids that an observer asks for | ignored
weir.schemas.wire.observation:MAX_REPORTED_REQUESTS | requests of a batch in its report | only counted
weir.schemas.wire.observation:MAX_REPORTED_TIMES | times in the report of a request | left out
weir.scheduler.service.observation:MAX_OPEN_BATCHES | reported batches whose ends are awaited | the end of the oldest is not reported
weir.bus.observation:REPORT_DELAY_S | how long a report waits for others | sent
weir.bus.observation:MAX_WAITING_BYTES | reports for one observer that wait | sent at once
weir.access.policy.document:MAX_POLICY_BYTES | an access policy | rejected; the policy before stays in force
weir.cluster.access.key_file:MAX_BYTES | a file of keys | rejected; the keys before stay in force
weir.access.tokens.signing_keys:MAX_SET_BYTES | the key set of an issuer | rejected; the last copy stays in use
weir.cluster.access.key_sets:FETCH_TIMEOUT_S | fetching a key set | tried again after 10 s
weir.access.gate:MAX_REMEMBERED | keys and tokens whose check is remembered | all are checked again
weir.access.limits.buckets:MAX_OWNERS | owners of requests whose token buckets are not full | refused: 429
weir.access.limits.leased_buckets:MAX_OWNERS | owners with rate limits that a gateway has had requests of within two seconds | refused: 429
weir.access.limits.leased_buckets:MAX_WAITING | requests that wait for tokens at one gateway | refused: 429
weir.access.limits.leased_buckets:SLICE_S | tokens that a gateway holds of a rate limit | those of this time, or one
weir.access.limits.leased_buckets:KEEP_S | time for which a gateway keeps unused tokens | they go back
weir.cluster.access.rate_limits:ANSWER_TIMEOUT_S | wait for tokens | the gateway goes on with its part of the limit
weir.cluster.observation.store:MAX_BYTES | reports that an observer keeps | the oldest are dropped
weir.cluster.observation.observer:MAX_WATCHED | models that an observer watches at a time | the one that was asked for longest ago is not watched any more
# Callers (gateways, and workers that call models)
weir.calls.in_flight:MAX_IN_FLIGHT | requests in flight in a gateway | 503
weir.calls.in_flight:MAX_IN_FLIGHT_BYTES | their packed bodies | 503
weir.calls.queues:MAX_BACKOFFS | queues whose back-off a caller remembers | their requests are sent and rejected
weir.calls.request_templates:MAX_HEADERS | cached request headers of a model | the least recently used are dropped
weir.calls.request_templates:MAX_HEADER_BYTES | size of one of them | it is parsed each time
weir.calls.request_templates:MAX_KEPT_BYTES | all of them together | the least recently used are dropped
weir.calls.cache.response_cache:MAX_HASHED_BYTES | content of a request that is looked up in a response cache | the request runs
weir.calls.responses.delivery:MAX_BUFFERED_RESPONSES | responses that wait for those of earlier requests | as below
weir.calls.responses.delivery:MAX_BUFFERED_BYTES | their outputs | requests: 503; a waiting stream ends: UNAVAILABLE
weir.calls.cache.stores:LOOKUP_TIMEOUT_S | wait for a shared response cache | the request is queued
weir.calls.traffic.counters:MAX_PROCESSES | processes whose counters by version a process keeps | the oldest are dropped
weir.gateway.admin.traffic:MAX_RAMP_S | how long a ramp may take, in seconds | 400
weir.bus.streams.history:MAX_CHANGES | changes of models in the history | the oldest are dropped
weir.gateway.admin.history:MAX_SHOWN | changes in one response | the newest
weir.schemas.wire.history:MAX_CONFIG_BYTES | configuration of a load that the history keeps | it can't be rolled back to
weir.repository.content_digests:MAX_READ_BYTES | contents of a version that are read for its digest | further files count by size and time of change
weir.repository.content_digests:MAX_KNOWN | files whose digests a worker keeps | computed again
weir.bus.kv.typed_bucket:MAX_RECORDS | models with a traffic rule that was set, models kept without a worker, keys of settings, principals with keys: of each | dropped
weir.schemas.config.traffic:MAX_ARMS | versions in a traffic rule | 400
weir.calls.outbox:MAX_FRAME_BYTES | bodies that share a frame | the next frame takes the rest
weir.calls.model_control:DEPENDENTS_TIMEOUT_S | wait for an ensemble's running requests before its models are unloaded with it | they are unloaded
weir.calls.payload_store:FRAME_INLINE_BYTES | bodies inside a frame, where memory is shared | by reference
weir.calls.outbox:MAX_UNACKNOWLEDGED_FRAMES | unacknowledged frames of one model | later requests wait for one
weir.calls.outbox:BROKER_TIMEOUT_S | wait for an unreachable broker | 503
weir.calls.responses.outputs:MAX_FETCHING_RESPONSES | responses that wait for payloads of other hosts | as if they were lost
weir.calls.traffic.shadow:MAX_OUTPUT_BYTES | outputs of a response that is compared with that of its copy | skipped
weir.calls.traffic.shadow:MAX_STRING_BYTES | an output of BYTES of such a response | skipped
weir.calls.traffic.shadow:MAX_HELD_BYTES | outputs of such responses that a gateway holds | skipped
weir.calls.traffic.shadow:MAX_SAMPLE_BYTES | a request that is kept because its copy gave another response | not kept
weir.calls.traffic.shadow:KEPT_SAMPLES | such requests of a version that a gateway keeps | the worst are kept
weir.bus.streams.shadow_samples:MAX_BYTES | such requests of all gateways | no more are kept
weir.calls.traffic.shadow:MAX_COPIES | copies of requests for shadow traffic in flight in a gateway | no copy is made
weir.calls.traffic.shadow:MAX_COPIED_BYTES | their packed bodies | no copy is made
weir.calls.dispatch:MAX_RERUNS | further runs of a request whose payloads were lost between hosts | 503
weir.calls.model_control:MAX_OPERATIONS | loads and unloads a role waits for | 503
weir.calls.catalog:WARMUP_TIMEOUT_S | wait of a new gateway for workers that load, before a model counts as unknown | 404 for models of no worker
weir.calls.model_control:OPERATION_TIMEOUT_S | wait for a load or unload | 503; the operation continues
weir.calls.readiness:RESPONSE_TIMEOUT_S | wait for workers' readiness | not ready
# Durable requests
weir.durable.consumer.runner:MAX_RUNNING_REQUESTS | durable requests of a lane of a model that run | they wait
weir.durable.requests.headers:MAX_BLOCKS | cached headers of a lane of a model | they are parsed again
weir.durable.requests.headers:MAX_BLOCK_BYTES | size of one of them | it is parsed again
weir.durable.records.object_bodies:OBJECTS_AT_A_TIME | objects that are read concurrently | they wait
weir.durable.records.reply_outbox:SUBSCRIBER_TIMEOUT_S | wait for subscribers of a reply subject, after a reconnection or a takeover | the response is only in `RESULT`
weir.durable.records.reply_outbox:ACK_TIMEOUT_S | wait for the stream of a reply subject | the response is only in `RESULT`
weir.durable.records.reply_outbox:RECENT_BYTES | responses kept to be published again after a lost connection | the oldest are not published again
weir.durable.records.recorder:MAX_KEPT | cached common parts of records | they are packed again
weir.durable.records.record_store:MAX_BATCH | records of one batch | the next batch takes the rest
weir.durable.records.record_store:MAX_BATCH_BYTES | their bytes | the next batch takes the rest
weir.durable.records.record_store:MAX_IN_FLIGHT | unacknowledged batches of records | later ones wait
weir.durable.consumer.acknowledger:BLOCKED_TIMEOUT_S | wait of an ended message for those before it | it is acknowledged by itself
weir.durable.requests.ordering:MAX_LOST | lost sequences of a lane that are remembered | as not started
weir.durable.requests.durable_queue:MAX_CANCELLED | cancelled durable requests that have not been pulled yet | the oldest run in vain
weir.durable.consumer.leased_model:LEASE_GRACE_S | time for which durable requests continue without their model's lease | they are dropped
weir.durable.api.acceptance:MAX_STORING_BYTES | bodies of asynchronous requests that are not on disk yet | 503
weir.durable.api.acceptance:STORE_TIMEOUT_S | wait until such a request is on disk | 503
weir.durable.api.lookup:MAX_WAITING_CLIENTS | clients that wait for the end of an asynchronous request | answered at once
weir.durable.api.options:MAX_WAIT_S | wait for the end of an asynchronous request | answered with its present state
weir.durable.api.callbacks:MAX_POSTS | responses posted to URLs concurrently | they wait
weir.durable.api.receivers:MAX_POSTS_TO_ONE | responses posted to one receiver concurrently | they are posted later
weir.durable.api.receivers:MAX_POSTS_TO_HOST | responses posted to one host concurrently | they are posted later
weir.durable.api.callbacks:POST_TIMEOUT_S | time of one post | posted again
weir.durable.api.callbacks:MAX_TRIES | posts of one response | it stays in RESULT
weir.durable.api.callbacks:MAX_PENDING | failed posts that wait to be repeated, of all gateways | no others are posted
weir.durable.api.callbacks:MAX_STORED_BYTES | responses that wait to be posted | further ones are not posted
weir.durable.api.callbacks:MAX_AGE_S | time for which a response waits to be posted | it stays in RESULT
weir.durable.api.options:MAX_KEY_LENGTH | characters of an idempotency key | 400
weir.durable.api.callback_rules:MAX_URL_LENGTH | characters of a callback URL | 400
weir.durable.api.metrics:MAX_MODELS | models with their own counters of durable requests | summed up as `_other`
weir.durable.api.metrics:MAX_CONSUMERS | durable queues with gauges | without gauges
# Jobs
weir.jobs.records.store:MAX_JOBS | batch jobs that are kept | the oldest ended ones are deleted; 503 if none has ended
weir.jobs.run.host:MAX_RUNNING | batch jobs that run concurrently | they wait
weir.jobs.run.host:MAX_RUNNING_OF_MODEL | those for one model | they wait
weir.jobs.records.record:MAX_INPUTS | paths that a batch job may name | 400
weir.jobs.records.record:MAX_RECORD_BYTES | description of a batch job | 400
weir.jobs.records.folders:MAX_EXAMINED | files and folders that a pattern of a job's input examines | the job is rejected
weir.jobs.run.run:MAX_IN_FLIGHT | items of a job in flight | they wait
weir.jobs.run.plan:MAX_HELD_BYTES | items and results that a job holds | it reads no further
weir.jobs.run.plan:MAX_SPAN | items of a job between the first not written and the last read | as above
weir.jobs.run.run:PAUSE_TIMEOUT_S | wait of a pausing job for its items in flight | they run again
weir.jobs.run.run:MAX_FAILURES_BEFORE_SUCCESS | failed items of a job before the first success, without `max_failures` | the job ends
weir.jobs.records.record:MAX_COLUMNS | columns of Parquet files that a job may choose | refused with 400
weir.jobs.formats.items:MAX_ITEM_BYTES | one item of a batch job | the item fails
weir.jobs.formats.jsonl:MAX_NOTED_LINES | remembered positions of lines in a job's file | every other one is dropped
weir.jobs.formats.npy:BLOCK_BYTES | block of an array read at a time | the next block follows
weir.jobs.formats.parquet_rows:BATCH_BYTES | rows of Parquet read at a time | the next rows follow
weir.jobs.formats.parquet_rows:READ_MEMORY_BYTES | memory for reading the Parquet files of a job, in a process of their own | smaller batches; a row that does not fit fails, and the rest of its row group
weir.jobs.formats.parquet_rows:MAX_FOOTER_BYTES | footer of a Parquet file | the job fails
weir.jobs.formats.parquet_rows:MAX_ROW_GROUPS | row groups of a Parquet file | the job fails
weir.jobs.formats.parquet_rows:MAX_ROWS | rows of a Parquet file | the job fails
weir.jobs.formats.parquet_rows:MAX_DECODED_BYTES | items of a Parquet file, beside `MAX_EXPANSION` | the items after that fail
weir.jobs.formats.parquet_rows:MAX_EXPANSION | times that its items may be larger than a Parquet file, beside `MAX_DECODED_BYTES` | as above
weir.jobs.formats.parquet_reader:READ_LIMIT_S | wait for the next rows of a Parquet file | the rest of the row group fails
weir.jobs.formats.parquet_reader:MAX_DEATHS | deaths of the process that reads a Parquet file | the rest of the file fails
weir.jobs.formats.files:LOCK_TIMEOUT_S | wait for another writer of a job's output | UNAVAILABLE: the job pauses
weir.jobs.formats.npy:MAX_ERROR_LENGTH | characters of an error in an `.npz` shard | cut off
# Scheduler
weir.scheduler.batching.former:MAX_REQUESTS | requests sent to an ensemble together | the next batch takes the rest
weir.scheduler.service.owned_queue:MAX_BUFFERED_BYTES | frames of one queue in a scheduler | the rest stays in the stream
weir.scheduler.service.owned_queue:MAX_TOTAL_BUFFERED_BYTES | frames of all queues of a scheduler | the rest stays in the stream
weir.scheduler.service.owned_queue:MIN_BUFFERED_BYTES | frames that each queue may always hold | the rest stays in the stream
weir.scheduler.placement.desired_workers:MAX_DESIRED | workers a queue asks for | no more are asked for
weir.scheduler.batching.former:MAX_BATCH_BYTES | bodies of one batch | the next batch takes the rest
weir.scheduler.placement.window:MAX_WINDOW | batches of one request that an instance holds | the others wait
weir.scheduler.placement.window:MAX_WINDOW_US | expected microseconds of all batches in the window of an instance | the others wait
weir.scheduler.placement.instances:MAX_BACKOFF_US | microseconds for which an instance that has returned a batch gets none | it gets one again
weir.scheduler.batching.version_queue:MAX_DIRECT_US | expected microseconds of a batch of a model whose requests a worker may start itself | it may not
weir.scheduler.service.messages:GRANT_MS | milliseconds for which it may | a request goes to the scheduler
weir.scheduler.batching.queue_rules:DEFAULT_MAX_QUEUE_SIZE | waiting requests of one version, at one level of a lane | 503
weir.scheduler.sequences.scheduler:MAX_WAITING | waiting requests of sequences, of one lane of a version | 503
weir.worker.sequence_reports:MAX_SEQUENCES | started sequences of a version that a worker reports to the next owner of its queue | rejected as not started when their scheduler is lost
weir.scheduler.service.served_queues:MAX_LOOKUPS | sequences of former owners that are looked up at a time | they wait
weir.scheduler.service.former_sequences:REPORT_TIMEOUT_S | wait for these reports | any sequence counts as lost for as long as one may be idle
weir.scheduler.sequences.table:MAX_LOST | lost sequences that are remembered | rejected as not started
weir.scheduler.model_scheduler:MAX_SUMMARY_BYTES | text of a queue in the log of a policy that raised | cut off
weir.scheduler.model_scheduler:MAX_LISTED | requests of a batch or a version, or workers, listed in that text | counted only
weir.scheduler.service.policy_failure:MAX_EVENT_LENGTH | characters of the event in that log | cut off
weir.scheduler.sequences.sequence:MAX_REPLAY_BYTES | bodies of one version kept for replay since the last checkpoints | a sequence that loses its slot ends
weir.scheduler.ownership.controller:POLICY_RESTART_S | time between two restarts of a queue whose policy fails | requests wait
weir.scheduler.ownership.controller:MAX_CONCURRENT_CHANGES | queues that a scheduler acquires or hands over at once | the others wait
weir.scheduler.service.owned_queue:DRAIN_WAITING_S | wait of a handover for waiting requests | they are delivered again
weir.scheduler.service.owned_queue:DRAIN_BATCHES_S | wait of a handover for running batches | they are delivered again
# Worker
weir.worker.ensembles.request:MAX_RUNS | runs of a request to an ensemble whose tensors are lost | 503
weir.worker.ensembles.request:STEP_TIMEOUT_S | wait for a step with `max_inflight_requests` | it exceeds the limit
weir.worker.direct_dispatch:MAX_AHEAD_US | expected microseconds of requests started without the scheduler, by instance | the next ones go to the scheduler
weir.worker.ensembles.step_templates:MAX_TEMPLATES | templates of an ensemble's steps | all are made again
weir.worker.execution.updates:MAX_HELD_S | wait of responses for those of the next batches of their instance | they are sent
weir.worker.batch_dispatch:MAX_STUCK_S | wait of several batches behind one that does not end | back to the queue
weir.worker.execution.microbatch:MAX_TOGETHER | batches that go to the process of an instance in one message | the others wait
weir.worker.execution.microbatch:MAX_TOGETHER_BYTES | their bodies | the others wait
weir.worker.execution.streaming:MAX_RESCHEDULED | rescheduled requests of an instance whose responses are numbered on | the stream of the oldest ends with an error
weir.worker.execution.statistics:MAX_RESPONSE_INDEXES | responses of a request with their own counters | counted with the last
weir.worker.backends.python.calls:MAX_UNSENT_BYTES | responses for a Python model that its process has not read | the call ends with an error
weir.worker.python_stub._weir_calls:MAX_UNREAD_BYTES | several responses of one call that a Python model has not read | the call ends with an error
weir.worker.python_stub._weir_calls:MAX_KEPT_BYTES | responses kept for a second iteration | no second iteration
weir.worker.python_stub._weir_calls:MAX_FILES_BYTES | files of a Python model's load_model | it raises
weir.bus.payloads.reach:MAX_INLINE_RESPONSE_BYTES | outputs of one response inside a message | 503
weir.worker.python_stub._weir_channel:MAX_MESSAGE_BYTES | a message of a Python model's process | the process is killed
weir.worker.backend_api.custom_metrics:MAX_METRICS_BYTES | custom metrics of a worker's models | creating one raises
weir.worker.backends.python.environment:INSTALL_TIMEOUT_S | installation of a Python model's requirements | the load fails
weir.worker.execution.shared_memory:MAX_REGION_TENSOR_BYTES | an input in a client's memory | 400
weir.worker.devices.cuda_shared_memory:MAX_OPEN_ALLOCATIONS | clients' GPU allocations open in a worker | the oldest is closed
weir.worker.cuda.pinned:MOST_POOL_BYTES | host memory that a worker pins for its GPUs, by default | ordinary memory
weir.worker.cuda.graphs:MAX_GRAPHS | CUDA graphs of each of an instance's two sets of buffers | it runs without a graph
weir.worker.lifecycle.reconciler:MAX_WAITING_OPERATIONS | operations on one model that wait in a worker | requests superseded by a newer one are skipped
weir.worker.lifecycle.placement:OFFERS_TIMEOUT_S | wait for the other workers' offers before a model that declares needs is placed | the plan is made without those that are missing
weir.repository.stores.store:RANGE_BYTES | part of a file that one request to an object store or to NATS reads | the next request reads the rest
weir.worker.lifecycle.downloads:RANGES_AT_A_TIME | such parts that a worker holds in memory | they wait
weir.worker.lifecycle.downloads:FILES_AT_A_TIME | files that a worker downloads at a time | they wait
weir.worker.lifecycle.downloads:SMALL_MODEL_BYTES | size of a model that is downloaded beside others | larger ones are downloaded one after another
weir.worker.lifecycle.downloads:SMALL_MODELS_AT_A_TIME | such models that a worker downloads at a time | they wait, in order
weir.worker.lifecycle.mirror:ATTEMPTS | attempts to fetch a model whose objects are replaced meanwhile, or whose store fails | it is UNAVAILABLE, or keeps its version
weir.worker.lifecycle.mirror:START_TIMEOUT_S | wait for the listing of a repository that is not local at the start | models that were fetched before are loaded
weir.worker.lifecycle.mirror:LOOK_TIMEOUT_S | wait for such a repository by a load request or a query of the index | the last listing is used
weir.worker.lifecycle.mirror:LOOKS_AT_A_TIME | listings of single models at a time | they wait
weir.worker.lifecycle.mirror:MAX_SETTLE_LISTINGS | listings of a model that changes all the time | it is fetched as it is
weir.worker.lifecycle.mirror:MAX_RETRY_S | time between attempts to read such a repository that failed at the start | the attempts go on at this interval
weir.worker.main:EARLY_READY_S | downloads that delay the start of gateways | they start, and the models follow
weir.repository.stores.cloud:MAX_OBJECTS | objects of a repository in an object store | it can't be read
weir.repository.stores.credentials:MAX_CREDENTIAL_FILE_BYTES | a file of credentials | the server does not start
weir.worker.execution.invocation:MAX_FAILED_BATCHES | successive batches in which every request fails | only a few requests of the next one are tried
weir.worker.execution.invocation:PROBES | requests of such a batch that run again, as long as none succeeds | the others fail with their batch
weir.worker.backends.python.supervisor:UNAVAILABLE_TIMEOUT_S | wait of a batch for its instance's process | it goes back to the queue
weir.worker.backends.python.supervisor:SEQUENCE_UNAVAILABLE_TIMEOUT_S | the same for a sequence model | its sequences end
weir.worker.backends.python.supervisor:RETIRE_TIMEOUT_S | wait for the streams of a replaced process | they end with an error
weir.worker.backends.python.supervisor:STOP_TIMEOUT_S | wait for a Python model's `finalize` | its process is killed
weir.worker.backends.python.supervisor:START_TIMEOUT_S | wait for a Python model's process to load it, without `stub-timeout-seconds` | the load fails
weir.worker.backends.python.process:MAX_LOAD_ATTEMPTS | starts of a process that is killed while it loads | the load fails
weir.worker.backends.python.backend:MAX_TRACKED_SEQUENCES | sequences that an instance remembers as started | the oldest end
weir.worker.backends.python.process:PROBE_TIMEOUT_S | wait for a Python model's `is_ready` | it is not ready
weir.worker.queries:MAX_READINESS_QUERIES | readiness queries that wait in a worker | not ready
weir.worker.execution.warmup:RESPONSES_TIMEOUT_S | wait for the last responses to a warm-up sample | the load fails
weir.worker.backend_api.inference_client:OPEN_TIMEOUT_S | wait for the registry by calls of models from a worker, while the broker is away | UNAVAILABLE; the worker tries again
weir.worker.lifecycle.coordination:DRAIN_TIMEOUT_S | wait for the schedulers' permission to unload a version, when none replies | it is unloaded
weir.worker.execution.response_writer:READERS_TIMEOUT_S | time for which outputs of an unloaded instance stay readable | they are lost
weir.worker.batch_dispatch:MAX_QUEUES | queues whose owners a worker remembers | the oldest are forgotten
# Bus
weir.bus.streams.pull:MAX_HELD_MESSAGES | durable requests of a lane of a model that are pulled | they wait
weir.bus.streams.pull:MAX_HELD_BYTES | their bytes | they wait
weir.bus.streams.consumers:MAX_UNACKED | unacknowledged durable requests of a lane of a model | they wait
weir.bus.links.link:MAX_BUFFERED_BYTES | messages that a process of the host has not read | it is disconnected, and gets them from nats-server
weir.bus.links.links:ACCEPTED_STALL_LIMIT_S | time in which a caller reads nothing of what waits for it | the same
weir.bus.links.links:OPENED_STALL_LIMIT_S | time in which a worker reads nothing of what waits for it | it counts as lost
weir.bus.links.links:MAX_LINKS | links of other processes to a worker | their messages go through nats-server
weir.bus.links.links:MAX_SUBJECTS | subjects that a process may announce on a link | the rest go through nats-server
weir.bus.links.framing:MAX_FRAME_BYTES | a message on a link | dropped, and logged
weir.scheduler.service.owned_queue:ACK_DELAY_S | wait of an acknowledgement for others | they are published
weir.worker.batch_dispatch:MAX_CALLERS | callers that a worker remembers having responded to | it forgets them all
weir.bus.nats.thread_publisher:MAX_UNSENT_BYTES | what nats-server has not read of a worker's messages | further responses for other hosts are queued
weir.bus.nats.thread_publisher:MAX_QUEUED_BYTES | responses so queued | the threads of instances wait
weir.bus.nats.thread_publisher:MAX_WAIT_S | wait of such a thread | its responses are queued all the same
weir.bus.nats.connection:MAX_KEPT_BYTES | messages kept while the broker is unreachable | dropped: gateways send again
weir.bus.streams.declarations:LIVE_MAX_BYTES | stream LIVE, or up to 8 streams of live requests | publishes are rejected: 503
weir.bus.naming.live_queues:MAX_LIVE_STREAMS | streams of live requests | the role does not start
weir.bus.streams.declarations:MAX_QUEUES_OF_STREAM | queues in one of them | the model's requests time out
weir.bus.streams.declarations:MAX_UNACKED_FRAMES | unacknowledged frames of one queue | the rest stays in the stream
weir.bus.kv.model_files:MODEL_FILES_MAX_BYTES | files of load requests | 503
weir.bus.payloads.arena:INLINE_LIMIT_BYTES | a tensor inside a message, where memory is shared | by reference
weir.bus.payloads.arena:REMOTE_INLINE_LIMIT_BYTES | the same between two hosts | fetched by reference
weir.bus.payloads.arena:DEFAULT_BUDGET_BYTES | default of shared memory for payloads of a process | inside messages
weir.bus.payloads.fetch_plan:MAX_FETCHED_BYTES | a payload fetched from another host | it counts as lost
weir.bus.payloads.fetch_plan:PIECE_BYTES | a piece of it | the next piece takes the rest
weir.bus.payloads.fetch_plan:MAX_OUTSTANDING | pieces requested on a link between hosts | further ones wait
weir.bus.payloads.fetcher:MAX_TCP_LINKS_OPENED | links that a process opens to other hosts | an idle one is closed; without one the payload counts as lost
weir.bus.payloads.fetcher:LINK_SILENCE_TIMEOUT_S | wait for any byte of requested pieces | the link is opened again, once for each payload
weir.bus.payloads.fetcher:ADDRESS_TIMEOUT_S | wait for the address of a payload's owner | the payload counts as lost
weir.bus.links.tcp:CONNECT_TIMEOUT_S | wait for a link to another host | the payload counts as lost
weir.bus.links.tcp:MAX_TCP_LINKS | links of other hosts to a process | further ones are rejected
weir.bus.links.tcp:MAX_UNPROVEN | those whose handshake is not complete | disconnected
weir.bus.links.tcp:HANDSHAKE_TIMEOUT_S | wait for the handshake | disconnected
weir.bus.links.tcp:MAX_REQUEST_FRAME_BYTES | a message of a handshake, or a request for a piece | disconnected
weir.bus.links.tcp:TCP_STALL_LIMIT_S | wait for a reader to receive a piece | disconnected
weir.bus.links.tcp:IDLE_LIMIT_S | idle time of a link of another host | disconnected
weir.bus.payloads.server:MAX_LINK_REQUESTS | waiting requests for pieces of one link | disconnected
weir.bus.nats.embedded_server:MAX_PAYLOAD | one message through the embedded nats-server | 400
weir.bus.streams.declarations:STATES_MAX_BYTES | checkpoints of the states of sequences | a sequence that loses its slot ends
weir.bus.streams.declarations:STATES_TTL_S | lifetime of a checkpoint | a sequence that loses its slot ends
weir.bus.kv.sequence_states:MAX_STATE_BYTES | state of one sequence that is checkpointed | no checkpoint
weir.bus.kv.sequence_states:FETCH_TIMEOUT_S | wait for the checkpoints of a batch | their sequences end
weir.bus.kv.pushed_models:PIECE_BYTES | memory for a file that is pushed or fetched | the next piece takes the rest
weir.bus.kv.settings:MAX_SETTING_BYTES | settings under one key | dropped and counted
weir.bus.streams.declarations:QUEUE_MAX_BYTES | default size of stream QUEUE, or two fifths of the embedded server's volume | rejected when published
weir.bus.streams.declarations:RESULT_MAX_BYTES | default size of stream RESULT, or two fifths of the embedded server's volume | the oldest results are deleted
weir.bus.streams.declarations:DEAD_MAX_BYTES | default size of stream DEAD, or a twentieth of the embedded server's volume | the oldest dead letters are deleted
weir.bus.streams.declarations:DEAD_TTL_S | lifetime of a dead letter | it is deleted
weir.bus.kv.queue_owners:MAX_RECORDS_BYTES | records of queue owners | queues without an owner
weir.bus.kv.presence:MAX_PROCESSES | processes that announce themselves | ignored
# Repository
weir.repository.layout:MAX_FILES | files of a version | the load fails
weir.repository.scheduler_rules:MAX_STEPS | steps of an ensemble | the load fails
weir.repository.paths:MAX_CONFIG_BYTES | a `config.pbtxt`, or the configuration of a load request | the load fails
weir.repository.paths:MAX_LABELS_BYTES | a label file | the load fails
weir.repository.paths:MAX_REQUIREMENTS_BYTES | a Python model's file of requirements | the load fails
weir.repository.paths:MAX_TENSOR_FILE_BYTES | a file of warm-up data, or of a sequence's initial state | the load fails
# Telemetry
weir.telemetry.tracing.file:MAX_UNWRITTEN_BYTES | traces of one setting before they are written | written at once
weir.telemetry.tracing.trace:MAX_TIMESTAMPS | timestamps of one traced request | left out
# Every process
weir.runtime.limits.open_files:MAX_OPEN_FILES | open files of a process, whatever the hard limit allows | errors of the system
weir.runtime.memory_ledger:DEFAULT_LIMIT_BYTES | memory of a gateway for what clients have sent and have not read, or a quarter of its memory for requests if that is less | 503, over gRPC RESOURCE_EXHAUSTED
weir.runtime.memory_ledger:SCARCITY_FACTOR | a connection may hold this many times what is left of its client's share | as above
weir.runtime.offload:OFF_LOOP_BYTES | JSON or msgpack parsed in the event loop | in a helper process
weir.runtime.offload:PROCESSES | helper processes of a gateway, each with one body at a time | bodies wait
weir.runtime.offload:MAX_WAITING | bodies that wait for, or are in, a helper process | 503
weir.runtime.offload:RUN_LIMIT_S | work of a helper process on one body | 503, and the process is killed
weir.runtime.offload_process:MAX_MEMORY_BYTES | memory of a helper process | 400
# Requests and messages
weir.schemas.kserve.response:MAX_WRITTEN_BYTES | an output written as JSON in the event loop | in a helper process
weir.schemas.core.tensors:MAX_WALKED_BYTES | BYTES content checked in the event loop | by the worker
weir.schemas.config.parameters:MAX_PARTITIONS | partitions of a model | the load fails
weir.schemas.core.errors:MAX_RETRY_AFTER_S | longest `Retry-After` | this value is returned
weir.schemas.core.errors:MAX_BACKOFF_US | longest back-off of a queue, in microseconds | the queue is tried again
weir.schemas.wire.model_control:MAX_FILES | files of one load request | 400
weir.schemas.wire.model_control:MAX_CONFIG_LENGTH | characters of its configuration | 400
weir.schemas.config.parameters:MAX_RESOURCES | resources that a model or a worker may name | the load fails
weir.schemas.wire.model_control:MAX_PUSHED_FILES | files of a pushed model | it is not pushed
weir.schemas.wire.statistics:MAX_BUCKETS | buckets of a histogram that a model's configuration gives | the load fails
weir.schemas.wire.registry:MAX_INSTANCES | instances of a version on one worker | the load fails
weir.schemas.wire.registry:MAX_PROBLEM_LENGTH | characters of a version's problem | cut off
weir.schemas.wire.calls:MAX_REASON_LENGTH | characters of the reason why a durable request was lost | cut off
"""


def _parsed() -> dict[str, list[Bound]]:
    groups: dict[str, list[Bound]] = {}
    rows: list[Bound] = []
    for line in _TABLE.strip().splitlines():
        if line.startswith("# "):
            rows = groups.setdefault(line.removeprefix("# "), [])
        else:
            place, what, beyond = line.split(" | ")
            rows.append(Bound(*place.split(":"), what, beyond))
    return groups


BOUNDS = _parsed()
"""By group of packages."""
