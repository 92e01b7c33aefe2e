"""Creates typer commands from the option table.

typer passes each option as text; the option itself parses it, so that parsing and error messages are in one place.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import typer

from weir.calls.cache.config import CacheConfig
from weir.commands.terminal import SectionedCommand
from weir.options import OPTIONS, Option, UsageError, options_of
from weir.options.secret import taken_from

_POSITIONAL = "arguments"
_HELP_ALL = "help_all"
_SHOWS_ALL = "weir.commands.option_commands.shows_all"
"""The key, in the metadata of a context, of whether all options are to be shown."""

_RARE = frozenset(option.key for option in OPTIONS if not option.is_common)

_BARE = {name: option.bare for option in OPTIONS for name in option.names if option.bare is not None}


def with_implied_values(arguments: Sequence[str], bare: Mapping[str, str] = _BARE) -> list[str]:
    """`arguments` with the implied value added to each `--option` given without one.

    `bare` maps option names to implied values; by default those of the option table.
    """
    completed: list[str] = []
    for argument, following in zip(arguments, [*arguments, "--"][1:], strict=True):
        implied = bare.get(argument) if following.startswith("--") else None
        completed.append(argument if implied is None else f"{argument}={implied}")
    return completed


class OptionCommand(SectionedCommand):
    """A command of the option table: `--help` shows its common options, `--help-all` all of them by topic."""

    def panel_of(self, ctx: Any, parameter: Any) -> str | None:
        """The topic of the option with `--help-all`; without it one section, and None for options that few people use."""
        panel = super().panel_of(ctx, parameter)
        if ctx.meta.get(_SHOWS_ALL) or parameter.param_type_name == "argument":
            return panel
        return None if parameter.name in _RARE else "Options"


def _show_all(ctx: typer.Context, wanted: bool) -> None:
    if wanted:
        ctx.meta[_SHOWS_ALL] = True
        typer.echo(ctx.get_help())
        raise typer.Exit


def command(name: str, help: str, run: Callable[[dict[str, Any]], None], positional: str = "") -> Callable[..., None]:
    """Create the typer function of command `name`, which calls `run` with the parsed values of its options, by key.

    Arguments without an option are further values of the repeatable option `positional`, if that is given.
    """
    options = options_of(name)

    def run_typed(**texts: Any) -> None:
        texts.pop(_HELP_ALL, None)
        if positional:
            texts[positional] = [*(texts[positional] or ()), *(texts.pop(_POSITIONAL) or ())]
        for key, secrets in taken_from().items():
            texts[key] = secrets if options[key].repeatable else secrets[-1]
        run(read_values(options, texts))

    parameters = [
        inspect.Parameter(
            key, inspect.Parameter.KEYWORD_ONLY, default=_typed_default(option), annotation=_typed(option)
        )
        for key, option in options.items()
    ]
    if positional:
        option = options[positional]
        described = typer.Argument(metavar=option.value.metavar, help=f"As {option.names[0]}.", show_default=False)
        annotation = Annotated[list[str] | None, described]
        parameters.insert(
            0, inspect.Parameter(_POSITIONAL, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
        )
    if any(key in _RARE for key in options):
        shown = typer.Option(
            "--help-all", callback=_show_all, is_eager=True, help=f"Show all {len(options)} options, by topic."
        )
        parameters.append(
            inspect.Parameter(
                _HELP_ALL, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Annotated[bool, shown]
            )
        )
    run_typed.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run_typed.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    run_typed.__name__ = name
    run_typed.__doc__ = help
    return run_typed


def read_values(options: Mapping[str, Option], texts: Mapping[str, Any]) -> dict[str, Any]:
    """Parse the text of each option (a list of texts for repeatable options; None: not given).

    Raises UsageError in Triton's wording.
    """
    values: dict[str, Any] = {}
    for key, option in options.items():
        text = texts.get(key)
        if option.repeatable:
            values[key] = option.read_all(text or ())
        else:
            values[key] = option.default if text is None else option.read(text)
    if values.get("load_model"):
        _check_startup_models(values["load_model"], values["model_control_mode"])
    try:
        CacheConfig.parse(values.get("cache_config", ()))
    except ValueError as error:
        raise UsageError(str(error)) from error
    return values


def _check_startup_models(names: Sequence[str], mode: str) -> None:
    if mode != "explicit":
        raise UsageError("Use of '--load-model' requires setting '--model-control-mode=explicit' as well.")
    if "*" in names and set(names) != {"*"}:
        raise UsageError("Wildcard model name '*' must be the ONLY startup model if specified at all.")


def _typed(option: Option) -> Any:
    shown = option.shown_default or option.default is not None
    described = typer.Option(
        *option.names,
        help=option.help,
        metavar=option.value.metavar,
        envvar=option.environment,
        show_default=shown,
        rich_help_panel=option.panel,
        autocompletion=_completion(option.value.choices) if option.value.choices else None,
    )
    return Annotated[list[str] | None if option.repeatable else str | None, described]


def _completion(choices: Sequence[str]) -> Callable[[str], list[str]]:
    def complete(incomplete: str) -> list[str]:
        return [choice for choice in choices if choice.startswith(incomplete)]

    return complete


def _typed_default(option: Option) -> str | None:
    return None if option.default is None else option.value.write(option.default)
