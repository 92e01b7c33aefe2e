"""A language model with random weights: a transformer with a cache of keys and values, for iterative batching.

Each run makes one token for every request of the batch: those that have begun before in one step together, new ones with
their prompts. Between two runs requests join and leave the batch. The configuration's parameter `sizes` has the width, the
layers, and the most tokens of a sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from weir.backend import RESCHEDULED, Execution, InferRequest, InstanceDevice, ModelVersion, Result, Tensor

WORDS = 32_000
DEFAULT_SIZES = "768,12,256"
"""About 110 million parameters with 32 000 words."""


class Generator:
    """The network, with room for `slots` sequences of at most `longest` tokens each."""

    def __init__(self, device: str, sizes: str, slots: int) -> None:
        import torch

        width, layers, longest = map(int, sizes.split(","))
        self.torch, self.device, self.width, self.longest = torch, device, width, longest
        self.heads, self.size = max(1, width // 64), min(64, width)
        dtype = torch.float16 if device.startswith("cuda") else torch.float32
        random = torch.Generator().manual_seed(7)

        def weights(*shape: int) -> Any:
            return (torch.randn(*shape, generator=random) / shape[0] ** 0.5).to(device, dtype)

        self.words, self.places = weights(WORDS, width), weights(longest, width)
        self.layers = [
            [weights(width, 3 * width), weights(width, width), weights(width, 4 * width), weights(4 * width, width)]
            for _ in range(layers)
        ]
        self.cache = torch.zeros(layers, 2, slots, self.heads, longest, self.size, device=device, dtype=dtype)

    def step(self, slots: Any, tokens: Any, starts: Any) -> Any:
        """The next token of each sequence; `tokens` [sequences, count] come at the positions from `starts` on."""
        torch = self.torch
        functional = torch.nn.functional
        rows, count = tokens.shape
        positions = starts[:, None] + torch.arange(count, device=self.device)
        x = self.words[tokens] + self.places[positions]
        longest = int(starts.max()) + count
        allowed = torch.arange(longest, device=self.device)[None, None, None] <= positions[:, None, :, None]
        at = slots[:, None]
        for number, (qkv, joined, wide, narrow) in enumerate(self.layers):
            parts = functional.layer_norm(x, (self.width,)) @ qkv
            q, k, v = parts.reshape(rows, count, 3, self.heads, self.size).permute(2, 0, 3, 1, 4)
            keys, values = self.cache[number]
            keys[at, :, positions] = k.transpose(1, 2)
            values[at, :, positions] = v.transpose(1, 2)
            mixed = functional.scaled_dot_product_attention(
                q, keys[slots, :, :longest], values[slots, :, :longest], attn_mask=allowed
            )
            x = x + mixed.transpose(1, 2).reshape(rows, count, self.width) @ joined
            x = x + functional.gelu(functional.layer_norm(x, (self.width,)) @ wide) @ narrow
        return (x[:, -1] @ self.words.T).argmax(-1)


class Backend:
    def load(self, model: ModelVersion) -> Backend:
        self.config = model.config
        return self

    def create_instance(self, device: InstanceDevice) -> Instance:
        place = f"cuda:{device.device_id}" if device.kind == "KIND_GPU" else "cpu"
        return Instance(Generator(place, self.config.parameter("sizes", DEFAULT_SIZES), self.config.max_batch_size))

    def unload(self) -> None:
        pass


class _Sequence:
    def __init__(self, slot: int, prompt: np.ndarray, count: int) -> None:
        self.slot, self.tokens, self.position, self.left = slot, prompt, 0, count


class Instance:
    """Keeps the sequences that have not ended, by correlation id."""

    def __init__(self, generator: Generator) -> None:
        self._generator = generator
        self._free = list(range(generator.cache.shape[2]))
        self._open: dict[Any, _Sequence] = {}

    def execute(self, requests: Sequence[InferRequest], execution: Execution) -> list[Result | None]:
        """Responds with one token to each request, and wants those again that have not ended."""
        torch, generator = self._generator.torch, self._generator
        sequences = [self._sequence(request) for request in requests]
        by_length: dict[int, list[int]] = {}
        for at, one in enumerate(sequences):
            by_length.setdefault(len(one.tokens), []).append(at)
        made: dict[int, int] = {}
        with torch.inference_mode():
            for members in by_length.values():
                slots, starts, tokens = (
                    torch.as_tensor(np.array(values), device=generator.device)
                    for values in (
                        [sequences[at].slot for at in members],
                        [sequences[at].position for at in members],
                        [sequences[at].tokens for at in members],
                    )
                )
                made.update(zip(members, generator.step(slots, tokens, starts).tolist(), strict=True))
        execution.inferred()
        return [self._respond(at, requests[at], one, made[at], execution) for at, one in enumerate(sequences)]

    def close(self) -> None:
        """Releases the network."""
        del self._generator

    def _sequence(self, request: InferRequest) -> _Sequence:
        found = self._open.get(request.correlation_id)
        if found is None:
            given = {tensor.name: tensor.to_numpy() for tensor in request.inputs}
            slot = self._free.pop()
            found = self._open[request.correlation_id] = _Sequence(slot, given["PROMPT"][0], int(given["COUNT"][0, 0]))
        return found

    def _respond(
        self, at: int, request: InferRequest, one: _Sequence, token: int, execution: Execution
    ) -> Result | None:
        one.position += len(one.tokens)
        one.tokens, one.left = np.array([token]), one.left - 1
        has_ended = one.left <= 0 or one.position >= self._generator.longest or execution.is_cancelled(at)
        result = Result([Tensor.from_numpy("TOKEN", np.array([[token]], np.int32), "INT32")])
        execution.respond(at, result, has_ended)
        if not has_ended:
            return RESCHEDULED
        del self._open[request.correlation_id]
        self._free.append(one.slot)
        return None
