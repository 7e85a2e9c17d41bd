"""Tree shapes and draft lengths: how many nodes to draft, how they hang together, and when to stop
drafting.
"""
