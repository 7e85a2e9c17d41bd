"""How a model of continuous tokens is meant to be sampled: what is read from ``settings.json``
beside it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from specmm.image_ar.continuous.decode import Plan
from specmm.image_ar.continuous.orders import CFGSchedule

Solver = Literal["ddpm", "ddim"]


@dataclass(frozen=True)
class Settings:
    """Recommended sampling (as ``Plan``), the head's solver, and class names by id."""

    num_iter: int = 64
    head_steps: str = "100"
    cfg: float = 1.0
    cfg_schedule: CFGSchedule = "linear"
    temperature: float = 1.0
    solver: Solver = "ddpm"
    classes: tuple[str, ...] = ()

    @property
    def claimed(self) -> dict[str, Any]:
        """The options that shape the distribution, for certificates."""
        solver = {"solver": self.solver} if self.solver != "ddpm" else {}
        guided = {"cfg_schedule": self.cfg_schedule} if self.cfg != 1 else {}
        steps = {"num_iter": self.num_iter, "head_steps": self.head_steps}
        return steps | {"temperature": self.temperature, "cfg": self.cfg} | guided | solver

    def plan(self) -> Plan:
        """What the decoding loop needs; raises ``ValueError`` for options out of range."""
        if self.solver not in ("ddpm", "ddim"):
            raise ValueError(f"solver must be 'ddpm' or 'ddim', got {self.solver!r}")
        if self.cfg_schedule not in ("linear", "constant"):
            raise ValueError(
                f"cfg_schedule must be 'linear' or 'constant', got {self.cfg_schedule!r}"
            )
        return Plan(
            self.num_iter, str(self.head_steps), self.cfg, self.cfg_schedule, self.temperature
        )
