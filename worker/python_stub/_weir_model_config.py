"""`ModelConfig` of `triton_python_backend_utils`: the configuration that a model's `auto_complete_config` completes."""

from __future__ import annotations

import json
from typing import Any

Properties = dict[str, Any]


class ModelConfig:
    """A model configuration being completed, as the dictionary form of `config.pbtxt`.

    Values of the configuration file can't be changed: completing them with other values raises ValueError, and so do
    entries with missing or unknown properties.
    """

    def __init__(self, model_config: str) -> None:
        self._config: Properties = json.loads(model_config)

    def as_dict(self) -> Properties:
        """The configuration itself, not a copy."""
        return self._config

    def set_max_batch_size(self, max_batch_size: int) -> None:
        """Sets `max_batch_size`, unless the configuration allows more."""
        configured = self._config.get("max_batch_size", 0)
        if configured > max_batch_size:
            raise ValueError(
                f"configuration specified max_batch_size {configured}, but in auto-complete-config function "
                f"for model '{self._model}' specified max_batch_size {max_batch_size}"
            )
        self._config["max_batch_size"] = max_batch_size

    def set_dynamic_batching(self) -> None:
        """Turns dynamic batching on."""
        for other in ("sequence_batching", "ensemble_scheduling"):
            if other in self._config:
                raise ValueError(
                    f"Configuration specified scheduling_choice as '{other}', but auto-complete-config function for "
                    f"model '{self._model}' tries to set scheduling_choice as 'dynamic_batching'"
                )
        self._config.setdefault("dynamic_batching", {})

    def set_model_transaction_policy(self, policy: Properties) -> None:
        """Sets the transaction policy: {"decoupled": bool}."""
        for key in policy:
            if key != "decoupled":
                raise ValueError(
                    f"model transaction property in auto-complete-config function for model '{self._model}' contains "
                    "property other than 'decoupled'."
                )
        configured = self._config.setdefault("model_transaction_policy", {})
        if "decoupled" not in policy:
            return
        if configured.setdefault("decoupled", policy["decoupled"]) != policy["decoupled"]:
            raise ValueError(
                f"trying to change decoupled property in auto-complete-config for model '{self._model}', "
                f"which is already set to '{configured['decoupled']}'."
            )

    def add_input(self, input: Properties) -> None:
        """Adds an input, or completes the one of that name: `name`, `data_type`, `dims`, and optionally `optional`."""
        self._add("input", input, ("name", "data_type", "dims"), ("optional",))

    def add_output(self, output: Properties) -> None:
        """Adds an output, or completes the one of that name: `name`, `data_type` and `dims`."""
        self._add("output", output, ("name", "data_type", "dims"), ())

    @property
    def _model(self) -> str:
        return str(self._config.get("name", ""))

    def _add(self, kind: str, given: Properties, needed: tuple[str, ...], allowed: tuple[str, ...]) -> None:
        self._check_properties(kind, given, needed, allowed)
        entries = self._config.setdefault(kind, [])
        for entry in entries:
            if entry.get("name") == given["name"]:
                self._complete(kind, entry, given)
                return
        entries.append(dict(given))

    def _check_properties(
        self, kind: str, given: Properties, needed: tuple[str, ...], allowed: tuple[str, ...]
    ) -> None:
        where = f"in auto-complete-config function for model '{self._model}'"
        label = f"{kind} '{given['name']}'" if "name" in given else kind
        known = needed + allowed
        if not set(given) <= set(known):
            listed = ", ".join(f"'{key}'" for key in known[:-1])
            raise ValueError(f"{label} {where} contains property other than {listed} and '{known[-1]}'.")
        for key in needed:
            if key not in given:
                raise ValueError(f"{label} {where} is missing '{key}' property.")

    def _complete(self, kind: str, entry: Properties, given: Properties) -> None:
        if entry.get("data_type") in (None, "TYPE_INVALID"):
            entry["data_type"] = given["data_type"]
        elif entry["data_type"] != given["data_type"]:
            raise ValueError(
                f"unable to load model '{self._model}', configuration expects datatype {entry['data_type']} for {kind} "
                f"'{given['name']}', model provides {given['data_type']}"
            )
        if entry.get("dims") in (None, []):
            entry["dims"] = given["dims"]
        elif not _same(entry["dims"], given["dims"]):
            raise self._mismatch("dims", entry, given)
        if "optional" in given and entry.setdefault("optional", given["optional"]) != given["optional"]:
            raise self._mismatch("optional", entry, given)

    def _mismatch(self, key: str, entry: Properties, given: Properties) -> ValueError:
        return ValueError(
            f"model '{self._model}', tensor '{given['name']}': the model expects {key} {given[key]} but the model "
            f"configuration specifies {key} {entry[key]}"
        )


def _same(configured: Any, given: Any) -> bool:
    # Dimensions of a configuration that went through protobuf's JSON are strings.
    if isinstance(configured, list):
        return [int(dim) for dim in configured] == [int(dim) for dim in given]
    return bool(configured == given)
