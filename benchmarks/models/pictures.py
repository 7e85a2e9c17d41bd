"""Prompts with pictures."""

from benchmarks.models.prompts import text_prompts
def picture_prompts(model):
    return text_prompts()
