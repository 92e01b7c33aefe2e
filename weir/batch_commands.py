"""`weir batch`: offline jobs from the command line. A gateway runs them; this only asks about them, over HTTP.

Exit statuses: 0 all items succeeded, 1 the job failed or was cancelled (or could not be asked for), 2 wrong usage,
3 the job is through and items failed, 130 no longer watched (Ctrl-C), while the job goes on.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weir.help import SectionedCommand
from weir.local_servers import DEFAULT_HTTP, none_found_hint, only_local_server
from weir.start_error import StartError

if TYPE_CHECKING:
    from weir.batch_client import JobsClient

batch = typer.Typer(
    name="batch",
    no_args_is_help=True,
    help="Offline jobs: run a model on files, as long as it takes.",
)

_INTERRUPTED = 130

_Url = Annotated[
    str,
    typer.Option(
        "--url",
        envvar="WEIR_URL",
        metavar="HOST:PORT",
        help=f"Where the server listens for HTTP. Without: that of the weir serve on this machine, else {DEFAULT_HTTP}.",
    ),
]
_DataDir = Annotated[
    Path | None,
    typer.Option("--data-dir", metavar="FOLDER", help="The data folder of a weir serve on this machine."),
]
_Id = Annotated[str, typer.Argument(metavar="ID", help="The job's id, or the beginning of it.")]


@batch.command(cls=SectionedCommand)
def submit(
    model: Annotated[str, typer.Option("--model", "-m", metavar="NAME", help="The model.")],
    output: Annotated[
        str, typer.Option("--output", "-o", metavar="DIR", help="A new or empty folder for the results.")
    ],
    inputs: Annotated[
        list[str] | None,
        typer.Option(
            "--input", "-i", metavar="FILES", help="Files, folders or patterns; more may follow as arguments."
        ),
    ] = None,
    files: Annotated[list[str] | None, typer.Argument(metavar="FILES", help="More input.")] = None,
    version: Annotated[str, typer.Option(metavar="NUMBER", help="The model's version.", show_default="latest")] = "",
    input_format: Annotated[
        str, typer.Option(metavar="NAME", help="jsonl, npy, parquet or files.", show_default="by the files' names")
    ] = "",
    output_format: Annotated[
        str, typer.Option(metavar="NAME", help="jsonl, npz or parquet.", show_default="as the input")
    ] = "",
    priority: Annotated[
        int, typer.Option(min=0, metavar="LEVEL", help="Priority of its requests.", show_default=False)
    ] = 0,
    max_in_flight: Annotated[
        int, typer.Option(min=0, metavar="COUNT", help="Items in flight at most.", show_default="as many as help")
    ] = 0,
    max_failures: Annotated[
        int,
        typer.Option(
            min=-1, metavar="COUNT", help="Stop when more items than this fail.", show_default="when all fail"
        ),
    ] = -1,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Watch the job until it has ended.")] = True,
    url: _Url = "",
    data_dir: _DataDir = None,
) -> None:
    """Submit a job, and watch it. The files must lie below a --batch-root of the server."""
    given = [*(inputs or ()), *(files or ())]
    if not given:
        raise StartError("--input must be specified")
    document = {
        "model": model,
        "version": version,
        "input": [os.path.abspath(path) for path in given],
        "input_format": input_format,
        "output": os.path.abspath(output),
        "output_format": output_format,
        "priority": priority,
        "max_in_flight": max_in_flight,
        "max_failures": max_failures,
    }
    client = _client(url, data_dir)
    job = _asked(client, client.submit, document)
    if not wait:
        print(job["id"])
        return
    typer.echo(f"job {job['id']}", err=True)
    _watch(client, job)


@batch.command("list", cls=SectionedCommand)
def list_jobs(
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
    url: _Url = "",
    data_dir: _DataDir = None,
) -> None:
    """List all jobs, the newest first."""
    client = _client(url, data_dir)
    jobs = _asked(client, client.list)
    if as_json:
        import json

        print(json.dumps(jobs, indent=2))
        return
    from weir.batch_display import show_table

    show_table(jobs)


@batch.command(cls=SectionedCommand)
def status(
    id: _Id,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
    url: _Url = "",
    data_dir: _DataDir = None,
) -> None:
    """Tell all of one job."""
    from weir.batch_display import show_job

    show_job(_job(_client(url, data_dir), id), as_json)


@batch.command(cls=SectionedCommand)
def watch(id: _Id, url: _Url = "", data_dir: _DataDir = None) -> None:
    """Watch a job until it has ended."""
    client = _client(url, data_dir)
    _watch(client, _job(client, id))


@batch.command(cls=SectionedCommand)
def pause(id: _Id, url: _Url = "", data_dir: _DataDir = None) -> None:
    """Have a job keep its place and do nothing until it is resumed."""
    _control(_client(url, data_dir), id, "pause")


@batch.command(cls=SectionedCommand)
def resume(id: _Id, url: _Url = "", data_dir: _DataDir = None) -> None:
    """Have a paused job go on."""
    _control(_client(url, data_dir), id, "resume")


@batch.command(cls=SectionedCommand)
def cancel(id: _Id, url: _Url = "", data_dir: _DataDir = None) -> None:
    """End a job; what is done of it stays."""
    _control(_client(url, data_dir), id, "cancel")


@batch.command(cls=SectionedCommand)
def retry(
    id: _Id,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Watch the job until it has ended.")] = True,
    url: _Url = "",
    data_dir: _DataDir = None,
) -> None:
    """Try the failures of a job that has ended again, and do what it had not come to."""
    client = _client(url, data_dir)
    job = _asked(client, client.control, _job(client, id)["id"], "retry")
    if wait:
        _watch(client, job)
    else:
        print(f"{job['id']}: {job['state']}")


def _client(url: str, data_dir: Path | None) -> JobsClient:
    """A client of the server at `url`; without a URL of the only local server, else of the default address."""
    from weir.batch_client import JobsClient

    if url and data_dir is None:
        return JobsClient(url)
    server = only_local_server(data_dir, "--url HOST:PORT")
    if server is None:
        return JobsClient(DEFAULT_HTTP, f"{none_found_hint(DEFAULT_HTTP)}--url HOST:PORT.")
    if not server.http:
        raise StartError(f"the server found on this machine does not listen for HTTP (yet): {server}")
    if data_dir is None:
        typer.echo(f"server found on this machine: {server}", err=True)
    return JobsClient(server.http)


def _asked(client: JobsClient, ask: Any, *arguments: Any) -> Any:
    from weir.batch_client import Unreachable

    try:
        return ask(*arguments)
    except Unreachable as error:
        raise StartError(f"{error}. {client.hint}" if client.hint else str(error)) from error


def _job(client: JobsClient, id: str) -> dict[str, Any]:
    """The job of this id, or the only one whose id begins so."""
    full = id if id.startswith("batch-") else f"batch-{id}"
    if len(full) >= len("batch-") + 16:
        return dict(_asked(client, client.status, full))
    found = [job for job in _asked(client, client.list) if job["id"].startswith(full)]
    if len(found) != 1:
        raise StartError(f"{'several jobs are' if found else 'there is no job'} called '{id}'")
    return dict(found[0])


def _control(client: JobsClient, id: str, verb: str) -> None:
    job = _asked(client, client.control, _job(client, id)["id"], verb)
    doing = {"pause": "pausing", "cancel": "cancelling"}.get(verb, "")
    state = job["state"] if not doing or job["state"] not in ("running", "queued") else doing
    print(f"{job['id']}: {state}")


def _watch(client: JobsClient, job: dict[str, Any]) -> None:
    from weir.batch_display import exit_status, url_option
    from weir.batch_display import watch as watched

    try:
        ended = watched(client, job)
    except KeyboardInterrupt:
        typer.echo(f"\nthe job goes on; come back with: weir batch watch {job['id']}{url_option(client)}", err=True)
        raise typer.Exit(_INTERRUPTED) from None
    raise typer.Exit(exit_status(ended))
