"""What a method leaves to this machine, decided once for each batch size and sampling: N of
``code``, and ``auto``.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from specmm import methods
from specmm.image_ar.scales import tuning
from specmm.image_ar.scales.sampling import Sampling
from specmm.image_ar.scales.settings import Settings
from specmm.image_ar.scales.var import VAR
from specmm.image_ar.scales.verified import coarse_scales
from specmm.image_ar.scales.vqvae import VQVAE

Key = tuple[int, Sampling]  # pictures at once, and how they are sampled
Settled = tuple[methods.ScalesMethod, str]  # what is run, and why


@dataclass
class Chooser:
    """Decides for the models of one pipeline; ``settings`` tell the FID by N, and the N of
    specialised models.
    """

    large: VAR
    small: VAR | None
    vqvae: VQVAE
    settings: Settings
    plans: dict[Key, tuning.Plan] = field(default_factory=dict)
    races: dict[Key, Settled] = field(default_factory=dict)

    def clear(self) -> None:
        """Forget what was measured: the models have moved."""
        self.plans.clear()
        self.races.clear()

    def settle(self, method: methods.ScalesMethod, batch: int, sampling: Sampling) -> Settled:
        """``method`` with nothing left open for ``batch`` pictures at once, and a note of what was
        decided.
        """
        if isinstance(method, methods.CoDe) and method.n == -1:
            n, reason = self._n(batch, sampling)
            return replace(method, n=n), reason
        if isinstance(method, methods.ScaleSpeculative) and method.until == -1:
            return replace(method, until=coarse_scales(self.large.config.schedule)), ""
        if not isinstance(method, methods.Auto):
            return method, ""
        key = (batch, sampling)
        if key not in self.races:
            self.races[key] = self._race(batch, sampling)
        return self.races[key]

    def plan(self, batch: int, sampling: Sampling) -> tuning.Plan:
        """What ``code`` costs by N, measured once, and the N it takes; raises ``ValueError``
        without a small model.
        """
        small, key = needed(self.small, "code"), (batch, sampling)
        if key not in self.plans:
            made = tuning.plan(self.large, small, self.vqvae, batch, sampling, self.settings.fid)
            special = self.settings.n
            self.plans[key] = (
                made if special == -1 else replace(made, n=special, reason=specialised(special))
            )
        return self.plans[key]

    def _n(self, batch: int, sampling: Sampling) -> tuple[int, str]:
        if self.settings.n != -1:
            return self.settings.n, specialised(self.settings.n)
        made = self.plan(batch, sampling)
        return made.n, made.reason

    def _race(self, batch: int, sampling: Sampling) -> Settled:
        """Speculation if it was measured to win here, else plain decoding; only exact methods are
        candidates.
        """
        if self.small is None:
            return methods.AR(), "plain decoding: no small model"
        method = methods.ScaleSpeculative(until=coarse_scales(self.large.config.schedule))
        spread = method.window, method.until
        wins, reason = tuning.speculation_wins(
            self.large, self.small, self.vqvae, batch, sampling, *spread
        )
        return (method if wins else methods.AR()), reason


def specialised(n: int) -> str:
    """Why the ``n`` of specialised models is taken."""
    return f"n {n}: what the models were specialised for"


def needed(small: VAR | None, method: str) -> VAR:
    """``small``; raises ``ValueError`` where there is none and ``method`` needs it."""
    if small is None:
        raise ValueError(
            f"method {method!r} needs a small model, give from_pretrained(…, small=folder) or use ar"
        )
    return small
