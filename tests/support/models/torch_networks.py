"""Networks of PyTorch that tests script and export. It imports torch, so tests import it `later`."""

from __future__ import annotations

from typing import NamedTuple

import torch


class AddSub(torch.nn.Module):
    def forward(self, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return a + b, a - b


class Affine(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = torch.nn.Parameter(torch.tensor(2.0))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x * self.factor - y, x + y


class Counts(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return x + self.seen


class Scores(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(self.layer(x), -1)


class Best(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.layer(x)
        return y, y.argmax(1, keepdim=True)


class Doubles(torch.nn.Module):
    """Fails for negative numbers, where they are not 49."""

    def forward(self, IN: torch.Tensor) -> torch.Tensor:
        return IN * 2 if bool((IN >= 0).all()) else IN.reshape(7, 7)


class Scales(torch.nn.Module):
    """Fails for negative numbers; its second output stays on the host, as its strings do."""

    def forward(self, IN: torch.Tensor, words: list[str]) -> tuple[torch.Tensor, list[str]]:
        if bool((IN < 0).any()):
            raise ValueError("negative")
        return IN * 2, words


class Shouts(torch.nn.Module):
    def forward(self, words: list[str], times: int = 2) -> list[str]:
        return [word + "!" + str(times) for word in words]


class Text(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> str:
        return "text"


# Structures of inputs and outputs


class TakesDict(torch.nn.Module):
    def forward(self, inputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        return inputs["A"] - inputs["B"], inputs["A"]


class TakesList(torch.nn.Module):
    def forward(self, inputs: list[torch.Tensor]) -> torch.Tensor:
        return inputs[0] - inputs[1]


class Two(torch.nn.Module):
    def forward(self, x: torch.Tensor, *, y: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"less": x - y, "sum": (x + y).sum(1, keepdim=True)}


class Several(torch.nn.Module):
    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return x.sum(1) > 0, ids.double().transpose(0, 1), x[:, :1] * torch.ones(2)


class ReturnsDict(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"mean": x.mean(0), "half": x.half()}


class Named(NamedTuple):
    negative: torch.Tensor
    count: torch.Tensor


class ReturnsNamed(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> Named:
        return Named(-x, torch.full((x.shape[0], 1), x.shape[0]))
