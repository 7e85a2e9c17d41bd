"""What a program is traced of in ``test_whole_programs``."""

from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import nn

from specmm.stats import Clock

CONSTANT = 3.0


@dataclass(frozen=True)
class Settings:
    factor: float = 0.5


class Network(nn.Module):
    def __init__(self, width=2):
        super().__init__()
        self.inner = nn.Linear(4, width)
        self.number = 2.0

    def forward(self, x):
        return self.inner(x).sum() * self.number


class Step:
    def __call__(self, x):
        return x * 2.0


class Doubled(Step):
    def __call__(self, x):
        return x * 4.0


def helped(x):
    return x + 2.0


def negated(module, args, output):
    return -output


def adding(number):
    return lambda x: x + number


class Parts:
    def __init__(self):
        torch.manual_seed(0)
        self.calls, self.seen = 0, torch.zeros(2)  # which nothing reads
        self.number, self.flag, self.maybe, self.items = 2, True, None, [1.0]
        self.step, self.settings, self.function = Step(), Settings(), torch.sin
        self.added, self.partial = adding(1.0), partial(torch.mul, other=3.0)
        self.network, self.clock = Network(), Clock()
        self.first, self.second = torch.zeros(4), torch.zeros(4)

    @cached_property
    def kept(self):
        return [self.number]


def worked(parts, x):
    x = x.float()[:4]
    out = x * parts.number + (1 if parts.flag else 0) + len(parts.items)
    out = out if parts.maybe is None else out + parts.maybe
    out = parts.function(parts.step(helped(out))) * parts.settings.factor * CONSTANT
    out = parts.partial(parts.added(out)) + parts.network(x)
    parts.first.copy_(out)
    parts.second.add_(1)
    return out + parts.first
