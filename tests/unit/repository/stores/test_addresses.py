"""Addresses of object stores, in the forms that Triton accepts."""

import pytest

from weir.repository.stores.addresses import StoreAddress, is_cloud_address, parse_address


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("s3://bucket", ("s3", "bucket", "", "", "")),
        ("s3://bucket/a//b/", ("s3", "bucket", "a/b", "", "")),
        ("s3://my.bucket-1/a", ("s3", "my.bucket-1", "a", "", "")),
        ("s3://localhost:4566/demo/models", ("s3", "demo", "models", "http://localhost:4566", "")),
        ("s3://http://10.0.0.1:9000/b", ("s3", "b", "", "http://10.0.0.1:9000", "")),
        ("s3://https://store.example:443/b/p/q", ("s3", "b", "p/q", "https://store.example:443", "")),
        ("s3://https://[::1]:9000/b", ("s3", "b", "", "https://[::1]:9000", "")),
        ("gs://bucket/path", ("gs", "bucket", "path", "", "")),
        ("as://account/container", ("as", "container", "", "", "account")),
        ("as://account.blob.core.windows.net/container/a/b", ("as", "container", "a/b", "", "account")),
    ],
)
def test_addresses(text: str, expected: tuple[str, str, str, str, str]) -> None:
    kind, bucket, path, endpoint, account = expected
    assert parse_address(text) == StoreAddress(text, kind, bucket, path, endpoint, account)  # type: ignore[arg-type]
    assert is_cloud_address(text)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("s3://", "names no bucket"),
        ("s3:///path", "names no bucket"),
        ("s3://bu cket/x", "names no bucket"),
        ("s3://host:9000", "names no bucket"),
        ("s3://host:99999/b", "a port is at most 65535"),
        ("s3://https://host/b/p", "has no port: write s3://https://HOST:PORT/BUCKET/PATH"),
        ("s3://https://key:secret@host:9000/b", "an address must not contain credentials"),
        ("gs://b/../x", "has a path with '.' or '..'"),
        ("as://account", "names no container"),
        ("as:///container", "names no Azure storage account"),
        ("ftp://a/b", "begins with none of s3://, gs://, as://"),
    ],
)
def test_invalid_addresses(text: str, problem: str) -> None:
    with pytest.raises(ValueError) as error:
        parse_address(text)
    assert problem in str(error.value)
    assert "secret@" not in str(error.value)


def test_other_repositories_are_no_cloud_addresses() -> None:
    assert not any(map(is_cloud_address, ["nats://models", "/models", "s3", None]))
