"""Option values are parsed with Triton's spellings; errors begin with Triton's wording and say what would be right."""

import pytest

from weir.commands.option_commands import read_values
from weir.options import UsageError, options_of

SERVE = options_of("serve")


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("strict_readiness", "TRUE", True),
        ("strict_readiness", "1", True),
        ("strict_readiness", "On", True),
        ("strict_readiness", "false", False),
        ("strict_readiness", "0", False),
        ("strict_readiness", "OFF", False),
        ("http_port", "0", 0),
        ("log_verbose", "true", 1),
        ("log_verbose", "false", 0),
        ("log_verbose", "3", 3),
        ("log_format", "text", "default"),
        ("log_format", "ISO8601", "ISO8601"),
        ("model_control_mode", "EXPLICIT", "explicit"),
        ("grpc_infer_response_compression_level", "High", "high"),
        ("exit_timeout_secs", "0.5", 0.5),
        ("model_namespacing", "false", False),
        ("rate_limit", "Execution_Count", "execution_count"),
        ("grpc_infer_thread_count", "128", 128),
        ("gateways", "3", 3),
        ("gateways", "AUTO", "auto"),
        ("worker_processors", "0", 0),
        ("trace_level", "max", "TIMESTAMPS"),
    ],
)
def test_values(key: str, text: str, value: object) -> None:
    assert SERVE[key].read(text) == value


@pytest.mark.parametrize(
    ("key", "text", "complaint"),
    [
        (
            "strict_readiness",
            "maybe",
            'Bad option: "--strict-readiness". invalid value for bool option: maybe. Choose true or false.',
        ),
        ("http_port", "abc", 'Bad option: "--http-port". Invalid option value. Got abc. It must be a whole number.'),
        (
            "http_port",
            "70000",
            'Bad option: "--http-port". Provided option value is out of bound. Got 70000. It must be between 0 and 65535.',
        ),
        (
            "exit_timeout_secs",
            "nan",
            'Bad option: "--exit-timeout-secs". Provided option value is out of bound. Got nan. It must be at least 0.',
        ),
        (
            "model_control_mode",
            "x",
            'Bad option: "--model-control-mode". invalid argument for --model-control-mode. '
            "Choose one of: none, poll, explicit.",
        ),
        (
            "log_format",
            "JSON",
            'Bad option: "--log-format". invalid argument for --log-format. Choose one of: default, ISO8601, json.',
        ),
        (
            "model_config_name",
            "",
            'Bad option: "--model-config-name". Error: empty argument for --model-config-name',
        ),
        (
            "trace_level",
            "FOO",
            'Bad option: "--trace-level". invalid value for trace level option: foo. '
            "Choose one of: OFF, TIMESTAMPS, TENSORS.",
        ),
        (
            "grpc_infer_thread_count",
            "1",
            'Bad option: "--grpc-infer-thread-count". '
            "invalid argument for --grpc_infer_thread_count. Must be in the range 2 to 128.",
        ),
        (
            "grpc_max_response_pool_size",
            "0",
            'Bad option: "--grpc-max-response-pool-size". Error: --grpc-max-response-pool-size must be greater than 0.',
        ),
        (
            "host_policy",
            "foo",
            "Bad option: \"--host-policy\". --host-policy option format is '<policy name>,<setting>=<value>'. Got foo",
        ),
        (
            "host_policy",
            "foo,bar=1",
            "Bad option: \"--host-policy\". Unsupported host policy setting 'bar' is specified, supported settings are "
            "'numa-node', 'cpu-cores'",
        ),
        (
            "cuda_memory_pool_byte_size",
            "foo",
            'Bad option: "--cuda-memory-pool-byte-size". Cannot parse pair option due to incorrect number of inputs.'
            "--<pair option> argument requires format <first>:<second>. Found: foo",
        ),
        (
            "gateways",
            "two",
            'Bad option: "--gateways". Invalid option value. Got two. It must be a whole number, or auto.',
        ),
        (
            "gateways",
            "0",
            'Bad option: "--gateways". Provided option value is out of bound. Got 0. It must be between 1 and 64, or auto.',
        ),
        (
            "rate_limit_resource",
            "foo",
            'Bad option: "--rate-limit-resource". --rate-limit-resource option format is '
            "'<resource_name>:<count>:<device>' or '<resource_name>:<count>'. Got foo",
        ),
        (
            "cache_config",
            "foo",
            'Bad option: "--cache-config". No cache specified. '
            "--cache-config option format is <cache name>,<setting>=<value>. Got foo",
        ),
    ],
)
def test_what_is_no_value(key: str, text: str, complaint: str) -> None:
    with pytest.raises(UsageError) as refused:
        SERVE[key].read(text)
    assert str(refused.value) == complaint


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("cache_directory", "/caches"),
    ],
)
def test_what_can_t_be_honoured_is_refused_with_its_reason(key: str, text: str) -> None:
    with pytest.raises(UsageError, match=rf"^{SERVE[key].name}={text} is rejected: \w"):
        SERVE[key].read(text)


@pytest.mark.parametrize("command", ["serve", "scheduler"])
def test_a_removed_option_is_refused_with_what_there_is_instead(command: str) -> None:
    with pytest.raises(UsageError) as refused:
        read_values(options_of(command), {"event_log": "/events"})
    assert str(refused.value) == (
        "--event-log=/events is rejected: event logs were removed; --log-verbose=1 logs which batch each request is in"
    )


def test_what_is_written_reads_as_it_was() -> None:
    for key, value in {"allow_http": False, "exit_timeout_secs": 0.1234567, "http_port": 0, "id": "a b"}.items():
        (word,) = SERVE[key].written(value)
        name, _, text = word.partition("=")
        assert name == SERVE[key].name
        assert SERVE[key].read(text) == value
    assert SERVE["load_model"].written(("a", "b")) == ["--load-model=a", "--load-model=b"]
    assert SERVE["load_model"].written(()) == []
    assert SERVE["metrics_address"].written(None) == []
