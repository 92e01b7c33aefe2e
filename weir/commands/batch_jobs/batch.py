"""`weir batch`: submits and controls offline jobs over HTTP. A gateway runs them.

Exit statuses: 0 all items succeeded, 1 the job failed or was cancelled (or the server can't be reached), 2 wrong usage,
3 the job finished and some items failed, 130 watching was interrupted (Ctrl-C) and the job continues.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weir.commands.completion import complete_model
from weir.commands.running_server import HttpUrl, LocalDataDir
from weir.commands.terminal import SectionedCommand, SectionedGroup, examples, print_json
from weir.errors import StartError
from weir.options.api_key import ApiKey

if TYPE_CHECKING:
    from weir.commands.batch_jobs.batch_client import JobsClient

batch = typer.Typer(
    name="batch",
    cls=SectionedGroup,
    no_args_is_help=True,
    help="Run a model over files: submit and control offline jobs.",
    epilog=examples("weir batch submit -m detector -i images.jsonl -o results", "weir batch list"),
)

_INTERRUPTED = 130

_Id = Annotated[str, typer.Argument(metavar="ID", help="Id of the job, or a prefix of it.")]


@batch.command(
    cls=SectionedCommand,
    epilog=examples(
        "weir batch submit -m detector -i images.jsonl -o results",
        "weir batch submit -m detector -o results --no-wait 2026-*.parquet",
    ),
)
def submit(  # noqa: PLR0913 - options of a command
    model: Annotated[
        str, typer.Option("--model", "-m", metavar="NAME", help="The model.", autocompletion=complete_model)
    ],
    output: Annotated[str, typer.Option("--output", "-o", metavar="DIR", help="New or empty folder for the results.")],
    inputs: Annotated[
        list[str] | None,
        typer.Option(
            "--input", "-i", metavar="FILES", help="Files, folders or patterns; further ones may be given as arguments."
        ),
    ] = None,
    files: Annotated[list[str] | None, typer.Argument(metavar="FILES", help="Further input files.")] = None,
    version: Annotated[str, typer.Option(metavar="NUMBER", help="Version of the model.", show_default="latest")] = "",
    input_format: Annotated[
        str, typer.Option(metavar="NAME", help="jsonl, npy, parquet or files.", show_default="from the file names")
    ] = "",
    output_format: Annotated[
        str, typer.Option(metavar="NAME", help="jsonl, npz or parquet.", show_default="that of the input")
    ] = "",
    columns: Annotated[
        str,
        typer.Option(
            metavar="NAMES",
            help="Columns to read of Parquet files, separated by commas. Results repeat those that are no input.",
            show_default="all, which must be inputs",
        ),
    ] = "",
    priority: Annotated[
        int, typer.Option(min=0, metavar="LEVEL", help="Priority of the job's requests.", show_default=False)
    ] = 0,
    max_in_flight: Annotated[
        int, typer.Option(min=0, metavar="COUNT", help="Maximum number of items in flight.", show_default="adaptive")
    ] = 0,
    max_failures: Annotated[
        int,
        typer.Option(
            min=-1, metavar="COUNT", help="Stop after more failed items than this.", show_default="when all fail"
        ),
    ] = -1,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Watch the job until it ends.")] = True,
    url: HttpUrl = "",
    data_dir: LocalDataDir = None,
    api_key: ApiKey = "",
) -> None:
    """Submit a job and watch it. Input and output must be below a --batch-root of the server."""
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
        "columns": [name for name in map(str.strip, columns.split(",")) if name],
    }
    client = _client(url, data_dir, api_key)
    job = _call(client, client.submit, document)
    if not wait:
        print(job["id"])
        return
    typer.echo(f"job {job['id']}", err=True)
    _watch(client, job)


@batch.command("list", cls=SectionedCommand, epilog=examples("weir batch list", "weir batch list --json"))
def list_jobs(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    url: HttpUrl = "",
    data_dir: LocalDataDir = None,
    api_key: ApiKey = "",
) -> None:
    """List all jobs, newest first."""
    client = _client(url, data_dir, api_key)
    jobs = _call(client, client.list)
    if as_json:
        print_json(jobs)
        return
    from weir.commands.batch_jobs.batch_display import show_table

    show_table(jobs)


@batch.command(cls=SectionedCommand, epilog=examples("weir batch status 7f3a", "weir batch status 7f3a --json"))
def status(
    id: _Id,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    url: HttpUrl = "",
    data_dir: LocalDataDir = None,
    api_key: ApiKey = "",
) -> None:
    """Show the details of one job."""
    from weir.commands.batch_jobs.batch_display import show_job

    show_job(_job(_client(url, data_dir, api_key), id), as_json)


@batch.command(cls=SectionedCommand, epilog=examples("weir batch watch 7f3a"))
def watch(id: _Id, url: HttpUrl = "", data_dir: LocalDataDir = None, api_key: ApiKey = "") -> None:
    """Watch a job until it ends."""
    client = _client(url, data_dir, api_key)
    _watch(client, _job(client, id))


@batch.command(cls=SectionedCommand, epilog=examples("weir batch pause 7f3a"))
def pause(id: _Id, url: HttpUrl = "", data_dir: LocalDataDir = None, api_key: ApiKey = "") -> None:
    """Pause a job until it is resumed."""
    _control(_client(url, data_dir, api_key), id, "pause")


@batch.command(cls=SectionedCommand, epilog=examples("weir batch resume 7f3a"))
def resume(id: _Id, url: HttpUrl = "", data_dir: LocalDataDir = None, api_key: ApiKey = "") -> None:
    """Resume a paused job."""
    _control(_client(url, data_dir, api_key), id, "resume")


@batch.command(cls=SectionedCommand, epilog=examples("weir batch cancel 7f3a"))
def cancel(id: _Id, url: HttpUrl = "", data_dir: LocalDataDir = None, api_key: ApiKey = "") -> None:
    """Cancel a job. Results written so far are kept."""
    _control(_client(url, data_dir, api_key), id, "cancel")


@batch.command(cls=SectionedCommand, epilog=examples("weir batch retry 7f3a", "weir batch retry 7f3a --no-wait"))
def retry(
    id: _Id,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Watch the job until it ends.")] = True,
    url: HttpUrl = "",
    data_dir: LocalDataDir = None,
    api_key: ApiKey = "",
) -> None:
    """Retry the failed and unprocessed items of a job that has ended."""
    client = _client(url, data_dir, api_key)
    job = _call(client, client.control, _job(client, id)["id"], "retry")
    if wait:
        _watch(client, job)
    else:
        print(f"{job['id']}: {job['state']}")


def _client(url: str, data_dir: Path | None, api_key: str) -> JobsClient:
    from weir.commands.batch_jobs.batch_client import JobsClient
    from weir.commands.gateway_client import client_of

    return client_of(JobsClient, url, data_dir, api_key)


def _call(client: JobsClient, ask: Any, *arguments: Any) -> Any:
    from weir.commands.gateway_client import call

    return call(client, ask, *arguments)


def _job(client: JobsClient, id: str) -> dict[str, Any]:
    """The job with this id, or the only job whose id begins with it."""
    full = id if id.startswith("batch-") else f"batch-{id}"
    if len(full) >= len("batch-") + 16:
        return dict(_call(client, client.status, full))
    found = [job for job in _call(client, client.list) if job["id"].startswith(full)]
    if len(found) != 1:
        raise StartError(f"several jobs match '{id}'" if found else f"no job matches '{id}'")
    return dict(found[0])


def _control(client: JobsClient, id: str, verb: str) -> None:
    job = _call(client, client.control, _job(client, id)["id"], verb)
    doing = {"pause": "pausing", "cancel": "cancelling"}.get(verb, "")
    state = job["state"] if not doing or job["state"] not in ("running", "queued") else doing
    print(f"{job['id']}: {state}")


def _watch(client: JobsClient, job: dict[str, Any]) -> None:
    from weir.commands.batch_jobs.batch_display import exit_status
    from weir.commands.batch_jobs.batch_display import watch as watched

    try:
        ended = watched(client, job)
    except KeyboardInterrupt:
        typer.echo(f"\nthe job continues; watch it again with: weir batch watch {job['id']}{client.option}", err=True)
        raise typer.Exit(_INTERRUPTED) from None
    raise typer.Exit(exit_status(ended))
