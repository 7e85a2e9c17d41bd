"""Which methods are measured, unless ``--methods`` says otherwise."""

from __future__ import annotations

from specmm import methods

SPEED: tuple[methods.Method, ...] = (
    methods.AR(),
    methods.Speculative(),
    methods.Speculative(rule="traversal"),
    methods.Speculative(drafter="eagle"),
    methods.LanternPP(lambda_=1.5, k=10),
    methods.LanternPP(lambda_=2.0, k=10),
    methods.LanternPP(lambda_=3.0, k=10),
    methods.LanternPP(lambda_=2.0, k=100),
    methods.LanternPP(lambda_=5.0, k=100),
    methods.Eagle(),
    methods.Lantern(delta=0.1, k=100),
    methods.Lantern(delta=0.1, k=100, drafter="block"),
    methods.SJD(),
)

QUALITY: tuple[methods.Method, ...] = (
    methods.AR(),
    methods.LanternPP(lambda_=2.0, k=10),
    methods.Speculative(),
    methods.LanternPP(lambda_=3.0, k=10),
    methods.LanternPP(lambda_=5.0, k=100),
    methods.Lantern(delta=0.1, k=100),
)
