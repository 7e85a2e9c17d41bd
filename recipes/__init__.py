"""How the pocket models were made: their data, tokenizers, targets and drafters. In the checkout,
not in the wheel.

``specmm train NAME`` runs the recipe in ``NAME.toml``.
"""
