"""Networks: diffusion language models (Dream, LLaDA, MDLM, BD3LM), DEER and DFlash drafters."""
