"""The option table is complete: it has each of Triton's options, and an option for each field of the settings."""

import dataclasses
from importlib import import_module

import pytest

from weir.bus.nats.access import BrokerAccess
from weir.options import OPTIONS, ROLES, SERVE, options_of
from weir.options.broker import ACCESS_FIELDS

TRITONS = """
--model-repository --model-store --id --exit-on-error --exit-timeout-secs --strict-readiness
--disable-auto-complete-config --strict-model-config --model-control-mode --repository-poll-secs --load-model
--model-config-name --model-load-thread-count --model-load-retry-count --model-namespacing
--model-load-gpu-limit --allow-http --http-port --http-address --reuse-http-port --http-thread-count
--http-max-input-size --http-header-forward-pattern --http-restricted-api --allow-grpc --grpc-port
--grpc-address --reuse-grpc-port --grpc-infer-thread-count --grpc-infer-allocation-pool-size
--grpc-max-response-pool-size --grpc-use-ssl --grpc-use-ssl-mutual --grpc-server-cert --grpc-server-key
--grpc-root-cert --grpc-infer-response-compression-level --grpc-keepalive-time --grpc-keepalive-timeout
--grpc-keepalive-permit-without-calls --grpc-http2-max-pings-without-data
--grpc-http2-min-recv-ping-interval-without-data --grpc-http2-max-ping-strikes --grpc-max-connection-age
--grpc-max-connection-age-grace --grpc-header-forward-pattern --grpc-restricted-protocol --allow-metrics
--metrics-port --metrics-address --allow-gpu-metrics --allow-cpu-metrics --metrics-interval-ms
--metrics-config --trace-config --trace-file --trace-level --trace-rate --trace-count --trace-log-frequency
--log-verbose --log-info --log-warning --log-error --log-format --log-file --backend-directory
--backend-config --cache-config --cache-directory --response-cache-byte-size --rate-limit
--rate-limit-resource --repoagent-directory --pinned-memory-pool-byte-size --cuda-memory-pool-byte-size
--cuda-virtual-address-size --min-supported-compute-capability --enable-peer-access
--buffer-manager-thread-count --host-policy --allow-client-shm --allow-sagemaker --sagemaker-port
--sagemaker-safe-port-range --sagemaker-thread-count --allow-vertex-ai --vertex-ai-port
--vertex-ai-thread-count --vertex-ai-default-model
"""
"""The options of `tritonserver --help` (2.51), and those of later versions."""

TRITONS_DEFAULTS = {
    "id": "triton",
    "exit_on_error": True,
    "exit_timeout_secs": 30,
    "strict_readiness": True,
    "disable_auto_complete_config": False,
    "model_control_mode": "none",
    "repository_poll_secs": 15,
    "model_load_thread_count": 4,
    "model_load_retry_count": 0,
    "allow_http": True,
    "http_port": 8000,
    "http_address": "0.0.0.0",
    "reuse_http_port": False,
    "http_max_input_size": 67108864,
    "allow_grpc": True,
    "grpc_port": 8001,
    "grpc_address": "0.0.0.0",
    "reuse_grpc_port": False,
    "grpc_use_ssl": False,
    "grpc_use_ssl_mutual": False,
    "grpc_infer_response_compression_level": "none",
    "grpc_keepalive_time": 7200000,
    "grpc_keepalive_timeout": 20000,
    "grpc_keepalive_permit_without_calls": False,
    "grpc_http2_max_pings_without_data": 2,
    "grpc_http2_min_recv_ping_interval_without_data": 300000,
    "grpc_http2_max_ping_strikes": 2,
    "allow_metrics": True,
    "metrics_port": 8002,
    "allow_gpu_metrics": True,
    "allow_cpu_metrics": True,
    "metrics_interval_ms": 2000,
    "log_verbose": 0,
    "log_info": True,
    "log_warning": True,
    "log_error": True,
    "log_format": "default",
    "allow_client_shm": False,
    "allow_sagemaker": False,
    "sagemaker_port": 8080,
    "allow_vertex_ai": False,
    "vertex_ai_port": 8080,
}


def test_none_of_triton_s_options_is_forgotten_and_none_is_made_up() -> None:
    names = [name for option in options_of(SERVE).values() if not option.ours for name in option.names]
    assert sorted(names) == sorted(TRITONS.split())


def test_defaults_are_triton_s_where_nothing_else_is_told() -> None:
    serve = options_of(SERVE)
    different = {key for key, default in TRITONS_DEFAULTS.items() if serve[key].default != default}
    assert different == {"exit_on_error", "http_address", "grpc_address"}
    assert all(serve[key].differs.startswith("The default is") for key in different)


@pytest.mark.parametrize("role", ROLES)
def test_each_field_of_a_role_s_settings_is_an_option_with_the_same_default(role: str) -> None:
    settings = getattr(import_module(f"weir.{role}.settings"), f"{role.title()}Settings")
    fields = {field.name: field.default for field in dataclasses.fields(settings)}
    options = {option.settings_field: option for option in options_of(role).values() if not option.refused}
    assert options.keys() - set(ACCESS_FIELDS) == fields.keys() - {"nats_access"}
    assert fields["nats_access"] == BrokerAccess.of({key: options[key].default for key in ACCESS_FIELDS}, {})
    required = {"nats_url", "nats_access", "model_repositories"}
    follows_http = {"metrics_address", "sagemaker_address", "vertex_ai_address"}
    for name in fields.keys() - required - follows_http:
        default = () if options[name].repeatable else options[name].default
        assert default == fields[name], name


@pytest.mark.parametrize("role", ROLES)
def test_what_a_role_takes_serve_takes_too(role: str) -> None:
    # `weir serve` itself says which worker has which GPU and which gateway is which, and has no readers on other hosts.
    alone = {
        "gateway": {"payload_listen", "durable_consumer", "durable_id", "gateway_number"},
        "durable": {"payload_listen"},
        "worker": {"payload_listen", "gpu", "cpu_instances"},
    }.get(role, set())
    assert options_of(role).keys() - options_of(SERVE).keys() == {f"{role}_id", *alone}


def test_each_option_is_declared_once_and_says_what_it_does() -> None:
    names = [name for option in OPTIONS for name in option.names]
    assert len(set(names)) == len(names)
    for option in OPTIONS:
        assert option.help.endswith("."), option.name
        assert not (option.ineffective and option.refused)
        assert option.read(option.value.write(option.default)) == option.default if option.default is not None else True
