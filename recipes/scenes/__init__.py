"""What ``pocket/llava`` is trained and tested on: easy-VQA, composed scenes of emoji, facts without
a picture.
"""
