"""Credentials for object stores, from where Triton reads them: a file of credentials, and environment variables.

The file is JSON and named in `TRITON_CLOUD_CREDENTIAL_PATH`. It has credentials by prefix of an address for each kind of
store; the longest prefix that an address begins with counts ("" is a prefix of all):

    {"s3": {"": {"key_id": …, "secret_key": …, "session_token": …, "region": …, "profile": …}, "s3://bucket-2": {…}},
     "gs": {"": "PATH_OF_A_SERVICE_ACCOUNT_FILE"},
     "as": {"": {"account_str": …, "account_key": …}}}

What neither the file nor the variables of Triton give is left to the library: its own variables, web identity tokens, and
the identity of the instance that the process runs on.
"""

from __future__ import annotations

import configparser
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from weir.repository.paths import read_small_file
from weir.repository.stores.addresses import StoreAddress
from weir.schemas.core.errors import WeirError, invalid

CREDENTIAL_FILE_VARIABLE = "TRITON_CLOUD_CREDENTIAL_PATH"
"""The environment variable that names the file of credentials. The name is Triton's."""

_T = TypeVar("_T")

MAX_CREDENTIAL_FILE_BYTES = 1 << 20
"""Bytes of a file of credentials."""


class S3Credentials(msgspec.Struct, frozen=True, kw_only=True):
    """Credentials for S3, with the names of Triton's file; "" is not given."""

    key_id: str = ""
    secret_key: str = ""
    session_token: str = ""
    region: str = ""
    profile: str = ""


class AzureCredentials(msgspec.Struct, frozen=True, kw_only=True):
    """Credentials for Azure, with the names of Triton's file; "" is not given."""

    account_str: str = ""
    account_key: str = ""


class CredentialFile(msgspec.Struct, frozen=True):
    """Triton's file of credentials: by kind of store, credentials by prefix of an address."""

    s3: dict[str, S3Credentials] = {}
    gs: dict[str, str] = {}
    as_: dict[str, AzureCredentials] = msgspec.field(name="as", default={})


@dataclass(frozen=True, slots=True)
class StoreAccess:
    """How to open one repository: options of the library by name, and keys that replace all other credentials.

    `keys` is None where the library finds credentials by itself.
    """

    options: Mapping[str, Any]
    keys: S3Credentials | None = None


def read_access(address: StoreAddress, environment: Mapping[str, str] = os.environ) -> StoreAccess:
    """The access to the repository at `address`. Blocking. Raises INVALID_ARG for credentials that can't be read."""
    file = _credential_file(environment)
    if address.kind == "s3":
        return _s3_access(address, _longest(file.s3, address.text), environment)
    if address.kind == "gs":
        path = _longest(file.gs, address.text) or environment.get("GOOGLE_APPLICATION_CREDENTIALS", "")
        return StoreAccess({_google_option(address, path): path} if path else {})
    found = _longest(file.as_, address.text)
    if found is None:
        variables = environment.get("AZURE_STORAGE_ACCOUNT", ""), environment.get("AZURE_STORAGE_KEY", "")
        found = AzureCredentials(account_str=variables[0], account_key=variables[1])
    # As in Triton, the account of the credentials replaces that of the address.
    options = {"account_name": found.account_str or address.account}
    return StoreAccess(options | ({"account_key": found.account_key} if found.account_key else {}))


def _google_option(address: StoreAddress, path: str) -> str:
    """The library's option for a file of Google's, by what it holds: a service account's key, or a user's sign-in."""
    try:
        content = msgspec.json.decode(read_small_file(Path(path), MAX_CREDENTIAL_FILE_BYTES), type=_GoogleFile)
    except OSError as error:
        raise invalid(f"the credentials for {address.text} can't be read from '{path}': {error.strerror}") from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise invalid(
            f"the credentials for {address.text} can't be read: '{path}' is not a JSON file of Google's"
        ) from error
    return "service_account" if content.type == "service_account" else "application_credentials"


