"""Diffusion language models and block drafters: Dream, LLaDA, MDLM, BD3LM, DFlash."""
