"""Credentials of object stores: Triton's file, environment variables, and files of the AWS command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from weir.repository.stores.addresses import parse_address
from weir.repository.stores.credentials import S3Credentials, check_access, read_access
from weir.schemas.core.errors import WeirError

S3, GS, AZURE = (parse_address(text) for text in ("s3://b/models", "gs://b/models", "as://account/c/models"))


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    return {"HOME": str(tmp_path)}


def written(folder: Path, content: Any, name: str = "credentials.json") -> str:
    (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return str(folder / name)


def test_s3_variables(environment: dict[str, str]) -> None:
    assert read_access(S3, environment).keys is None
    environment |= {"AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s", "AWS_DEFAULT_REGION": "eu-1"}
    access = read_access(S3, environment)
    assert (access.keys, access.options) == (S3Credentials(key_id="k", secret_key="s"), {"region": "eu-1"})
    local = read_access(parse_address("s3://host:9000/b"), {**environment, "AWS_SESSION_TOKEN": "t"})
    assert local.options == {"region": "eu-1", "endpoint": "http://host:9000"}
    assert local.keys is not None
    assert local.keys.session_token == "t"


def test_s3_profiles(environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / ".aws").mkdir()
    written(tmp_path / ".aws", "[default]\naws_access_key_id=d\naws_secret_access_key=s\n[p]\n", "credentials")
    written(
        tmp_path / ".aws",
        "[default]\nregion = us-2\n[profile p]\naws_access_key_id=of p\naws_secret_access_key=s\nregion=eu-2\n"
        "[profile sso]\nsso_session=x\n",
        "config",
    )
    access = read_access(S3, environment)
    assert (access.keys, access.options) == (
        S3Credentials(key_id="d", secret_key="s", region="us-2"),
        {"region": "us-2"},
    )
    access = read_access(S3, {**environment, "AWS_PROFILE": "p", "AWS_REGION": "ap-1"})
    assert access.keys is not None
    assert (access.keys.key_id, access.options) == ("of p", {"region": "ap-1"})
    assert "AWS profile 'q' is in no file" in check_access(S3, {**environment, "AWS_PROFILE": "q"})
    assert "profiles that sign in or assume a role are not supported" in check_access(
        S3, {**environment, "AWS_PROFILE": "sso"}
    )
    written(tmp_path / ".aws", "secret without a section", "credentials")
    problem = check_access(S3, environment)
    assert "can't be read from" in problem
    assert "secret" not in problem


def test_the_longest_prefix_of_triton_s_file_counts(environment: dict[str, str], tmp_path: Path) -> None:
    account = written(tmp_path, {"type": "service_account"}, "account.json")
    keys = {"secret_key": "s", "session_token": "", "region": "", "profile": ""}
    content = {
        "s3": {"": {"key_id": "any", **keys}, "s3://b": {"key_id": "b", **keys}, "s3://b/models-2": {"key_id": "2"}},
        "gs": {"": account},
        "as": {
            "": {"account_str": "other", "account_key": "k"},
            "as://account/c": {"account_str": "", "account_key": ""},
        },
    }
    environment |= {
        "TRITON_CLOUD_CREDENTIAL_PATH": written(tmp_path, content),
        "AWS_ACCESS_KEY_ID": "of the environment",
        "AWS_SESSION_TOKEN": "of the environment",
        "GOOGLE_APPLICATION_CREDENTIALS": "/nowhere",
    }
    assert read_access(S3, environment).keys == S3Credentials(key_id="b", secret_key="s")
    assert read_access(GS, environment).options == {"service_account": account}
    assert read_access(AZURE, environment).options == {"account_name": "account"}
    other = read_access(parse_address("as://x/y"), environment)
    assert other.options == {"account_name": "other", "account_key": "k"}


def test_azure_variables(environment: dict[str, str]) -> None:
    assert read_access(AZURE, environment).options == {"account_name": "account"}
    environment |= {"AZURE_STORAGE_ACCOUNT": "other", "AZURE_STORAGE_KEY": "k"}
    assert read_access(AZURE, environment).options == {"account_name": "other", "account_key": "k"}


def test_google_s_files(environment: dict[str, str], tmp_path: Path) -> None:
    assert read_access(GS, environment).options == {}
    user = written(tmp_path, {"type": "authorized_user"})
    assert read_access(GS, {"GOOGLE_APPLICATION_CREDENTIALS": user}).options == {"application_credentials": user}
    assert "No such file" in check_access(GS, {"GOOGLE_APPLICATION_CREDENTIALS": "/nowhere"})
    no_json = {"GOOGLE_APPLICATION_CREDENTIALS": written(tmp_path, "secret")}
    assert check_access(GS, no_json).endswith("is not a JSON file of Google's")


@pytest.mark.parametrize("content", ["", "[]", '{"s3": {"": "secret"}}', '{"gs": 5}'])
def test_a_malformed_file_of_credentials(content: str, environment: dict[str, str], tmp_path: Path) -> None:
    environment["TRITON_CLOUD_CREDENTIAL_PATH"] = written(tmp_path, content)
    with pytest.raises(WeirError, match="is not a file of credentials: ") as error:
        read_access(S3, environment)
    assert "secret" not in error.value.message
