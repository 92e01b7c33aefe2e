"""The forms of options that hold several things in one text, checked in the words of Triton's parser.

Checks import what they need of our packages when they run, which is in our own processes only (`weir.own_packages`).
Source: `command_line_parser.cc` of Triton's server. The text itself is passed on as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from urllib.parse import urlsplit

from weir.options.values import BadValue, Integer, Number


def setting_of(option: str, what: str) -> Callable[[str], None]:
    """A check for `<what>,<setting>=<value>`, all three of which must be there."""

    def check(text: str) -> None:
        owner, comma, setting = text.partition(",")
        key, equals, value = setting.partition("=")
        if not (owner and comma and key and equals and value):
            raise BadValue(f"--{option} option format is '<{what}>,<setting>=<value>'. Got {text}")

    return check


def backend_setting(text: str) -> None:
    """`<backend name>,<setting>=<value>`, or `<setting>=<value>` for all."""
    from worker.backend_settings import BackendSettings

    try:
        BackendSettings([text])
    except ValueError as error:
        raise BadValue(str(error)) from error


def host_policy(text: str) -> None:
    """`<policy name>,<setting>=<value>`, of a setting that there is."""
    setting_of("host-policy", "policy name")(text)
    setting = text.partition(",")[2].partition("=")[0]
    if setting not in ("numa-node", "cpu-cores"):
        raise BadValue(
            f"Unsupported host policy setting '{setting}' is specified, supported settings are 'numa-node', 'cpu-cores'"
        )


def cache_setting(text: str) -> None:
    """`<cache name>,<setting>=<value>`."""
    if text.find(",") <= 0:
        raise BadValue(
            f"No cache specified. --cache-config option format is <cache name>,<setting>=<value>. Got {text}"
        )
    setting_of("cache-config", "cache name")(text)


def listen_address(text: str) -> None:
    """`<host>` or `<host>:<port>`."""
    from schemas.listen_address import ListenAddress

    try:
        ListenAddress.of(text)
    except ValueError as error:
        raise BadValue(str(error)) from error


def device_pair(text: str) -> None:
    """`<device>:<number>`."""
    device, colon, number = text.partition(":")
    if not colon:
        raise BadValue(
            "Cannot parse pair option due to incorrect number of inputs."
            f"--<pair option> argument requires format <first>:<second>. Found: {text}"
        )
    Integer().read(device)
    Number().read(number)


def rate_limit_resource(text: str) -> None:
    """`<resource_name>:<count>:<device>` or `<resource_name>:<count>`."""
    _, *numbers = text.split(":")
    if not 1 <= len(numbers) <= 2:
        raise BadValue(
            "--rate-limit-resource option format is "
            f"'<resource_name>:<count>:<device>' or '<resource_name>:<count>'. Got {text}"
        )
    for number in numbers:
        Integer().read(number)


def worker_resource(text: str) -> None:
    """`<name>=<count>`."""
    from schemas.placement import read_resource

    try:
        read_resource(text)
    except ValueError as error:
        raise BadValue(f"--worker-resource option format is '<name>=<count>'. Got {text}: {error}") from error


def tenant_weight(text: str) -> None:
    """`<tenant>=<weight>`, a number above 0."""
    tenant, equals, weight = text.rpartition("=")
    if not (tenant and equals and Number().read(weight) > 0):
        raise BadValue(f"--tenant-weight option format is '<tenant>=<weight>'. Got {text}")


def tenant_limit(text: str) -> None:
    """`<tenant>=<count>`, at least 1."""
    tenant, equals, count = text.rpartition("=")
    if not (tenant and equals and Integer().read(count) > 0):
        raise BadValue(f"--tenant-limit option format is '<tenant>=<count>'. Got {text}")


def callback_prefix(text: str) -> None:
    """The beginning of an HTTP URL, with the host and a path."""
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname or not parts.path.startswith("/"):
        raise BadValue(f"--callback-allow option format is 'http[s]://<host>[:<port>]/<path>'. Got {text}")
