"""Draft trees: their shapes, how they are drawn, and which are worth their nodes."""