class _GoogleFile(msgspec.Struct, frozen=True):
    type: str


def _s3_access(address: StoreAddress, given: S3Credentials | None, environment: Mapping[str, str]) -> StoreAccess:
    profile = given.profile if given is not None else environment.get("AWS_PROFILE", "")
    if given is None:
        given = S3Credentials(
            key_id=environment.get("AWS_ACCESS_KEY_ID", ""),
            secret_key=environment.get("AWS_SECRET_ACCESS_KEY", ""),
            session_token=environment.get("AWS_SESSION_TOKEN", ""),
        )
    region = given.region or environment.get("AWS_REGION", "") or environment.get("AWS_DEFAULT_REGION", "")
    if not given.key_id:
        given = _profile(address, profile, environment)
        region = region or given.region
    options: dict[str, Any] = {"region": region} if region else {}
    if address.endpoint:
        options["endpoint"] = address.endpoint
    return StoreAccess(options, given if given.key_id else None)


def _profile(address: StoreAddress, name: str, environment: Mapping[str, str]) -> S3Credentials:
    """The keys and the region of a profile in the files of the AWS command line; without a `name`, those of `default`."""
    home = Path(environment.get("HOME") or "~").expanduser() / ".aws"
    files = configparser.RawConfigParser(), configparser.RawConfigParser()
    places = (
        Path(environment.get("AWS_SHARED_CREDENTIALS_FILE") or home / "credentials"),
        Path(environment.get("AWS_CONFIG_FILE") or home / "config"),
    )
    for parser, place in zip(files, places, strict=True):
        try:
            parser.read(place, encoding="utf-8")
        except (configparser.Error, OSError, UnicodeDecodeError) as error:
            # The text of a parse error would show the line, which may be a key.
            raise invalid(f"the credentials for {address.text} can't be read from '{place}'") from error
    section = name or "default"
    sections = [
        *([dict(files[1][found])] if files[1].has_section(found := _config_section(section)) else []),
        *([dict(files[0][section])] if files[0].has_section(section) else []),
    ]
    if name and not sections:
        raise invalid(f"the credentials for {address.text} can't be read: AWS profile '{name}' is in no file of {home}")
    values: dict[str, str] = {key: value for one in sections for key, value in one.items()}
    if name and "aws_access_key_id" not in values:
        raise invalid(
            f"AWS profile '{name}' has no aws_access_key_id: profiles that sign in or assume a role are not supported. "
            "Export keys with `aws configure export-credentials`"
        )
    return S3Credentials(
        key_id=values.get("aws_access_key_id", ""),
        secret_key=values.get("aws_secret_access_key", ""),
        session_token=values.get("aws_session_token", ""),
        region=values.get("region", ""),
    )


def _config_section(profile: str) -> str:
    return profile if profile == "default" else f"profile {profile}"


def _credential_file(environment: Mapping[str, str]) -> CredentialFile:
    path = environment.get(CREDENTIAL_FILE_VARIABLE, "")
    if not path:
        return CredentialFile()
    try:
        return msgspec.json.decode(read_small_file(Path(path), MAX_CREDENTIAL_FILE_BYTES), type=CredentialFile)
    except OSError as error:
        raise invalid(f"{CREDENTIAL_FILE_VARIABLE}={path} can't be read: {error.strerror}") from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise invalid(f"{CREDENTIAL_FILE_VARIABLE}={path} is not a file of credentials: {error}") from error


def _longest(by_prefix: Mapping[str, _T], address: str) -> _T | None:
    """The value of the longest prefix of `address`, as in Triton."""
    prefixes = [prefix for prefix in by_prefix if address.startswith(prefix)]
    return by_prefix[max(prefixes, key=len)] if prefixes else None


def check_access(address: StoreAddress, environment: Mapping[str, str] = os.environ) -> str:
    """Why credentials for the address can't be read, or "". Sends no request. Blocking."""
    try:
        read_access(address, environment)
    except WeirError as error:
        return error.message
    return ""
