"""`StoreAddress`: where a model repository lies in an object store, in the forms that Triton accepts.

| form | store |
|---|---|
| `s3://BUCKET/PATH` | Amazon S3 |
| `s3://HOST:PORT/BUCKET/PATH`, `s3://http://HOST:PORT/BUCKET/PATH` | an S3 server without TLS |
| `s3://https://HOST:PORT/BUCKET/PATH` | an S3 server with TLS |
| `gs://BUCKET/PATH` | Google Cloud Storage |
| `as://ACCOUNT/CONTAINER/PATH`, `as://ACCOUNT.blob.core.windows.net/CONTAINER/PATH` | Azure Blob Storage |
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

CLOUD_PREFIXES = ("s3://", "gs://", "as://")
"""The prefixes of the addresses of repositories in object stores."""

_S3_SERVER = re.compile(r"(?:(?P<scheme>https?)://)?(?P<host>[^/:@]+|\[[^\]/]+\]):(?P<port>[0-9]{1,5})(?P<rest>/.*)?")
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}")
_AZURE_HOST = ".blob.core.windows.net"
_AZURE_ACCOUNT = re.compile(r"[A-Za-z0-9-]{1,64}")

StoreKind = Literal["s3", "gs", "as"]


@dataclass(frozen=True, slots=True)
class StoreAddress:
    """A repository in an object store. `text` is the address as given, `path` has no slash at either end ("": the bucket).

    `bucket` is Azure's container. `endpoint` is the URL of an S3 server other than Amazon's, `account` that of Azure.
    """

    text: str
    kind: StoreKind
    bucket: str
    path: str = ""
    endpoint: str = ""
    account: str = ""


def is_cloud_address(address: object) -> bool:
    """Whether `address` is that of a repository in an object store, valid or not."""
    return isinstance(address, str) and address.startswith(CLOUD_PREFIXES)


def parse_address(text: str) -> StoreAddress:
    """The repository at the address. Raises ValueError that says which part is invalid."""
    scheme, _, rest = text.partition("://")
    if scheme == "s3":
        return _s3(text, rest)
    if scheme == "gs":
        bucket, path = _bucket_and_path(text, rest)
        return StoreAddress(text, "gs", bucket, path)
    if scheme == "as":
        return _azure(text, rest)
    raise ValueError(
        f"'{text}' is not an address of an object store: it begins with none of {', '.join(CLOUD_PREFIXES)}"
    )


def _s3(text: str, rest: str) -> StoreAddress:
    if "@" in rest.partition("://")[2].partition("/")[0]:
        raise ValueError("an address must not contain credentials: use AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY")
    server = _S3_SERVER.fullmatch(rest)
    if server is None:
        if rest.startswith(("http://", "https://")):
            raise ValueError(f"'{text}' has no port: write s3://https://HOST:PORT/BUCKET/PATH")
        bucket, path = _bucket_and_path(text, rest)
        return StoreAddress(text, "s3", bucket, path)
    if int(server["port"]) > 0xFFFF:
        raise ValueError(f"'{text}' has port {server['port']}: a port is at most 65535")
    bucket, path = _bucket_and_path(text, (server["rest"] or "").lstrip("/"))
    # As in Triton, a server without a protocol is asked over HTTP.
    return StoreAddress(text, "s3", bucket, path, f"{server['scheme'] or 'http'}://{server['host']}:{server['port']}")


def _azure(text: str, rest: str) -> StoreAddress:
    host, _, place = rest.partition("/")
    account = host.removesuffix(_AZURE_HOST)
    if not _AZURE_ACCOUNT.fullmatch(account):
        raise ValueError(f"'{text}' names no Azure storage account: write as://ACCOUNT/CONTAINER/PATH")
    container, path = _bucket_and_path(text, place, "container")
    return StoreAddress(text, "as", container, path, account=account)


def _bucket_and_path(text: str, place: str, noun: str = "bucket") -> tuple[str, str]:
    bucket, _, path = place.partition("/")
    if not _BUCKET.fullmatch(bucket):
        raise ValueError(f"'{text}' names no {noun}")
    parts = path.split("/")
    if ".." in parts or "." in parts:
        raise ValueError(f"'{text}' has a path with '.' or '..'")
    return bucket, "/".join(part for part in parts if part)
