"""DiffuSpec (arXiv 2510.02358): a diffusion model's block, pruned, searched for a path that reads
well, cut to fit.
"""
