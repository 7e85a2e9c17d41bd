"""Which methods are measured, unless ``--methods`` says otherwise."""

from __future__ import annotations

from specmm import methods

SPEED: tuple[methods.Method, ...] = (
    methods.AR(),
    methods.Speculative(),
    methods.Speculative(tree=(1, 1, 1, 1, 1, 1)),
    methods.Speculative(rule="recursive"),
    methods.Speculative(rejected_weight=0.0),
    methods.Speculative(drafter="eagle"),
    methods.LanternPP(),
    methods.LanternPP(rejected_weight=0.0),
    methods.LanternPP(residual="release"),
    methods.LanternPP(lambda_=3.0, k=10),
    methods.LanternPP(lambda_=10.0, k=40),
    methods.LanternPP(lambda_=40.0, k=100),
    methods.Eagle(),
    methods.Lantern(),
    methods.Lantern(drafter="block"),
    methods.SJD(),
)

QUALITY: tuple[methods.Method, ...] = (
    methods.AR(),
    methods.LanternPP(),
    methods.LanternPP(lambda_=40.0, k=100),
    methods.LanternPP(lambda_=10.0, k=40),
    methods.Speculative(),
)
