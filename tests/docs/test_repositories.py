"""The commands of the page about cloud stores run as they are shown, against emulators of the stores."""

from __future__ import annotations

import json
import shlex
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.docs.pages import REPOSITORIES, blocks, commands
from tests.support.models.zoo import write_identity
from tests.support.servers.demo import DRAWN_PORTS, environment, in_venv
from tests.support.servers.object_stores import (
    KEY,
    AzureServer,
    GoogleServer,
    S3Server,
    needs_azure,
    needs_s3,
)
from weir.repository.stores.credentials import CredentialFile

pytestmark = [needs_s3, needs_azure, pytest.mark.timeout(120)]

COMMANDS = [command for page, command in commands() if page == REPOSITORIES]


@pytest.fixture(scope="module")
def variables(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Variables that lead the documented addresses to emulators, which have the documented buckets with model `magika`."""
    folder = tmp_path_factory.mktemp("stores")
    write_identity(folder / "models", "magika", "FP32")
    write_identity(folder / "models", "more", "FP32")
    with ExitStack() as stack:
        s3, google = S3Server(), GoogleServer(folder)
        stack.callback(s3.close)
        stack.callback(google.close)
        azure = AzureServer(folder / "azure")
        stack.callback(azure.close)
        for store, bucket in ((s3, "my-bucket"), (google, "my-bucket"), (azure, "my-container")):
            store.create(bucket)
            store.upload(bucket, folder / "models" / "magika", "models/magika")
        google.upload("my-bucket", folder / "models" / "more", "more/more")
        yield {
            "AWS_ENDPOINT_URL": s3.url,
            "AZURE_STORAGE_ENDPOINT": azure.url,
            "KEY": KEY,
            "ACCOUNT_FILE": str(google.file),
        }


def test_there_are_commands() -> None:
    assert len(COMMANDS) == 6


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_page(command: str, variables: dict[str, str], tmp_path: Path) -> None:
    account_file = Path(variables["ACCOUNT_FILE"]).read_text()
    (credentials,) = (block.text for block in blocks("json") if block.page == REPOSITORIES)
    (tmp_path / "service-account.json").write_text(account_file)
    (tmp_path / "credentials.json").write_text(credentials)
    words = shlex.split(command.replace("$KEY", variables["KEY"]))
    given = dict(word.split("=", 1) for word in words if not word.startswith((".venv", "-")) and "=" in word)
    program = shlex.join(words[len(given) :])
    process = subprocess.Popen(
        [*in_venv(program), *DRAWN_PORTS, f"--data-dir={tmp_path / 'data'}"],
        cwd=tmp_path,
        env={**environment(), **variables, **given},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    printed = ""
    while not ("magika" in printed and printed.endswith("\n\n")) and (line := process.stdout.readline()):
        printed += line
    try:
        assert "is ready" in printed
        url = next(line.split()[1] for line in printed.splitlines() if line.split()[:1] == ["HTTP"])
        request = urllib.request.Request(f"{url}/v2/repository/index", data=b"")
        index = json.load(urllib.request.urlopen(request))
        assert {row["state"] for row in index} == {"READY"}
    finally:
        process.terminate()
        _, log = process.communicate(timeout=60)
    assert process.returncode == 0, log
    assert list((tmp_path / "data" / "models").glob("store-*/*/*/files")), "what was fetched is kept"


def test_the_file_of_credentials_is_valid() -> None:
    import msgspec

    (shown,) = (block.text for block in blocks("json") if block.page == REPOSITORIES)
    file = msgspec.json.decode(shown, type=CredentialFile)
    assert set(file.s3) == {"", "s3://other-bucket"}
    assert set(file.as_) == {""}
