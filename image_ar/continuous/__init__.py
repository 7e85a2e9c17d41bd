"""Continuous image tokens: MAR, its KL autoencoder, and speculation along the head's denoising
chain.
"""
