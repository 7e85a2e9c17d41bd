"""The trainings that recipes run: drafters of text and vision-language models, and their data."""
